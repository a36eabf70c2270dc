"""One agent's part in the transfers of one batch: its workers' waiting calls, its booking, and the vote.

Pure. Calls wait in a queue a rank; when every local rank of a side waits, the agent says READY. What
it says to itself (it may be the coordinator of one or both directions) is delivered before ``handle``
returns, so one agent alone and many agents run the same machine. ``standing`` has the part before GO,
``doubt`` says why the end is safe when the coordinator is lost.

    IDLE --Go--> MOVING --moved--> VOTED --Commit--> COMMITTED --Settle--> IDLE
      |             |                 |\\--Abort--> IDLE
      |             |                 +--coordinator lost, asked--> DOUBT --answers, Abort--> COMMITTED | IDLE
      |             +--stop--> STOPPING --quiet--> SPOILT --Abort--> IDLE
      +--Go that cannot begin here--------------> SPOILT
"""

from __future__ import annotations

from etha.agent.protocol.coordinator import Settle
from etha.agent.protocol.effects import (
    BeginLane,
    CallKey,
    Doubt,
    Fail,
    Member,
    OfferChanged,
    Settled,
    StartMove,
    StopMove,
)
from etha.agent.protocol.standing import Moving, Standing, TransferEffect
from etha.agent.protocol.termination import Inquiry, Outcome
from etha.agent.protocol.waiting import Call, Current, unknown, verdict
from etha.errors import (
    EthaError,
    PeerLostError,
    TransferAbortedError,
    TransferTimeoutError,
)
from etha.peer.messages import (
    Abort,
    Answer,
    Book,
    Booked,
    Commit,
    Committed,
    Declined,
    Done,
    Failed,
    Go,
    Message,
    Offer,
    Question,
    Ready,
    Recall,
    Refused,
    Stood,
    Unbook,
    Unready,
)

__all__ = ["Moving", "TransferEffect", "Transfers"]


class Transfers(Standing):
    """The transfers of one batch on agent ``me``.

    ``agents``: side -> agent of each rank; ``digests``: source side -> plan digest; ``seq``: the last
    number given; ``atomic``: targets are shadows, so an abort never tears a live tensor; ``now``: ns of
    a clock that all agents share roughly, for the order in which transfers get what they book; ``hold(source)``:
    book it at once for a transfer from that side, if it is there.
    """

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
        if call is not None and (call.cause is None or call.yields):
            call.yields = False
            side, rank = call.member
            what = "its deadline passed" if expired else "it was cancelled"
            kind = TransferTimeoutError if expired else TransferAbortedError
            running = self.current is not None and call is self.current.calls.get(call.member)
            text = f"{self.name}: {call.verb} of {side} rank {rank} ended: {what}"
            error = kind(text, outcome="aborted" if running else "withdrawn")
            if running:
                call.cause = error
                self._spoil(call.member, error)
            else:
                self._withdraw(call, error)
        return self._flush()

    def supersede(self, member: Member) -> list[TransferEffect]:
        """A worker takes a newer snapshot: the ones that it still offers end, unless GO takes them before."""
        for call in list(self.queues.calls[member]):
            if call.edition and call.cause is None:
                side, rank = member
                text = f"{self.name}: the snapshot of {side} rank {rank} was superseded by a newer one"
                call.yields = True
                self._withdraw(call, TransferAbortedError(text, outcome="withdrawn"))
        return self._flush()

    def hear(self, agent: str, message: Message) -> list[TransferEffect]:
        """Another agent's message; nothing is heard of one that is lost."""
        if agent not in self.gone:
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
                    self._tell_ahead()
                else:
                    self._aborted()
            elif error is None:
                self.move(Moving.VOTED)
                self._tell(current.coordinator, Done(seq=seq))
            else:
                self.move(Moving.SPOILT)
                self._tell_ahead()
                self._tell(current.coordinator, Failed(seq=seq, cause=error))
        return self._flush()

    def lose_agent(self, agent: str) -> list[TransferEffect]:
        """An agent's link closed: it is not heard any more, and no transfer of this batch begins here."""
        if agent not in self.members or agent in self.gone:
            return []
        self.gone.add(agent)
        cause = self._lost(agent)
        for coordinator in self.coordinators.values():
            self._post(coordinator.lose(agent))
        if self.booking is not None and self.booking.agent == agent:
            self._unbook()
        for side in self.sides:
            self._retreat(side)
        current = self.current
        if current is None:
            pass
        elif current.inquiry is not None:
            current.inquiry.lose(agent)
            self._conclude()
        elif self.state not in (Moving.VOTED, Moving.COMMITTED):
            if current.coordinator == agent:
                self._abort(cause)
            else:
                self._spoil(None, cause)
        elif current.coordinator == agent:
            self._doubt(cause)
            self._conclude()
        return self._flush()

    def break_up(self, error: PeerLostError) -> list[TransferEffect]:
        """The pair is lost, or a worker of this batch is gone: every call ends with ``error``."""
        self.broken = self.broken or error
        for side, state in self.sides.items():
            if state.standing is not None:
                self._tell_coordinators(Unready(side=side, attempt=state.attempt))
        self.queues.rest()
        for call in list(self.queues):
            self._drop(call, self._gone(error))
        if self.booking is not None and not self.booking.begun:
            self._unbook()
        if self.current is not None:
            self._spoil(None, error)
        return self._flush()

    def undecided(self, seq: int) -> list[TransferEffect]:
        """A second after Doubt(seq): who has not answered by now is as good as gone."""
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

    def validate(self) -> None:
        """What must hold between any two events; for tests."""
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
        # Last, for the lane may be granted at once: what follows from that is said after all of this.
        out = [*self._out, *([self._want] if self._want is not None else [])]
        self._out, self._want = [], None
        return out

    def _hear(self, agent: str, message: Message | Settle) -> None:
        match message:
            case Ready() | Unready() | Booked() | Recall() | Done() | Failed() | Committed() | Declined():
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
            case Book():
                self._book(agent, message)
            case Unbook(side=side, number=number):
                booking = self.booking
                if booking is not None and (booking.agent, booking.side, booking.number) == (agent, side, number):
                    self._unbook()
            case Abort(seq=seq, cause=cause) if self.current is not None and self.current.seq == seq:
                self._abort(cause)
            case Commit(seq=seq):
                self._commit(agent, seq)
            case Settle(seq=seq) if self.current is not None and self.current.seq == seq:
                self._settle(message)
            case Question(seq=seq):
                self._question(agent, seq)
            case Answer(seq=seq, verdict=known) if self.current is not None and self.current.seq == seq:
                if self.current.inquiry is not None:
                    self.current.inquiry.answer(agent, known)
                    self._conclude()

    def _go(self, agent: str, message: Go) -> None:
        seq = message.seq
        self.seq = max(self.seq, seq)
        for coordinator in self.coordinators.values():
            self._post(coordinator.observe(message))
        if self.broken is not None:  # its calls have all been told
            self.memory.keep(seq, "aborted")
            self._tell(agent, Failed(seq=seq, cause=self.broken))
            return
        assert self.current is None, f"{self.name}: GO {seq} within {self.current}"
        calls = self.queues.take()
        self.current = Current(seq=seq, source=message.side, version=message.version, coordinator=agent, calls=calls)
        if self.booking is not None:
            self.booking.begun = True
            self._out.append(BeginLane())
        if (refusal := self._refusal(seq, agent)) is not None:
            self.current.causes |= {member: call.cause for member, call in calls.items() if call.cause is not None}
            self.move(Moving.SPOILT)
            self._tell_ahead()
            self._tell(agent, Failed(seq=seq, cause=refusal))
            return
        self.current.begun = True
        self.move(Moving.MOVING)
        keys = {member: call.key for member, call in calls.items()}
        self._out.append(StartMove(seq=seq, source=message.side, snapshot=message.snapshot, calls=keys))
        for member, call in calls.items():
            if call.cause is not None:  # withdrawn too late: GO has overtaken it
                self._spoil(member, call.cause)

    def _refusal(self, seq: int, coordinator: str) -> PeerLostError | None:
        """Why a transfer whose GO came cannot begin here."""
        if self.gone:
            return self._lost(*self.gone)
        if self.memory[seq] is not None:  # asked about it before GO came, and answered
            return self._lost(coordinator, to_others=True)
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
        """Calls that have ended here, of a transfer that cannot be committed without our vote: no wait for ABORT.

        For the word of a coordinator that is cut off comes only when its link is found to be lost.
        """
        current = self.current
        if current is None or self.state is not Moving.SPOILT:
            return
        for member, cause in current.causes.items():
            if member not in current.told:
                current.told.add(member)
                error = verdict(self.name, current.seq, cause, cause, self._torn(member))
                self._out.append(Fail(call=current.calls[member].key, error=error))

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
            if member in current.told:
                continue
            own = current.causes.get(member)
            error = verdict(self.name, current.seq, own, current.abort, self._torn(member))
            self._out.append(Fail(call=call.key, error=error))
        self._finish("aborted", current.abort)

    def _unknown(self, cause: EthaError) -> None:
        current = self.current
        assert current is not None
        for member, call in current.calls.items():
            error = unknown(self.name, current.seq, cause, self._torn(member))
            self._out.append(Fail(call=call.key, error=error))
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
            self._tell(agent, Declined(seq=seq, cause=cause or self._lost(agent, to_others=True)))
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
                return  # it lives and decides; who asks has lost it, and wants to hear the others
            asked = self._lost(current.coordinator, to_others=True)
            if self.state is Moving.VOTED:
                self._doubt(asked)
            if current.inquiry is not None:
                self._tell(agent, Answer(seq=seq, verdict="fenced"))
                current.inquiry.answer(agent, "fenced")  # as everybody who asks
                self._conclude()
            else:
                self._tell(agent, Answer(seq=seq, verdict="aborted"))
                self._spoil(None, asked)
            return
        if seq > self.seq:  # its GO has not come: it will not begin here when it does
            self.seq = seq
            for coordinator in self.coordinators.values():
                coordinator.skip(seq)
            self.memory.keep(seq, "aborted")
        match self.memory[seq]:
            case "committed" | "aborted" as ended:
                self._tell(agent, Answer(seq=seq, verdict=ended))
            case "unknown":
                # It was fenced to its end and has told nobody that it aborted: the same as one still in doubt.
                self._tell(agent, Answer(seq=seq, verdict="fenced"))

    def _doubt(self, cause: PeerLostError) -> None:
        current = self.current
        assert current is not None
        self.move(Moving.DOUBT)
        others = self.members - {self.me, current.coordinator}
        current.inquiry = Inquiry(others, self.gone, cause)
        for agent in sorted(others):
            self._tell(agent, Question(seq=current.seq))
        self._out.append(Doubt(seq=current.seq))

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
            self._out.append(
                Settled(seq=current.seq, source=current.source, version=current.version, error=error, calls=keys)
            )
        self.memory.keep(current.seq, outcome)
        self.current = None
        self.move(Moving.IDLE)
        self._unbook()
        for side in self.sides:
            self._ready(side)
