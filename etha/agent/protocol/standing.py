"""An agent's part in the transfers of one batch up to GO: its workers' waiting calls, and READY; pure.

``Transfers`` goes on from GO. What the agent says to itself (it may be the coordinator of one or both
directions) goes through an inbox that is empty again before an event's effects are returned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import chain
from typing import Any, ClassVar

from etha.agent.protocol.coordinator import Coordinator, Letters, Settle
from etha.agent.protocol.effects import (
    BeginLane,
    CallKey,
    Doubt,
    Fail,
    FreeLane,
    Member,
    OfferChanged,
    Settled,
    StartMove,
    StopMove,
    Tell,
    WantLane,
    name_agents,
)
from etha.agent.protocol.machine import Machine
from etha.agent.protocol.termination import Memory
from etha.agent.protocol.waiting import Booking, Call, Current, Queues
from etha.errors import EthaError, PeerLostError, TransferError
from etha.peer.messages import Book, Message, Ready, Refused, Stood, Unready, Verb, Version

LaneEffect = WantLane | BeginLane | FreeLane
TransferEffect = Fail | Tell | StartMove | StopMove | Settled | OfferChanged | Doubt | LaneEffect


class Moving(Enum):
    """Where this agent stands in a transfer."""

    IDLE = 1
    MOVING = 2
    STOPPING = 3
    SPOILT = 4
    VOTED = 5
    DOUBT = 6
    COMMITTED = 7


class Standing(Machine[Moving]):
    """Calls that wait on agent ``me``, a queue a local rank, and what of them the coordinators know.

    Parameters as of ``Transfers``.
    """

    TABLE: ClassVar[Mapping[Any, frozenset[Any]]] = {
        Moving.IDLE: frozenset({Moving.MOVING, Moving.SPOILT}),
        Moving.MOVING: frozenset({Moving.VOTED, Moving.STOPPING, Moving.SPOILT}),
        Moving.STOPPING: frozenset({Moving.SPOILT, Moving.IDLE}),
        Moving.SPOILT: frozenset({Moving.IDLE}),
        Moving.VOTED: frozenset({Moving.COMMITTED, Moving.DOUBT, Moving.IDLE}),
        Moving.DOUBT: frozenset({Moving.COMMITTED, Moving.IDLE}),
        Moving.COMMITTED: frozenset({Moving.IDLE}),
    }

    def __init__(
        self,
        name: str,
        *,
        me: str,
        agents: Mapping[str, tuple[str, ...]],
        digests: Mapping[str, str],
        seq: int,
        atomic: bool,
        now: Callable[[], int] = time.time_ns,
        hold: Callable[[str], bool] = lambda source: False,
    ) -> None:
        super().__init__(f"batch {name}", Moving.IDLE)
        self.me, self.agents, self.digests, self.atomic = me, agents, digests, atomic
        self.members = frozenset(chain.from_iterable(agents.values()))
        first, second = agents
        self.other = {first: second, second: first}
        self.coordinators = {
            side: Coordinator(name, source=side, target=self.other[side], agents=agents, seq=seq, now=now)
            for side in agents
            if agents[side][0] == me
        }
        self.seq, self._hold = seq, hold
        self.memory = Memory()
        self.queues = Queues(me, agents)
        self.sides = self.queues.sides
        self.offers: dict[str, Version] = {}
        self.current: Current | None = None
        self.booking: Booking | None = None
        self.broken: PeerLostError | None = None
        self.gone: set[str] = set()
        self._inbox: deque[Message | Settle] = deque()
        self._out: list[TransferEffect] = []
        self._want: WantLane | None = None
        #: Source side -> who was missing when its coordinator, another agent, last said so.
        self._heard: dict[str, tuple[Member, ...]] = {}

    # ---- questions ----------------------------------------------------------------------------

    def find(self, key: CallKey) -> Call | None:
        """The waiting or running call under ``key``."""
        running = self.current.calls.values() if self.current is not None else ()
        return next((call for call in chain(self.queues, running) if call.key == key), None)

    def missing(self) -> tuple[Member, ...]:
        """Ranks that the oldest waiting call here still waits for, as far as this agent knows."""
        call = next(iter(self.queues), None)
        return () if self.current is not None or call is None else self.queues.missing(call, self._told(call))

    # ---- telling ------------------------------------------------------------------------------

    def _tell(self, agent: str, message: Message | Settle) -> None:
        if agent == self.me:
            self._inbox.append(message)
        elif agent not in self.gone:
            assert not isinstance(message, Settle)
            self._out.append(Tell(agent=agent, message=message))

    def _post(self, letters: Letters) -> None:
        for agent, message in letters:
            self._tell(agent, message)

    def _tell_coordinators(self, message: Ready | Unready) -> None:
        for agent in sorted({ranks[0] for ranks in self.agents.values()}):
            self._tell(agent, message)

    def _coordinating(self, verb: Verb, side: str) -> str:
        """The agent that can say GO to calls of ``side`` with ``verb``."""
        return self.agents[side if verb == "send" else self.other[side]][0]

    def _drop(self, call: Call, error: EthaError) -> None:
        self.queues.calls[call.member].remove(call)
        self._out.append(Fail(call=call.key, error=error))

    def _drop_all(self, calls: list[Call], text: str) -> None:
        for call in calls:
            self._drop(call, TransferError(text, outcome="withdrawn"))

    def _told(self, call: Call) -> tuple[Member, ...]:
        """Who is not ready for ``call``, if this agent coordinates its direction; else as its coordinator last said."""
        source = call.member[0] if call.verb == "send" else self.other[call.member[0]]
        coordinator = self.coordinators.get(source)
        return coordinator.missing() if coordinator is not None else self._heard.get(source, ())

    def _gone(self, error: PeerLostError) -> PeerLostError:
        return PeerLostError(f"{self.name}: {error.message}", reason=error.reason, outcome="withdrawn")

    def _lost(self, *agents: str, to_others: bool = False) -> PeerLostError:
        """``to_others``: others of the batch have lost it, whatever this agent's own link says."""
        text = f"{name_agents(self.agents, agents)} {'lost to other agents of the batch' if to_others else 'gone'}"
        return PeerLostError(text, reason="died")

    def told(self, source: str, missing: tuple[Member, ...]) -> None:
        """What the coordinator of the direction from ``source``, another agent, says of who is not ready."""
        self._heard[source] = missing

    # ---- READY --------------------------------------------------------------------------------

    def _ready(self, side: str) -> None:
        state, heads = self.sides[side], self.queues.heads(side)
        if self.state is not Moving.IDLE or state.standing is not None or heads is None or self.gone:
            return
        verbs = {call.verb for call in heads}
        if len(verbs) > 1 or any(call.cause for call in heads):
            return
        labels = {str(c.version): c.version for c in heads if c.version is not None}
        verb, editions = heads[0].verb, {call.edition for call in heads}
        if "" not in editions and len(editions) > 1:
            return  # a rank is still to come with the snapshot that another has taken already
        if verb == "send" and len(editions) > 1:
            self._drop_all(heads, f"{self.name}: some ranks of {side} send a snapshot, others what their tensors hold")
            return
        if verb == "send" and len(labels) > 1:
            listed = ", ".join(sorted(labels))
            self._drop_all(heads, f"{self.name}: ranks of {side} send under different versions, {listed}")
            return
        state.attempt += 1
        state.standing = verb
        digest = self.digests.get(side if verb == "send" else self.other[side], "")
        version = next(iter(labels.values()), None)
        source = side if verb == "send" else self.other[side]
        lane = len(self.members) > 1 and self.booking is None and self._hold(source)
        message = Ready(
            side=side,
            verb=verb,
            attempt=state.attempt,
            version=version,
            digest=digest,
            edition=heads[0].edition,
            lane=lane,
        )
        if lane:
            self.booking = Booking(
                agent=self.agents[source][0], side=source, number=message.held_number, ready=side, granted=True
            )
        self._tell_coordinators(message)

    def _withdraw(self, call: Call, cause: EthaError) -> None:
        """A waiting call wants to end: at once, or once the coordinator lets go of the READY that it is part of."""
        side = self.sides[call.member[0]]
        if side.standing is None or self.queues.calls[call.member][0] is not call:
            self._drop(call, self.queues.named(call, cause, self._told(call)))
            self._ready(call.member[0])
        else:
            call.cause = cause
            if not side.withdrawing:
                side.withdrawing = True
                self._tell_coordinators(Unready(side=call.member[0], attempt=side.attempt))

    def _stood(self, agent: str, message: Stood) -> None:
        side = self.sides.get(message.side)
        if side is None or not side.withdrawing or side.attempt != message.attempt or side.standing is None:
            return
        # Both coordinators answer, but GO can come only from the one whose direction the verb fits:
        # only its word ends the race. (On one agent the first answer does: GO would be here already.)
        if agent == self._coordinating(side.standing, message.side):
            source = message.side if side.standing == "send" else self.other[message.side]
            self._heard[source] = message.missing
            self._stand_down(message.side, message.missing)

    def _refused(self, message: Refused) -> None:
        side = self.sides.get(message.side)
        if side is None or side.standing is None or side.attempt != message.attempt:
            return
        side.standing, side.withdrawing = None, False
        self._let_go(message.side)
        self._tell_coordinators(Unready(side=message.side, attempt=message.attempt))
        for call in self.queues.heads(message.side) or ():
            self._drop(call, call.cause or message.error)
        self._ready(message.side)

    def _retreat(self, name: str) -> None:
        """An agent is gone: no READY is to stand, for nothing begins without it."""
        side = self.sides[name]
        if side.standing is None:
            return
        if not side.withdrawing:
            side.withdrawing = True
            self._tell_coordinators(Unready(side=name, attempt=side.attempt))
        if self._coordinating(side.standing, name) in self.gone:  # neither GO nor Stood can come any more
            self._stand_down(name, ())

    def _stand_down(self, name: str, missing: tuple[Member, ...]) -> None:
        side = self.sides[name]
        side.standing, side.withdrawing = None, False
        self._let_go(name)
        for call in self.queues.of(name):
            if call.cause is not None:
                self._drop(call, self.queues.named(call, call.cause, missing))
        self._ready(name)

    # ---- the booking --------------------------------------------------------------------------

    def _book(self, agent: str, message: Book) -> None:
        if self.broken is not None or self.gone:
            return  # READY has been taken back, which ends the booking
        self._unbook()
        self.booking = Booking(agent=agent, side=message.side, number=message.number)
        self._want = WantLane(message.ticket, message.side)

    def _let_go(self, side: str) -> None:
        """READY of ``side`` stands no more, nor does the booking that came with it."""
        if self.booking is not None and self.booking.ready == side and not self.booking.begun:
            self._unbook()

    def _unbook(self) -> None:
        if self._want is not None:
            self._want = None
        elif self.booking is not None:
            self._out.append(FreeLane())
        self.booking = None
