"""What a lane or a stream met, in words that name the worker."""

from __future__ import annotations

import asyncio
import logging

from etha.agent.services.batch_state import Live
from etha.errors import EthaError, PeerLostError, TransferError
from etha.memory.handles import span_nbytes
from etha.memory.mapping import DTYPES
from etha.memory.reach import FaultError, ReachError, RevokedError, WorkerGoneError

log = logging.getLogger(__name__)


def translate(live: Live, error: BaseException) -> EthaError:
    """``error`` of the transfer that moves now as what its workers are told."""
    if isinstance(error, EthaError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return TransferError("stopped")
    who = "a worker"
    if isinstance(error, ReachError) and error.owner is not None:
        role, rank = error.owner
        source = live.current.source if live.current is not None else ""
        who = f"{source if role == 'source' else live.other(source)} rank {rank}"
    if isinstance(error, FaultError) and (found := _tensor_at(live, error)) is not None:
        (side, rank), name = found
        who = f"{side} rank {rank} at its tensor {name!r}"
    match error:
        case WorkerGoneError():
            return PeerLostError(f"{who} died in the transfer", reason="died")
        case RevokedError():
            return TransferError(f"the call of {who} has ended and taken its memory back")
        case ReachError():
            return TransferError(f"the memory of {who} could not be reached: {error}")
    log.error("batch %s: a lane failed", live.name, exc_info=error)
    return TransferError(f"the agent's lane failed, a bug of Etha: {type(error).__name__}: {error}")


def _tensor_at(live: Live, error: FaultError) -> tuple[tuple[str, int], str] | None:
    """Which registered tensor of this agent's workers lies where nothing is: ((side, rank), name).

    The address tells, because ``error.owner`` is a guess where one process is several ranks.
    """
    source = live.current.source if live.current is not None else ""
    found: list[tuple[tuple[str, int], str]] = []
    for (side, rank), tensors in live.tensors.items():
        if tensors.session.memory.process.pid != error.pid:
            continue
        for name, handle in tensors.handles.items():
            nbytes = span_nbytes(handle.shape, handle.strides, DTYPES[handle.dtype].itemsize)
            if handle.segment is None and handle.offset <= error.address < handle.offset + nbytes:
                if error.owner == ("source" if side == source else "target", rank):
                    return (side, rank), name
                found.append(((side, rank), name))
    return found[0] if found else None
