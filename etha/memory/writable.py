"""Whether memory of this process may be written, asked of the kernel.

Writing into a read-only page, as of a file mapped with PROT_READ, ends the process with SIGSEGV. So a worker asks
before it copies into a tensor itself. It asks by futex(FUTEX_WAKE_OP), by which the kernel does ``word |= 0``
atomically: that needs the right to write, changes nothing even if other threads write the word meanwhile, and fails
with EFAULT where a store would end the process. It takes about 1 us; /proc/self/maps takes milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import os

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)
_WAKE_OP_PRIVATE = 5 | 128
#: FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_EQ, 0): the comparison only decides whom to wake, and nobody waits.
_OR_NOTHING = 1 << 28

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, *[ctypes.c_long] * 3, ctypes.c_void_p, ctypes.c_long]
_unwaited = ctypes.c_uint32()
_UNWAITED = ctypes.addressof(_unwaited)


def writable(address: int, nbytes: int) -> bool:
    """Whether the first and the last byte of a range may be written. True if the kernel does not tell."""
    if not nbytes or _SYS_FUTEX is None:
        return True
    # The aligned word of a byte lies in the same page, and protection is of whole pages.
    return all(_may_write(word) for word in {address & ~3, (address + nbytes - 1) & ~3})


def _may_write(word: int) -> bool:
    answer = _syscall(_SYS_FUTEX, _UNWAITED, _WAKE_OP_PRIVATE, 0, 0, word, _OR_NOTHING)
    return answer >= 0 or ctypes.get_errno() != errno.EFAULT
