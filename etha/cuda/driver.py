"""What Etha needs of a CUDA driver, as one Protocol: memory, streams, events, and both across processes.

    runtime.py       the real one, over cuda-bindings; imported only when a device is asked for
    select.py        the one of this process

Addresses, streams and events are plain ints. Device memory and pinned host memory share one address space (unified
virtual addressing), so a copy or a kernel may have either at both ends. Every call may be made from any thread. A call
that needs a current device makes it current for its own thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class DeviceError(Exception):
    """A call failed; ``name`` is CUDA's name of the error ("cudaErrorInvalidValue").

    ``sticky``: the context is broken, and every later call of this process fails with the same error.
    """

    def __init__(self, name: str, text: str, *, sticky: bool = False) -> None:
        super().__init__(f"{text}: {name}")
        self.name, self.sticky = name, sticky


class Unexportable(DeviceError):
    """This memory has no IPC handle: expandable segments, cudaMallocAsync, a sleep mode's virtual memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU as this process sees it. Only ``uuid`` ("GPU-8-4-4-4-12 hex digits") means the same in other
    processes."""

    ordinal: int
    uuid: str
    name: str
    nbytes: int
    capability: tuple[int, int]


class Extent(NamedTuple):
    """An allocation: its first address and its size in bytes."""

    base: int
    nbytes: int


class Driver(Protocol):
    """See the module. Every method raises DeviceError, and names in it what was asked for."""

    def versions(self) -> dict[str, str]:
        """Versions of the driver, the runtime and the bindings, as text."""
        ...

    def devices(self) -> tuple[Device, ...]:
        """All devices that this process sees, by ordinal; none without a GPU or a driver."""
        ...

    def peers(self, uuid: str, other: str) -> bool:
        """Whether ``uuid`` can reach ``other``'s memory directly. A device always reaches its own."""
        ...

    def holds(self, tensor: torch.Tensor) -> str | None:
        """The uuid of the device that a tensor's memory is on; None for the CPU's."""
        ...

    def tensor(self, uuid: str, address: int, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor over device memory that something else keeps alive. 0 bytes are allowed."""
        ...

    def current_stream(self, uuid: str) -> int:
        """torch's current stream of the calling thread on that device."""
        ...

    def allocate(self, uuid: str, nbytes: int) -> int:
        """``nbytes`` > 0 of plain device memory (cudaMalloc), which always has an IPC handle."""
        ...

    def free(self, address: int) -> None:
        """Free what ``allocate`` returned. Waits for the device."""
        ...

    def pin(self, nbytes: int) -> int:
        """``nbytes`` > 0 of page-locked host memory that every device can reach."""
        ...

    def unpin(self, address: int) -> None:
        """Free what ``pin`` returned."""
        ...

    def extent(self, address: int) -> Extent:
        """The allocation around a device address."""
        ...

    def serial(self, address: int) -> int:
        """A number of the allocation around ``address`` that no other allocation of this process ever has."""
        ...

    def backed(self, address: int) -> bool:
        """Whether a device address has memory behind it. A sleep mode takes it away from tensors that live on."""
        ...

    def export(self, base: int) -> bytes:
        """The IPC handle (64 bytes) of the allocation at ``base``. Unexportable if it has none."""
        ...

    def open(self, uuid: str, handle: bytes) -> int:
        """Map another process's allocation for ``uuid``, with peer access. Returns its first address here.

        Opened again, it has the same address, and stays mapped until it has been closed as often.
        """
        ...

    def close(self, address: int) -> None:
        """Unmap what ``open`` mapped. The exporter may be gone."""
        ...

    def stream(self, uuid: str) -> int:
        """A new stream that does not wait for the legacy default stream."""
        ...

    def drop_stream(self, stream: int) -> None:
        """Destroy it once what is queued on it is done."""
        ...

    def event(self, uuid: str, *, interprocess: bool = False) -> int:
        """A new event without timing. An event that was never recorded counts as done."""
        ...

    def drop_event(self, event: int) -> None:
        """Destroy it, also one that ``open_event`` returned. Streams that wait for it go on waiting."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Make the event done once everything queued on ``stream`` now is done. It replaces the former recording."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """Let what is queued on ``stream`` from now on begin after the event's newest recording. Returns at once."""
        ...

    def reached(self, event: int) -> bool:
        """Whether the event is done. If its process died before, it may never be."""
        ...

    def synchronize(self, event: int) -> None:
        """Return once the event is done. The GIL is released meanwhile."""
        ...

    def settle(self, uuid: str) -> None:
        """Return once everything that this process has queued on the device by now is done. The GIL is released
        meanwhile."""
        ...

    def export_event(self, event: int) -> bytes:
        """The IPC handle (64 bytes) of an interprocess event."""
        ...

    def open_event(self, uuid: str, handle: bytes) -> int:
        """Another process's interprocess event, in this process."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between any two of device and pinned memory."""
        ...

    def launch(self, uuid: str, stream: int, work: Callable[[], None]) -> None:
        """Queue what ``work`` does with torch or Triton on tensors of ``tensor``.

        ``stream`` is torch's current stream in it. It must neither wait for the device nor assume that it runs before
        this returns.
        """
        ...
