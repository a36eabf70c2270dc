"""DimRuns: which runs of one tensor dim a rank keeps. A region is a product of them, one per dim.

This module reads and bounds what users and peers give. Regions are the parts of a tensor that a loader takes: ranks may
keep equal, overlapping or disjoint parts, and nobody has to keep what is in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etha.errors import LayoutError

#: Most runs of one region, all dims together. More are a mistake or an attack.
MAX_RUNS = 1 << 16
_MAX_INDEX = 1 << 60


class DimRuns:
    """Ascending disjoint (start, stop) runs of one dim. It is hashed once, because many tables have it as a key."""

    __slots__ = ("_hash", "runs")

    def __init__(self, runs: tuple[tuple[int, int], ...]) -> None:
        self.runs = runs
        self._hash = hash(runs)

    @property
    def size(self) -> int:
        """Number of elements kept."""
        return sum(stop - start for start, stop in self.runs)

    @property
    def end(self) -> int:
        """Where the last run stops, 0 without runs. The dim must be at least that large."""
        return self.runs[-1][1] if self.runs else 0

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, DimRuns) and self._hash == other._hash and self.runs == other.runs)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Kept({self})"  # in the digest of every plan with regions, so it must not change

    def __str__(self) -> str:
        return ",".join(f"{start}:{stop}" for start, stop in self.runs) or "-"


Product = tuple[DimRuns, ...]


def read_product(runs: Any) -> Product:
    """Read the runs of a product, per tensor dim, from any input. Runs that touch are joined.

    LayoutError says which dim is not ascending, disjoint, non-empty and integer.
    """
    dims = _sequence(runs, "a region is, for each tensor dim, a sequence of (start, stop)")
    if len(dims) > 64:
        raise LayoutError(f"a region of {len(dims)} dims: a tensor has at most 64")
    given = [_sequence(dim, f"dim {d} of a region is a sequence of (start, stop)") for d, dim in enumerate(dims)]
    if (count := sum(len(dim) for dim in given)) > MAX_RUNS:
        raise LayoutError(f"a region of {count} runs: {MAX_RUNS} at most")
    return tuple(_read_dim(d, dim) for d, dim in enumerate(given))


def _read_dim(dim: int, runs: Sequence[Any]) -> DimRuns:
    found: list[tuple[int, int]] = []
    for run in runs:
        match run:
            case [start, stop] if _index(start) and _index(stop):
                start, stop = int(start), int(stop)
            case _:
                raise LayoutError(f"dim {dim} of a region: {str(run)[:100]} is not a (start, stop) of integers from 0")
        if stop <= start:
            raise LayoutError(f"dim {dim} of a region: the run {start}:{stop} is empty; leave it out")
        if found and start < found[-1][1]:
            last = f"{found[-1][0]}:{found[-1][1]}"
            raise LayoutError(f"dim {dim} of a region: {start}:{stop} is not behind {last}; give ascending runs")
        if found and start == found[-1][1]:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return DimRuns(tuple(found))


def _index(value: object) -> bool:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    return 0 <= int(value.__index__()) <= _MAX_INDEX


def _sequence(value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise LayoutError(f"{what}, not {str(value)[:100]}")
    return value


def check_product(product: Product, shape: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise LayoutError unless the product, kept by ``ranks``, lies inside a tensor of ``shape``."""
    who = f"the region of rank {ranks[0]}" if len(ranks) == 1 else f"the region of ranks {list(ranks[:8])}"
    if len(product) != len(shape):
        raise LayoutError(f"{who} has {len(product)} dims, the tensor's shape {tuple(shape)} has {len(shape)}")
    for d, (kept, n) in enumerate(zip(product, shape, strict=True)):
        if kept.end > n:
            raise LayoutError(f"{who} reaches to {kept.end} in dim {d}, where the tensor has {n}: shape {tuple(shape)}")


def plain_product(product: Product) -> list[list[list[int]]]:
    """The inverse of ``read_product``, as plain data."""
    return [[list(run) for run in kept.runs] for kept in product]


def part_name(name: str, number: int) -> str:
    """The name of product ``number`` of tensor ``name``, of which a rank holds a list. The first one, 0, has the
    tensor's own name."""
    return f"{name} [product {number}]" if number else name
