"""What is done before a first run: memory taken, tables made, kernels loaded, and all of it waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial

from etha.cuda.driver import Driver
from etha.cuda.kernels import RANK, WIDTH, Fused
from etha.cuda.reaper import reaper
from etha.cuda.torch_kernels import TorchKernels
from etha.memory.views import view_of
from etha.plan import Layout, TensorSpec
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.device import Copier
from etha.transport.copy.device_warmup import prepare
from etha.transport.copy.local import compile_local
from tests.fakes.cuda import GPU0
from tests.fakes.nccl import FakeNccl
from tests.unit.transport.agents import Job, make_plan, same
from tests.unit.transport.cards import Placed, fleet
from tests.unit.transport.copy.test_local import local_plan
from tests.unit.transport.on_device import card, card_view, compiled, on_card

MEMORY = ("allocate", "pin", "free", "unpin")
Seen = list[object]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """In order: kinds of copies that were launched, "group" where an NCCL group begins."""
    found: Seen = []
    launch, group = TorchKernels.launch, FakeNccl.group_start

    def launched(self: TorchKernels, driver: Driver, uuid: str, stream: int, fused: Fused) -> None:
        for row in fused.rows.tolist():
            found.append((fused.source, fused.target, row[WIDTH], row[RANK] > 0))
        launch(self, driver, uuid, stream, fused)

    def grouped(self: FakeNccl) -> None:
        found.append("group")
        group(self)

    monkeypatch.setattr(TorchKernels, "launch", launched)
    monkeypatch.setattr(FakeNccl, "group_start", grouped)
    yield found


def mixed() -> Job:
    """Casts both ways and bits, strided; a sum whose contributions are near and far."""
    shape = (48, 40)
    agents = ("a", "b"), ("a", "b")
    source = {
        "up": TensorSpec(shape, torch.bfloat16, Layout((2,), [Shard(0)])),
        "down": TensorSpec(shape, torch.float64, Layout((2,), [Shard(0)])),
        "bits": TensorSpec(shape, torch.int16, Layout((2,), [Shard(0)])),
        "sum": TensorSpec(shape, torch.float32, Layout((2,), [Partial("sum")])),
    }
    wanted = {"up": torch.float32, "down": torch.float16, "bits": torch.int16, "sum": torch.float64}
    target = {n: TensorSpec(shape, wanted[n], Layout((2,), [Shard(1)])) for n in source}
    here = {r: {n: torch.rand(s.local_shape(r) or ()).mul(99).to(s.dtype) for n, s in source.items()} for r in range(2)}
    there = {r: {n: torch.zeros(s.local_shape(r) or (), dtype=s.dtype) for n, s in target.items()} for r in range(2)}
    return Job(make_plan(source, target, *agents), *agents, here, there)


async def test_each_kernel_of_a_run_is_loaded_before_anything_of_it_waits_for_another_host(seen: Seen) -> None:
    job = mixed()
    expected = job.expected()
    async with fleet("ab") as at:
        placed = Placed(job, at)
        transports, runs = await placed.runs()
        before = seen[:]
        assert "group" not in before
        for name in "ab":
            assert all(not stream.pending for stream in at.cards[name].driver._all_streams()), "it was waited for"
        calls = {name: dict(at.cards[name].driver.calls) for name in "ab"}
        await asyncio.gather(*(transports[name].run(runs[name]) for name in "ab"))
        kinds = {one for one in seen[len(before) :] if isinstance(one, tuple) and len(one) == 4}
        assert {(torch.bfloat16, torch.float32), (None, None)} <= {kind[:2] for kind in kinds}
        assert kinds <= set(before)
        for name in "ab":
            assert [at.cards[name].driver.calls[c] - calls[name].get(c, 0) for c in MEMORY] == [0] * 4
        same(placed.target, expected)


PLACEMENTS: list[Placement] = [Partial("sum"), Partial("max"), _NormPartial(2.0), Replicate(), Shard(0)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("bounced", [False, True])
def test_a_program_that_was_prepared_takes_no_memory_in_its_first_run(
    placement: Placement, bounced: bool, seen: Seen
) -> None:
    spec = TensorSpec((70, 96), torch.float32, Layout((4,), [placement]))
    small = TensorSpec((6, 12), torch.float64, Layout((4,), [placement]))
    plan = local_plan(
        {"g": spec, "h": small},
        {
            "g": TensorSpec((70, 96), torch.bfloat16, Layout((2,), [Shard(1)])),
            "h": TensorSpec((6, 12), torch.float64, Layout((2,), [Shard(1)])),
        },
        4,
        2,
    )
    with card() as (driver, copier):
        other = Copier(driver, GPU0)
        here = {
            r: {n: torch.rand(s.local_shape(r) or (), dtype=s.dtype) for n, s in (("h", small), ("g", spec))}
            for r in range(4)
        }
        there = {
            r: {"g": driver.empty(GPU0, (70, 48), torch.bfloat16), "h": driver.empty(GPU0, (6, 6), torch.float64)}
            for r in range(2)
        }
        if bounced:
            number = {n: i for i, n in enumerate(plan.names)}
            program = compile_local(
                plan,
                {r: {number[n]: view_of(t) for n, t in held.items()} for r, held in here.items()},
                {r: {number[n]: card_view(t) for n, t in held.items()} for r, held in there.items()},
            )
        else:
            program = compiled(plan, {r: {n: on_card(driver, t) for n, t in h.items()} for r, h in here.items()}, there)
        for one in (copier, other):
            prepare(program, one)
        assert reaper.drain()
        before, loaded = dict(driver.calls), set(seen)
        assert all(not t.any() for held in there.values() for t in held.values()), "nothing of it was run"
        works = [Workspace(copier), Workspace(other)]
        for start in range(2):  # any piece on either thread
            for i in range(len(program.pieces)):
                program.run(i, works[(start + i) % 2])
        assert reaper.drain()
        assert [driver.calls[name] - before.get(name, 0) for name in MEMORY] == [0] * 4
        assert set(seen) <= loaded
        assert all(t.any() for held in there.values() for t in held.values())
        prepare(program, copier)
        assert [driver.calls[name] - before.get(name, 0) for name in MEMORY] == [0] * 4
        program.release()
        other.close()
