"""Sealed memfds and their mappings. The mapping's Python object keeps the pages mapped.

``mmap.mmap`` is not used because it would keep a second descriptor per mapping, and a process has only some thousand.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
# Keeps the interpreter's lock: a call takes microseconds, and to get the lock back from a busy thread takes 5 ms.
_quick = ctypes.PyDLL(None, use_errno=True)
_quick.mremap.restype = ctypes.c_void_p
_quick.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
HUGE = 2 << 20
_RW = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 0x10, 23, 25
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_FAILED = ctypes.c_void_p(-1).value


def sealed_memfd(name: str, nbytes: int) -> int:
    """A descriptor of a new memfd of exactly ``nbytes`` that can neither shrink nor grow."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """Whether ``fd`` is a memfd that can neither shrink nor grow, so that reading its mapping cannot fault."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False


def map_pages(
    fd: int,
    nbytes: int,
    *,
    fresh: bool = False,
    touch: bool = True,
    before_unmap: Callable[[int], None] | None = None,
) -> ctypes.Array[Any]:
    """Map all of ``fd`` shared and writable, with every page touched. It is unmapped when the result is collected.

    ``touch=False`` leaves the pages to whoever touches them first, because most of them may never be used.

    The result is a writable buffer of ``nbytes``; a torch storage made by ``torch.frombuffer`` holds it. ``fresh``: the
    file is new, so ask for huge pages (copies gain a quarter; first touch is several times faster). OSError if the
    kernel refuses. ``fd`` may be closed afterwards. ``before_unmap`` is called with the address.
    """
    populate = mmap.MAP_POPULATE if touch else 0
    if nbytes < HUGE or not touch:
        start = address = _mmap(None, nbytes, _RW, mmap.MAP_SHARED | populate, fd)
        length = nbytes
    else:
        # A huge page can be mapped only at its own alignment, so reserve more and map inside of it.
        length = nbytes + HUGE
        start = _mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        address = -(-start // HUGE) * HUGE
        try:
            flags = mmap.MAP_SHARED | _MAP_FIXED
            _mmap(address, nbytes, _RW, flags if fresh else flags | mmap.MAP_POPULATE, fd)
        except OSError:
            _libc.munmap(start, length)
            raise
        if fresh:
            for at in range(address, address + nbytes // HUGE * HUGE, HUGE):
                ctypes.memset(at, 0, 1)
            collapse(address, nbytes)
            if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE):
                _mmap(address, nbytes, _RW, flags | mmap.MAP_POPULATE, fd)
    pages = (ctypes.c_uint8 * nbytes).from_address(address)
    # Not at exit: torch may still hold tensors then, and the kernel unmaps anyway.
    weakref.finalize(pages, _unmap, start, length, address, before_unmap).atexit = False
    return pages


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def collapse(address: int, nbytes: int) -> bool:
    """Ask the kernel to back the range with huge pages where whole ones fit; contents and addresses do not change.

    ``process_vm_readv`` of ordinary memory spends half its time on looking up 4 KiB pages. Any kernel may refuse
    (before 6.1, THP off, no free memory). Then this returns False, and nothing has changed.
    """
    first, last = -(-address // HUGE) * HUGE, (address + nbytes) // HUGE * HUGE
    return first < last and _libc.madvise(first, last - first, _MADV_COLLAPSE) == 0


def _unmap(start: int, length: int, address: int, before: Callable[[int], None] | None) -> None:
    try:
        if before is not None:
            before(address)
    finally:
        _libc.munmap(start, length)


class Asides:
    """Two unused ranges of addresses, through which ``exchange`` moves page tables.

    They are reserved when they are needed, and given back by ``close``. Many exchanges use the same ones: each range
    that is mapped or unmapped interrupts every core on which a thread of this process runs, which costs more than to
    move the page tables.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._nbytes = 0

    def __enter__(self) -> Asides:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the addresses back. They may be used again."""
        for start in self._starts:
            _libc.munmap(start, self._nbytes)
        self._starts.clear()
        self._nbytes = 0

    def exchange(self, first: int, second: int, nbytes: int) -> None:
        """Exchange two shared mappings of ``nbytes`` each: afterwards each address shows what the other one did.

        Page tables move and no data, so 256 MiB take 0.1 ms, and no page is touched for the first time afterwards.
        Threads may read and write meanwhile, because neither address is unmapped at any moment. OSError if the kernel
        refuses (before 5.13, ``vm.max_map_count``, or a range of which a part is mapped in another way); nothing has
        changed then. Do not try again and again: a refusal may leave an unused range of addresses behind.
        """
        if nbytes > self._nbytes:
            self.close()
            self._nbytes = nbytes
        # First both are moved aside, where a refusal does no harm: what stays behind is the same file without page
        # tables, which faults bring back. The kernel has no reason left to refuse what comes then.
        for i, address in enumerate((first, second)):
            if i == len(self._starts):
                self._starts.append(_reserve(self._nbytes))
            try:
                _move(address, nbytes, self._starts[i])
            except OSError:
                # The kernel may have unmapped what it should have moved to, and another thread may have it.
                del self._starts[i]
                self.close()
                raise
        _move(self._starts[1], nbytes, first)
        _move(self._starts[0], nbytes, second)


def _reserve(nbytes: int) -> int:
    """The address of an unused range. A huge page, or a whole page table, moves only to an address of its alignment."""
    spare = HUGE if nbytes >= HUGE else 0
    start = _mmap(None, nbytes + spare, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-start // HUGE) * HUGE if spare else start
    for at, length in ((start, address - start), (address + nbytes, start + spare - address)):
        if length:
            _libc.munmap(at, length)
    return address


def _move(address: int, nbytes: int, to: int) -> None:
    """Move a mapping's page tables over whatever is mapped at ``to``. The address stays mapped, without page tables."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    found = _quick.mremap(address, nbytes, nbytes, flags, to)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
