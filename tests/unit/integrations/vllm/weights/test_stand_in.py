"""Stand-ins: random chains of views over an enumerated tensor; what they read is what the views really show."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from etha.integrations.vllm.weights.cut import RegionCut
from etha.integrations.vllm.weights.standin import StandIn
from etha.integrations.vllm.weights.trace import Region, Trace, shape_of, union, whole

CPU = torch.device("cpu")
View = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Tap:
    """Notes traces; reads from a cut where there is one."""

    cut: RegionCut | None = None
    traces: list[Trace | None] = field(default_factory=list)

    def read(self, trace: Trace | None, seen: torch.Tensor) -> torch.Tensor:
        self.traces.append(trace)
        empty = torch.zeros(seen.shape, dtype=seen.dtype)
        return empty if self.cut is None or trace is None else self.cut.read(trace)

    def copy(self, into: torch.Tensor, trace: Trace | None, seen: torch.Tensor) -> None:
        into.copy_(self.read(trace, seen))

    def put(self, into: torch.Tensor, value: torch.Tensor) -> None:
        into.copy_(value)

    def change(self) -> torch.Tensor:
        raise NotImplementedError


def through(tensor: torch.Tensor, views: list[View]) -> torch.Tensor:
    for view in views:
        tensor = view(tensor)
    return tensor


def draw(rng: random.Random, tensor: torch.Tensor) -> View | None:
    """One view that a loader might take of ``tensor``."""
    if tensor.ndim == 0:
        return None
    d = rng.randrange(tensor.ndim)
    n = tensor.shape[d]
    match rng.choice(["narrow", "transpose", "select", "chunk", "unsqueeze", "step", "unflatten", "flatten"]):
        case "narrow":
            start = rng.randint(0, n)
            length = rng.randint(0, n - start)
            return lambda t: t.narrow(d, start, length)
        case "transpose":
            e = rng.randrange(tensor.ndim)
            return lambda t: t.transpose(d, e)
        case "select" if n:
            i = rng.randrange(n)
            return lambda t: t.select(d, i)
        case "chunk":
            return lambda t: t.chunk(2, d)[0]
        case "unsqueeze":
            return lambda t: t.unsqueeze(d)
        case "step":
            cut = slice(rng.randint(0, 2), None, rng.randint(1, 3))
            return lambda t: t[(slice(None),) * d + (cut,)]
        case "unflatten" if n:
            outer = rng.choice([q for q in range(1, n + 1) if n % q == 0])
            return lambda t: t.unflatten(d, (outer, n // outer))
        case "flatten" if d + 1 < tensor.ndim:
            return lambda t: t.view(*t.shape[:d], -1, *t.shape[d + 2 :])
    return None


def dense(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, runs in enumerate(region):
        kept = torch.tensor([i for start, stop in runs for i in range(start, stop)], dtype=torch.long)
        tensor = tensor.index_select(dim, kept)
    return tensor


def case(seed: int) -> tuple[random.Random, torch.Tensor, list[View], torch.Tensor]:
    rng = random.Random(seed)
    shape = [rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.randint(1, 4))]
    original = torch.arange(torch.Size(shape).numel()).reshape(shape)
    views: list[View] = []
    shown = original
    for _ in range(rng.randint(0, 5)):
        view = draw(rng, shown)
        try:
            shown = shown if view is None else view(shown)
        except RuntimeError:  # a flatten that would have to copy
            continue
        views += [] if view is None else [view]
    return rng, original, views, shown


@pytest.mark.parametrize("block", range(4))
def test_a_read_is_traced_to_exactly_its_elements_and_replayed_from_a_larger_region(block: int) -> None:
    untraceable = 0
    for seed in range(block * 250, block * 250 + 250):
        rng, original, views, shown = case(seed)
        tap = Tap()
        stand_in = through(StandIn.of(original.shape, original.dtype, CPU, tap), views)
        assert stand_in.shape == shown.shape
        stand_in + 0
        (trace,) = tap.traces
        if trace is None:
            untraceable += 1
            continue
        region = trace.region()
        assert set(dense(original, region).flatten().tolist()) == set(shown.flatten().tolist()), seed
        larger = union(region, tuple(((0, rng.randint(1, n)),) for n in original.shape))
        cut = RegionCut(dense(original, larger), larger)
        assert cut.dense.shape == shape_of(larger)
        replay = through(StandIn.of(original.shape, original.dtype, CPU, Tap(cut)), views)
        out = torch.empty(shown.shape, dtype=shown.dtype)
        out.copy_(replay)
        assert torch.equal(out, shown), seed
    assert untraceable < 25, "nearly all views of loaders are products of index sets"


def mixed(rng: random.Random, original: torch.Tensor) -> tuple[list[View], torch.Tensor]:
    """Views, and copies among them: what a loader does that puts rows in another order."""
    steps: list[View] = []
    shown = original
    for _ in range(rng.randint(1, 8)):
        order = rng.sample(range(shown.ndim), shown.ndim)
        step = rng.choice([
            draw(rng, shown),
            lambda t, order=order: t.permute(order),
            lambda t, order=order: t.permute(order).reshape(t.shape),
            lambda t: t.contiguous(),
            lambda t: t.clone(),
        ])  # fmt: skip
        if step is None:
            continue
        try:
            shown = step(shown)
        except RuntimeError:  # a flatten that would have to copy
            continue
        steps.append(step)
    return steps, shown


@pytest.mark.parametrize("block", range(4))
def test_copies_that_only_move_elements_are_reads_of_what_they_were_made_of(block: int) -> None:
    traced = 0
    for seed in range(block * 250, block * 250 + 250):
        rng = random.Random(seed)
        original = torch.arange(rng.choice([24, 48, 96])).reshape(rng.choice([(4, -1), (2, 3, -1), (2, 2, 3, -1)]))
        steps, shown = mixed(rng, original)
        tap = Tap()
        stand_in = through(StandIn.of(original.shape, original.dtype, CPU, tap), steps)
        assert stand_in.shape == shown.shape
        out = torch.empty(shown.shape, dtype=shown.dtype)
        out.copy_(stand_in)
        if None in tap.traces:
            continue
        region: Region | None = None
        for trace in tap.traces:
            region = union(region, trace.region() if trace is not None else whole(original.shape))
        assert region is not None
        needed = set(dense(original, region).flatten().tolist())
        assert set(shown.flatten().tolist()) <= needed
        traced += len(needed) == len(set(shown.flatten().tolist()))
        cut = RegionCut(dense(original, region), region)
        out.copy_(through(StandIn.of(original.shape, original.dtype, CPU, Tap(cut)), steps))
        assert torch.equal(out, shown), seed
    assert traced > 150, "most of them keep just what they need"


def test_a_copy_that_is_written_into_is_one_of_its_own() -> None:
    original = torch.arange(24).reshape(4, 6)
    cut = RegionCut(original.clone(), whole((4, 6)))
    stand_in = StandIn.of((4, 6), torch.int64, CPU, Tap(cut))
    copied = stand_in.t().contiguous()
    copied[1:3].mul_(0)
    expected = original.t().contiguous()
    expected[1:3].mul_(0)
    assert torch.equal(copied[:2] + 0, expected[:2])
    assert torch.equal(stand_in + 0, original)
    assert torch.equal(cut.dense, original)


def test_a_view_that_runs_over_the_end_of_a_row_is_no_product() -> None:
    assert Trace.of((4, 4), 2, (3,), (1,)) is None
    assert Trace.of((4, 4), 0, (3,), (3,)) is None


def test_a_walk_of_several_laps_keeps_its_shape() -> None:
    trace = Trace.of((3, 4), 0, (12,), (1,))
    assert trace is not None
    assert trace.counts == (3, 4)
    assert trace.sizes == (12,)
    assert trace.region() == whole((3, 4))


def test_a_region_of_two_runs_is_read_by_a_gather_where_the_steps_are_uneven() -> None:
    original = torch.arange(30).reshape(10, 3)
    region: Region = (((0, 2), (5, 8)), ((0, 3),))
    cut = RegionCut(dense(original, region), region)
    trace = Trace.of((10, 3), 3, (2, 3), (15, 3 // 3))
    assert trace is not None
    assert torch.equal(cut.read(trace), original[1:7:5])
    outside = Trace.of((10, 3), 6, (2, 3), (3, 1))
    assert outside is not None
    with pytest.raises(ValueError, match="outside the runs"):
        cut.read(outside)


def test_tensors_without_elements_and_without_dims() -> None:
    tap = Tap()
    nobody = StandIn.of((0, 4), torch.float32, CPU, tap)
    assert (nobody + 1).shape == (0, 4)
    scalar = StandIn.of((), torch.float32, CPU, tap)
    assert (scalar + 1).shape == ()
    empty, one = tap.traces
    assert empty is not None and one is not None
    assert empty.region() == ((), ())
    assert one.region() == ()


def test_unions_are_exact_in_one_dim_and_a_product_otherwise() -> None:
    one: Region = (((0, 2),), ((0, 4),))
    assert union(one, (((2, 3), (6, 8)), ((0, 4),))) == (((0, 3), (6, 8)), ((0, 4),))
    assert union(one, (((4, 5),), ((6, 7),))) == (((0, 2), (4, 5)), ((0, 4), (6, 7)))
    assert union(None, one) == one
    assert union(one, ((), ())) == one
