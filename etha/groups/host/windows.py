"""The memory that a member of a group shares with the others: state words, call descriptors, windows, rings.

    offset 0          state words, each on a cache line of its own (native.executor names them)
    4096              two slots of descriptors, one for calls with even numbers, one for odd
    behind these      two tables of places: where the tensors of a call lie, if others may read them there
    page aligned      window 0, window 1: what this member shows of its tensors, piece by piece
    page aligned      one ring per member: the bytes of point-to-point calls to it

Each member makes one block, a sealed memfd, for every configure, and maps the others'. It writes only into its own,
except for the words that wake a sleeper and those that say how far a ring was read. So a call that was given up touches
nobody's tensor, and a member that was stopped for a while finds the block as its last epoch left it. Pages that nobody
touched cost no memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

from etha.errors import GroupError
from etha.memory.pages import map_pages, sealed_memfd

PAGE = mmap.PAGESIZE
WORDS = 4096
#: Of the state words: the first cause of a failure, as text of its member.
CAUSE_OFFSET, CAUSE_BYTES = 256, WORDS - 256
WINDOW = 4 << 20
RING = 256 << 10
_RING_WORDS = 128
#: Bytes of a table of places.
PLACES = 4096
_MADV_DONTFORK = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

#: Mappings that a forked child inherited as objects but not as memory: it must never unmap what is there now.
unmapped_in_forks: list[Any] = []


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Where everything lies in a block of a group of ``size`` members, in bytes."""

    size: int
    window: int = WINDOW
    ring: int = RING

    @property
    def descriptor_stride(self) -> int:
        return _up(256 + 16 * self.size, 64)

    @property
    def descriptors(self) -> int:
        return WORDS

    @property
    def places(self) -> int:
        return WORDS + 2 * self.descriptor_stride

    @property
    def windows(self) -> int:
        return _up(self.places + 2 * PLACES, PAGE)

    @property
    def rings(self) -> int:
        return _up(self.windows + 2 * self.window, PAGE)

    @property
    def ring_stride(self) -> int:
        return _RING_WORDS + self.ring

    @property
    def nbytes(self) -> int:
        return self.rings + self.size * self.ring_stride


def map_shared(fd: int, nbytes: int) -> tuple[ctypes.Array[Any], int]:
    """Map all of ``fd`` without touching it; the mapping, and where it lies. OSError if the kernel refuses.

    A forked child, such as a DataLoader's worker, does not get it, because it would keep the pages for its whole life.
    """
    pages = map_pages(fd, nbytes, touch=False)
    address = ctypes.addressof(pages)
    _libc.madvise(address, nbytes, _MADV_DONTFORK)
    return pages, address


class SharedBlock:
    """A mapped block. ``address`` is valid until ``close()`` or until the last view of it is gone."""

    def __init__(self, fd: int, layout: BlockLayout) -> None:
        """Maps ``fd``, which stays the caller's. GroupError if the kernel refuses."""
        self.layout = layout
        try:
            pages, self.address = map_shared(fd, layout.nbytes)
        except OSError as error:
            raise GroupError(f"mapping {layout.nbytes} bytes of a member failed: {error.strerror}") from None
        self._pages: ctypes.Array[Any] | None = pages
        self.view = memoryview(self._pages).cast("B")

    def window(self, index: int) -> int:
        """The address of a window."""
        return self.address + self.layout.windows + index * self.layout.window

    def descriptor(self, call: int) -> memoryview:
        """The slot of a call's descriptor."""
        stride = self.layout.descriptor_stride
        start = self.layout.descriptors + call % 2 * stride
        return self.view[start : start + stride]

    def table(self, call: int) -> memoryview:
        """The table of places of a call."""
        start = self.layout.places + call % 2 * PLACES
        return self.view[start : start + PLACES]

    def close(self) -> None:
        """Unmap it. Nobody may use the address any more. Idempotent."""
        if self._pages is not None:
            self.view.release()
            self._pages = None

    def disown(self) -> None:
        """In a forked child: forget the mapping without unmapping, because other memory may lie there by now."""
        if self._pages is not None:
            unmapped_in_forks.append((self._pages, self.view))
            self._pages = None


def new_block(layout: BlockLayout) -> tuple[int, SharedBlock]:
    """A new block and its descriptor, which the caller closes once all members have mapped it."""
    try:
        fd = sealed_memfd("etha-group", layout.nbytes)
    except OSError as error:
        raise GroupError(f"a memfd of {layout.nbytes} bytes could not be made: {error.strerror}") from None
    try:
        return fd, SharedBlock(fd, layout)
    except BaseException:
        os.close(fd)
        raise
