"""The 24 mesh cases between two hosts: every element, each distinct byte across once, nothing allocated on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bench.footprint import Footprint, forget_peak
from bench.mesh_cases import CASES, MeshCase, held, ideal_bytes, numbers, part
from etha.config import STAGING
from etha.plan import Layout, TensorSpec
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site
from tests.flow.ways import Way

#: The last one is large enough for a copy of it to be seen in a process's memory.
SHAPES = {"even": (64, 96), "uneven": (61, 37), "few rows": (3, 130), "large": (1024, 1024)}
MIB = 1 << 20
WHOLE = 4 * MIB
#: What an agent may grow by besides its staging: plans, messages, threads.
SLACK = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A source and a target layout, and the tensors of each rank."""

    layouts: dict[str, Layout]
    given: dict[Member, dict[str, torch.Tensor]]
    expected: dict[Member, dict[str, torch.Tensor]]

    @classmethod
    def of(cls, source: Layout, target: Layout) -> Move:
        layouts = {"trainer": source, "inference": target}
        expected = {
            (side, rank): {
                name: (held if side == "trainer" else part)(numbers(shape), layout, rank)
                for name, shape in SHAPES.items()
            }
            for side, layout in layouts.items()
            for rank in range(layout.ranks.size)
        }
        given = {member: {n: x.clone() for n, x in tensors.items()} for member, tensors in expected.items()}
        return cls(layouts=layouts, given=given, expected=expected)

    def spoil(self) -> None:
        """Let every target element be wrong."""
        for (side, _), tensors in self.given.items():
            if side == "inference":
                for tensor in tensors.values():
                    tensor.fill_(-1)

    def judge(self) -> None:
        """Every element of every rank of both sides."""
        wrong = [
            (member, name)
            for member, tensors in self.given.items()
            for name, tensor in tensors.items()
            if not torch.equal(tensor, self.expected[member][name])
        ]
        assert wrong == []

    @property
    def ideal(self) -> int:
        """Least bytes between the two hosts."""
        source, target = (
            {name: TensorSpec(shape, torch.float32, layout) for name, shape in SHAPES.items()}
            for layout in self.layouts.values()
        )
        here, there = (["ab"[i]] * layout.ranks.size for i, layout in enumerate(self.layouts.values()))
        return sum(ideal_bytes(source[name], target[name], here, there) for name in SHAPES)


class Agents:
    """Both sides' agents: what they have sent to others, and their memory."""

    def __init__(self, sides: Sides) -> None:
        self._clients = [sides.clients[side, 0] for side in ("trainer", "inference")]

    async def reports(self) -> list[dict[str, Any]]:
        return [(await client.status())["agent"] for client in self._clients]

    async def sent(self) -> list[int]:
        """Bytes that each has sent to other agents so far."""
        return [sum(link["bytes_sent"] for link in agent["links"]) for agent in await self.reports()]

    async def pids(self) -> list[int]:
        return [agent["pid"] for agent in await self.reports()]


async def moved(site: Site, pair: str, source: Layout, target: Layout) -> None:
    """Two transfers, the second one measured."""
    move = Move.of(source, target)
    worlds = {side: layout.ranks.size for side, layout in move.layouts.items()}
    async with Sides(site, pair, **worlds, timeout=60) as sides:
        agents = Agents(sides)
        pids = await agents.pids()
        before_all = [Footprint.of(pid) for pid in pids]
        for pid in pids:
            forget_peak(pid)
        meshes = {
            side: {"device_mesh": layout.mesh_shape, "placements": list(layout.placements)}
            for side, layout in move.layouts.items()
        }
        await sides.meet(**meshes)
        handles = await sides.register("b", lambda side, rank: (move.given[side, rank], {"shapes": SHAPES}))
        for measured in (False, True):
            move.spoil()
            before = await agents.sent()
            forget_peak()
            resident = Footprint.of().resident
            results = await sides.move(handles)
            grown = Footprint.of().peak - resident
            move.judge()
            sent = [now - then for now, then in zip(await agents.sent(), before, strict=True)]
            # On one host the receiving agent reads: nothing is sent at all.
            assert sent == [move.ideal if site.way is Way.TCP else 0, 0]
            staging = max(result.peak_staging for result in results.values())
            assert staging <= STAGING
            if measured:  # the first transfer loads code, too
                assert grown < WHOLE, f"the workers have allocated {grown} bytes"
        for member, result in results.items():
            if member[0] == "inference":
                assert result.bytes == sum(x.nbytes for x in move.given[member].values())
        for pid, then in zip(pids, before_all, strict=True):
            now = Footprint.of(pid)
            # Tensors of earlier tests may still have been mapped when the peak was forgotten.
            grown = now.peak - max(then.shared, now.shared) - then.own
            assert grown <= staging + SLACK, f"staging {staging}, before {then}, now {now}"


@pytest.mark.ways("tcp")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.slug, marks=() if at % 3 == 0 else pytest.mark.more) for at, case in enumerate(CASES)],
)
async def test_each_distinct_byte_crosses_once(site: Site, pair: str, case: MeshCase) -> None:
    await moved(site, pair, case.source, case.target)


@pytest.mark.ways("tcp", "host")
@pytest.mark.parametrize("dim", [0, 1])
async def test_fsdp_over_tp_to_tp_crosses_once(site: Site, pair: str, dim: int) -> None:
    source = Layout((4, 2), [_StridedShard(0, split_factor=2), Shard(0)])
    await moved(site, pair, source, Layout((1, 4), [Replicate(), Shard(dim)]))
