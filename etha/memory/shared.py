"""Segments: memory of this worker that an agent maps directly.

    worker: memfd (sealed) -> mmap -> torch storage        agent: the same memfd -> mmap

A segment lives as long as any tensor in it: each torch storage holds the mapping's Python object. When the last one is
gone, a finalizer removes the segment from the registry, closes and unmaps it. Segments are sealed against shrinking and
growing, so that no worker can make an agent fault. Pages are touched here, once, because the first touch is five times
slower than a copy.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from etha.errors import ConfigError
from etha.memory.pages import map_pages, sealed_memfd
from etha.memory.room import RoomCheck

PAGE = mmap.PAGESIZE
#: Tensors begin on cache lines.
ALIGN = 64
#: Tensors below SMALL share arenas of ARENA bytes, so that a model's norms do not cost a descriptor each.
SMALL, ARENA = 1 << 20, 4 << 20

Pages = ctypes.Array[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSegment:
    """A sealed memfd mapped at ``address`` of this process. ``fd`` is open as long as the segment lives."""

    id: str
    fd: int
    nbytes: int
    address: int


class _Registry:
    """Address -> segment, for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while its own thread holds it
        self._room = RoomCheck()
        self._starts: list[int] = []
        self._segments: dict[int, SharedSegment] = {}

    def create(self, nbytes: int) -> Pages:
        """The pages of a new segment of at least ``nbytes``. It lives as long as they are referenced."""
        nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
        self._room.check(nbytes, "a tensor that agents map")
        fd = -1
        try:
            fd = sealed_memfd("etha", nbytes)
            pages = map_pages(fd, nbytes, fresh=True, before_unmap=partial(self._drop, fd))
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ConfigError(
                f"no shared memory of {nbytes} bytes: {error.strerror}; see `ulimit -n` and the free memory"
            ) from None
        address = ctypes.addressof(pages)
        with self._lock:
            bisect.insort(self._starts, address)
            self._segments[address] = SharedSegment(id=secrets.token_hex(8), fd=fd, nbytes=nbytes, address=address)
        return pages

    def _drop(self, fd: int) -> None:
        """Called after the last tensor is gone. The pages are still mapped, so their address is not reused yet."""
        with self._lock:
            address = next(a for a, s in self._segments.items() if s.fd == fd)
            del self._segments[address]
            self._starts.remove(address)
        os.close(fd)

    def find(self, address: int, nbytes: int) -> tuple[SharedSegment, int] | None:
        with self._lock:
            i = bisect.bisect_right(self._starts, address) - 1
            if i < 0:
                return None
            segment = self._segments[self._starts[i]]
        offset = address - segment.address
        return (segment, offset) if offset + nbytes <= segment.nbytes else None

    def get(self, id: str) -> SharedSegment | None:
        with self._lock:
            return next((s for s in self._segments.values() if s.id == id), None)

    def all(self) -> tuple[SharedSegment, ...]:
        with self._lock:
            return tuple(self._segments.values())


_registry = _Registry()
_arena_lock = threading.Lock()
_arena: list[tuple[weakref.ref[Pages], int]] = []


def find(address: int, nbytes: int) -> tuple[str, int] | None:
    """(segment id, byte offset) of ``nbytes`` at ``address`` if they lie inside one segment, otherwise None."""
    found = _registry.find(address, nbytes) if nbytes else None
    return None if found is None else (found[0].id, found[1])


def segment(id: str) -> SharedSegment | None:
    """The living segment with this id, if any. Its ``fd`` is sent to an agent."""
    return _registry.get(id)


def segments() -> tuple[SharedSegment, ...]:
    return _registry.all()


def storages(sizes: Sequence[int]) -> list[torch.UntypedStorage]:
    """Zeroed storages of these sizes in bytes (each > 0) in one segment, which each of them keeps alive."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += math.ceil(nbytes / ALIGN) * ALIGN
    if not sizes:
        return []
    memory = _registry.create(end)
    return [_storage(memory, offset, nbytes) for offset, nbytes in zip(offsets, sizes, strict=True)]


def storage(nbytes: int) -> torch.UntypedStorage:
    """One zeroed storage of ``nbytes`` > 0. Small ones share an arena."""
    if nbytes >= SMALL:
        return storages([nbytes])[0]
    with _arena_lock:
        memory, start = (_arena[0][0](), _arena[0][1]) if _arena else (None, 0)
        if memory is None or start + nbytes > ARENA:
            memory = _registry.create(ARENA)
            start = 0
        _arena[:] = [(weakref.ref(memory), start + math.ceil(nbytes / ALIGN) * ALIGN)]
        return _storage(memory, start, nbytes)


def _storage(memory: Pages, offset: int, nbytes: int) -> torch.UntypedStorage:
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=nbytes).untyped_storage()


def strided(
    storage: torch.UntypedStorage, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0
) -> torch.Tensor:
    """A base tensor (not a view of another) over ``storage``; ``offset`` and ``strides`` are in elements."""
    return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), tuple(strides))
