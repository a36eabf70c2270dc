"""What every element holds: a number made from its index in the global tensor, the tensor's number, and a stamp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .cases import Block, Row, Side, Whole

#: Elements whose numbers are made at a time.
MOST = 1 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Integers below these are exact in the dtype.
EXACT = {"float32": 1 << 24, "bfloat16": 1 << 8}
#: Tensor, its first row, what is held, what should be.
Part = tuple[Whole, int, torch.Tensor, torch.Tensor]


def numbers(tensor: Whole, number: int, stamp: int, block: Block, begin: int, end: int) -> torch.Tensor:
    """Rows ``begin`` to ``end`` of a block, mixed so that no shifted row looks like another."""
    columns = tensor.matrix[1]
    row = (torch.arange(begin, end, dtype=torch.int64) + block.row).unsqueeze(1)
    column = torch.arange(block.columns, dtype=torch.int64).unsqueeze(0) + block.column
    mixed = ((row * columns + column) * 2654435761 + number * 7919 + stamp * 104729) >> 11
    return (mixed % EXACT[tensor.dtype]).to(DTYPES[tensor.dtype])


def parts(row: Row, side: Side, rank: int, stamp: int, held: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """All that a rank holds, cut in parts of some rows, each with what it should be."""
    for number, tensor in enumerate(row.tensors):
        block = row.local(tensor, side, rank)
        view = held[tensor.name].view(block.rows, block.columns)
        step = max(MOST // block.columns, 1)
        for begin in range(0, block.rows, step):
            end = min(begin + step, block.rows)
            yield tensor, begin, view[begin:end], numbers(tensor, number, stamp, block, begin, end)


def fill(row: Row, rank: int, stamp: int, held: Mapping[str, torch.Tensor]) -> None:
    """Give a source rank its numbers."""
    for _, _, view, right in parts(row, "source", rank, stamp, held):
        view.copy_(right)


def clear(held: Mapping[str, torch.Tensor]) -> None:
    """Give a target rank what no element should hold."""
    for tensor in held.values():
        tensor.fill_(-1)


def fault(row: Row, rank: int, stamp: int, held: Mapping[str, torch.Tensor]) -> str | None:
    """The first wrong part of a target rank, in words; None if every element is right."""
    for tensor, begin, view, right in parts(row, "target", rank, stamp, held):
        if not torch.equal(view, right):
            wrong = view != right
            place = [int(i) for i in wrong.nonzero()[0]]
            found, expected = view[place[0], place[1]].item(), right[place[0], place[1]].item()
            where = f"{tensor.name}[{begin + place[0]}, {place[1]}] of target rank {rank}"
            return f"{where} holds {found:g} instead of {expected:g} ({int(wrong.sum())} of its part are wrong)"
    return None
