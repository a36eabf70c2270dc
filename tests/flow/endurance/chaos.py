"""Transfers of which some are cancelled, run out of time, lose a client or an agent, at moments drawn from a seed.

After each one the bookkeeping is compared: who was told what, and what every target holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Shard

from etha import TransferResult
from etha.errors import AgentLostError, EthaError, TransferError
from tests.flow.sides import Member, Sides
from tests.flow.truth import cut

SHAPE = (1024, 512)
STEP = 1 << 24
PATTERN = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int64).reshape(SHAPE)
#: What happens in a turn, and how often.
EVENTS = {"cancel": 5, "deadline": 5, "close": 2, "kill": 2}


@dataclass
class Chaos:
    """``share`` of the turns have an event. ``counts``: events, outcomes, and who was told ``unknown``."""

    sides: Sides
    atomic: bool
    seed: int
    share: float = 0.15
    counts: Counter[str] = field(default_factory=Counter)
    version: int = 0
    held: dict[Member, int | None] = field(default_factory=dict)
    seqs: set[int] = field(default_factory=set)
    victim_left: Member | None = None

    async def run(self, turns: int) -> None:
        self.dice = random.Random(self.seed)
        await self.open()
        took = await self.good()
        for _ in range(turns):
            if self.dice.random() >= self.share:
                took = 0.8 * took + 0.2 * await self.good()
                continue
            event = self.dice.choices(list(EVENTS), list(EVENTS.values()))[0]
            self.counts[event] += 1
            await self.disturbed(event, self.dice.uniform(0, 1.3 * took))
            await self.recover()
            await self.good()

    async def open(self) -> None:
        """The pair and the batch, formed (again) by all; targets keep what they hold."""
        try:
            await self.meet()
        except AgentLostError:  # somebody heard only now that its agent had been killed
            await self.meet()
        if not self.held:
            whole = torch.zeros_like(PATTERN)
            self.tensors = {m: cut(whole, int(m[0] != "trainer"), 2, m[1]).contiguous() for m in self.sides.members}
            self.held = {m: None for m in self.sides.members if m[0] == "inference"}
        handles = await self.sides.register(
            "b", lambda side, rank: ({"w": self.tensors[side, rank]}, {"shapes": {"w": SHAPE}, "atomic": self.atomic})
        )
        for handle in handles.values():
            assert not isinstance(handle, EthaError), handle
        self.handles = handles

    async def meet(self) -> None:
        await self.sides.meet(
            device_mesh=(2,), trainer={"placements": [Shard(0)]}, inference={"placements": [Shard(1)]}, timeout=60
        )

    def begin(self, deadlines: dict[Member, float] | None = None) -> dict[Member, asyncio.Task[Any]]:
        self.version += 1
        for (side, rank), tensor in self.tensors.items():
            if side == "trainer":
                tensor.copy_(cut(PATTERN + self.version * STEP, 0, 2, rank))
        return {
            (side, rank): asyncio.create_task(
                handle.transfer(
                    "send" if side == "trainer" else "recv",
                    version=self.version if side == "trainer" else None,
                    timeout=(deadlines or {}).get((side, rank), 20),
                )
            )
            for (side, rank), handle in self.handles.items()
        }

    async def good(self) -> float:
        """Nothing happens: everybody has a result, the same one, and the new version."""
        began = time.monotonic()
        tasks = self.begin()
        found = await asyncio.gather(*tasks.values(), return_exceptions=True)
        took = time.monotonic() - began
        for member, result in zip(tasks, found, strict=True):
            assert isinstance(result, TransferResult), (member, result)
        self.check(dict(zip(tasks, found, strict=True)))
        return took

    async def disturbed(self, event: str, delay: float) -> None:
        victim = self.dice.choice(self.sides.members)
        tasks = self.begin({victim: delay} if event == "deadline" else None)
        with contextlib.suppress(EthaError):
            pid = (await self.sides.clients[victim].status())["agent"]["pid"] if event == "kill" else 0
        await asyncio.sleep(delay)  # the random moment itself; nothing is waited for
        match event:
            case "cancel":
                tasks[victim].cancel()
            case "close":
                await self.sides.clients[victim].close()
                self.victim_left = victim
            case "kill":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _, waiting = await asyncio.wait(tasks.values(), timeout=2.5)
        for task in waiting:  # their transfer never began, and one of them will not come again
            task.cancel()
        found = await asyncio.gather(*tasks.values(), return_exceptions=True)
        self.check(dict(zip(tasks, found, strict=True)))

    async def recover(self) -> None:
        """What died is there again; who was told of a loss forms the pair again."""
        lost = self.victim_left is not None
        if self.victim_left is not None:
            self.sides.clients[self.victim_left] = self.sides.site.client(*self.victim_left, timeout=20)
            self.victim_left = None
        try:
            await self.sides.ask_all()
        except AgentLostError:
            lost = True
        # Whoever hears of its agent's death in the middle of a call has to call again.
        with contextlib.suppress(AgentLostError):
            await self.sides.ask_all()
        if lost or any(pair.lost.is_set() for pair in self.sides.pairs.values()):
            await self.open()

    def check(self, found: dict[Member, Any]) -> None:
        outcomes: dict[Member, str] = {}
        for member, end in found.items():
            match end:
                case TransferResult():
                    outcomes[member] = "result"
                case asyncio.CancelledError():
                    outcomes[member] = "cancelled"
                case TransferError():
                    outcomes[member] = end.outcome
                case AgentLostError():
                    outcomes[member] = "unknown"
                case _:
                    raise AssertionError(f"{member} ended with {end!r}")
        self.counts.update(outcomes.values())
        reported = set(outcomes.values())
        assert not {"result", "aborted"} <= reported, f"a result here, aborted there: {found}"
        seqs = {end.seq for end in found.values() if isinstance(end, TransferResult)}
        assert len(seqs) <= 1 and not seqs & self.seqs, f"numbers {seqs} after {sorted(self.seqs)[-3:]}"
        self.seqs |= seqs
        for member, before in self.held.items():
            holds = self.holds(member)
            end, outcome = found[member], outcomes[member]
            if outcome == "result":
                assert holds == self.version, (member, holds, self.version)
            elif self.atomic:
                assert holds in (before, self.version), f"{member} holds {holds}, after {before}: {end!r}"
            elif isinstance(end, TransferError) and not end.torn and outcome != "unknown":
                assert holds == before, f"{member} holds {holds}, not {before}, and is not told: {end!r}"
            self.held[member] = holds

    def holds(self, member: Member) -> int | None:
        """The version that a target holds as a whole; None before the first one, -1 for parts of several."""
        rest = self.tensors[member] - cut(PATTERN, 1, 2, member[1])
        first = int(rest[0, 0])
        if not bool((rest == first).all()) or first % STEP:
            return None if not self.seqs else -1
        return first // STEP
