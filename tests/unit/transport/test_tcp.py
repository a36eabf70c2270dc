"""Agents over real loopback sockets against ``simulate``: any layouts, dtypes, strides and memory, to the bit."""

from __future__ import annotations

import random

import pytest
import torch

from etha.plan import TensorSpec
from tests.unit.transport.agents import Job, Local, agents, make_plan, same, transfer
from tests.unit.transport.test_local import FLOATS, allocate, layout


def random_job(seed: int, *, partial: float = 0.3, big: float = 0.1, hosts: bool = False) -> Job:
    """Random layouts, dtypes, strides and memory over two or three agents that serve ranks of both sides."""
    rng = random.Random(seed)
    m, n = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 3, 4])
    source, target = {}, {}
    for i in range(rng.randint(1, 4)):
        large = rng.random() < big
        ndim = rng.randint(0, 3)
        shape = tuple(rng.choice([64, 100, 257] if large else [0, 1, 2, 3, 5, 7, 8, 16, 33]) for _ in range(ndim))
        a = rng.choice(FLOATS)
        b = rng.choice([a, a, *FLOATS[:4]])
        reduces = rng.random() < partial and a is not torch.float8_e4m3fn
        source[f"t{i}"] = TensorSpec(shape, a, layout(rng, m, ndim, reduces))
        target[f"t{i}"] = TensorSpec(shape, b, layout(rng, n, ndim, False))
    names = rng.choice([["a", "b"], ["a", "b"], ["a", "b", "c"]])
    here, there = (tuple(rng.choice(names) for _ in range(k)) for k in (m, n))
    if rng.random() < 0.3:
        here, there = ("a",) * m, ("b",) * n
    reads = frozenset()
    if hosts:
        reads = frozenset((x, y) for x in names for y in names if x != y and rng.random() < 0.5)

    def held(specs: dict[str, TensorSpec], ranks: int, is_source: bool) -> Local:
        return {
            r: {
                k: allocate(random.Random(f"{seed} {k} {content(s, r)}"), shape, s.dtype, is_source)
                for k, s in specs.items()
                if (shape := s.local_shape(r)) is not None
            }
            for r in range(ranks)
        }

    plan = make_plan(source, target, here, there)
    assert not plan.violations
    private = (rng.random() < 0.5, rng.random() < 0.5)
    return Job(plan, here, there, held(source, m, True), held(target, n, False), private, reads)


def content(spec: TensorSpec, rank: int) -> str:
    """What a rank holds: equal for replicas, whose values must be equal too."""
    one = spec.layouts[0]
    where = torch.nonzero(torch.from_numpy(one.ranks == rank))[0].tolist()
    return f"{one.owned(spec.shape, rank)} {[i for i, p in zip(where, one.placements, strict=True) if p.is_partial()]}"


@pytest.mark.parametrize("seed", range(60))
async def test_random_redistributions_equal_simulate(seed: int) -> None:
    job = random_job(seed)
    expected = job.expected()
    async with agents("abc", streams=2) as at:
        job.streams = 2
        await transfer(job, at)
    same(job.target, expected)
