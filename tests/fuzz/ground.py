"""Good citizens on real agents, beside whom strangers talk nonsense: they must notice nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.tensor import Replicate, Shard

from tests.flow.sides import Member, Sides
from tests.flow.sites import Site

#: What stands in an agent's log only where it has a bug.
BUGS = ("Traceback", "a bug of Etha", "Error in sys.excepthook")


class Ground:
    """Two trainers and one inference worker of pair "ground" with an open batch; ``transfer`` whenever one likes."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.sides = Sides(site, "ground", trainer=2, inference=1)
        self.tensors = {
            member: {"w": torch.zeros(32 if member[0] == "trainer" else 64, 8)} for member in self.sides.members
        }
        self._version = 0
        self._handles: dict[Member, Any] = {}

    async def __aenter__(self) -> Self:
        await self.sides.__aenter__()
        await self.settle()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.sides.__aexit__(*exc)

    async def settle(self) -> None:
        """Form the pair and register the batch."""
        await self.sides.meet(
            trainer={"device_mesh": (2,), "placements": [Shard(0)]},
            inference={"device_mesh": (1,), "placements": [Replicate()]},
        )
        self._handles = await self.sides.register(
            "b", lambda side, rank: (self.tensors[side, rank], {"shapes": {"w": (64, 8)}})
        )
        await self.transfer()

    async def transfer(self) -> None:
        """One more version, every element compared."""
        self._version += 1
        whole = torch.arange(512.0).reshape(64, 8) + 1000 * self._version
        for rank in range(2):
            self.tensors["trainer", rank]["w"].copy_(whole[32 * rank : 32 * (rank + 1)])
        results = await self.sides.move(self._handles, timeout=30.0)
        for result in results.values():
            assert not isinstance(result, BaseException), result
        assert torch.equal(self.tensors["inference", 0]["w"], whole)

    async def pids(self) -> list[int]:
        """The agents' processes."""
        reports = [await client.status() for client in self.sides.clients.values()]
        return sorted({report["agent"]["pid"] for report in reports})

    def socket(self, place: str = "a") -> Path:
        """The bus socket of the agent at a place."""
        return self.site.directory / place / "default" / "cpu.sock"

    def bugs(self) -> list[str]:
        """Lines of the agents' logs that no message may bring about, each with what stands around it."""
        found = []
        for log in self.site.directory.glob("*/default/cpu.log"):
            lines = log.read_text(errors="replace").splitlines()
            for i, line in enumerate(lines):
                if any(bug in line for bug in BUGS):
                    found.append("\n".join(lines[max(0, i - 2) : i + 40]))
        return found[:3]
