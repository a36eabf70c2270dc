"""Why a group failed, as its members tell each other, so that all of them report the same first cause.

Whoever fails first writes its cause into its own block and claims the group with one word of rank 0's block. Everybody
else finds that word taken and reports what stands in the claimer's block. Rank 0's memory outlives its process.
"""

from __future__ import annotations

import msgspec

from etha.decoders import decoder
from etha.errors import GroupAbortedError, GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError

#: Reason of a "timeout" that was not the call's own: the member that claimed has left the others.
WAIT_IS_OVER = "wait"


class Cause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``kind``: "lost", "timeout", "mismatch", "aborted" or "failed". ``by`` is the rank that claimed."""

    kind: str
    by: int
    text: str
    ranks: tuple[int, ...] = ()
    reason: str = ""
    calls: dict[int, str] = {}


_decoder = decoder(Cause)


def encode(cause: Cause, limit: int) -> bytes:
    """``cause`` in at most ``limit`` bytes. Long texts are cut."""
    text = cause.text
    while len(data := msgspec.msgpack.encode(cause)) > limit:
        text = text[: len(text) // 2]
        calls = {rank: call[:60] for rank, call in list(cause.calls.items())[:8]}
        cause = msgspec.structs.replace(cause, text=text + "...", ranks=cause.ranks[:64], calls=calls)
    return data


def decode(data: bytes) -> Cause:
    """The cause that another member wrote; one that says nothing if it is unreadable."""
    try:
        cause: Cause = _decoder.decode(data)
        return cause
    except msgspec.MsgspecError:
        return Cause(kind="failed", by=-1, text="another member failed, and its reason is unreadable")


def error_of(cause: Cause, rank: int, epoch: int | None) -> GroupError:
    """The error of ``rank``. A member that aborted is lost for all others."""
    match cause.kind:
        case "lost":
            return GroupLostError(cause.text, ranks=cause.ranks, reason=cause.reason, epoch=epoch)
        case "timeout" if cause.reason == WAIT_IS_OVER and cause.by != rank:
            return GroupLostError(cause.text, ranks=(cause.by,), reason="aborted", epoch=epoch)
        case "timeout":
            return GroupTimeoutError(cause.text, waiting_for=cause.ranks)
        case "mismatch":
            return GroupMismatchError(cause.text, calls=cause.calls)
        case "aborted" if cause.by == rank:
            return GroupAbortedError(cause.text)
        case "aborted":
            return GroupLostError(cause.text, ranks=(cause.by,), reason=cause.reason or "aborted", epoch=epoch)
        case _:
            return GroupError(cause.text)
