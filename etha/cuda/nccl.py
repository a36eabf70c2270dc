"""What Etha needs of NCCL, as one Protocol: communicators that never block, and point-to-point in groups.

    nccl4py.py     the real one, over NVIDIA's bindings; imported only when NCCL is asked for
    select.py      the one of this process

The caller keeps NCCL's rules:

- One thread makes all calls.
- After ``init``, ``group_end`` or ``finalize``, only ``state`` and ``abort`` may be called until ``state`` says OK.
  Until then, nothing may be queued on the group's streams either.
- Sends and receives of two ranks meet in the order in which each issued them, and have equal sizes. What must progress
  together is in one group.
- NCCL does not report a rank that has died: whoever waits for it goes on waiting.
"""

from __future__ import annotations

from typing import Protocol

#: Bytes of a unique id.
ID_BYTES = 128
#: Answers of ``state`` besides the text of an error.
OK, IN_PROGRESS = "ok", "in progress"


class NcclError(Exception):
    """A call of NCCL failed. The text says which and why."""


class Nccl(Protocol):
    """See the module. Communicators and streams are plain ints. Every method raises NcclError."""

    def version(self) -> str:
        """Version of the loaded library, such as "2.29.7"."""
        ...

    def unique_id(self) -> bytes:
        """ID_BYTES bytes for one communicator. This process must live until all of its ranks have joined."""
        ...

    def init(self, ordinal: int, nranks: int, rank: int, unique_id: bytes) -> int:
        """Begin to join a new communicator as ``rank``, with the device of that ordinal. Returns at once."""
        ...

    def state(self, comm: int) -> str:
        """OK, IN_PROGRESS, or the text of an error, after which only ``abort`` may be called."""
        ...

    def group_start(self) -> None:
        """Collect sends and receives until ``group_end``."""
        ...

    def group_end(self, comm: int) -> None:
        """Queue what was collected, all of it for ``comm``. ``state`` says when it is queued."""
        ...

    def send(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Send device memory to the rank ``peer``."""
        ...

    def receive(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Receive into device memory from the rank ``peer``."""
        ...

    def abort(self, comm: int) -> None:
        """End what is queued, at the other ranks, too, and free the communicator in any state."""
        ...

    def finalize(self, comm: int) -> None:
        """Begin to flush, together with the other ranks."""
        ...

    def destroy(self, comm: int) -> None:
        """Free a communicator that is finalized."""
        ...
