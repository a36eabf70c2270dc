"""Members' memory for tests: anonymous shared mappings, and short ways to write steps."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from etha.native import ALL, SOURCE, STEP, GroupMemory, StepKind

#: Two descriptor slots for up to 16 members.
STRIDE = 512


class Pages:
    """The mappings of all members. They are shared with children that are forked later."""

    def __init__(self, size: int, length: int = 1 << 16) -> None:
        self.maps = [mmap.mmap(-1, length) for _ in range(size)]
        self.at = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps]

    def member(self, rank: int, **more: int) -> GroupMemory:
        return GroupMemory(rank=rank, pages=self.at, descriptor_stride=STRIDE, **more)

    def word(self, rank: int, at: int) -> int:
        return int.from_bytes(self.maps[rank][at : at + 8], "little")


def steps(*rows: tuple[int, ...]) -> NDArray[np.void]:
    """Rows of (kind, n, dst_space, src_space, dst, src, count)."""
    return np.array(list(rows), dtype=STEP)


def post(phase: int) -> tuple[int, ...]:
    return (StepKind.POST, 0, 0, 0, 0, 0, phase)


def wait(phase: int, rank: int = ALL) -> tuple[int, ...]:
    return (StepKind.WAIT, 0, 0, rank, 0, 0, phase)


def match() -> tuple[int, ...]:
    return (StepKind.MATCH, 0, 0, 0, 0, 0, 0)


def copy(dst_space: int, src_space: int, count: int, dst: int = 0, src: int = 0) -> tuple[int, ...]:
    return (StepKind.COPY, 0, dst_space, src_space, dst, src, count)


def reduce(
    dst_space: int, first: int, n: int, count: int, dst: int = 0, kind: StepKind = StepKind.REDUCE
) -> tuple[int, ...]:
    return (kind, n, dst_space, 0, dst, first, count)


def sources(*rows: tuple[int, int], hosts: Sequence[int] = ()) -> NDArray[np.void]:
    """Rows of (space, offset)."""
    each = hosts or [0] * len(rows)
    return np.array([(space, host, offset) for (space, offset), host in zip(rows, each, strict=True)], dtype=SOURCE)


def spaces(*arrays: NDArray | int) -> NDArray[np.uint64]:
    """Addresses of arrays, or addresses as they are."""
    return np.array([a if isinstance(a, int) else a.ctypes.data for a in arrays], dtype=np.uint64)
