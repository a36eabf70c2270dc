"""The difference between two versions of some bytes, block by block: difference.c, or the same in NumPy without it.

    encode(newer, older) -> records that ``apply`` turns older bytes into newer ones with

Elements are compared as integers. difference.c says what the records look like.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from etha.native.opened import opened

#: Bytes that are compared at a time; the last block may be shorter.
BLOCK = 1 << 16
#: Bytes of the word before each record.
WORD = 4
_SAME, _SPARSE, _DENSE, _KIND = 0, 1, 2, 28

Bytes = NDArray[np.uint8]


def most_bytes(nbytes: int) -> int:
    """Most bytes of the difference of ``nbytes`` bytes."""
    return nbytes + WORD * (-(-nbytes // BLOCK))


class DifferenceLibrary(Protocol):
    """Both ways to do it. All arrays are contiguous; ``item``, the bytes of an element, is 1, 2, 4 or 8."""

    def encode(self, newer: Bytes, older: Bytes | None, item: int, out: Bytes) -> int:
        """Write the difference to ``out``, which has room for ``most_bytes``, and return its length.

        ``older`` None: all of ``newer``.
        """
        ...

    def apply(self, target: Bytes | None, nbytes: int, item: int, records: Bytes) -> int:
        """Apply a difference to a target of ``nbytes``, or only look at it (None), and return the number of blocks that
        it changes; -1 if it is malformed. Nothing outside of the target is written then, but the target may be torn."""
        ...


class CompiledDifference:
    """Without the interpreter's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._encode = library.etha_encode_difference
        self._encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p]
        self._encode.restype = ctypes.c_uint64
        self._apply = library.etha_apply_difference
        self._apply.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64]
        self._apply.restype = ctypes.c_int64

    def encode(self, newer: Bytes, older: Bytes | None, item: int, out: Bytes) -> int:
        _check(newer, older, item, out)
        before = None if older is None else older.ctypes.data
        return int(self._encode(newer.ctypes.data, before, newer.nbytes, item, out.ctypes.data))

    def apply(self, target: Bytes | None, nbytes: int, item: int, records: Bytes) -> int:
        address = None if target is None else target.ctypes.data
        return int(self._apply(address, nbytes, item, records.ctypes.data, records.nbytes))


class PythonDifference:
    """The same bytes, by NumPy."""

    def encode(self, newer: Bytes, older: Bytes | None, item: int, out: Bytes) -> int:
        _check(newer, older, item, out)
        at, same = 0, 0

        def put(kind: int, count: int, *parts: NDArray[Any]) -> None:
            nonlocal at
            word = np.array([kind << _KIND | count], "<u4")
            for part in (word, *parts):
                flat = part.view(np.uint8)
                out[at : at + flat.nbytes] = flat
                at += flat.nbytes

        for first in range(0, newer.nbytes, BLOCK):
            block = newer[first : first + BLOCK]
            most = block.nbytes // (2 + item)
            changed = None
            if older is not None:
                values = block.view(f"u{item}")
                changed = np.flatnonzero(values != older[first : first + BLOCK].view(f"u{item}"))
                if not len(changed):
                    same += 1
                    continue
            if same:
                put(_SAME, same)
                same = 0
            if changed is None or len(changed) > most:
                put(_DENSE, block.nbytes, block)
            else:
                put(_SPARSE, len(changed), changed.astype("<u2"), np.ascontiguousarray(values[changed]))
        if same:
            put(_SAME, same)
        return at

    def apply(self, target: Bytes | None, nbytes: int, item: int, records: Bytes) -> int:
        at = read = changed = 0
        while records.nbytes - read >= WORD:
            word = int.from_bytes(records[read : read + WORD].tobytes(), "little")
            read += WORD
            kind, count = word >> _KIND, word & ((1 << _KIND) - 1)
            rest, left = nbytes - at, records.nbytes - read
            size = min(rest, BLOCK)
            if rest <= 0 or not count:
                return -1
            if kind == _SAME:
                if count > -(-rest // BLOCK):
                    return -1
                at += count * BLOCK
                continue
            if kind == _DENSE:
                if count != size or left < count:
                    return -1
                if target is not None:
                    target[at : at + size] = records[read : read + size]
                read += count
            elif kind == _SPARSE:
                if count > size // item or left < count * (2 + item):
                    return -1
                places = np.frombuffer(records[read : read + 2 * count].tobytes(), "<u2")
                values = np.frombuffer(records[read + 2 * count : read + (2 + item) * count].tobytes(), f"u{item}")
                if (places >= size // item).any():
                    return -1
                if target is not None:
                    target[at : at + size - size % item].view(f"u{item}")[places] = values
                read += count * (2 + item)
            else:
                return -1
            changed += 1
            at += size
        return changed if read == records.nbytes and at >= nbytes else -1


def _check(newer: Bytes, older: Bytes | None, item: int, out: Bytes) -> None:
    """AssertionError for arrays of sizes that do not fit, because the compiled loops would write beyond them."""
    assert item in (1, 2, 4, 8) and newer.nbytes % item == 0, "elements that do not divide the bytes"
    assert older is None or older.nbytes == newer.nbytes, "two versions of different sizes"
    assert out.nbytes >= most_bytes(newer.nbytes), "too little room for a difference"


@cache
def load_difference() -> DifferenceLibrary:
    """The compiled library if there is one of this source, and ``ETHA_NATIVE=0`` does not forbid it; else NumPy."""
    return opened(CompiledDifference) or PythonDifference()
