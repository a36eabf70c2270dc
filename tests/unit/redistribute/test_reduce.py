"""Contributions added where they go, compared to the bit with the reduction that the proof uses."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from etha.errors import TransferError
from etha.plan import Layout
from etha.plan.proof.simulate import combine, finish
from etha.redistribute.piece import bits
from etha.redistribute.reduce import Coming, Piece, reduce_parts
from etha.redistribute.route import make_route
from tests.unit.plan.truth import Truth, take

R = Replicate()
SHAPE = (48, 10)


def tensor(seed: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 10
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize(
    "sharded",
    [[R], [Shard(0)], [Shard(1)], [_StridedShard(0, split_factor=4)], [_StridedShard(0, split_factor=24)]],
    ids=str,
)
def test_the_bits_are_those_of_the_order_0_to_k(dtype: torch.dtype, op: str, sharded: list[Placement]) -> None:
    """Contributions on 5 x 2 ranks, whole or in pieces of one, few and many boxes, come to rank 3 of 3."""
    source = Truth((5, 2), list(range(10)), [Partial(op), *sharded], "order")
    parts = [tensor(seed, dtype) for seed in range(5)]
    route = make_route(SHAPE, dtype, (source.layout(),), (Layout((3,), [R]),), 2)
    how, (stage,) = route.reduction, route.stages
    assert how is not None and stage.shape == SHAPE
    pieces: list[list[Piece]] = [[] for _ in parts]
    for peer, arrivals in stage.receives.items():
        for arrival in arrivals:
            wanted = torch.empty(arrival.piece.shape, dtype=dtype)
            arrival.piece.pack(bits(parts[arrival.part]), bits(wanted))
            assert source.contribution(peer) == arrival.part
            pieces[arrival.part].append(Piece(arrival.piece, bits(wanted), Coming(None)))
    for piece, arrival in stage.kept:
        held = take(parts[arrival.part], source.indices(SHAPE, 2))
        pieces[arrival.part].append(Piece(arrival.piece, piece.dense(bits(held)), Coming(None)))
    result = torch.empty(SHAPE, dtype=dtype)
    reduce_parts(pieces, result, how)
    total = parts[0].to(how.accumulate)
    for part in parts[1:]:
        total = combine(total, part.to(how.accumulate), how)
    assert torch.equal(bits(result), bits(finish(total, how).to(dtype)))


class Recorded:
    """Work of a process group: says when it was waited for."""

    def __init__(self, said: list[int], number: int, error: Exception | None = None) -> None:
        self.said, self.number, self.error = said, number, error

    def wait(self) -> None:
        self.said.append(self.number)
        if self.error is not None:
            raise self.error


def parts_of(count: int, said: list[int], error: Exception | None = None) -> tuple[list[list[Piece]], torch.Tensor]:
    route = make_route((8,), torch.float32, (Layout((count,), [Partial()]),), (Layout((count,), [R]),), 0)
    (stage,) = route.stages
    arrivals = [a for _, a in stage.kept] + [a for found in stage.receives.values() for a in found]
    arrivals.sort(key=lambda a: a.part)
    dense = torch.arange(float(count))[:, None].expand(count, prod((8,))).contiguous()
    pieces = [
        [Piece(a.piece, bits(dense[i]), Coming(Recorded(said, i, error if i == 2 else None)))]  # type: ignore[arg-type]
        for i, a in enumerate(arrivals)
    ]
    return pieces, torch.empty(8)


def test_each_contribution_is_waited_for_in_turn_and_once() -> None:
    said: list[int] = []
    pieces, result = parts_of(4, said)
    how = make_route((8,), torch.float32, (Layout((4,), [Partial()]),), (Layout((4,), [R]),), 0).reduction
    assert how is not None
    reduce_parts(pieces, result, how)
    assert said == [0, 1, 2, 3] and result.tolist() == [6.0] * 8
    for (piece,) in pieces:
        piece.coming.wait()
    assert said == [0, 1, 2, 3]


def test_an_error_of_the_process_group_is_raised() -> None:
    said: list[int] = []
    pieces, result = parts_of(4, said, TransferError("gone"))
    how = make_route((8,), torch.float32, (Layout((4,), [Partial()]),), (Layout((4,), [R]),), 0).reduction
    assert how is not None
    with pytest.raises(TransferError, match="gone"):
        reduce_parts(pieces, result, how)
    assert said == [0, 1, 2]
