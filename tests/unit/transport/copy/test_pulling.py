"""What workers pull of a program, and the agent copies of it, is all of it, to the bit. Some is not for workers."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from etha.agent.runtime.run import Execution
from etha.memory.mapping import WorkerMemory
from etha.memory.pull import PullRun
from etha.plan import Layout, Plan, TensorSpec, simulate
from etha.transport.copy import pulling
from etha.transport.copy.program import Program
from etha.transport.copy.pulling import pull_plan
from tests.examples import examples
from tests.unit.transport.copy.test_local import (
    Local,
    allocate,
    bits,
    compiled,
    layout,
    local_plan,
    me,
)

__all__ = ["me"]


def pulled(program: Program) -> int:
    """Run a program as an agent and its workers do; the bytes that workers pulled."""
    plan = pull_plan(program)
    job = Execution(program, {}, without=frozenset() if plan is None else plan.pieces)
    for piece in range(job.pieces):
        job.run(piece, 0)
    done = 0
    for table in {} if plan is None else plan.tables.values():
        run = PullRun(table, threads=2)
        run.start()
        run.finish()
        done += run.done
    return done


def check(plan: Plan, source: Local, target: Local, me: WorkerMemory) -> int:
    expected = {r: {k: x.clone() for k, x in held.items()} for r, held in target.items()}
    simulate(plan, {r: {k: x.clone() for k, x in held.items()} for r, held in source.items()}, expected)
    done = pulled(compiled(plan, source, target, me, True, True))
    for r, held in target.items():
        for k, x in held.items():
            assert bits(x) == bits(expected[r][k]), (k, r, plan.source[k], plan.target[k])
    return done


@pytest.mark.parametrize("seed", range(examples(40)))
def test_random_redistributions_equal_simulate(seed: int, me: WorkerMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "MIN_BYTES", 1)
    monkeypatch.setattr(pulling, "CHUNK", random.Random(seed).choice([64, 5000, 1 << 20]))
    rng = random.Random(seed)
    m, n = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    source, target = {}, {}
    for i in range(rng.randint(1, 4)):
        ndim = rng.randint(0, 3)
        shape = tuple(rng.choice([1, 3, 8, 33, 64, 100]) for _ in range(ndim))
        dtype = rng.choice([torch.float32, torch.bfloat16])
        other = rng.choice([dtype, dtype, torch.float64, torch.float32, torch.bfloat16, torch.float16])
        source[f"t{i}"] = TensorSpec(shape, dtype, layout(rng, m, ndim, rng.random() < 0.2))
        target[f"t{i}"] = TensorSpec(shape, other, layout(rng, n, ndim, False))
    plan = local_plan(source, target, m, n)

    def held(specs: dict[str, TensorSpec], rank: int, side: bool) -> dict[str, torch.Tensor]:
        local = {k: spec.layouts[0].local_shape(spec.shape, rank) for k, spec in specs.items()}
        return {k: allocate(rng, shape, specs[k].dtype, side) for k, shape in local.items()}

    check(plan, {r: held(source, r, True) for r in range(m)}, {r: held(target, r, False) for r in range(n)}, me)


def moved(
    me: WorkerMemory, source: Placement, target: Placement, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[int, Program]:
    """(bytes that workers pull from two ranks to two, the program)."""
    spec = {"w": TensorSpec(shape, torch.float32, Layout((2,), [source]))}
    into = {"w": TensorSpec(shape, dtype, Layout((2,), [target]))}
    plan = local_plan(spec, into, 2, 2)
    here = {r: {"w": torch.rand(Layout((2,), [source]).local_shape(shape, r))} for r in range(2)}
    there = {r: {"w": torch.zeros(Layout((2,), [target]).local_shape(shape, r), dtype=dtype)} for r in range(2)}
    return check(plan, here, there, me), compiled(plan, here, there, me, True, True)


@pytest.mark.parametrize("target", [Shard(0), Shard(1), Replicate()])
def test_every_byte_of_a_large_plain_tensor_is_pulled(target: Placement, me: WorkerMemory) -> None:
    done, program = moved(me, Shard(0), target, (1024, 1024))
    assert done == program.total
    plan = pull_plan(program)
    assert plan is not None and sorted(plan.tables) == [("target", 0), ("target", 1)]
    assert plan.work == program.work and plan.sources == (("source", 0), ("source", 1))


@pytest.mark.parametrize(
    ("columns", "pulled"), [(256, True), (128, False)], ids=["runs of 512 bytes", "runs of 256 bytes"]
)
def test_short_runs_are_the_agents(columns: int, pulled: bool, me: WorkerMemory) -> None:
    done, program = moved(me, Shard(0), Shard(1), (8192, columns))
    assert done == (program.total if pulled else 0)


def test_a_matrix_of_any_number_of_runs_is_pulled(me: WorkerMemory) -> None:
    """Its table has a row for each chunk and not for each run."""
    _, program = moved(me, Shard(0), Shard(1), (8192, 1024))
    plan = pull_plan(program)
    assert plan is not None
    assert all(len(table.remote) < 4 * len(table.process) < 200 for table in plan.tables.values())


@pytest.mark.parametrize(
    ("source", "target", "shape", "dtype"),
    [
        (Shard(0), Shard(0), (64, 1024), torch.float32),  # too little
        (Shard(0), Shard(0), (1024, 1024), torch.float64),  # cast on the way
        (Partial(), Shard(0), (1024, 1024), torch.float32),  # added on the way
        (Shard(0), Shard(1), (500_000, 2), torch.float32),  # runs of four bytes
    ],
)
def test_what_workers_cannot_copy_or_not_well_is_the_agents(
    source: Placement, target: Placement, shape: tuple[int, ...], dtype: torch.dtype, me: WorkerMemory
) -> None:
    done, program = moved(me, source, target, shape, dtype)
    assert done == 0 and pull_plan(program) is None


def test_copies_that_wait_for_others_are_the_agents(me: WorkerMemory) -> None:
    """One memory is source and target: its columns are read before they are written."""
    memory = torch.rand(1024, 1024)
    plan = local_plan(
        {"w": TensorSpec((1024, 1024), torch.float32, Layout((1,), [Replicate()]))},
        {"w": TensorSpec((1024, 1024), torch.float32, Layout((1,), [Replicate()]))},
        1,
        1,
    )
    program = compiled(plan, {0: {"w": memory}}, {0: {"w": memory.T}}, me, True, True)
    assert program.barriers and pull_plan(program) is None
