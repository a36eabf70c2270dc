"""Agents with a fake card each, joined by a fake NCCL in this process, for the tests of the wire between GPUs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from etha.config import STAGING
from etha.memory.revocation import Guard
from etha.memory.views import View, view_of
from etha.transport.base import TransportPeer, WireRun
from etha.transport.copy.program import Member
from etha.transport.nccl.communicator import Communicator
from etha.transport.nccl.transport import NcclPlane, NcclTransport
from etha.transport.wire.compiler import compile_wire
from etha.transport.wire.flows import WireProgram
from etha.transport.wire.host_reads import compile_host
from etha.transport.wire.nccl_messages import MessageCut, device_cut
from tests.fakes.cuda import FakeDriver
from tests.fakes.nccl import World
from tests.unit.transport.agents import Job, Local, run_here


def uuid_of(number: int) -> str:
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


class Card:
    """One agent: a device of its own, and what is needed to use NCCL on it."""

    def __init__(self, name: str, number: int, world: World, staging: int) -> None:
        self.name, self.uuid = name, uuid_of(number)
        self.driver = FakeDriver((self.uuid,), nbytes=4 << 30)
        self.nccl = world.join(name, self.driver)
        [device] = self.driver.devices()
        self.plane = NcclPlane(name, device, driver=self.driver, nccl=self.nccl, staging=staging)
        #: By the storage that it stands for: a source and a target of one memory stay so.
        self._copies: dict[int, torch.Tensor] = {}

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it lies on the card, with its strides."""
        storage = tensor.untyped_storage()
        found = self._copies.get(storage.data_ptr())
        if found is None:
            nbytes = storage.nbytes()
            found = self.driver.empty(self.uuid, (nbytes,), torch.uint8)
            found.copy_(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,)))
            self._copies[storage.data_ptr()] = found
        placed = torch.empty(0, dtype=tensor.dtype)
        return placed.set_(
            found.untyped_storage(),
            found.storage_offset() // tensor.itemsize + tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )

    def view(self, placed: torch.Tensor) -> View:
        """A tensor of this card as its agent sees it."""
        return replace(view_of(placed), flat=None, raw=None, device=self.uuid, space=("card", self.uuid), keep=placed)


@dataclass
class Fleet:
    """The cards of one test."""

    world: World
    cards: dict[str, Card]
    seq: int = 0

    async def connect(self, names: Sequence[str], scope: object = 1, **options: Any) -> dict[str, Communicator]:
        """A communicator of these agents, as their verdicts would bring it about."""
        unique_id = await self.cards[min(names)].plane.communicators.unique_id()
        made = await asyncio.gather(
            *(self.cards[n].plane.communicators.get(scope, names, unique_id, **options) for n in names)
        )
        return dict(zip(names, made, strict=True))


@asynccontextmanager
async def fleet(names: Sequence[str], *, staging: int = STAGING) -> AsyncIterator[Fleet]:
    """In the end all is closed, no contract was broken and nothing is left."""
    world = World()
    made = Fleet(world, {name: Card(name, i, world, staging) for i, name in enumerate(names)})
    try:
        yield made
        async with asyncio.timeout(40):
            await asyncio.gather(*(card.plane.close() for card in made.cards.values()))
        assert all(card.plane.budget.used == 0 for card in made.cards.values())
        world.check()
        for card in made.cards.values():
            card.driver.check()
    finally:
        world.close()
        for card in made.cards.values():
            card.plane.thread.close()
            card.driver.shut()


class Placed:
    """A job with its tensors on the cards of its agents."""

    def __init__(self, job: Job, at: Fleet, cut: MessageCut | None = None) -> None:
        job.private = (False, False)
        self.job, self.fleet = job, at
        self.cut = cut or device_cut(job.agents, job.staging)
        where = (job.source_agents, job.target_agents)
        self.source, self.target = (
            {r: {k: at.cards[agent[r]].place(x) for k, x in held.items()} for r, held in local.items()}
            for local, agent in zip((job.source, job.target), where, strict=True)
        )

    def here(self, me: str) -> tuple[Local, Local]:
        """The tensors of an agent's ranks."""
        job = self.job
        return (
            {r: t for r, t in self.source.items() if job.source_agents[r] == me},
            {r: t for r, t in self.target.items() if job.target_agents[r] == me},
        )

    def views(self, me: str, card: Card | None) -> list[dict[int, dict[int, View]]]:
        names = {name: i for i, name in enumerate(self.job.plan.names)}
        see = view_of if card is None else card.view
        return [{r: {names[k]: see(x) for k, x in held.items()} for r, held in one.items()} for one in self.here(me)]

    def wire(self, me: str) -> WireProgram:
        sources, targets = self.views(me, self.fleet.cards[me])
        job = self.job
        return compile_wire(job.plan, job.routing(me), sources, targets, staging=job.staging, cut=self.cut)

    def copy_here(self, me: str) -> None:
        """What the agent's lane does: the card's memory is the CPU's here."""
        run_here(compile_host(self.job.plan, self.job.routing(me), *self.views(me, None)))

    async def runs(
        self, seq: int = 1, guards: Mapping[str, Mapping[Member, Guard]] | None = None, **options: Any
    ) -> tuple[dict[str, NcclTransport], dict[str, WireRun]]:
        """All agents connected and prepared, their local copies made."""
        job = self.job
        programs = {name: self.wire(name) for name in job.agents}
        comms = await self.fleet.connect(job.agents, **options)
        transports = {name: NcclTransport(self.fleet.cards[name].plane, comms[name]) for name in job.agents}
        runs = {
            name: WireRun(program=program, seq=seq, guards=(guards or {}).get(name, {}))
            for name, program in programs.items()
        }
        for name, run in runs.items():
            peers = sorted({*run.program.sends, *run.program.receives})
            await transports[name].open([TransportPeer(agent=peer) for peer in peers])
            await transports[name].prepare(run)
        for name in job.agents:
            self.copy_here(name)
        return transports, runs

    async def transfer(self, seq: int = 1) -> dict[str, WireRun]:
        """One whole transfer over all agents."""
        transports, runs = await self.runs(seq)
        order = list(runs)
        random.Random(seq).shuffle(order)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(transports[name].run(runs[name])) for name in order}
        for name, task in tasks.items():
            assert task.result() == runs[name].program.total
        return runs
