"""Why a worker's memory could not be reached; raised in the agent's lanes.

    ReachError
    +-- WorkerGoneError   the process is dead (ESRCH, or its pidfd says so)
    +-- AccessError       the kernel refuses (EPERM): ptrace scope, another user, another namespace
    +-- FaultError        nothing is mapped there any more (EFAULT): the tensor was freed or moved
    +-- RevokedError      the worker's call has returned and taken its memory back

Internal: the agent turns them into the public errors, which know pairs, batches and ranks.
"""

from __future__ import annotations


class ReachError(Exception):
    """Base class. ``owner`` is the (side, rank) whose memory it was, once known.

    ``moved`` is the number of bytes that the failed call had copied before. ``kind`` names the class in messages.
    """

    kind = "other"

    def __init__(self, message: str, *, pid: int | None = None, owner: tuple[str, int] | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.owner = owner
        self.moved = 0


class WorkerGoneError(ReachError):
    """The worker's process has died."""

    kind = "gone"


class AccessError(ReachError):
    """The kernel does not let this process touch the worker's memory."""

    kind = "access"


class FaultError(ReachError):
    """The worker has nothing (writable) mapped at ``address``, which it registered."""

    kind = "fault"
    address = 0


class RevokedError(ReachError):
    """The worker's call has returned; its memory must not be touched any more."""


def error_of(kind: str, message: str, *, pid: int | None, address: int) -> ReachError:
    """The error that another process met in memory that is this process's to explain."""
    found: type[ReachError] = {"gone": WorkerGoneError, "access": AccessError, "fault": FaultError}.get(
        kind, ReachError
    )
    error = found(message, pid=pid)
    if isinstance(error, FaultError):
        error.address = address
    return error
