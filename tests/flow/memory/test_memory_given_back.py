"""Memory goes back when a batch closes, its tensors die or the other side comes again; who only sends takes none."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.memory import shared
from tests.flow.endurance.cycles import SIDES, Cycles, shared_bytes
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.puppets import Stage
from tests.flow.sides import Sides
from tests.flow.sites import Site, open_site, started_in
from tests.flow.ways import Way

#: Elements of the large tensor: 4 MiB.
LARGE = 1 << 20


@pytest.mark.ways("local", "host")
def test_nobody_holds_more_after_closed_batches_and_relaunches(way: Way, pair: str) -> None:
    """Batches of every kind; some are closed, some are open when the other side goes and comes again."""
    with open_site(way) as site, Job(site.env) as job:
        cycles = Cycles(site, job, pair, LARGE, staged=way is Way.LOCAL)
        cycles.begin()
        cycles.run(8)
        for side in SIDES:
            cycles.relaunch(side, process=False)
        cycles.run(16)
        assert not cycles.grown(0.0, memory=False), cycles.report()


def move_once(me: SimpleNamespace) -> None:
    """Register a batch that is received atomically, move it; tells the bytes of shared memory that this process made.

    It leaves when it may, because the others' shadows go with the pair.
    """
    with etha.TensorBusClient(timeout=60) as client:
        client.init_pair(me.pair, me.side, me.remote, 1, (1,), rank=0)
        tensors = {"w": torch.ones(LARGE)}
        asked = {"placements": {"w": [Replicate()]}, "pair_name": me.pair, "atomic": True}
        with client.register_tensors("b", tensors, **asked) as handle:
            if me.side == "trainer":
                handle.transfer("send")
            else:
                handle.transfer("recv")
                assert bool((tensors["w"] == 1).all())
            tell("bytes", shared_bytes([os.getpid()]))
            wait_for("leave")


@pytest.mark.ways("local")
def test_who_only_sends_allocates_no_shadows(stage: Stage) -> None:
    """Both sides register alike, with no direction: which side receives shows when it does."""
    trainer, inference = (stage.puppet(side, 0, 1) for side in SIDES)
    for puppet in (trainer, inference):
        puppet.begin(move_once)
    sent, received = trainer.worker.expect("bytes"), inference.worker.expect("bytes")
    for puppet in (trainer, inference):
        puppet.worker.go("leave")
        puppet.ends()
    assert sent < 4 * LARGE <= received


def held(site: Site) -> int:
    """Bytes of shared memory of this process and of the site's agent."""
    return shared_bytes([os.getpid(), *agents(site)])


def agents(site: Site) -> list[int]:
    """Processes."""
    return [pid for pid, command in started_in(str(site.directory)).items() if "agent" in command]


class Batch:
    """One tensor of 4 MiB on both sides, in this process."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides

    async def register(self, name: str, **options: Any) -> dict[Any, etha.BatchHandle]:
        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            return {"w": torch.zeros(LARGE)}, {"placements": {"w": [Replicate()]}, **options}

        handles: dict[Any, etha.BatchHandle] = await self.sides.register(name, given)
        return handles


@pytest.mark.ways("local")
async def test_a_closed_handle_and_a_lost_one_keep_no_memory(site: Site, pair: str) -> None:
    """Who keeps the handles, as scripts do in lists, keeps neither tensors nor shadows nor what the agent maps."""
    kept = []
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,))
        batch = Batch(sides)
        before = held(site)
        for number in range(3):
            handles = await batch.register(f"closed_{number}", atomic=True, direction="recv")
            assert held(site) >= before + 4 * LARGE
            for handle in handles.values():
                await handle.close()
            kept.append(handles)
            assert held(site) == before and not shared.segments()
        handles = await batch.register("lost", atomic=True, direction="recv")
        trainer, inference = sides.clients["trainer", 0], sides.clients["inference", 0]
        await inference.close()
        await sides.pairs["trainer", 0].lost
        connection = trainer._connection
        assert connection is not None
        await asyncio.gather(*connection._tasks)  # what the client does by itself once a pair is lost
        assert held(site) == before and not shared.segments()
        with pytest.raises(etha.PeerLostError, match="init_pair") as raised:
            await handles["trainer", 0].transfer("send")
        assert (raised.value.reason, raised.value.outcome) == ("closed", "withdrawn")
        with pytest.raises(etha.PeerLostError):
            await handles["trainer", 0].wait_offer()
    assert kept


@pytest.mark.ways("local")
async def test_a_refused_registration_leaves_nothing_mapped(site: Site, pair: str) -> None:
    """Staged tensors and etha.empty are shown before the batch is judged."""
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,))
        before = shared_bytes(agents(site))
        for _ in range(3):

            def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
                return {"w": etha.empty((LARGE + (side == "trainer"),))}, {"placements": {"w": [Replicate()]}}

            found = await sides.register("b", given)
            assert all(isinstance(error, etha.RegistrationError) for error in found.values())
            del found
        assert shared_bytes(agents(site)) == before
