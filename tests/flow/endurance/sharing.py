"""Random transfers over tensors that share memory, by real agents: worlds of random sizes, batch after batch.

A world is a pair: both sides with meshes of their own, whole or in groups. A batch is some random cargo
(``tests/unit/transport/aliasing.py``) in private and mapped memory, with random options, moved twice.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import torch

import etha
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site
from tests.flow.ways import Way
from tests.unit.plan.truth import Loaded, Truth, runs_of
from tests.unit.transport.aliasing import Cargo, Group, Item, groups_of, random_cargo

#: Batches of one world, and transfers of one batch.
BATCHES, TURNS = 20, 2
#: Mapped memory of each worker, used again by batch after batch.
MAPPED = 4 << 20


class Memory:
    """Where tensors of one world's workers lie: half of them in memory that agents map."""

    def __init__(self, seed: str, members: list[Member]) -> None:
        self._dice = random.Random(seed)
        self._mapped = {member: etha.empty((MAPPED,), dtype=torch.uint8) for member in members}
        self._used = dict.fromkeys(members, 0)

    def clear(self) -> None:
        """Use it again: the last batch is closed."""
        self._used = dict.fromkeys(self._used, 0)

    def alloc(self, side: str, rank: int, nbytes: int) -> torch.Tensor:
        member = ("trainer" if side == "source" else "inference", rank)
        begin = self._used[member]
        if self._dice.random() < 0.5 or begin + nbytes > MAPPED:
            return torch.zeros(nbytes, dtype=torch.uint8)
        self._used[member] = begin + -(-nbytes // 64) * 64
        return self._mapped[member][begin : begin + nbytes].zero_()


@dataclass
class World:
    """One pair of random sides. ``where``: of ``NEIGHBOURS``, then targets lie in place."""

    site: Site
    seed: str
    where: str = ""

    async def play(self, transfers: int) -> int:
        """So many transfers, each of them exact; how many they were."""
        dice = random.Random(self.seed)
        m, n = (dice.randint(1, 2), 3) if self.where else (dice.randint(1, 3), dice.randint(1, 3))
        where = (lambda _, rank: self.where[rank]) if self.where else None
        groups = {"trainer": groups_of(dice, m), "inference": groups_of(dice, n)}
        done = 0
        pair = f"sharing-{self.seed}"
        async with Sides(self.site, pair, trainer=m, inference=n, timeout=60, where=where) as sides:
            memory = Memory(self.seed, sides.members)
            await sides.meet_each(lambda side, rank: {"device_mesh": _mesh(groups[side], rank)})
            while done < transfers:
                done += await self._batch(sides, groups, memory, f"{self.seed} {done}", min(TURNS, transfers - done))
        return done

    async def _batch(self, sides: Sides, groups: dict[str, list[Group]], memory: Memory, seed: str, turns: int) -> int:
        dice = random.Random(seed)
        memory.clear()
        # One process is both sides here; that they share memory is for agents of one host to know.
        in_place = bool(self.where) or (self.site.way in (Way.LOCAL, Way.HOST) and dice.random() < 0.1)
        cargo = random_cargo(
            dice, groups["trainer"], groups["inference"], memory.alloc, most=5, in_place=in_place, ties=True
        )
        atomic, verify = not self.where and dice.random() < 0.3, dice.choice([None, None, "sample", "full"])
        bucket = dice.choice([None, None, 1 << dice.randint(10, 20)])

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            held = (cargo.source if side == "trainer" else cargo.target).get(rank, {})
            options = _layouts(cargo, side, rank)
            if side == "inference":
                options |= {"atomic": atomic, "verify": verify}
            return held, {"direction": "send" if side == "trainer" else "recv", "bucket_size": bucket, **options}

        handles = await sides.register("b", given)
        for handle in handles.values():
            if isinstance(handle, Exception):
                raise AssertionError(f"seed {seed!r}: {cargo.items}") from handle
        for turn in range(turns):
            cargo.fill(dice.getrandbits(32))
            snapshot = not in_place and dice.random() < 0.2
            answers = await sides.move(handles, trainer={"snapshot": snapshot})
            for answer in answers.values():
                if isinstance(answer, Exception):
                    raise AssertionError(f"seed {seed!r} turn {turn}: {cargo.items}") from answer
            about = (
                f"seed {seed!r} turn {turn}, in_place {in_place}, atomic {atomic}, verify {verify}, snapshot {snapshot}"
            )
            assert not (wrong := cargo.wrong()), f"{about}: {wrong}"
        for handle in handles.values():
            await handle.close()
        return turns


def _mesh(groups: list[Group], rank: int) -> torch.Tensor:
    [group] = [group for group in groups if rank in group.ranks]
    return torch.tensor(group.ranks).reshape(group.mesh)


def _layouts(cargo: Cargo, side: str, rank: int) -> dict[str, Any]:
    """What a rank says of the layouts of what it holds."""
    placements: dict[str, Any] = {}
    regions: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    for name, item in cargo.items.items():
        truth = _truth(item, side, rank)
        if truth is None:
            continue
        shapes[name] = item.shape
        if isinstance(truth, Loaded):
            regions[name] = [runs_of(kept) for kept in truth.kept]
        else:
            placements[name] = truth.placements
    return {"placements": placements, "shapes": shapes, **({"regions": regions} if regions else {})}


def _truth(item: Item, side: str, rank: int) -> Truth | None:
    truths = item.source if side == "trainer" else item.target
    return next((truth for truth in truths if rank in truth.ranks), None)


#: Agents of one host by rank: a process that is on both sides has one agent. Ranks 0 and 1 send, all receive.
NEIGHBOURS = {
    "two agents with both sides": "aba",
    "a second receiving agent": "aab",
    "a third receiving agent": "abc",
    "two receiving agents": "abb",
}


async def play(site: Site, first: int, transfers: int, *, beside: int = 4) -> int:
    """``transfers`` of them, in worlds whose seeds are "WAY-FIRST", "WAY-FIRST+1" and so on, some side by side."""
    each = BATCHES * TURNS
    worlds = iter([(first + i, min(each, transfers - i * each)) for i in range(-(-transfers // each))])

    async def one_after_another() -> int:
        return sum([await World(site, f"{site.way}-{number}").play(share) for number, share in worlds])

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_after_another()) for _ in range(beside)]
    return sum(task.result() for task in tasks)
