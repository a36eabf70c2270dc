"""What the trace (ETHA_TRACE) says of a transfer at this agent. Entered only while a trace is written."""

from __future__ import annotations

from typing import Any

from etha.agent.protocol.effects import Settled
from etha.agent.services.batch_state import RegisteredBatch, RunningProgram
from etha.observe.trace import Part, Tracer


def about_batch(batch: RegisteredBatch) -> dict[str, Any]:
    """What every span of a batch says."""
    return {"pair": batch.pairs[0], "epoch": batch.scope.epoch, "batch": batch.name}


def about_run(batch: RegisteredBatch, current: RunningProgram) -> dict[str, Any]:
    """What every piece of a transfer says."""
    return {"name": "copy", **about_batch(batch), "seq": current.seq}


def trace_transfer(
    tracer: Tracer, batch: RegisteredBatch, effect: Settled, current: RunningProgram, now: float
) -> None:
    """A transfer was over here ``now``, and its workers have their answers."""
    members = sorted(effect.calls)
    first = min((current.asked[member] for member in members), default=current.started)
    about = {
        **about_batch(batch),
        "seq": effect.seq,
        "version": effect.version,
        "sources": [m for m in members if m[0] == effect.source],
        "targets": [m for m in members if m[0] != effect.source],
    }
    if trace_ids := list(filter(None, current.trace_ids)):
        about["trace_id"] = ", ".join(trace_ids)
    if current.program is not None:
        payload = current.program.payload
        about |= {"bytes": payload.whole, "sent": payload.sent, "received": payload.received}
    if effect.error is not None:
        about["error"] = f"{effect.error.code}: {effect.error.message}"[:2000]
    tracer.span("transfers", "transfer", _ns(first), _ns(now), about, _phases(current, first, now))


def _phases(current: RunningProgram, first: float, now: float) -> list[Part]:
    """When each phase was. The names are those of ``Phases``; ``wait`` is that of the first call."""
    submitted, moved = current.submitted or now, current.moved or now
    before = after = 0.0
    if current.run is not None:
        before, after = current.run.verify_first, current.run.verify_seconds - current.run.verify_first
    booked = max(first, current.started - current.booking)
    moments = (
        ("wait", first, booked),
        ("book", booked, current.started),
        ("compile", current.started, submitted),
        ("verify", submitted, submitted + before),
        ("move", submitted + before, moved - after),
        ("verify", moved - after, moved),
        ("commit", moved, now),
    )
    return [(name, _ns(begun), _ns(ended) - _ns(begun)) for name, begun, ended in moments if ended > begun]


def _ns(seconds: float) -> int:
    """A time of ``time.monotonic`` as the trace has it."""
    return round(seconds * 1e9)
