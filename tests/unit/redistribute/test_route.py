"""How many exchanges, how many bytes, who reduces what: routes of all ranks, run in one process."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from etha.errors import LayoutError
from etha.plan import Layout
from etha.plan.proof.simulate import combine, finish
from etha.redistribute import route as routes
from etha.redistribute.piece import LocalRegion, bits
from etha.redistribute.route import Route, divided, make_route
from etha.redistribute.stage import ExchangeStage
from tests.unit.plan.truth import Truth, contributions, random_truth, take

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
LARGE = (4096, 1024)


def routes_of(shape: tuple[int, ...], source: Truth, target: Truth, world: int = 8) -> list[Route]:
    here, there = (source.layout(),), (target.layout().with_reading("order"),)
    return [make_route(shape, torch.float32, here, there, rank) for rank in range(world)]


def eight(mesh: tuple[int, ...], placements: list[object]) -> Truth:
    return Truth(mesh, list(range(8)), placements)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "sent"),
    [
        ((8,), [P], [S0], [7 / 8]),  # reduce-scatter
        ((8,), [P], [R], [7 / 8, 7 / 8]),  # all-reduce
        ((2, 4), [P, R], [R, R], [1]),  # two contributions: one exchange is as little as two
        ((2, 4), [R, P], [R, R], [3 / 8, 7 / 8]),
        ((2, 2, 2), [P, R, P], [R, R, R], [3 / 8, 7 / 8]),
        ((2, 4), [P, P], [R, S0], [7 / 8, 1 / 8]),
        ((2, 4), [P, P], [S1, S0], [7 / 8]),
        ((2, 4), [S0, S1], [S1, S0], [1 / 8]),
        ((2, 4), [S0, R], [R, S0], [1 / 8]),
        ((2, 4), [R, R], [S0, S1], [0]),
    ],
)
def test_exchanges_and_bytes(
    mesh: tuple[int, ...], source: list[object], target: list[object], sent: list[float]
) -> None:
    found = routes_of(LARGE, eight(mesh, source), eight(mesh, target))
    for i, most in enumerate(sent):
        assert all(len(route.stages) == len(sent) for route in found)
        stages = [route.stages[i] for route in found]
        assert max(_sent(stage) for stage in stages) / prod(LARGE) == pytest.approx(
            most, abs=0.13 if most == 1 / 8 else 0
        )
        assert {stage.quiet for stage in stages} == {most == 0}


def _sent(stage: ExchangeStage) -> int:
    return sum(piece.numel for pieces in stage.sends.values() for piece in pieces)


@pytest.mark.parametrize(
    ("mesh", "source", "limit"),
    [
        ((8,), [P], 4 / 3),  # 7 B bytes into a rank in 7 messages, or 7/4 B in 14
        ((2, 4), [R, P], 2),  # 3 B in 3, or 3/2 B in 6: each half of the mesh for itself
    ],
)
def test_small_reductions_take_one_exchange(mesh: tuple[int, ...], source: list[object], limit: float) -> None:
    replicated = eight(mesh, [R] * len(mesh))
    for near, stages in ((0.98, 1), (1.02, 2)):
        rows = int(limit * near * routes.MESSAGE / 4) // 64 * 64
        assert [len(r.stages) for r in routes_of((rows,), eight(mesh, source), replicated)] == [stages] * 8


def test_reductions_of_medium_size_leave_replicas_to_themselves() -> None:
    """On 2 x 4 ranks: 3/2 of the tensor in 6 messages, or 5/4 of it in 10."""
    for size, sent in ((15, [3 / 4, 3 / 4]), (17, [3 / 8, 7 / 8])):
        rows = size * routes.MESSAGE // 4
        found = routes_of((rows,), eight((2, 4), [R, P]), eight((2, 4), [R, R]))
        assert [max(_sent(route.stages[i]) for route in found) / rows for i in (0, 1)] == pytest.approx(sent, abs=1e-3)
        for stage in (stage for route in found for stage in route.stages if size == 15):
            assert len(stage.sends) == len(stage.receives) == 3


def play(found: list[Route], sources: dict[int, torch.Tensor], ranks: list[int]) -> dict[int, torch.Tensor]:
    """All ranks in one process; what each sends a peer lies in the order in which the peer expects it."""
    local = dict(sources)
    for i in range(len(found[0].stages)):
        stages = [route.stages[i] for route in found]
        wire: dict[tuple[int, int], list[torch.Tensor]] = {}
        for rank, stage in enumerate(stages):
            for peer, pieces in stage.sends.items():
                wire[rank, peer] = [_packed(piece, local[rank]) for piece in pieces]
        made: dict[int, torch.Tensor] = {}
        for rank, stage in enumerate(stages):
            if stage.shape is None:
                continue
            parts = [torch.full(stage.shape, 99, dtype=torch.float32) for _ in range(stage.parts)]
            for peer, arrivals in stage.receives.items():
                for arrival, dense in zip(arrivals, wire.pop((peer, rank)), strict=True):
                    assert dense.shape == arrival.piece.shape
                    arrival.piece.unpack(bits(parts[arrival.part]), dense)
            for piece, arrival in stage.kept:
                arrival.piece.unpack(bits(parts[arrival.part]), _packed(piece, local[rank]))
            made[rank] = parts[0]
            how = found[rank].reduction
            if i == 0 and how is not None:
                assert how.count == len(parts) and how.op == "sum"
                for part in parts[1:]:
                    made[rank] = combine(made[rank], part, how)
                made[rank] = finish(made[rank], how)
        assert not wire
        local = made
    return local


def _packed(piece: LocalRegion, tensor: torch.Tensor) -> torch.Tensor:
    dense = bits(tensor).new_empty(piece.shape)
    piece.pack(bits(tensor), dense)
    return dense


@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["two", "one"])
def test_random_layouts(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(routes, "MESSAGE", limit)
    make_route.cache_clear()
    lengths = set()
    for seed in range(60):
        rng = random.Random(seed)
        ndim = rng.choice([1, 2, 3])
        shape = tuple(rng.choice([1, 3, 7, 8, 64]) for _ in range(ndim))
        sides = [rng.sample(range(8), rng.choice([1, 2, 3, 4, 6, 8])) for _ in "ab"]
        source = random_truth(rng, sides[0], ndim, [P] if seed % 2 else None)
        target = random_truth(rng, sides[1], ndim, None)
        source.reading, target.reading = rng.choice(["order", "literal"]), "order"
        full = torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(seed)).float()
        parts = contributions(source, full, rng)
        given = {r: take(parts[source.contribution(r)], source.indices(shape, r)) for r in source.ranks}
        found = routes_of(shape, source, target)
        got = play(found, given, target.ranks)
        assert sorted(got) == sorted(target.ranks)
        for rank, local in got.items():
            assert torch.equal(local, take(full, target.indices(shape, rank))), (seed, rank)
        lengths.add(len(found[0].stages))
    make_route.cache_clear()
    assert lengths == ({1, 2} if limit == 0 else {1})


def test_division_gives_every_replica_its_share() -> None:
    layout = Layout((2, 4), [R, Shard(0)])
    parts = divided(layout, (4096, 16))
    assert [parts.local_shape((4096, 16), rank) for rank in range(8)] == [(512, 16)] * 8
    for rank in range(8):
        cell, part = layout.owned((4096, 16), rank), parts.owned((4096, 16), rank)
        assert cell is not None and part is not None
        assert cell[0][0][0] <= part[0][0][0] < part[0][0][1] <= cell[0][0][1]
    assert divided(Layout((8,), [R]), ()).placements == (R,)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.complex128, torch.uint16])
def test_pieces_of_many_runs(dims: int, dtype: torch.dtype) -> None:
    shape = (64, 40, 36)[:dims]
    full = (torch.arange(prod(shape)).reshape(shape) % 251).to(dtype)
    source = Truth((2,), [0, 1], [_StridedShard(0, split_factor=25)], "literal")
    target = Truth((dims,), list(range(dims)), [_StridedShard(dims - 1, split_factor=18)], "literal")
    layouts = source.layout(), target.layout()
    for rank in range(dims):
        got = torch.zeros([len(kept) for kept in target.indices(shape, rank)], dtype=dtype)
        for sender in range(2):
            local = take(bits(full), source.indices(shape, sender))
            stages = [make_route(shape, dtype, (layouts[0],), (layouts[1],), r).stages[0] for r in range(max(dims, 2))]
            pieces, arrivals = stages[sender].sends.get(rank, ()), stages[rank].receives.get(sender, ())
            for piece, arrival in zip(pieces, arrivals, strict=True):
                arrival.piece.unpack(bits(got), _packed(piece, local))
            for piece, arrival in stages[rank].kept if rank == sender else ():
                arrival.piece.unpack(bits(got), _packed(piece, local))
        wanted = take(bits(full), target.indices(shape, rank))
        assert torch.equal(bits(got), wanted)


def test_what_cannot_be_reduced() -> None:
    target = (Layout((2,), [R]),)
    for placements, dtype, text in (
        ([Partial("avg")], torch.int32, "avg"),
        ([Partial("bor")], torch.int32, "bor"),
        ([Partial("sum")], torch.bool, "bool"),
    ):
        with pytest.raises(LayoutError, match=text):
            make_route((4,), dtype, (Layout((2,), placements),), target, 0)
    with pytest.raises(LayoutError, match="different kinds"):
        make_route((4,), torch.float32, (Layout((1, 2), [Partial("max"), P]),), target, 0)
