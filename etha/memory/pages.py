"""Sealed memfds and their mappings; the mapping's Python object is what keeps the pages there.

``mmap.mmap`` would keep a second descriptor per mapping, and a process has some thousand in all.
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
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
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


def map_pages(fd: int, nbytes: int, *, before_unmap: Callable[[], None] | None = None) -> ctypes.Array[Any]:
    """Map all of ``fd`` shared and writable, every page touched; unmapped when the result is collected.

    The result is a writable buffer of ``nbytes``: a torch storage made by ``torch.frombuffer`` holds it.
    OSError when the kernel refuses. ``fd`` may be closed afterwards.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    pages = (ctypes.c_uint8 * nbytes).from_address(address)
    # Not at exit: torch may still hold tensors then, and the kernel unmaps anyway.
    weakref.finalize(pages, _unmap, address, nbytes, before_unmap).atexit = False
    return pages


def _unmap(address: int, nbytes: int, before: Callable[[], None] | None) -> None:
    try:
        if before is not None:
            before()
    finally:
        _libc.munmap(address, nbytes)
