"""Makes the records of transfers and requests that are over, after they were answered."""

from __future__ import annotations

import time
from typing import Any

from etha.agent.protocol.effects import Fail, Settled
from etha.agent.runtime.sessions import WorkerSession
from etha.agent.services.batch_state import Ask, RegisteredBatch, RunningProgram
from etha.bus.messages import AttachShadows, AttachSnapshot, InitPair, Register, Transfer
from etha.errors import AgentLostError, EthaError, TransferAbortedError, TransferError
from etha.observe.records import NO_PAYLOAD, Culprit, Incident, Outcome, Record, TransferRecord
from etha.phases import Phases

#: Characters of an error that a record keeps. A registration can fail for 20 reasons of a line each.
MAX_REASON = 4000
#: Seconds after the first call from which on the last one is recorded as late.
LATE = 0.001
#: Requests whose errors are recorded, and how.
_WHAT: dict[type, str] = {
    InitPair: "rendezvous_failed",
    Register: "registration_failed",
    AttachShadows: "registration_failed",
    AttachSnapshot: "registration_failed",
    Transfer: "transfer",
}


def settled_transfer(batch: RegisteredBatch, effect: Settled, current: RunningProgram, now: float) -> TransferRecord:
    """The record of a transfer that is over here. Its phases are those of the rank here that called first."""
    error, asked = effect.error, current.asked
    first, last = min(asked, key=asked.__getitem__), max(asked, key=asked.__getitem__)
    late = asked[last] - asked[first]
    return TransferRecord(
        at=time.time(),
        pairs=batch.pairs,
        batch=batch.name,
        seq=effect.seq,
        version=effect.version,
        source=effect.source,
        target=batch.other(effect.source),
        ranks=tuple(effect.calls),
        payload=current.program.payload if current.program is not None else NO_PAYLOAD,
        outcome="committed" if error is None else _outcome(error, "aborted"),
        torn=effect.torn,
        code="" if error is None else error.code,
        reason="" if error is None else error.message[:MAX_REASON],
        culprits=culprits(batch, error),
        seconds=now - current.started,
        phases=current.phases(first, now),
        ended_in="" if error is None else current.phase,
        last=last if late >= LATE else None,
        late=late if late >= LATE else 0.0,
    )


def failed_call(batch: RegisteredBatch, ask: Ask, effect: Fail, phases: Phases) -> TransferRecord:
    """The record of a call that ended although no transfer of it began here."""
    error, (side, _) = effect.error, ask.member
    # An agent ends its own hop, because the subscriber's claim is over; whoever ended that says why.
    given_up = ask.verb == "send" and batch.name in ask.session.hops and isinstance(error, TransferAbortedError)
    source = side if ask.verb == "send" else batch.other(side)
    return TransferRecord(
        at=time.time(),
        pairs=batch.pairs,
        batch=batch.name,
        seq=effect.seq,
        source=source,
        target=batch.other(source),
        ranks=(ask.member,),
        outcome=_outcome(error, "withdrawn" if effect.seq is None else "aborted"),
        torn=isinstance(error, TransferError) and error.torn,
        code=error.code,
        reason=error.message[:MAX_REASON],
        culprits=culprits(batch, error),
        phases=phases,
        superseded=effect.superseded or given_up,
    )


def failed_request(session: WorkerSession, message: Any, error: EthaError) -> Record | None:
    """The record of a worker's request that ended with an error before it was part of any batch's transfers.

    None for questions: who asks again and again would push out what matters.
    """
    what = _WHAT.get(type(message))
    if what is None:
        return None
    batch, pair = getattr(message, "batch", ""), getattr(message, "pair", "")
    seats = [seat.member for seat in session.seats.values()][:1]
    if isinstance(message, Transfer):
        return TransferRecord(
            at=time.time(),
            pairs=(session.batches.get(batch, ("",))[0],),
            batch=batch,
            ranks=tuple(seats),
            outcome=_outcome(error, "withdrawn"),
            code=error.code,
            reason=error.message[:MAX_REASON],
        )
    if isinstance(message, Register):
        pair = message.pairs[0] if message.pairs else ""
    blamed: dict[str, Any] = getattr(error, "missing", {})
    return Incident(
        at=time.time(),
        what=what,
        reason=error.message[:MAX_REASON],
        pair=pair,
        batch=batch,
        code=error.code,
        culprits=(
            *(Culprit(side=side, rank=rank) for side, ranks in blamed.items() for rank in ranks),
            *(Culprit(side=side, rank=rank) for side, rank in getattr(error, "culprits", ())),
        ),
    )


def _outcome(error: EthaError, else_: Outcome) -> Outcome:
    unknown = isinstance(error, TransferError | AgentLostError) and error.outcome == "unknown"
    return "unknown" if unknown else else_


def culprits(batch: RegisteredBatch, error: EthaError | None) -> tuple[Culprit, ...]:
    """Who ended the transfer, with the processes and hosts as they were when the batch was registered."""
    if not isinstance(error, TransferError):
        return ()
    found = []
    for side, rank in error.culprits:
        members = batch.registration.view.sides[side].members if side in batch.registration.view.sides else {}
        if (holder := members.get(rank)) is None:
            found.append(Culprit(side=side, rank=rank))
        else:
            found.append(Culprit(side=side, rank=rank, agent=holder.agent, host=holder.shown_host, pid=holder.pid))
    return tuple(found)


def death(session: WorkerSession) -> Incident:
    """The record of a worker whose connection ended without a goodbye."""
    holder = session.holder
    seats = [seat for _, seat in sorted(session.seats.items())]
    ranks = ", ".join(f"{seat.side} rank {seat.rank} of pair {seat.pair!r}" for seat in seats)
    return Incident(
        at=time.time(),
        what="worker_died",
        reason=f"process {holder.pid} on host {holder.shown_host} died: {ranks}",
        pair=seats[0].pair,
        culprits=tuple(
            Culprit(side=seat.side, rank=seat.rank, agent=holder.agent, host=holder.shown_host, pid=holder.pid)
            for seat in seats
        ),
    )
