"""Every compiler's programs, run over sources that share memory in every way, against the enumerated truth."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from etha.memory.handles import describe
from etha.memory.views import View, view_of
from etha.plan import Plan, build_plan
from etha.redistribute.route import make_route
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.device import Copier
from etha.transport.copy.local import compile_local
from etha.transport.copy.program import Program
from tests.examples import examples
from tests.fakes.cuda import GPU0, FakeDriver
from tests.unit.plan.truth import take
from tests.unit.redistribute.test_route import play
from tests.unit.transport.agents import Job, agents, run_here, transfer
from tests.unit.transport.aliasing import Cargo, bits_of, groups_of, is_region, random_cargo
from tests.unit.transport.cards import Placed, fleet
from tests.unit.transport.on_device import card, card_view

#: A case is too many draws for hypothesis to make one by one, so it draws the seed of all of them.
RANDOM = st.integers(0, 1 << 32).map(random.Random)
#: Nor would a smaller seed be a smaller case.
SETTINGS = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=set(Phase) - {Phase.shrink},
)


def memory(side: str, rank: int, nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def cargo_of(rng: random.Random, *, in_place: bool = False) -> tuple[Cargo, int, int]:
    m, n = rng.randint(1, 4), rng.randint(1, 4)
    cargo = random_cargo(rng, groups_of(rng, m), groups_of(rng, n), memory, in_place=in_place)
    cargo.fill(rng.getrandbits(32))
    return cargo, m, n


def plan_of(cargo: Cargo, here: tuple[str, ...], there: tuple[str, ...]) -> Plan:
    specs = {name: item.specs() for name, item in cargo.items.items()}
    plan = build_plan(
        {name: spec for name, (spec, _) in specs.items()},
        {name: spec for name, (_, spec) in specs.items()},
        source_agents=here,
        target_agents=there,
        source_hosts=here,
        target_hosts=there,
        fan_out="direct",
    )
    assert not plan.violations
    return plan


@dataclass
class Mixed(Job):
    """A job whose tensors are private one by one."""

    dice: random.Random = field(default_factory=random.Random)

    def views_of(self, me: str) -> tuple[dict[int, dict[int, View]], dict[int, dict[int, View]]]:
        number, routing = {name: i for i, name in enumerate(self.plan.names)}, self.routing(me)
        here = {r: t for r, t in self.source.items() if routing.reach(me, self.source_agents[r])}
        there = {r: t for r, t in self.target.items() if self.target_agents[r] == me}

        def views(local: dict[int, dict[str, torch.Tensor]], side: str) -> dict[int, dict[int, View]]:
            return {r: {number[k]: self.view(side, r, x) for k, x in held.items()} for r, held in local.items()}

        return views(here, "source"), views(there, "target")

    def view(self, side: str, rank: int, tensor: torch.Tensor) -> View:
        """One memory is private, or mapped, for all of its tensors."""
        key = f"{self.seed} {tensor.untyped_storage().data_ptr()}"
        return self.memory.resolve(describe(tensor)) if random.Random(key).random() < 0.7 else view_of(tensor)

    seed: int = 0


def job_of(rng: random.Random, cargo: Cargo, m: int, n: int, names: str, hosts: bool) -> Mixed:
    here, there = (tuple(rng.choice(names) for _ in range(k)) for k in (m, n))
    if cargo.in_place:  # one process has one agent
        both = tuple(rng.choice(names) for _ in range(max(m, n)))
        here, there = both[:m], both[:n]
    reads = frozenset((x, y) for x in names for y in names if hosts and x != y and rng.random() < 0.5)
    plan = plan_of(cargo, here, there)
    job = Mixed(plan, here, there, cargo.source, cargo.target, reads=reads, seed=rng.getrandbits(32))
    job.streams, job.bucket_size = 2, 1 << rng.randint(10, 20)
    return job


@settings(SETTINGS, max_examples=examples(200))
@given(RANDOM)
def test_one_agent(rng: random.Random) -> None:
    cargo, m, n = cargo_of(rng)
    job = job_of(rng, cargo, m, n, "a", False)
    run_here(compile_local(job.plan, *job.views_of("a")))
    assert not cargo.wrong()


@settings(SETTINGS, max_examples=examples(200))
@given(RANDOM)
def test_one_agent_in_place(rng: random.Random) -> None:
    cargo, m, n = cargo_of(rng, in_place=True)
    job = job_of(rng, cargo, m, n, "a", False)
    run_here(compile_local(job.plan, *job.views_of("a")))
    assert not cargo.wrong()


async def over_streams(rng: random.Random, *, hosts: bool = False, in_place: bool = False) -> None:
    cargo, m, n = cargo_of(rng, in_place=in_place)
    job = job_of(rng, cargo, m, n, rng.choice(["ab", "abc"]), hosts)
    async with agents("abc", streams=2) as at:
        await transfer(job, at)
    assert not cargo.wrong()


@SETTINGS
@given(RANDOM)
async def test_agents_that_stream(rng: random.Random) -> None:
    await over_streams(rng)


@SETTINGS
@given(RANDOM)
async def test_agents_that_stream_in_place(rng: random.Random) -> None:
    await over_streams(rng, in_place=True)


@SETTINGS
@given(RANDOM)
async def test_agents_of_one_host_that_read_each_other(rng: random.Random) -> None:
    await over_streams(rng, hosts=True)


@SETTINGS
@given(RANDOM)
async def test_agents_of_cards_over_nccl(rng: random.Random) -> None:
    cargo, m, n = cargo_of(rng)
    job = job_of(rng, cargo, m, n, "ab", False)
    async with fleet("ab") as at:
        placed = Placed(job, at)
        await placed.transfer()
        cargo.target = placed.target
        assert not cargo.wrong()


@settings(SETTINGS, max_examples=examples(100))
@given(RANDOM)
def test_one_card(rng: random.Random) -> None:
    """Tables and launches, with tensors of plain host memory among those of the card."""
    with card() as (driver, copier):
        memory_of = OnCard(driver)
        m, n = rng.randint(1, 4), rng.randint(1, 4)
        cargo = random_cargo(rng, groups_of(rng, m), groups_of(rng, n), memory_of.alloc(rng.choice([0.0, 0.3])))
        cargo.fill(rng.getrandbits(32))
        plan = plan_of(cargo, ("a",) * m, ("a",) * n)
        number = {name: i for i, name in enumerate(plan.names)}
        here, there = (
            {r: {number[k]: memory_of.view(x) for k, x in held.items()} for r, held in side.items()}
            for side in (cargo.source, cargo.target)
        )
        program = compile_local(plan, here, there)
        run_on(copier, program)
        program.release()
        assert not cargo.wrong()


class OnCard:
    """Memory of workers on a fake GPU, some of it on the host."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver, self._there = driver, set[int]()
        self._dice = random.Random(0)

    def alloc(self, plain: float) -> Callable[[str, int, int], torch.Tensor]:
        def one(side: str, rank: int, nbytes: int) -> torch.Tensor:
            if self._dice.random() < plain:
                return memory(side, rank, nbytes)
            found = self._driver.empty(GPU0, (nbytes,), torch.uint8)
            self._there.add(found.untyped_storage().data_ptr())
            return found

        return one

    def view(self, tensor: torch.Tensor) -> View:
        return card_view(tensor) if tensor.untyped_storage().data_ptr() in self._there else view_of(tensor)


def run_on(copier: Copier, program: Program) -> None:
    work = Workspace(copier)
    for i in range(len(program.pieces)):
        program.run(i, work)


@settings(SETTINGS, max_examples=examples(200))
@given(RANDOM)
def test_a_redistribution_in_one_job(rng: random.Random) -> None:
    """Each rank's local tensor is any strided view, elements over each other included."""
    world = rng.randint(1, 5)
    [group] = groups_of(rng, world, most=1)
    cargo = random_cargo(rng, [group], groups_of(rng, world, most=1), memory, partial=False)
    cargo.fill(rng.getrandbits(32))
    for name, item in cargo.items.items():
        if item.dtypes[0] is not torch.float32 or is_region(item):
            continue
        here, there = ((truth[0].layout().with_reading("order"),) for truth in (item.source, item.target))
        found = [make_route(item.shape, torch.float32, here, there, rank) for rank in range(world)]
        given = {rank: held[name] for rank, held in cargo.source.items() if name in held}
        for rank, local in play(found, given, item.target[0].ranks).items():
            wanted = take(item.full, item.target[0].indices(item.shape, rank))
            assert torch.equal(bits_of(local), bits_of(wanted)), (name, rank, item)
