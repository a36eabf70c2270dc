"""What a lane or a stream met, in words that name the worker."""

from __future__ import annotations

import asyncio
import logging

from etha.agent.live import Live
from etha.errors import EthaError, PeerLostError, TransferError
from etha.memory.reach import ReachError, RevokedError, WorkerGoneError

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
    match error:
        case WorkerGoneError():
            return PeerLostError(f"{who} died in the transfer", reason="died")
        case RevokedError():
            return TransferError(f"the call of {who} has ended and taken its memory back")
        case ReachError():
            return TransferError(f"the memory of {who} could not be reached: {error}")
    log.error("batch %s: a lane failed", live.name, exc_info=error)
    return TransferError(f"the agent's lane failed, a bug of Etha: {type(error).__name__}: {error}")
