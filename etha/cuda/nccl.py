"""What Etha asks of NCCL, as one Protocol: communicators that never block, and point-to-point in groups.

    nccl4py.py     the real one, over NVIDIA's bindings; imported only when NCCL is asked for
    nccl()         the one of this process

NCCL's rules, which the caller keeps: one thread makes all calls; after ``init``, ``group_end`` or ``finalize`` nothing
but ``state`` and ``abort`` until ``state`` says OK, and until then nothing is queued on the group's streams either;
sends and receives of two ranks meet in the order in which each issued them, and with equal sizes; what must go on
together is in one group. A rank that has died is not told of by anybody: whoever waits for it waits.
"""

from __future__ import annotations

from typing import Protocol

#: Bytes of a unique id.
ID_BYTES = 128
#: What ``state`` answers besides the text of an error.
OK, IN_PROGRESS = "ok", "in progress"


class NcclError(Exception):
    """A call of NCCL failed; its text says which and why."""


class Nccl(Protocol):
    """See the module's head. Communicators and streams are plain ints; every method raises NcclError."""

    def version(self) -> str:
        """Of the library that is loaded, "2.29.7"."""
        ...

    def unique_id(self) -> bytes:
        """ID_BYTES for one communicator. This process must live until all of its ranks are there."""
        ...

    def init(self, ordinal: int, nranks: int, rank: int, unique_id: bytes) -> int:
        """Begin to be ``rank`` of a new communicator with the device of that ordinal; returns at once."""
        ...

    def state(self, comm: int) -> str:
        """OK, IN_PROGRESS or what went wrong since; after that only ``abort`` is left."""
        ...

    def group_start(self) -> None:
        """Collect what is sent and received until ``group_end``."""
        ...

    def group_end(self, comm: int) -> None:
        """Queue what was collected, all of it for ``comm``; ``state`` says when it is queued."""
        ...

    def send(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Send device memory to the rank ``peer``."""
        ...

    def receive(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Receive into device memory from the rank ``peer``."""
        ...

    def abort(self, comm: int) -> None:
        """End what is queued, not only here, and free the communicator, whatever its state is."""
        ...

    def finalize(self, comm: int) -> None:
        """Begin to flush; together with the other ranks."""
        ...

    def destroy(self, comm: int) -> None:
        """Free a communicator that is finalized."""
        ...


_installed: Nccl | None = None


def nccl() -> Nccl:
    """This process's NCCL; the real one from the first call on, unless one was installed. ConfigError without it."""
    global _installed
    if _installed is None:
        from etha.cuda.nccl4py import Bindings

        _installed = Bindings()
    return _installed


def install(one: Nccl | None) -> None:
    """Use ``one`` from now on, in this process; None: the real one again."""
    global _installed
    _installed = one


def installed() -> Nccl | None:
    """The one that is in use already; asking loads nothing."""
    return _installed
