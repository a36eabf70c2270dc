"""Segments: memory of this worker that an agent maps directly.

    worker: memfd (sealed) -> mmap -> torch storage        agent: the same memfd -> mmap

A segment lives as long as any tensor in it: each torch storage holds the mapping's Python object. When the last one is
gone, a finalizer removes the segment from the registry, closes and unmaps it. Segments are sealed against shrinking and
growing, so that no worker can make an agent fault. Pages are touched here, once, because the first touch is five times
slower than a copy.

``exchange`` puts one segment where another one was, without a copy. An id names a memfd and not an address, so whoever
has mapped a segment by its id keeps seeing the same bytes; whoever maps it for a tensor has to be told. So every use of
a segment by others is noted by ``hold``, and ``exchange`` refuses a segment that somebody else holds.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from etha.errors import ConfigError
from etha.memory.pages import Asides, map_pages, sealed_memfd
from etha.memory.room import RoomCheck

PAGE = mmap.PAGESIZE
#: Tensors begin on cache lines.
ALIGN = 64
#: Tensors below SMALL share arenas of ARENA bytes, so that a model's norms do not cost a descriptor each.
SMALL, ARENA = 1 << 20, 4 << 20

Pages = ctypes.Array[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSegment:
    """A sealed memfd mapped at ``address`` of this process. ``fd`` is open as long as the segment lives.

    ``alone``: bytes of the one storage that has the segment for itself; 0 if several share it. ``forks``: how often
    this process had forked when the segment was made.
    """

    id: str
    fd: int
    nbytes: int
    address: int
    alone: int
    forks: int


class _Registry:
    """Address -> segment, for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while its own thread holds it
        self._room = RoomCheck()
        self._starts: list[int] = []
        self._segments: dict[int, SharedSegment] = {}
        #: segment id -> who holds it.
        self._holders: dict[str, weakref.WeakSet[object]] = {}
        self._forks = 0
        # A child maps what this process maps at that moment. So no exchange may be half done.
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._after_fork, after_in_child=self._after_fork
        )

    def _after_fork(self) -> None:
        self._forks += 1
        self._lock.release()

    def create(self, nbytes: int, *, alone: bool) -> Pages:
        """The pages of a new segment of at least ``nbytes``. It lives as long as they are referenced."""
        used = nbytes if alone else 0
        nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
        self._room.check(nbytes, "a tensor that agents map")
        fd = -1
        try:
            fd = sealed_memfd("etha", nbytes)
            pages = map_pages(fd, nbytes, fresh=True, before_unmap=self._drop)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ConfigError(
                f"no shared memory of {nbytes} bytes: {error.strerror}; see `ulimit -n` and the free memory"
            ) from None
        address = ctypes.addressof(pages)
        with self._lock:
            bisect.insort(self._starts, address)
            self._segments[address] = SharedSegment(
                id=secrets.token_hex(8), fd=fd, nbytes=nbytes, address=address, alone=used, forks=self._forks
            )
        return pages

    def _drop(self, address: int) -> None:
        """Called after the last tensor is gone. The pages are still mapped, so their address is not reused yet."""
        with self._lock:
            dropped = self._segments.pop(address)
            self._starts.remove(address)
            self._holders.pop(dropped.id, None)
        os.close(dropped.fd)

    def hold(self, holder: object, ids: Iterable[str]) -> None:
        with self._lock:
            for id in ids:
                self._holders.setdefault(id, weakref.WeakSet()).add(holder)

    def hold_at(self, holder: object, address: int, nbytes: int) -> SharedSegment | None:
        with self._lock:
            if (found := self.find(address, nbytes)) is None:
                return None
            self.hold(holder, [found[0].id])
            return found[0]

    def let_go(self, holder: object, ids: Iterable[str]) -> None:
        with self._lock:
            for id in ids:
                if (holders := self._holders.get(id)) is not None:
                    holders.discard(holder)
                    if not holders:
                        del self._holders[id]

    def exchange(self, holder: object, first: int, second: int, asides: Asides) -> tuple[str, str]:
        with self._lock:
            one, other = self._segments.get(first), self._segments.get(second)
            if one is None or other is None or one.nbytes != other.nbytes:
                raise ExchangeError("its memory was replaced")
            if why := self._kept(holder, one) or self._kept(holder, other):
                raise ExchangeError(why)
            try:
                asides.exchange(first, second, one.nbytes)
            except OSError as error:
                raise ExchangeError(f"the kernel refuses: {error.strerror}", refused=True) from error
            self._segments[first] = replace(other, address=first)
            self._segments[second] = replace(one, address=second)
            return one.id, other.id

    def _kept(self, holder: object, segment: SharedSegment) -> str:
        """Why a segment must stay where it is; "" if it need not."""
        if segment.forks != self._forks:
            return "this process has forked since, and its child sees the same memory"
        if any(other is not holder for other in self._holders.get(segment.id, ())):
            return "another open batch, a subscription or a process group uses its memory, too"
        return ""

    def find(self, address: int, nbytes: int) -> tuple[SharedSegment, int] | None:
        with self._lock:
            i = bisect.bisect_right(self._starts, address) - 1
            if i < 0:
                return None
            segment = self._segments[self._starts[i]]
        offset = address - segment.address
        return (segment, offset) if offset + nbytes <= segment.nbytes else None

    def at(self, address: int) -> SharedSegment | None:
        with self._lock:
            return self._segments.get(address)

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


def at(address: int) -> SharedSegment | None:
    """The segment that begins at this address, if any."""
    return _registry.at(address)


def hold(holder: object, ids: Iterable[str]) -> None:
    """Note that ``holder`` uses these segments, as long as it lives, so that nobody else exchanges them."""
    _registry.hold(holder, ids)


def hold_at(holder: object, address: int, nbytes: int) -> SharedSegment | None:
    """The segment in which this memory lies now, held by ``holder``; None if it lies in none.

    Hold first and ask where a tensor lies afterwards: in between it may change its segment.
    """
    return _registry.hold_at(holder, address, nbytes) if nbytes else None


def let_go(holder: object, ids: Iterable[str]) -> None:
    """Note that ``holder`` does not use these segments any more. Ignores what it does not hold."""
    _registry.let_go(holder, ids)


class ExchangeError(Exception):
    """Why two segments were not exchanged. Nothing has changed. ``refused``: by the kernel, so do not try again."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


def exchange(holder: object, first: int, second: int, asides: Asides) -> tuple[str, str]:
    """Put the segment at address ``second`` where the one at ``first`` is, and that one there; their ids, as they were.

    No data is copied. ExchangeError if there are not two segments of equal size, somebody but ``holder`` uses one of
    them, a child of this process may see them, or the kernel refuses. All exchanges of a call use the same ``asides``.
    Not on the main thread, where a signal's handler may raise an exception between two steps.
    """
    return _registry.exchange(holder, first, second, asides)


def storages(sizes: Sequence[int]) -> list[torch.UntypedStorage]:
    """Zeroed storages of these sizes in bytes (each > 0) in one segment, which each of them keeps alive."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += math.ceil(nbytes / ALIGN) * ALIGN
    if not sizes:
        return []
    memory = _registry.create(sizes[0] if len(sizes) == 1 else end, alone=len(sizes) == 1)
    return [_storage(memory, offset, nbytes) for offset, nbytes in zip(offsets, sizes, strict=True)]


def storage(nbytes: int) -> torch.UntypedStorage:
    """One zeroed storage of ``nbytes`` > 0. Small ones share an arena."""
    if nbytes >= SMALL:
        return storages([nbytes])[0]
    with _arena_lock:
        memory, start = (_arena[0][0](), _arena[0][1]) if _arena else (None, 0)
        if memory is None or start + nbytes > ARENA:
            memory = _registry.create(ARENA, alone=False)
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
