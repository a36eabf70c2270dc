"""The agent's side of a worker's memory: mapped segments, private memory, and handles resolved to views.

A segment is a sealed memfd or, on a GPU's agent, an allocation that was opened by its IPC handle.

A handle comes from a socket and may contain anything. It is checked against its segment to the last byte. In private
memory the kernel checks it, and it can only name the worker's own memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from etha.errors import RegistrationError
from etha.memory.cuda import Mapping, Mappings
from etha.memory.handles import TensorHandle, span_nbytes
from etha.memory.pages import Asides, map_pages
from etha.memory.process import ProcessMemory
from etha.memory.views import CARRIERS, View

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEGMENT_ID = re.compile(r"[0-9a-f]{1,64}")
_MAX_DIMS = 64
_MAX_ADDRESS = 1 << 57  # five-level page tables

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and d.itemsize in CARRIERS and not str(d).startswith(("torch.q", "torch.bits"))
}


def map_sealed(fd: int, nbytes: int) -> ctypes.Array[Any]:
    """Map a received memfd of ``nbytes``. RegistrationError unless it is sealed and of that size.

    An unsealed file could be truncated under the mapping, and the next access would kill this process.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RegistrationError(f"the descriptor is not a memfd: {error.strerror}") from None
    size = os.fstat(fd).st_size
    if seals & _SEALS != _SEALS:
        raise RegistrationError(f"the memfd is not sealed against SHRINK and GROW (seals {seals:#x})")
    if nbytes <= 0 or size != nbytes:
        raise RegistrationError(f"the memfd has {size} bytes, the worker says {nbytes}")
    try:
        return map_pages(fd, nbytes)
    except OSError as error:
        raise RegistrationError(f"mapping {nbytes} bytes of a worker failed: {error.strerror}") from None


@dataclass(slots=True, kw_only=True)
class Spared:
    """Memory that was removed from a WorkerMemory. ``release`` may take long, so do not call it on an event loop."""

    pages: list[ctypes.Array[Any]]
    allocations: list[Mapping]

    def release(self) -> None:
        """Unmap it; a segment is unmapped with its last view. Idempotent."""
        self.pages.clear()
        while self.allocations:
            self.allocations.pop().close()


class StandingSegment:
    """A segment that this agent holds itself: it outlives the worker that has shared it.

    ``fd`` stays open, because other agents of this host find the segment among this process's descriptors.
    """

    def __init__(self, id: str, fd: int, nbytes: int) -> None:
        """Map a segment of a worker. Takes ``fd``. RegistrationError for anything but a sealed memfd of that size."""
        self.id, self.fd, self.nbytes = id, fd, nbytes
        try:
            if _SEGMENT_ID.fullmatch(id) is None:
                raise RegistrationError(f"segment id {id[:80]!r} is not hex")
            self.pages: ctypes.Array[Any] | None = map_sealed(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close it. It is unmapped with its last view, which may take long. Idempotent."""
        if self.pages is not None:
            self.pages = None
            os.close(self.fd)


class WorkerMemory:
    """All memory of one worker that this agent can reach.

    Views keep their memory alive: a detached or closed segment is unmapped when its last view is gone. ``private`` is
    False if the probe failed; handles into private memory are then refused. ``mappings`` is given on a GPU's agent,
    which reaches only allocations of GPUs.
    """

    def __init__(self, pid: int, started: int, *, private: bool = True, mappings: Mappings | None = None) -> None:
        self.process = ProcessMemory(pid, started)
        self.private = private and mappings is None
        self._segments: dict[str, ctypes.Array[Any]] = {}
        self._mappings = mappings
        self._allocations: dict[str, Mapping] = {}

    def attach(self, segment: str, fd: int, nbytes: int) -> None:
        """Map a segment of the worker. Takes ``fd`` and closes it in any case."""
        try:
            if _SEGMENT_ID.fullmatch(segment) is None:
                raise RegistrationError(f"segment id {segment[:80]!r} is not hex")
            if segment not in self._segments:
                self._segments[segment] = map_sealed(fd, nbytes)
        finally:
            os.close(fd)

    def adopt(self, segment: StandingSegment) -> None:
        """Reach a segment that this agent holds itself, as one of the worker's."""
        assert segment.pages is not None
        self._segments[segment.id] = segment.pages

    def exchange(self, pairs: Sequence[tuple[str, str]]) -> None:
        """The worker has exchanged these segments pair by pair, so exchange their mappings, all or none: a view stays
        where it is and shows what the worker's tensor shows. RegistrationError if that is not possible."""
        with Asides() as asides:
            self._exchange(pairs, asides)

    def _exchange(self, pairs: Sequence[tuple[str, str]], asides: Asides) -> None:
        done: list[tuple[str, str]] = []
        try:
            for first, second in pairs:
                one, other = self._segments.get(first), self._segments.get(second)
                if one is None or other is None or one is other or len(one) != len(other):
                    raise RegistrationError(
                        f"segments {first[:80]!r} and {second[:80]!r} are not two mapped ones of equal size"
                    )
                asides.exchange(ctypes.addressof(one), ctypes.addressof(other), len(one))
                self._segments[first], self._segments[second] = other, one
                done.append((first, second))
        except (OSError, RegistrationError) as error:
            self._exchange(done[::-1], asides)
            if isinstance(error, OSError):
                raise RegistrationError(f"exchanging mappings failed: {error.strerror}") from None
            raise

    def spare(self, segments: Iterable[str]) -> Spared:
        """Remove these segments, ignoring unknown ones. The caller releases them once nothing uses them."""
        names = set(segments)
        return Spared(
            pages=[self._segments.pop(name) for name in names & self._segments.keys()],
            allocations=[self._allocations.pop(name) for name in names & self._allocations.keys()],
        )

    @property
    def on_device(self) -> bool:
        """Whether this belongs to a GPU's agent."""
        return self._mappings is not None

    def attach_allocation(self, header: dict[str, Any]) -> None:
        """Open a GPU allocation of the worker from its client's header. RegistrationError says what is wrong."""
        if self._mappings is None:
            raise RegistrationError("this agent serves the CPU's memory: use a client with device= of the tensor's GPU")
        segment = header["segment"]
        if not isinstance(segment, str) or _SEGMENT_ID.fullmatch(segment) is None:
            raise RegistrationError(f"segment id {str(segment)[:80]!r} is not hex")
        if segment not in self._allocations:
            self._allocations[segment] = self._mappings.attach(self.process.pid, self.process.started, header)

    def header(self, segment: str) -> dict[str, Any] | None:
        """The header with which another agent opens a GPU allocation of the worker; None for any other segment."""
        found = self._allocations.get(segment)
        return None if found is None else dict(found.header)

    @property
    def segments(self) -> frozenset[str]:
        return frozenset(self._segments) | frozenset(self._allocations)

    def resolve(self, handle: TensorHandle) -> View:
        """The view that a handle names. RegistrationError says what is wrong with the handle."""
        shape, strides, offset = handle.shape, handle.strides, handle.offset
        dtype = DTYPES.get(handle.dtype)
        if dtype is None:
            raise RegistrationError(f"dtype {handle.dtype[:80]!r} cannot be moved")
        if len(shape) != len(strides) or len(shape) > _MAX_DIMS:
            raise RegistrationError(f"{len(shape)} sizes with {len(strides)} strides are no tensor")
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, *strides, offset)):
            raise RegistrationError(f"shape {shape}, strides {strides}, offset {offset}: whole numbers >= 0 are needed")
        nbytes = span_nbytes(shape, strides, dtype.itemsize)
        if nbytes == 0:
            return View(shape=shape, strides=strides, dtype=dtype, address=0, space="nothing", place=0, nbytes=0)
        if handle.segment is None:
            return self._private(handle, dtype, nbytes)
        if (found := self._allocations.get(handle.segment)) is not None:
            return self._on_device(handle, dtype, nbytes, found)
        memory = self._segments.get(handle.segment)
        if memory is None:
            raise RegistrationError(f"segment {handle.segment[:80]!r} was not attached")
        if offset + nbytes > len(memory):
            raise RegistrationError(
                f"a tensor of {nbytes} bytes at {offset} does not fit the segment's {len(memory)} bytes"
            )
        count = nbytes // dtype.itemsize
        raw = torch.frombuffer(memory, dtype=CARRIERS[dtype.itemsize], offset=offset, count=count)
        return View(
            shape=shape,
            strides=strides,
            dtype=dtype,
            address=raw.data_ptr(),
            space=handle.segment,
            place=offset,
            nbytes=nbytes,
            flat=raw.view(dtype),
            raw=raw,
        )

    def _on_device(self, handle: TensorHandle, dtype: torch.dtype, nbytes: int, found: Mapping) -> View:
        if handle.offset + nbytes > found.nbytes or handle.offset % dtype.itemsize:
            raise RegistrationError(
                f"a tensor of {nbytes} bytes at {handle.offset} does not fit the allocation's {found.nbytes} bytes"
            )
        return View(
            shape=handle.shape,
            strides=handle.strides,
            dtype=dtype,
            address=found.address + handle.offset,
            space=found.space,
            place=handle.offset,
            nbytes=nbytes,
            device=found.device,
            keep=found,
        )

    def _private(self, handle: TensorHandle, dtype: torch.dtype, nbytes: int) -> View:
        if self._mappings is not None:
            raise RegistrationError("the agent of a GPU moves what lies on GPUs: this tensor was not exported to it")
        if not self.private:
            raise RegistrationError(
                "this agent cannot reach the worker's private memory (`etha doctor` says why): "
                "allocate the tensor with etha.empty or move the module with etha.share_module"
            )
        if not 0 < handle.offset <= _MAX_ADDRESS - nbytes:
            raise RegistrationError(f"{nbytes} bytes at address {handle.offset:#x} are no memory of a process")
        return View(
            shape=handle.shape,
            strides=handle.strides,
            dtype=dtype,
            address=handle.offset,
            space=(self.process.pid, self.process.started),
            place=handle.offset,
            nbytes=nbytes,
            process=self.process,
        )

    def close(self) -> None:
        """Release all segments and the process. Idempotent. No lane may be using them any more."""
        self.spare([*self._segments, *self._allocations]).release()
        self.process.close()
