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

    ``moved`` is the number of bytes that the failed call had copied before.
    """

    def __init__(self, message: str, *, pid: int | None = None, owner: tuple[str, int] | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.owner = owner
        self.moved = 0


class WorkerGoneError(ReachError):
    """The worker's process has died."""


class AccessError(ReachError):
    """The kernel does not let this process touch the worker's memory."""


class FaultError(ReachError):
    """The worker has nothing (writable) mapped at ``address``, which it registered."""

    address = 0


class RevokedError(ReachError):
    """The worker's call has returned; its memory must not be touched any more."""
