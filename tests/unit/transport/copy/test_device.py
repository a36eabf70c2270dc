"""Programs whose memory is on a device against ``simulate``: any layouts, dtypes and strides, to the bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial

from etha.cuda.driver import DeviceError
from etha.cuda.reaper import reaper
from etha.cuda.select import install_driver
from etha.memory.reach import ReachError
from etha.memory.views import view_of
from etha.plan import Layout, Plan, TensorSpec, simulate
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.device import Copier
from etha.transport.copy.local import compile_local
from etha.transport.copy.program import DEVICE_PIECE, PIECE, Program
from tests.examples import examples
from tests.fakes.cuda import GPU0, FakeDriver
from tests.unit.transport.copy.test_local import FLOATS, allocate, bits, layout, local_plan
from tests.unit.transport.on_device import Local, card, card_view, compiled, on_card, run


def check(driver: FakeDriver, copier: Copier, plan: Plan, source: Local, target: Local) -> Program:
    """Run the plan with all of it on the GPU and compare every bit with ``simulate`` on the CPU."""
    expected = {r: {k: x.clone() for k, x in held.items()} for r, held in target.items()}
    simulate(plan, {r: {k: x.clone() for k, x in held.items()} for r, held in source.items()}, expected)
    here, there = (
        {r: {k: on_card(driver, x) for k, x in held.items()} for r, held in side.items()} for side in (source, target)
    )
    program = compiled(plan, here, there)
    assert run(program, copier) == program.work
    for r, held in there.items():
        for k, x in held.items():
            assert bits(x) == bits(expected[r][k]), (k, r, plan.source[k], plan.target[k])
    program.release()
    return program


@pytest.mark.parametrize("seed", range(examples(60)))
def test_random_redistributions_equal_simulate(seed: int) -> None:
    rng = random.Random(seed)
    m, n = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 3, 4])
    source, target = {}, {}
    for i in range(rng.randint(1, 4)):
        ndim, big = rng.randint(0, 4), rng.random() < 0.1
        sizes = [20, 33, 64] if big else [0, 1, 2, 3, 5, 7, 8, 16]
        shape = tuple(rng.choice(sizes) for _ in range(ndim))
        a = rng.choice([*FLOATS, torch.int8])
        b = rng.choice([a, a, *FLOATS[:4]]) if a.is_floating_point else rng.choice([a, torch.int64])
        partial = rng.random() < 0.3 and a in FLOATS[:4]
        source[f"t{i}"] = TensorSpec(shape, a, layout(rng, m, ndim, partial))
        target[f"t{i}"] = TensorSpec(shape, b, layout(rng, n, ndim, False))
    plan = local_plan(source, target, m, n)
    assert not plan.violations

    def held(specs: dict[str, TensorSpec], ranks: int, is_source: bool) -> Local:
        return {
            r: {
                k: allocate(rng, shape, s.dtype, is_source)
                for k, s in specs.items()
                if (shape := s.local_shape(r)) is not None
            }
            for r in range(ranks)
        }

    with card() as (driver, copier):
        check(driver, copier, plan, held(source, m, True), held(target, n, False))


@pytest.mark.parametrize(
    "placement",
    [Partial("sum"), Partial("avg"), Partial("product"), Partial("max"), *(_NormPartial(p) for p in (1.0, 2.0, 3.0))],
    ids=str,
)
def test_reductions_equal_simulate(placement: Placement) -> None:
    dtype = torch.float32 if isinstance(placement, _NormPartial) else torch.bfloat16
    spec = TensorSpec((70, 333), dtype, Layout((4,), [placement]))
    plan = local_plan({"n": spec}, {"n": TensorSpec((70, 333), torch.float32, Layout((2,), [Shard(1)]))}, 4, 2)
    source = {r: {"n": torch.rand(70, 333, generator=torch.Generator().manual_seed(r)).to(dtype)} for r in range(4)}
    with card() as (driver, copier):
        check(driver, copier, plan, source, {r: {"n": torch.zeros(70, n)} for r, n in ((0, 167), (1, 166))})


def test_a_reduction_is_one_gathering_its_arithmetic_and_one_scattering_step() -> None:
    spec = TensorSpec((40, 100), torch.bfloat16, Layout((4,), [Partial("sum")]))
    plan = local_plan({"g": spec}, {"g": TensorSpec((40, 100), torch.float32, Layout((2,), [Shard(1)]))}, 4, 2)
    with card() as (driver, copier):
        source = {r: {"g": on_card(driver, torch.rand(40, 100).bfloat16())} for r in range(4)}
        target = {r: {"g": driver.empty(GPU0, (40, 50))} for r in range(2)}
        program = compiled(plan, source, target)
        run(program, copier)
        before = dict(driver.calls)
        for held in source.values():
            held["g"].mul_(2)
        run(program, copier)
        after = {name: driver.calls[name] - before.get(name, 0) for name in driver.calls}
        # Few rows are copies, many a launch.
        assert after["copy"] == 4 * len(program.pieces), "gather"
        assert after["launch"] == 3 * len(program.pieces), "add, finish, scatter"
        assert (after["allocate"], after["pin"]) == (0, 0), "the tables were there already"
        total = torch.zeros(40, 100)
        for r in range(4):
            total += source[r]["g"].float()
        assert torch.equal(torch.cat([target[r]["g"] for r in range(2)], 1), total.bfloat16().float())
        program.release()


def test_contributions_that_are_too_many_come_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etha.transport.copy.reduce.DEVICE_GATHER", 3 << 14)
    # A norm's odd power is not cut, so its contributions do not shrink with their number.
    for placement in (_NormPartial(3.0), Partial("sum")):
        spec = TensorSpec((64, 64), torch.float32, Layout((7,), [placement]))
        plan = local_plan({"g": spec}, {"g": TensorSpec((64, 64), torch.float32, Layout((1,), [Replicate()]))}, 7, 1)
        source = {r: {"g": torch.rand(64, 64, generator=torch.Generator().manual_seed(r))} for r in range(7)}
        with card() as (driver, copier):
            program = check(driver, copier, plan, source, {0: {"g": torch.zeros(64, 64)}})
            assert program.scratch < 8 << 14, "never all seven at once"


@pytest.fixture
def only() -> Iterator[FakeDriver]:
    """A GPU that is the process's own, as staging memory is taken from it."""
    driver = FakeDriver()
    install_driver(driver)
    try:
        yield driver
    finally:
        install_driver(None)
        driver.shut()


def test_one_memory_as_source_and_target_is_staged_on_the_device(only: FakeDriver) -> None:
    shape = (6, 6)
    plan = local_plan(
        {"t": TensorSpec(shape, torch.float32, Layout((2,), [Shard(0)])), "g": _summed(shape)},
        {"t": TensorSpec(shape, torch.float32, Layout((2,), [Shard(1)])), "g": _full(shape)},
        2,
        2,
    )
    full, parts = torch.arange(36.0).view(shape), [torch.rand(shape) for _ in range(2)]
    memory = {r: {"t": only.empty(GPU0, (18,)), "g": on_card(only, parts[r])} for r in range(2)}
    source = {r: {"t": held["t"].view(3, 6), "g": held["g"]} for r, held in memory.items()}
    target = {r: {"t": held["t"].view(6, 3), "g": held["g"]} for r, held in memory.items()}
    for r in range(2):
        source[r]["t"].copy_(full[3 * r : 3 * r + 3])
    program = compiled(plan, source, target)
    copier = Copier(only, GPU0)
    assert program.barriers
    assert program.staged == 36 * 4 + 36 * 4
    run(program, copier)
    assert torch.equal(torch.cat([target[r]["t"] for r in range(2)], 1), full)
    assert torch.equal(target[0]["g"], parts[0] + parts[1])
    assert torch.equal(target[1]["g"], parts[0] + parts[1])
    copier.close()
    program.release()
    del program
    only.check()


def _summed(shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(shape, torch.float32, Layout((2,), [Partial("sum")]))


def _full(shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(shape, torch.float32, Layout((2,), [Replicate()]))


def test_a_thousand_small_tensors_are_one_launch_per_dtype_class_and_its_table_is_kept() -> None:
    names = [f"w{i}" for i in range(1000)]
    same = {n: TensorSpec((8, 6), torch.float32, Layout((2,), [Shard(0)])) for n in names}
    to = {n: torch.bfloat16 if i % 2 else torch.float32 for i, n in enumerate(names)}
    plan = local_plan(same, {n: TensorSpec((8, 6), to[n], Layout((2,), [Shard(1)])) for n in names}, 2, 2)
    with card() as (driver, copier):
        source = {r: {n: on_card(driver, torch.rand(4, 6)) for n in names} for r in range(2)}
        target = {r: {n: driver.empty(GPU0, (8, 3), to[n]) for n in names} for r in range(2)}
        program = compiled(plan, source, target)
        assert len(program.pieces) == 1
        run(program, copier)
        before = dict(driver.calls)
        assert before["launch"] == 2
        for held in source.values():
            for t in held.values():
                t.mul_(3)
        run(program, copier)
        after = {name: driver.calls[name] - before.get(name, 0) for name in driver.calls}
        assert after["launch"] == 2
        assert (after["allocate"], after["pin"], after["copy"]) == (0, 0, 0)
        for n in names:
            whole = torch.cat([source[r][n] for r in range(2)])
            assert torch.equal(torch.cat([target[r][n] for r in range(2)], 1), whole.to(to[n]))
        held_before = [leak for leak in driver.leaks() if "memory" in leak]
        program.release()
        assert reaper.drain()
        assert len([leak for leak in driver.leaks() if "memory" in leak]) == len(held_before) - 1


def test_a_table_goes_with_its_program() -> None:
    plan = local_plan({"t": _full((4, 6))}, {"t": TensorSpec((4, 6), torch.float32, Layout((2,), [Shard(1)]))}, 2, 2)
    with card() as (driver, copier):
        source = {r: {"t": on_card(driver, torch.rand(4, 6))} for r in range(2)}
        target = {r: {"t": driver.empty(GPU0, (4, 3))} for r in range(2)}
        run(compiled(plan, source, target), copier)


def test_long_neighbours_of_different_tensors_are_a_copy_each() -> None:
    """A card refuses a copy that runs from one allocation into the next, although their addresses touch."""
    half = 1 << 20
    names = ("a", "b")
    spec = TensorSpec((half,), torch.uint8, Layout((1,), [Replicate()]))
    plan = local_plan(dict.fromkeys(names, spec), dict.fromkeys(names, spec), 1, 1)
    with card() as (driver, copier):
        source = {n: on_card(driver, torch.randint(0, 255, (half,), dtype=torch.uint8)) for n in names}
        target = {n: driver.empty(GPU0, (half,), torch.uint8) for n in names}
        for held in (source, target):
            assert held["a"].data_ptr() + half == held["b"].data_ptr()
        run(compiled(plan, {0: source}, {0: target}), copier)
        assert (driver.calls["copy"], driver.calls["launch"]) == (2, 0)
        assert all(torch.equal(target[n], source[n]) for n in names)


def test_long_neighbours_of_one_pair_of_tensors_are_one_copy_and_no_launch() -> None:
    rows = 3 * PIECE // 2
    spec = TensorSpec((2, rows), torch.uint8, Layout((1,), [Replicate()]))
    plan = local_plan({"t": spec}, {"t": spec}, 1, 1)
    with card() as (driver, copier):
        source = on_card(driver, torch.randint(0, 255, (2, rows), dtype=torch.uint8))
        target = driver.empty(GPU0, (2, rows), torch.uint8)
        run(compiled(plan, {0: {"t": source}}, {0: {"t": target}}), copier)
        assert (driver.calls["copy"], driver.calls["launch"]) == (1, 0)
        assert torch.equal(target, source)


def test_long_neighbours_of_two_ranks_are_a_copy_each_and_no_launch() -> None:
    source = TensorSpec((3 << 20,), torch.uint8, Layout((2,), [Shard(0)]))
    plan = local_plan({"t": source}, {"t": TensorSpec((3 << 20,), torch.uint8, Layout((1,), [Replicate()]))}, 2, 1)
    full = torch.randint(0, 255, (3 << 20,), dtype=torch.uint8)
    with card() as (driver, copier):
        whole = on_card(driver, full)  # both ranks' halves touch, at both ends
        target = {0: {"t": driver.empty(GPU0, (3 << 20,), torch.uint8)}}
        program = compiled(plan, {r: {"t": whole[r * 3 << 19 : (r + 1) * 3 << 19]} for r in range(2)}, target)
        run(program, copier)
        assert (driver.calls["copy"], driver.calls["launch"]) == (2, 0)
        assert torch.equal(target[0]["t"], full)


def test_pieces_of_a_device_are_bounded() -> None:
    rows = 3 * DEVICE_PIECE // 2 // (1 << 20)
    spec = TensorSpec((rows, 1 << 20), torch.uint8, Layout((1,), [Shard(0)]))
    plan = local_plan({"t": spec}, {"t": spec}, 1, 1)
    meta = torch.empty((1 << 20,), dtype=torch.uint8)
    view = {0: {"t": meta.expand(rows, 1 << 20).as_strided((rows, 1 << 20), (0, 1))}}
    # Only the geometry: nothing runs.
    program = compiled(plan, view, {0: {"t": torch.empty((rows, 2), dtype=torch.uint8)[:, :1].expand(rows, 1 << 20)}})
    assert [p.nbytes for p in program.pieces] and max(p.nbytes for p in program.pieces) <= DEVICE_PIECE
    assert len(program.pieces) == 2


def test_a_sticky_error_surfaces_as_a_reach_error_with_its_cause() -> None:
    driver = FakeDriver()
    try:
        copier = Copier(driver, GPU0)
        plan = local_plan(
            {"t": _full((4, 6))}, {"t": TensorSpec((4, 6), torch.float32, Layout((2,), [Shard(1)]))}, 2, 2
        )
        source = {r: {"t": on_card(driver, torch.rand(4, 6))} for r in range(2)}
        program = compiled(plan, source, {r: {"t": driver.empty(GPU0, (4, 3))} for r in range(2)})
        driver.fail("launch", DeviceError("cudaErrorIllegalAddress", "launch", sticky=True))
        with pytest.raises(ReachError, match=f"{GPU0}.*cudaErrorIllegalAddress") as caught:
            run(program, copier)
        assert isinstance(caught.value.__cause__, DeviceError)
        assert caught.value.__cause__.sticky
        copier.close()
        program.release()
    finally:
        driver.shut()


def test_device_memory_without_a_copier_is_refused() -> None:
    plan = local_plan({"t": _full((4, 6))}, {"t": _full((4, 6))}, 2, 2)
    with card() as (driver, _):
        held = {r: {"t": on_card(driver, torch.rand(4, 6))} for r in range(2)}
        program = compiled(plan, held, {r: {"t": driver.empty(GPU0, (4, 6))} for r in range(2)})
        with pytest.raises(ReachError, match="this agent has none"):
            program.run(0, Workspace())


@pytest.mark.slow
def test_the_cpu_path_loads_no_kernels() -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, torch\n"
            "before = set(sys.modules)\n"  # torch looks itself whether there are bindings
            "import etha.transport.copy.host, etha.transport.copy.staging, etha.transport.wire.host_reads\n"
            "print([m for m in set(sys.modules) - before if m.split('.')[0] in ('triton', 'cuda')"
            " or m.startswith(('etha.cuda.triton', 'etha.cuda.runtime', 'etha.cuda.kernels'))])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_pieces_that_bounce_are_as_short_as_the_cpus_and_apart_from_the_devices() -> None:
    """Between any two of them a revocation is heard; those of the card alone are as long as they were."""
    n = 5 * PIECE // 2
    plans = {"in": torch.uint8, "cast": torch.float32, "here": torch.uint8}
    whole = {k: TensorSpec((n if k != "cast" else n // 4,), d, Layout((1,), [Replicate()])) for k, d in plans.items()}
    to = {k: TensorSpec(s.shape, torch.bfloat16 if k == "cast" else s.dtype, s.layout) for k, s in whole.items()}
    summed = TensorSpec((n // 4,), torch.float32, Layout((2,), [Partial("sum")]))
    plan = local_plan({**whole, "sum": summed}, {**to, "sum": TensorSpec((n // 4,), torch.float32, _one())}, 2, 1)
    with card() as (driver, copier):
        number = {name: i for i, name in enumerate(plan.names)}
        host = {k: torch.randint(0, 99, s.shape).to(s.dtype) for k, s in whole.items()}
        terms = [torch.rand(n // 4) for _ in range(2)]
        here = {k: view_of(t) if k != "here" else card_view(on_card(driver, t)) for k, t in host.items()}
        there = {k: driver.empty(GPU0, s.shape, s.dtype) for k, s in to.items()} | {
            "sum": driver.empty(GPU0, (n // 4,))
        }
        program = compile_local(
            plan,
            {
                0: {number[k]: v for k, v in {**here, "sum": view_of(terms[0])}.items()},
                1: {number["sum"]: view_of(terms[1])},
            },
            {0: {number[k]: card_view(t) for k, t in there.items()}},
        )
        sizes = sorted(p.nbytes for p in program.pieces if p.other is None)
        assert sizes[-1] == n and sum(sizes[:-1]) == n + n // 2 and sizes[-2] <= PIECE
        reduced = [p for p in program.pieces if p.other is not None]
        assert len(reduced) >= 4 and max(2 * p.nbytes for p in reduced) <= PIECE
        run(program, copier)
        for k, t in host.items():
            assert torch.equal(there[k], t.to(to[k].dtype))
        assert torch.equal(there["sum"], terms[0] + terms[1])
        program.release()


def _one() -> Layout:
    return Layout((1,), [Replicate()])
