"""Memory of a fake GPU: pages of a memfd at an address that stays reserved, so that late accesses are seen.

Given back, the pages become private ones full of POISON: whoever still reads gets that, whoever still writes is found
by ``spoilt``. New memory begins where the last one ended, as on a card, so that a copy that runs from one into the next
is seen. Importers hold a shared flock on a description of their own, which the kernel drops when they die.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from dataclasses import dataclass

PAGE = mmap.PAGESIZE
POISON = 0xDB
_NO_ACCESS, _NORESERVE = 0, 0x4000
_RW, _FIXED, _FAILED = mmap.PROT_READ | mmap.PROT_WRITE, 0x10, ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def rounded(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // PAGE) * PAGE


class _Arena:
    """Addresses of this process for memory of cards, one behind the other."""

    SIZE = 1 << 40

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = self._end = 0

    def take(self, nbytes: int) -> int:
        with self._lock:
            if self._next + nbytes > self._end:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
                self._next = _mapped(None, self.SIZE, _NO_ACCESS, flags, -1)
                self._end = self._next + self.SIZE
            found, self._next = self._next, self._next + nbytes
            return found


_arena = _Arena()


def _map(address: int | None, nbytes: int, fd: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED
    at = address or _arena.take(rounded(nbytes))
    return _mapped(at, rounded(nbytes), _RW, flags | _FIXED, fd)


def _mapped(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


@dataclass(slots=True)
class Pages:
    """``nbytes`` at ``address``; ``fd`` is -1 for private ones."""

    address: int
    nbytes: int
    fd: int = -1

    @classmethod
    def fresh(cls, nbytes: int, *, shared: bool, at: Pages | None = None) -> Pages:
        """New ones, in the place of poisoned ones if those are given."""
        fd = -1
        if shared:
            fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
            os.ftruncate(fd, rounded(nbytes))
        return cls(_map(at.address if at else None, nbytes, fd), nbytes, fd)

    @classmethod
    def opened(cls, path: str, inode: int, nbytes: int) -> Pages:
        """Those of another process's descriptor; OSError when it has no such file any more."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != inode:
                raise FileNotFoundError(f"{path} is another file by now")
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return cls(_map(None, nbytes, fd), nbytes, fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def inode(self) -> int:
        return os.fstat(self.fd).st_ino

    def shared(self) -> bool:
        """Whether a living process has opened them."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    def poison(self) -> None:
        """Give the memory back; the address stays taken."""
        _map(self.address, self.nbytes, -1)
        ctypes.memset(self.address, POISON, self.nbytes)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def spoilt(self) -> bool:
        """Whether somebody has written since ``poison``."""
        return ctypes.string_at(self.address, self.nbytes).strip(bytes([POISON])) != b""

    def unmap(self) -> None:
        """Give back the address, too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        _libc.munmap(self.address, rounded(self.nbytes))
