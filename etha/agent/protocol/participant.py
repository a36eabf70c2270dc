"""One agent's part in the transfers of one batch: its workers' waiting calls, its booking, and the vote.

Pure. Each rank has a queue of calls. When every local rank of a side waits, the agent says READY. What it says to
itself (it may be the coordinator of one or both directions) is delivered before ``handle`` returns, so one agent and
many agents run the same machine. ``termination`` says why the end is safe if the coordinator is lost.

    IDLE --Go--> MOVING --moved--> VOTED --Commit--> COMMITTED --Settle--> IDLE
      |             |                 |\\--Abort--> IDLE
      |             |                 +--coordinator lost, asked--> DOUBT --answers, Abort--> COMMITTED | IDLE
      |             +--stop--> STOPPING --quiet--> FAILED --Abort--> IDLE
      +--Go that cannot begin here--------------> FAILED
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from etha.agent.protocol.coordinator import TOGETHER, Coordinator, Outbox, Settle
from etha.agent.protocol.effects import (
    BeginLane,
    CallKey,
    Fail,
    FreeLane,
    HoldLane,
    InDoubt,
    Member,
    OfferChanged,
    Settled,
    StartMove,
    StopMove,
    Tell,
    WantLane,
    members_of,
    name_agents,
    name_members,
)
from etha.agent.protocol.machine import Machine, MachineState
from etha.agent.protocol.termination import Inquiry, Outcome
from etha.errors import (
    EthaError,
    PeerLostError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
    with_again,
)
from etha.peer.messages import (
    Abort,
    Book,
    Booked,
    Commit,
    Committed,
    Declined,
    Done,
    Failed,
    Go,
    Message,
    PeerOffer,
    Question,
    Ready,
    Recall,
    Refused,
    Unbook,
    Unready,
    Verb,
    VerdictAnswer,
    Version,
    WithdrawAcknowledged,
)


@dataclass(slots=True, kw_only=True)
class Call:
    """A worker's waiting call.

    ``cause`` is set once the call wants to end; with ``yields``, a GO that comes first still takes it. ``edition``
    names the snapshot that it sends, "" for its tensors. ``expects``: it receives only what is sent under this version.
    """

    key: CallKey
    member: Member
    verb: Verb
    version: Version = None
    edition: str = ""
    expects: int | None = None
    cause: EthaError | None = None
    yields: bool = False
    #: When it came, by the clock of ``Participant``.
    since: int = field(default=0, compare=False)


@dataclass(slots=True)
class SideReady:
    """READY of one side; ``standing`` while the coordinators have it."""

    attempt: int = 0
    standing: Verb | None = None
    withdrawing: bool = False


@dataclass(slots=True, kw_only=True)
class TransferInProgress:
    """A transfer after GO.

    ``causes`` are why its own workers want to end it, ``abort`` is the decision. ``begun``: StartMove was said.
    ``inquiry`` holds the questions to others once the coordinator is lost. ``answered`` are the members whose calls
    were answered before the decision.
    """

    seq: int
    source: str
    version: Version
    coordinator: str
    calls: dict[Member, Call]
    causes: dict[Member, EthaError] = field(default_factory=dict)
    answered: set[Member] = field(default_factory=set)
    abort: EthaError | None = None
    begun: bool = False
    touched: bool = False
    inquiry: Inquiry | None = None


@dataclass(slots=True, kw_only=True)
class Booking:
    """What ``agent``, coordinator of the direction from ``side``, has booked here under ``number``.

    ``ready`` is the side with whose READY it was held; None if the coordinator asked for it.
    """

    agent: str
    side: str
    number: int
    ready: str | None = None
    granted: bool = False
    begun: bool = False


class Queues:
    """The waiting calls of each local rank, oldest first, and READY of each side with local ranks."""

    def __init__(self, me: str, agents: Mapping[str, tuple[str, ...]], now: Callable[[], int]) -> None:
        self.me, self.agents, self.now = me, agents, now
        #: When the last call of a rank ended at its deadline.
        self.gave_up: dict[Member, int] = {}
        self.calls: dict[Member, deque[Call]] = {
            (side, rank): deque() for side in agents for rank, agent in enumerate(agents[side]) if agent == me
        }
        #: The same queues by side.
        self._of_side: dict[str, list[deque[Call]]] = {}
        for (side, _), queue in self.calls.items():
            self._of_side.setdefault(side, []).append(queue)
        self.sides = {side: SideReady() for side in self._of_side}

    def __iter__(self) -> Iterator[Call]:
        for queue in self.calls.values():
            yield from queue

    def of(self, side: str) -> list[Call]:
        """All waiting calls of a side."""
        return [call for call in self if call.member[0] == side]

    def heads(self, side: str) -> list[Call] | None:
        """The oldest call of each local rank; None while a rank has none."""
        queues = self._of_side[side]
        return [queue[0] for queue in queues] if all(queues) else None

    def waits(self, member: Member, verb: Verb) -> bool:
        """Whether the oldest call of a local rank is a ``verb``."""
        queue = self.calls.get(member)
        return bool(queue) and queue is not None and queue[0].verb == verb

    def missing(self, call: Call, elsewhere: tuple[Member, ...]) -> tuple[Member, ...]:
        """Ranks that are not ready for ``call``: this agent's without a fitting call, and others' that are in
        ``elsewhere``."""
        return tuple(
            (side, rank)
            for side, agents in self.agents.items()
            for rank, agent in enumerate(agents)
            if (not self.waits((side, rank), _fitting(call, side)) if agent == self.me else (side, rank) in elsewhere)
        )

    def named(self, call: Call, cause: EthaError, elsewhere: tuple[Member, ...]) -> EthaError:
        """``cause`` with the ranks that were not ready, for a call that is still in its queue."""
        now = self.now()
        missing = tuple(
            member
            for member in self.missing(call, elsewhere)
            # It has waited as long as this call, and for the same ranks.
            if member[0] != call.member[0] or self.gave_up.get(member, -1) < max(call.since, now - TOGETHER)
        )
        if not missing or not isinstance(cause, TransferTimeoutError):
            return cause
        text = f"{cause.message}; not ready: {name_members(missing)}"
        same = [m for m in missing if m[0] != call.member[0] and self.waits(m, call.verb)]
        text += f" ({name_members(same)} wait to {call.verb}, too)" if same else ""
        return TransferTimeoutError(text, **(cause.data() | {"culprits": missing}))

    def take(self) -> dict[Member, Call]:
        """Handle GO: take each rank's oldest call out of its queue. Every READY is used up."""
        self.rest()
        taken = {member: queue.popleft() for member, queue in self.calls.items()}
        for call in taken.values():
            if call.yields:
                call.cause, call.yields = None, False
        return taken

    def rest(self) -> None:
        """Forget all READYs."""
        for side in self.sides.values():
            side.standing, side.withdrawing = None, False


def _labels(calls: list[Call]) -> dict[str, Version]:
    """The versions under which calls send, by how they are shown."""
    return {str(call.version): call.version for call in calls if call.version is not None}


def _fitting(call: Call, side: str) -> Verb:
    """What the ranks of ``side`` must call for ``call`` to begin."""
    if side == call.member[0]:
        return call.verb
    return "recv" if call.verb == "send" else "send"


def verdict(name: str, seq: int, own: EthaError | None, first: EthaError, torn: bool) -> EthaError:
    """The error of one worker for an aborted transfer: its own cause, or else the first one."""
    error = own or first
    data = error.data() if isinstance(error, TransferError) else {}
    data |= {"outcome": "aborted", "torn": torn}
    text = f"{name} seq {seq} aborted: {error.message}"
    text = with_again(text) if isinstance(error, PeerLostError) else text
    if isinstance(error, PeerLostError) or own is not None:
        return (type(error) if isinstance(error, TransferError) else TransferAbortedError)(text, **data)
    return TransferAbortedError(text, outcome="aborted", torn=torn, culprits=_culprits(first))


def _culprits(error: EthaError) -> tuple[Member, ...]:
    return error.culprits if isinstance(error, TransferError) else ()


def unknown(name: str, seq: int, cause: EthaError, torn: bool) -> PeerLostError:
    """The error of every worker here for a transfer whose end no reachable agent knows."""
    text = f"{name} seq {seq} was committed or aborted, which of them is unknown here: {cause.message}"
    return PeerLostError(with_again(text), reason="died", outcome="unknown", torn=torn, culprits=_culprits(cause))


#: What a participant says to coordinators.
_TO_COORDINATORS = frozenset((Ready, Unready, Booked, Recall, Done, Failed, Committed, Declined))

LaneEffect = HoldLane | WantLane | BeginLane | FreeLane
TransferEffect = Fail | Tell | StartMove | StopMove | Settled | OfferChanged | InDoubt | LaneEffect


class Moving(MachineState):
    """The state of this agent's part in a transfer."""

    IDLE = 1
    MOVING = 2
    STOPPING = 3
    FAILED = 4
    VOTED = 5
    DOUBT = 6
    COMMITTED = 7


class EndedTransfers:
    """How the last transfers of a batch ended here.

    A question that still matters is about the last number given out: its asker has not ended that transfer, says READY
    for no other until it has, and without it no later transfer begins. Keeping a few more does no harm.
    """

    KEPT = 4

    def __init__(self) -> None:
        self._ends: dict[int, Outcome] = {}

    def keep(self, seq: int, outcome: Outcome) -> None:
        """``seq`` ended with ``outcome``."""
        self._ends[seq] = outcome
        while len(self._ends) > self.KEPT:
            del self._ends[min(self._ends)]

    def __getitem__(self, seq: int) -> Outcome | None:
        return self._ends.get(seq)


class Participant(Machine[Moving]):
    """The transfers of one batch on agent ``me``.

    ``agents``: side -> agent of each rank. ``digests``: source side -> plan digest. ``seq``: the last number given out.
    ``atomic``: targets are shadows, so an abort never tears a live tensor. ``now``: ns of a clock that all agents
    roughly share, which orders their bookings. ``can_hold(source)``: whether what a transfer from that side needs of
    this agent is free; it changes nothing.
    """

    LOGGED = False
    TABLE: ClassVar[Mapping[Any, frozenset[Any]]] = {
        Moving.IDLE: frozenset({Moving.MOVING, Moving.FAILED}),
        Moving.MOVING: frozenset({Moving.VOTED, Moving.STOPPING, Moving.FAILED}),
        Moving.STOPPING: frozenset({Moving.FAILED, Moving.IDLE}),
        Moving.FAILED: frozenset({Moving.IDLE}),
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
        can_hold: Callable[[str], bool] = lambda source: False,
    ) -> None:
        super().__init__(f"batch {name}", Moving.IDLE)
        self.me, self.agents, self.digests, self.atomic = me, agents, digests, atomic
        self.members = frozenset(chain.from_iterable(agents.values()))
        #: The agents of both directions' coordinators, in the order in which they are told.
        self._directing = tuple(sorted({ranks[0] for ranks in agents.values()}))
        first, second = agents
        self.other = {first: second, second: first}
        self.coordinators = {
            side: Coordinator(name, source=side, target=self.other[side], agents=agents, seq=seq, now=now)
            for side in agents
            if agents[side][0] == me
        }
        self.seq, self._can_hold = seq, can_hold
        self.memory = EndedTransfers()
        self.queues = Queues(me, agents, now)
        self.sides = self.queues.sides
        self.offers: dict[str, Version] = {}
        self.current: TransferInProgress | None = None
        self.booking: Booking | None = None
        self.broken: PeerLostError | None = None
        self.lost_agents: set[str] = set()
        #: Those of them that only a hub has lost: they may live, and another hub may pass on what they say.
        self.lost_by_word: set[str] = set()
        self._inbox: deque[Message | Settle] = deque()
        self._out: list[TransferEffect] = []
        self._want: WantLane | None = None
        #: Source side -> who was missing when its coordinator, another agent, last said so.
        self._heard: dict[str, tuple[Member, ...]] = {}

    # ---- events -------------------------------------------------------------------------------

    def wait(self, call: Call) -> list[TransferEffect]:
        """A worker's call came in."""
        call.since = self.queues.now()
        self.queues.gave_up.pop(call.member, None)
        self.queues.calls[call.member].append(call)
        if self.broken is not None:
            self._drop(call, self._withdrawn_error(self.broken))
        self._ready(call.member[0])
        return self._flush()

    def end(self, key: CallKey, *, expired: bool) -> list[TransferEffect]:
        """A call's deadline passed (``expired``), or its worker cancelled it."""
        call = self.find(key)
        if call is not None and (call.cause is None or call.yields):
            call.yields = False
            side, rank = call.member
            what = "its deadline passed" if expired else "it was cancelled"
            kind = TransferTimeoutError if expired else TransferAbortedError
            running = self.current is not None and call is self.current.calls.get(call.member)
            text = f"{self.name}: {call.verb} of {side} rank {rank} ended: {what}"
            error = kind(text, outcome="aborted" if running else "withdrawn", culprits=[call.member])
            if running:
                call.cause = error
                self._spoil(call.member, error)
            else:
                self._withdraw(call, error)
        return self._flush()

    def supersede(self, member: Member) -> list[TransferEffect]:
        """A worker takes a newer snapshot: calls that still offer older ones end, unless GO takes them first."""
        for call in list(self.queues.calls[member]):
            if call.edition and call.cause is None:
                side, rank = member
                text = f"{self.name}: the snapshot of {side} rank {rank} was superseded by a newer one"
                call.yields = True
                self._withdraw(call, TransferAbortedError(text, outcome="withdrawn"))
        return self._flush()

    def hear(self, agent: str, message: Message) -> list[TransferEffect]:
        """Another agent's message. Messages of a lost agent are ignored."""
        if self._may_pass(agent, message):
            self._hear(agent, message)
        return self._flush()

    def moved(self, seq: int, error: EthaError | None, *, touched: bool = True) -> list[TransferEffect]:
        """The program of ``seq`` ended and no longer touches memory. ``touched``: it wrote something."""
        current = self.current
        if current is not None and current.seq == seq:
            current.touched = touched
            if self.state is Moving.STOPPING:
                if current.abort is None:
                    self.move(Moving.FAILED)
                    self._tell_ahead()
                else:
                    self._aborted()
            elif error is None:
                self.move(Moving.VOTED)
                self._tell(current.coordinator, Done(seq=seq))
            else:
                self.move(Moving.FAILED)
                self._tell_ahead()
                self._tell(current.coordinator, Failed(seq=seq, cause=error))
        return self._flush()

    def on_agent_lost(self, agent: str, *, by_word: bool = False) -> list[TransferEffect]:
        """An agent's link closed: its messages are ignored, and no transfer of this batch begins here any more.

        ``by_word``: it is a hub's link that closed. Then the agent is still asked how a transfer ended.
        """
        if agent not in self.members or (agent in self.lost_agents and (by_word or agent not in self.lost_by_word)):
            return []
        known = agent in self.lost_agents
        self.lost_agents.add(agent)
        (self.lost_by_word.add if by_word else self.lost_by_word.discard)(agent)
        if known:  # now its own link is lost, too
            self._unheard(agent)
            return self._flush()
        cause = self._agent_lost_error(agent)
        for coordinator in self.coordinators.values():
            self._post(coordinator.on_agent_lost(agent))
        if self.booking is not None and self.booking.agent == agent:
            self._unbook()
        for side in self.sides:
            self._retreat(side)
        current = self.current
        if current is None:
            pass
        elif current.inquiry is not None:
            if not by_word:
                self._unheard(agent)
        elif self.state not in (Moving.VOTED, Moving.COMMITTED):
            if current.coordinator == agent:
                self._abort(cause)
            else:
                self._spoil(None, cause)
        elif current.coordinator == agent:
            self._doubt(cause)
            self._conclude()
        return self._flush()

    def _unheard(self, agent: str) -> None:
        """An agent answers no question any more."""
        if self.current is not None and self.current.inquiry is not None:
            self.current.inquiry.on_agent_lost(agent)
            self._conclude()

    def break_up(self, error: PeerLostError) -> list[TransferEffect]:
        """The pair is lost, or a worker of this batch has left: every call ends with ``error``."""
        self.broken = self.broken or error
        for side, state in self.sides.items():
            if state.standing is not None:
                self._tell_coordinators(Unready(side=side, attempt=state.attempt))
        self.queues.rest()
        for call in list(self.queues):
            self._drop(call, self._withdrawn_error(error))
        if self.booking is not None and not self.booking.begun:
            self._unbook()
        if self.current is not None:
            self._spoil(None, error)
        return self._flush()

    def undecided(self, seq: int) -> list[TransferEffect]:
        """A second has passed since Doubt(seq): agents that have not answered count as lost."""
        current = self.current
        if current is not None and current.seq == seq and current.inquiry is not None:
            self._unknown(current.inquiry.cause)
        return self._flush()

    def granted(self) -> list[TransferEffect]:
        """What was wanted is booked for this batch."""
        booking = self.booking
        if booking is not None and not booking.granted:
            booking.granted = True
            self._tell(booking.agent, Booked(side=booking.side, number=booking.number))
        return self._flush()

    def recalled(self) -> list[TransferEffect]:
        """An older transfer wants what was granted."""
        booking = self.booking
        if booking is not None and booking.granted and not booking.begun:
            self._tell(booking.agent, Recall(side=booking.side, number=booking.number))
        return self._flush()

    # ---- questions ----------------------------------------------------------------------------

    def find(self, key: CallKey) -> Call | None:
        """The waiting or running call under ``key``."""
        running = self.current.calls.values() if self.current is not None else ()
        return next((call for call in chain(self.queues, running) if call.key == key), None)

    def missing(self) -> tuple[Member, ...]:
        """Ranks for which the oldest waiting call here still waits, as far as this agent knows."""
        call = next(iter(self.queues), None)
        return () if self.current is not None or call is None else self.queues.missing(call, self._not_ready(call))

    def validate(self) -> None:
        """Assert what must hold between any two events; for tests."""
        assert (self.current is None) == (self.state is Moving.IDLE), self.history
        assert not self._inbox and not self._out and self._want is None
        assert (self.state is Moving.DOUBT) == (self.current is not None and self.current.inquiry is not None)
        assert self.booking is None or not self.booking.begun or self.current is not None
        for side in self.sides.values():
            assert not (side.withdrawing and side.standing is None)
        for coordinator in self.coordinators.values():
            assert coordinator.seq <= self.seq

    # ---- inside -------------------------------------------------------------------------------

    def _flush(self) -> list[TransferEffect]:
        while self._inbox:
            self._hear(self.me, self._inbox.popleft())
        # Last, because the lane may be granted at once, and the messages that follow from that come after all of these.
        out = [*self._out, *([self._want] if self._want is not None else [])]
        self._out, self._want = [], None
        return out

    def _hear(self, agent: str, message: Message | Settle) -> None:
        if not isinstance(message, Settle) and type(message) in _TO_COORDINATORS:
            for coordinator in self.coordinators.values():
                for to, letter in coordinator.hear(agent, message):
                    self._tell(to, letter)
            return
        match message:
            case Go():
                self._go(agent, message)
            case Commit(seq=seq):
                self._commit(agent, seq)
            case Settle(seq=seq) if self.current is not None and self.current.seq == seq:
                self._settle(message)
            case PeerOffer(side=side, standing=standing, version=version):
                self.offers.pop(side, None)
                if standing:
                    self.offers[side] = version
                self._out.append(OfferChanged(source=side, standing=standing, version=version))
            case WithdrawAcknowledged():
                self._stood(agent, message)
            case Refused():
                self._refused(message)
            case Book():
                self._book(agent, message)
            case Unbook(side=side, number=number):
                booking = self.booking
                if booking is not None and (booking.agent, booking.side, booking.number) == (agent, side, number):
                    self._unbook()
            case Abort(seq=seq, cause=cause) if self.current is not None and self.current.seq == seq:
                self._abort(cause)
            case Question(seq=seq):
                self._question(agent, seq)
            case VerdictAnswer(seq=seq, verdict=known) if self.current is not None and self.current.seq == seq:
                if self.current.inquiry is not None:
                    self.current.inquiry.answer(agent, known)
                    self._conclude()

    def _go(self, agent: str, message: Go) -> None:
        seq = message.seq
        self.seq = max(self.seq, seq)
        for coordinator in self.coordinators.values():
            self._post(coordinator.observe(message))
        if self.broken is not None:  # all of its calls have failed already
            self.memory.keep(seq, "aborted")
            self._tell(agent, Failed(seq=seq, cause=self.broken))
            return
        assert self.current is None, f"{self.name}: GO {seq} within {self.current}"
        calls = self.queues.take()
        self.current = TransferInProgress(
            seq=seq, source=message.side, version=message.version, coordinator=agent, calls=calls
        )
        if self.booking is not None:
            self.booking.begun = True
            self._out.append(BeginLane())
        if (refusal := self._refusal(seq, agent)) is not None:
            self.current.causes |= {member: call.cause for member, call in calls.items() if call.cause is not None}
            self.move(Moving.FAILED)
            self._tell_ahead()
            self._tell(agent, Failed(seq=seq, cause=refusal))
            return
        self.current.begun = True
        self.move(Moving.MOVING)
        keys = {member: call.key for member, call in calls.items()}
        self._out.append(
            StartMove(
                seq=seq, source=message.side, snapshot=message.snapshot, calls=keys, booking=max(0.0, message.booking)
            )
        )
        for member, call in calls.items():
            if call.cause is not None:  # withdrawn too late, because GO has overtaken it
                self._spoil(member, call.cause)

    def _refusal(self, seq: int, coordinator: str) -> PeerLostError | None:
        """Why a transfer whose GO came cannot begin here; None if it can."""
        if self.lost_agents:
            return self._agent_lost_error(*self.lost_agents)
        if self.memory[seq] is not None:  # asked about it before GO came, and answered
            return self._agent_lost_error(coordinator, to_others=True)
        return None

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
        self._tell_ahead()

    def _tell_ahead(self) -> None:
        """Answer calls that have ended here if their transfer cannot be committed without our vote; do not wait for
        ABORT.

        If the coordinator is cut off, ABORT would come only when its link is found to be lost.
        """
        current = self.current
        if current is None or self.state is not Moving.FAILED:
            return
        for member, cause in current.causes.items():
            if member not in current.answered:
                current.answered.add(member)
                error = verdict(self.name, current.seq, cause, cause, self._torn(member))
                self._out.append(Fail(call=current.calls[member].key, error=error, seq=current.seq))

    def _abort(self, cause: EthaError) -> None:
        assert self.current is not None
        self.current.abort = self.current.abort or cause
        if self.state is Moving.MOVING:
            self.move(Moving.STOPPING)
            self._out.append(StopMove(seq=self.current.seq))
        elif self.state is not Moving.STOPPING:
            self._aborted()

    def _aborted(self) -> None:
        current = self.current
        assert current is not None and current.abort is not None
        for member, call in current.calls.items():
            if member in current.answered:
                continue
            own = current.causes.get(member)
            error = verdict(self.name, current.seq, own, current.abort, self._torn(member))
            self._out.append(Fail(call=call.key, error=error, seq=current.seq))
        self._finish("aborted", current.abort)

    def _unknown(self, cause: EthaError) -> None:
        current = self.current
        assert current is not None
        for member, call in current.calls.items():
            error = unknown(self.name, current.seq, cause, self._torn(member))
            self._out.append(Fail(call=call.key, error=error, seq=current.seq))
        self._finish("unknown", unknown(self.name, current.seq, cause, False))

    def _torn(self, member: Member) -> bool:
        current = self.current
        assert current is not None
        return current.touched and not self.atomic and member[0] != current.source

    def _commit(self, agent: str, seq: int) -> None:
        current = self.current
        if current is None or current.seq != seq:
            known = self.memory[seq] == "committed"
        elif known := self.state is Moving.VOTED:
            self.move(Moving.COMMITTED)
        if not known:
            cause = current.inquiry.cause if current is not None and current.inquiry is not None else None
            self._tell(agent, Declined(seq=seq, cause=cause or self._agent_lost_error(agent, to_others=True)))
            return
        self._tell(agent, Committed(seq=seq))
        if self.state is Moving.COMMITTED and agent != self.me:
            self._finish("committed", None)

    def _settle(self, message: Settle) -> None:
        if message.cause is None:
            self._finish("committed", None)
        elif message.outcome == "unknown":
            self._unknown(message.cause)
        else:
            self._abort(message.cause)

    def _question(self, agent: str, seq: int) -> None:
        current = self.current
        if current is not None and current.seq == seq:
            if self.me == current.coordinator:
                return  # it lives and decides; the asker has lost it and needs the others' answers
            asked = self._agent_lost_error(current.coordinator, to_others=True)
            if self.state is Moving.VOTED:
                self._doubt(asked)
            if current.inquiry is not None:
                self._tell(agent, VerdictAnswer(seq=seq, verdict="fenced"))
                current.inquiry.answer(agent, "fenced")  # because every agent that asks is fenced
                self._conclude()
            else:
                self._tell(agent, VerdictAnswer(seq=seq, verdict="aborted"))
                self._spoil(None, asked)
            return
        if seq > self.seq:  # its GO has not come; when it comes, it will not begin here
            self.seq = seq
            for coordinator in self.coordinators.values():
                coordinator.skip(seq)
            self.memory.keep(seq, "aborted")
        match self.memory[seq]:
            case "committed" | "aborted" as ended:
                self._tell(agent, VerdictAnswer(seq=seq, verdict=ended))
            case "unknown":
                # It was fenced to its end and never said that it aborted, so it counts as still in doubt.
                self._tell(agent, VerdictAnswer(seq=seq, verdict="fenced"))

    def _doubt(self, cause: PeerLostError) -> None:
        current = self.current
        assert current is not None
        self.move(Moving.DOUBT)
        others = self.members - {self.me, current.coordinator}
        current.inquiry = Inquiry(others, self.lost_agents - self.lost_by_word, cause)
        for agent in sorted(others):
            self._tell(agent, Question(seq=current.seq))
        self._out.append(InDoubt(seq=current.seq))

    def _conclude(self) -> None:
        current = self.current
        assert current is not None and current.inquiry is not None
        match current.inquiry.outcome():
            case "committed":
                self.move(Moving.COMMITTED)
                self._finish("committed", None)
            case "aborted":
                self._abort(current.inquiry.cause)
            case "unknown":
                self._unknown(current.inquiry.cause)

    def _finish(self, outcome: Outcome, error: EthaError | None) -> None:
        current = self.current
        assert current is not None
        keys = {member: call.key for member, call in current.calls.items()}
        if current.begun:
            torn = error is not None and any(map(self._torn, keys))
            self._out.append(
                Settled(
                    seq=current.seq,
                    source=current.source,
                    version=current.version,
                    error=error,
                    calls=keys,
                    torn=torn,
                )
            )
        self.memory.keep(current.seq, outcome)
        self.current = None
        self.move(Moving.IDLE)
        self._unbook()
        for side in self.sides:
            self._ready(side)

    # ---- telling ------------------------------------------------------------------------------

    def _tell(self, agent: str, message: Message | Settle) -> None:
        if agent == self.me:
            self._inbox.append(message)
        elif self._may_pass(agent, message):
            assert not isinstance(message, Settle)
            self._out.append(Tell(agent=agent, message=message))

    def _may_pass(self, agent: str, message: Message | Settle) -> bool:
        """Whether a message is sent to, or taken from, another agent."""
        if agent not in self.lost_agents:
            return True
        return agent in self.lost_by_word and isinstance(message, Question | VerdictAnswer)

    def _post(self, letters: Outbox) -> None:
        for agent, message in letters:
            self._tell(agent, message)

    def _tell_coordinators(self, message: Ready | Unready) -> None:
        for agent in self._directing:
            self._tell(agent, message)

    def _coordinating(self, verb: Verb, side: str) -> str:
        """The agent that can say GO to calls of ``side`` with ``verb``."""
        return self.agents[side if verb == "send" else self.other[side]][0]

    def _drop(self, call: Call, error: EthaError) -> None:
        self.queues.calls[call.member].remove(call)
        if isinstance(error, TransferTimeoutError):
            self.queues.gave_up[call.member] = self.queues.now()
        superseded = call.yields and isinstance(error, TransferAbortedError)
        self._out.append(Fail(call=call.key, error=error, superseded=superseded))

    def _drop_all(self, calls: list[Call], text: str) -> None:
        for call in calls:
            self._drop(call, TransferError(text, outcome="withdrawn"))

    def _not_ready(self, call: Call) -> tuple[Member, ...]:
        """Who is not ready for ``call``: as this agent knows if it coordinates the direction, otherwise as its
        coordinator last said."""
        source = call.member[0] if call.verb == "send" else self.other[call.member[0]]
        if (coordinator := self.coordinators.get(source)) is None:
            return self._heard.get(source, ())
        return coordinator.not_ready(call.member[0], self.me)

    def _withdrawn_error(self, error: PeerLostError) -> PeerLostError:
        text = f"{self.name}: {error.message}"
        return PeerLostError(text, reason=error.reason, outcome="withdrawn", culprits=error.culprits)

    def _agent_lost_error(self, *agents: str, to_others: bool = False) -> PeerLostError:
        """``to_others``: other agents of the batch have lost it, whatever this agent's own link says."""
        text = f"{name_agents(self.agents, agents)} {'lost to other agents of the batch' if to_others else 'gone'}"
        return PeerLostError(text, reason="died", culprits=members_of(self.agents, agents))

    def note_missing(self, source: str, missing: tuple[Member, ...]) -> None:
        """Note who is not ready in the direction from ``source``, as its coordinator, another agent, says."""
        self._heard[source] = missing

    # ---- READY --------------------------------------------------------------------------------

    def _ready(self, side: str) -> None:
        state = self.sides[side]
        if self.state is not Moving.IDLE or state.standing is not None or self.lost_agents:
            return
        heads = self.queues.heads(side)
        if heads is None or not (heads[0].cause is None if len(heads) == 1 else self._fit(side, heads)):
            return
        verb = heads[0].verb
        state.attempt += 1
        state.standing = verb
        source = side if verb == "send" else self.other[side]
        digest = self.digests.get(source, "")
        version = heads[0].version if len(heads) == 1 else next(iter(_labels(heads).values()), None)
        lane = len(self.members) > 1 and self.booking is None and self._hold(source)
        message = Ready(
            side=side,
            verb=verb,
            attempt=state.attempt,
            version=version,
            digest=digest,
            edition=heads[0].edition,
            lane=lane,
            expects=heads[0].expects,
        )
        if lane:
            self.booking = Booking(
                agent=self.agents[source][0], side=source, number=message.held_number, ready=side, granted=True
            )
        self._tell_coordinators(message)

    def _fit(self, side: str, heads: list[Call]) -> bool:
        """Whether the oldest calls of all ranks of a side can go together. Those that never can are ended."""
        verbs = {call.verb for call in heads}
        if len(verbs) > 1 or any(call.cause for call in heads) or len({call.expects for call in heads}) > 1:
            return False
        editions = {call.edition for call in heads}
        if "" not in editions and len(editions) > 1:
            return False  # a rank has yet to come with the snapshot that another has already taken
        sends = heads[0].verb == "send"
        if sends and len(editions) > 1:
            self._drop_all(heads, f"{self.name}: some ranks of {side} send a snapshot, others what their tensors hold")
            return False
        if sends and len(labels := _labels(heads)) > 1:
            listed = ", ".join(sorted(labels))
            self._drop_all(heads, f"{self.name}: ranks of {side} send under different versions, {listed}")
            return False
        return True

    def _withdraw(self, call: Call, cause: EthaError) -> None:
        """End a waiting call: at once, or once the coordinator releases the READY that it is part of."""
        side = self.sides[call.member[0]]
        if side.standing is None or self.queues.calls[call.member][0] is not call:
            self._drop(call, self.queues.named(call, cause, self._not_ready(call)))
            self._ready(call.member[0])
        else:
            call.cause = cause
            if not side.withdrawing:
                side.withdrawing = True
                self._tell_coordinators(Unready(side=call.member[0], attempt=side.attempt))

    def _stood(self, agent: str, message: WithdrawAcknowledged) -> None:
        side = self.sides.get(message.side)
        if side is None or not side.withdrawing or side.attempt != message.attempt or side.standing is None:
            return
        # Both coordinators answer, but GO can come only from the one whose direction the verb fits, so only its answer
        # ends the race. (On one agent the first answer does, because GO would be here already.)
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
        """An agent is lost: take READY back, because nothing begins without that agent."""
        side = self.sides[name]
        if side.standing is None:
            return
        if not side.withdrawing:
            side.withdrawing = True
            self._tell_coordinators(Unready(side=name, attempt=side.attempt))
        if self._coordinating(side.standing, name) in self.lost_agents:  # neither GO nor WithdrawAcknowledged can come
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

    def _hold(self, source: str) -> bool:
        """Book what a transfer from side ``source`` needs, if it is free now. Returns whether it was."""
        freed = any(isinstance(effect, FreeLane) for effect in self._out)  # the shell has not freed it yet
        if freed or not self._can_hold(source):
            return False
        self._out.insert(0, HoldLane(source))
        return True

    def _book(self, agent: str, message: Book) -> None:
        if self.broken is not None or self.lost_agents:
            return  # READY has been taken back, which ends the booking
        self._unbook()
        self.booking = Booking(agent=agent, side=message.side, number=message.number)
        self._want = WantLane(message.ticket, message.side)

    def _let_go(self, side: str) -> None:
        """READY of ``side`` is void, and so is the booking that came with it."""
        if self.booking is not None and self.booking.ready == side and not self.booking.begun:
            self._unbook()

    def _unbook(self) -> None:
        if self._want is not None:
            self._want = None
        elif self.booking is not None:
            self._out.append(FreeLane())
        self.booking = None
