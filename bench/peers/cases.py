"""The rows of the comparison, and the index arithmetic that a peer without layouts needs. Pure; no torch.

The source of every row is ``Shard(0)`` over its ranks; the target is ``Shard(dim)`` over as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
Side = Literal["source", "target"]
SIDES: tuple[Side, Side] = ("source", "target")
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A global tensor of one or two dims."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2) or self.dtype not in ITEMSIZE:
            raise ValueError(f"{self.name}: {self.dtype} {self.shape}; one or two dims of {', '.join(ITEMSIZE)}")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape as rows and columns; a vector is one column."""
        return (self.shape[0], self.shape[1] if len(self.shape) == 2 else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows and columns of a matrix: where they begin, and how many they are."""

    row: int
    column: int
    rows: int
    columns: int

    def shared(self, other: Block) -> Block | None:
        """What lies in both, or None."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Block(row=row, column=column, rows=rows, columns=columns) if rows > 0 and columns > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes that are contiguous at both ends: their offsets in both local tensors, and their number."""

    at_source: int
    at_target: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table: ``ranks`` a side, ``Shard(0)`` to ``Shard(dim)``, on one host or between two."""

    key: str
    title: str
    tensors: tuple[Whole, ...]
    ranks: int = 1
    dim: int = 0
    way: Literal["host", "tcp"] = "host"

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            for dim in (0, self.dim):
                if dim >= len(tensor.shape) or tensor.shape[dim] % self.ranks:
                    raise ValueError(f"{tensor.name} {tensor.shape}: dim {dim} is not cut in {self.ranks} equal parts")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def local(self, tensor: Whole, side: Side, rank: int) -> Block:
        """What ``rank`` holds of a tensor."""
        rows, columns = tensor.matrix
        if side == "source" or self.dim == 0:
            rows //= self.ranks
            return Block(row=rank * rows, column=0, rows=rows, columns=columns)
        columns //= self.ranks
        return Block(row=0, column=rank * columns, rows=rows, columns=columns)

    def local_shape(self, tensor: Whole, side: Side, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``."""
        block = self.local(tensor, side, rank)
        return (block.rows, block.columns)[: len(tensor.shape)]

    def piece(self, tensor: Whole, source: int, target: int) -> Block | None:
        """What source rank ``source`` has for target rank ``target``."""
        return self.local(tensor, "source", source).shared(self.local(tensor, "target", target))

    def runs(self, tensor: Whole, source: int, target: int) -> Iterator[Run]:
        """The same as contiguous runs of bytes: one if whole rows match at both ends, else one for each row."""
        piece = self.piece(tensor, source, target)
        if piece is None:
            return
        here, there = self.local(tensor, "source", source), self.local(tensor, "target", target)
        whole = piece.columns == here.columns == there.columns
        for row in range(piece.row, piece.row + (1 if whole else piece.rows)):
            yield Run(
                at_source=_offset(here, row, piece.column) * tensor.itemsize,
                at_target=_offset(there, row, piece.column) * tensor.itemsize,
                nbytes=piece.columns * (piece.rows if whole else 1) * tensor.itemsize,
            )


def _offset(block: Block, row: int, column: int) -> int:
    """Number of the element of a local tensor that is at a place of the global one."""
    return (row - block.row) * block.columns + column - block.column


def matrix(nbytes: int) -> tuple[Whole, ...]:
    """One float32 matrix with rows of 32 KiB."""
    return (Whole(name="w", shape=(nbytes // 32768, 8192)),)


def small(count: int) -> tuple[Whole, ...]:
    """``count`` float32 vectors of 16 KiB."""
    return tuple(Whole(name=f"t{i}", shape=(4096,)) for i in range(count))


def llama(hidden: int) -> tuple[Whole, ...]:
    """The 291 tensors of Llama-3-8B in bf16 with every width scaled by ``hidden`` / 4096."""
    kv, ffn, vocab = hidden // 4, hidden * 7 // 2, hidden * 501 // 16
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "norm": (hidden,), "head": (vocab, hidden)}
    for i in range(32):
        for name, rows, columns in (
            ("q", hidden, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, hidden),
            ("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn),
        ):  # fmt: skip
            shapes[f"layers.{i}.{name}"] = (rows, columns)
        shapes |= {f"layers.{i}.{name}": (hidden,) for name in ("input_norm", "post_norm")}
    return tuple(Whole(name=name, shape=shape, dtype="bfloat16") for name, shape in shapes.items())


def rows(shrink: int = 1) -> list[Row]:
    """The rows of the table, ``shrink`` times smaller in bytes (the model: in about the root of that in width)."""
    quarter, whole = 256 * MIB // shrink, 1024 * MIB // shrink
    count = max(10_000 // shrink, 1)
    model = llama(max(round(1056 / math.sqrt(shrink) / 16), 1) * 16)
    one, two = "1 -> 1  Shard(0) -> Shard(0)", "2 -> 2  Shard(0) -> Shard(1)"
    return [
        Row(key="one-256", title=one, tensors=matrix(quarter)),
        Row(key="one-1024", title=one, tensors=matrix(whole)),
        Row(key="two-256", title=two, tensors=matrix(quarter), ranks=2, dim=1),
        Row(key="small", title=f"1 -> 1  {count:,} tensors of 16 KiB", tensors=small(count)),
        Row(key="llama", title="1 -> 1  Llama-3-8B proportions, 291 tensors, bf16", tensors=model),
        Row(key="tcp-one-256", title=one, tensors=matrix(quarter), way="tcp"),
        Row(key="tcp-two-256", title=two, tensors=matrix(quarter), ranks=2, dim=1, way="tcp"),
    ]
