"""One agent's part in the transfers of one batch: its workers' waiting calls, and the vote.

Pure. Calls wait in a queue a rank; when every local rank of a side waits, the agent says READY. What
it says to itself (it may be the coordinator of one or both directions) is delivered before ``handle``
returns, so one agent alone and many agents run the same machine.

    IDLE --Go--> MOVING --moved--> VOTED --Commit--> COMMITTED --Settle--> IDLE
                    |                 \\--Abort--> IDLE
                    +--stop--> STOPPING --quiet--> SPOILT --Abort--> IDLE
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from itertools import chain
from typing import Any, ClassVar

from etha.agent.coordinator import Coordinator, Settle
from etha.agent.effects import CallKey, Fail, Member, OfferChanged, Settled, StartMove, StopMove, Tell
from etha.agent.machine import Machine
from etha.agent.waiting import Call, Current, Queues, verdict
from etha.errors import (
    EthaError,
    PeerLostError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)
from etha.peer.messages import (
    Abort,
    Commit,
    Committed,
    Done,
    Failed,
    Go,
    Message,
    Offer,
    Ready,
    Refused,
    Stood,
    Unready,
    Verb,
    Version,
)

TransferEffect = Fail | Tell | StartMove | StopMove | Settled | OfferChanged


class Moving(Enum):
    """Where this agent stands in a transfer."""

    IDLE = 1
    MOVING = 2
    STOPPING = 3
    SPOILT = 4
    VOTED = 5
    COMMITTED = 6


class Transfers(Machine[Moving]):
    """The transfers of one batch on agent ``me``.

    ``agents``: side -> agent of each rank; ``digests``: source side -> plan digest; ``seq``: the last
    number given; ``atomic``: targets are shadows, so an abort never tears a live tensor.
    """

    TABLE: ClassVar[Mapping[Any, frozenset[Any]]] = {
        Moving.IDLE: frozenset({Moving.MOVING}),
        Moving.MOVING: frozenset({Moving.VOTED, Moving.STOPPING, Moving.SPOILT}),
        Moving.STOPPING: frozenset({Moving.SPOILT, Moving.IDLE}),
        Moving.SPOILT: frozenset({Moving.IDLE}),
        Moving.VOTED: frozenset({Moving.COMMITTED, Moving.IDLE}),
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
    ) -> None:
        super().__init__(f"batch {name}", Moving.IDLE)
        self.me, self.agents, self.digests, self.atomic = me, agents, digests, atomic
        first, second = agents
        self.other = {first: second, second: first}
        self.coordinators = {
            side: Coordinator(name, source=side, target=self.other[side], agents=agents, seq=seq)
            for side in agents
            if agents[side][0] == me
        }
        self.seq = seq
        self.queues = Queues(me, agents)
        self.sides = self.queues.sides
        self.offers: dict[str, Version] = {}
        self.current: Current | None = None
        self.broken: PeerLostError | None = None
        self._inbox: deque[Message | Settle] = deque()
        self._out: list[TransferEffect] = []

    # ---- events -------------------------------------------------------------------------------

    def wait(self, call: Call) -> list[TransferEffect]:
        """A worker's call came in."""
        self.queues.calls[call.member].append(call)
        if self.broken is not None:
            self._drop(call, self._gone(self.broken))
        self._ready(call.member[0])
        return self._flush()

    def end(self, key: CallKey, *, expired: bool) -> list[TransferEffect]:
        """A call's deadline passed (``expired``) or its worker cancelled it."""
        call = self.find(key)
        if call is not None and call.cause is None:
            side, rank = call.member
            what = "its deadline passed" if expired else "it was cancelled"
            kind = TransferTimeoutError if expired else TransferAbortedError
            running = self.current is not None and call is self.current.calls.get(call.member)
            text = f"{self.name}: {call.verb} of {side} rank {rank} ended: {what}"
            self._end(call, kind(text, outcome="aborted" if running else "withdrawn"))
        return self._flush()

    def hear(self, agent: str, message: Message) -> list[TransferEffect]:
        """Another agent's message."""
        self._hear(agent, message)
        return self._flush()

    def moved(self, seq: int, error: EthaError | None, *, touched: bool = True) -> list[TransferEffect]:
        """The program of ``seq`` ended and touches memory no more; ``touched``: it wrote something."""
        current = self.current
        if current is not None and current.seq == seq:
            current.touched = touched
            if self.state is Moving.STOPPING:
                if current.abort is None:
                    self.move(Moving.SPOILT)
                else:
                    self._aborted()
            elif error is None:
                self.move(Moving.VOTED)
                self._tell(current.coordinator, Done(seq=seq))
            else:
                self.move(Moving.SPOILT)
                self._tell(current.coordinator, Failed(seq=seq, cause=error))
        return self._flush()

    def lose_agent(self, agent: str) -> list[TransferEffect]:
        """An agent's link closed."""
        for coordinator in self.coordinators.values():
            self._post(coordinator.lose(agent))
        current = self.current
        if current is not None and current.coordinator == agent:
            error = PeerLostError(f"{self.name}: the coordinator's agent is gone", reason="died")
            if self.state is Moving.VOTED:
                for member in current.calls:
                    current.causes[member] = PeerLostError(error.message, reason="died", outcome="unknown")
            self._inbox.append(Abort(seq=current.seq, cause=error))
        return self._flush()

    def break_up(self, error: PeerLostError) -> list[TransferEffect]:
        """The pair is lost, or a worker of this batch is gone: every call ends with ``error``."""
        self.broken = self.broken or error
        self.queues.rest()
        for call in list(self.queues):
            self._drop(call, self._gone(error))
        if self.current is not None:
            self._spoil(None, error)
        return self._flush()

    # ---- questions ----------------------------------------------------------------------------

    def find(self, key: CallKey) -> Call | None:
        """The waiting or running call under ``key``."""
        running = self.current.calls.values() if self.current is not None else ()
        return next((call for call in chain(self.queues, running) if call.key == key), None)

    def missing(self) -> tuple[Member, ...]:
        """Ranks that the oldest waiting call here still waits for, as far as this agent knows."""
        call = next(iter(self.queues), None)
        return () if self.current is not None or call is None else self.queues.missing(call, self._told(call))

    def validate(self) -> None:
        """What must hold between any two events; for tests."""
        assert (self.current is None) == (self.state is Moving.IDLE), self.history
        assert not self._inbox and not self._out
        for side in self.sides.values():
            assert not (side.withdrawing and side.standing is None)
        for coordinator in self.coordinators.values():
            assert coordinator.seq <= self.seq

    # ---- inside -------------------------------------------------------------------------------

    def _flush(self) -> list[TransferEffect]:
        while self._inbox:
            self._hear(self.me, self._inbox.popleft())
        out, self._out = self._out, []
        return out

    def _tell(self, agent: str, message: Message | Settle) -> None:
        if agent == self.me:
            self._inbox.append(message)
        else:
            assert not isinstance(message, Settle)
            self._out.append(Tell(agent=agent, message=message))

    def _post(self, letters: list[tuple[str, Any]]) -> None:
        for agent, message in letters:
            self._tell(agent, message)

    def _hear(self, agent: str, message: Message | Settle) -> None:
        match message:
            case Ready() | Unready() | Done() | Failed() | Committed():
                for coordinator in self.coordinators.values():
                    self._post(coordinator.hear(agent, message))
            case Offer(side=side, standing=standing, version=version):
                self.offers.pop(side, None)
                if standing:
                    self.offers[side] = version
                self._out.append(OfferChanged(source=side, standing=standing, version=version))
            case Stood():
                self._stood(agent, message)
            case Refused():
                self._refused(message)
            case Go():
                self._go(agent, message)
            case Abort(seq=seq, cause=cause) if self.current is not None and self.current.seq == seq:
                self._abort(cause)
            case Commit(seq=seq) if self.current is not None and self.current.seq == seq:
                self._commit(agent)
            case Settle(seq=seq) if self.current is not None and self.current.seq == seq:
                self._committed()

    def _coordinating(self, verb: Verb, side: str) -> str:
        """The agent that can say GO to calls of ``side`` with ``verb``."""
        return self.agents[side if verb == "send" else self.other[side]][0]

    def _ready(self, side: str) -> None:
        state, heads = self.sides[side], self.queues.heads(side)
        if self.state is not Moving.IDLE or state.standing is not None or heads is None:
            return
        verbs = {call.verb for call in heads}
        if len(verbs) > 1 or any(call.cause for call in heads):
            return
        labels = {str(c.version): c.version for c in heads if c.version is not None}
        verb = heads[0].verb
        if verb == "send" and len(labels) > 1:
            for call in heads:
                text = f"{self.name}: ranks of {side} send under different versions, {', '.join(sorted(labels))}"
                self._drop(call, TransferError(text, outcome="withdrawn"))
            return
        state.attempt += 1
        state.standing = verb
        digest = self.digests.get(side if verb == "send" else self.other[side], "")
        version = next(iter(labels.values()), None)
        message = Ready(side=side, verb=verb, attempt=state.attempt, version=version, digest=digest)
        self._tell_coordinators(message)

    def _tell_coordinators(self, message: Ready | Unready) -> None:
        for agent in sorted({ranks[0] for ranks in self.agents.values()}):
            self._tell(agent, message)

    def _end(self, call: Call, cause: EthaError) -> None:
        side = self.sides[call.member[0]]
        if self.current is not None and self.current.calls.get(call.member) is call:
            call.cause = cause
            self._spoil(call.member, cause)
        elif side.standing is None or self.queues.calls[call.member][0] is not call:
            self._drop(call, self.queues.named(call, cause, self._told(call)))
            self._ready(call.member[0])
        else:
            call.cause = cause
            if not side.withdrawing:
                side.withdrawing = True
                self._tell_coordinators(Unready(side=call.member[0], attempt=side.attempt))

    def _told(self, call: Call) -> tuple[Member, ...]:
        """Who is not ready for ``call``, if this agent coordinates its direction."""
        source = call.member[0] if call.verb == "send" else self.other[call.member[0]]
        coordinator = self.coordinators.get(source)
        return coordinator.missing() if coordinator is not None else ()

    def _gone(self, error: PeerLostError) -> PeerLostError:
        return PeerLostError(f"{self.name}: {error.message}", reason=error.reason, outcome="withdrawn")

    def _drop(self, call: Call, error: EthaError) -> None:
        self.queues.calls[call.member].remove(call)
        self._out.append(Fail(call=call.key, error=error))

    def _stood(self, agent: str, message: Stood) -> None:
        side = self.sides.get(message.side)
        if side is None or not side.withdrawing or side.attempt != message.attempt or side.standing is None:
            return
        # Both coordinators answer, but GO can come only from the one whose direction the verb fits:
        # only its word ends the race. (On one agent the first answer does: GO would be here already.)
        if agent != self._coordinating(side.standing, message.side):
            return
        side.standing, side.withdrawing = None, False
        for call in self.queues.of(message.side):
            if call.cause is not None:
                self._drop(call, self.queues.named(call, call.cause, message.missing))
        self._ready(message.side)

    def _refused(self, message: Refused) -> None:
        side = self.sides.get(message.side)
        if side is None or side.standing is None or side.attempt != message.attempt:
            return
        side.standing, side.withdrawing = None, False
        self._tell_coordinators(Unready(side=message.side, attempt=message.attempt))
        for call in self.queues.heads(message.side) or ():
            self._drop(call, call.cause or message.error)
        self._ready(message.side)

    def _go(self, agent: str, message: Go) -> None:
        self.seq = max(self.seq, message.seq)
        for coordinator in self.coordinators.values():
            coordinator.observe(message)
        if self.broken is not None:
            self._tell(agent, Failed(seq=message.seq, cause=self.broken))
            return
        assert self.current is None, f"{self.name}: GO {message.seq} within {self.current}"
        calls = self.queues.take()
        self.current = Current(
            seq=message.seq, source=message.side, version=message.version, coordinator=agent, calls=calls
        )
        self.move(Moving.MOVING)
        keys = {member: call.key for member, call in calls.items()}
        self._out.append(StartMove(seq=message.seq, source=message.side, calls=keys))
        for member, call in calls.items():
            if call.cause is not None:  # withdrawn too late: GO has overtaken it
                self._spoil(member, call.cause)

    def _spoil(self, member: Member | None, cause: EthaError) -> None:
        current = self.current
        assert current is not None
        if member is not None:
            current.causes.setdefault(member, cause)
        if self.state is Moving.MOVING:
            self.move(Moving.STOPPING)
            self._out.append(StopMove(seq=current.seq))
        if self.state in (Moving.STOPPING, Moving.VOTED) and current.abort is None:
            self._tell(current.coordinator, Failed(seq=current.seq, cause=cause))

    def _abort(self, cause: EthaError) -> None:
        assert self.current is not None
        self.current.abort = self.current.abort or cause
        if self.state is Moving.MOVING:
            self.move(Moving.STOPPING)
            self._out.append(StopMove(seq=self.current.seq))
        elif self.state in (Moving.SPOILT, Moving.VOTED):
            self._aborted()

    def _aborted(self) -> None:
        current = self.current
        assert current is not None and current.abort is not None
        for member, call in current.calls.items():
            torn = current.touched and not self.atomic and member[0] != current.source
            own = current.causes.get(member)
            self._out.append(Fail(call=call.key, error=verdict(self.name, current.seq, own, current.abort, torn)))
        self._finish(current.abort)

    def _commit(self, agent: str) -> None:
        assert self.current is not None
        self.move(Moving.COMMITTED)
        self._tell(agent, Committed(seq=self.current.seq))
        if agent != self.me:
            self._committed()

    def _committed(self) -> None:
        self._finish(None)

    def _finish(self, error: EthaError | None) -> None:
        current = self.current
        assert current is not None
        keys = {member: call.key for member, call in current.calls.items()}
        self._out.append(
            Settled(seq=current.seq, source=current.source, version=current.version, error=error, calls=keys)
        )
        self.current = None
        self.move(Moving.IDLE)
        for side in self.sides:
            self._ready(side)
