"""Both sides of a pair in the test's own process: one client a rank, real agents, real sockets, no waiting for forks.

async with Sides(site, "weights", trainer=2, inference=1) as sides:
    await sides.meet(device_mesh=...)
    errors = await sides.register("b", lambda side, rank: ({...}, {...}))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

from etha.client.results import AsyncPair
from etha.errors import EthaError
from tests.flow.sites import Site

Member = tuple[str, int]


class Sides:
    """``clients`` by (side, rank), at the places of the site's way or at ``where(side, rank)``; closed by the block."""

    def __init__(
        self,
        site: Site,
        pair: str,
        *,
        trainer: int = 1,
        inference: int = 1,
        timeout: float = 20.0,
        where: Callable[[str, int], str] | None = None,
    ) -> None:
        self.site, self.pair = site, pair
        where = where or site.way.place
        self.worlds = {"trainer": trainer, "inference": inference}
        self.members = [(side, rank) for side, world in self.worlds.items() for rank in range(world)]
        self.clients = {member: site.client(*member, place=where(*member), timeout=timeout) for member in self.members}
        self.pairs: dict[Member, AsyncPair] = {}

    async def __aenter__(self) -> Self:
        # Starting an agent takes long on a busy machine; the deadlines of a test are for what comes after.
        await asyncio.gather(*(client.status(timeout=60) for client in self.clients.values()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(client.close() for client in self.clients.values()))

    async def ask_all(self) -> None:
        """One round trip to every agent: what they were told before has been taken note of."""
        await asyncio.gather(*(client.status() for client in self.clients.values()))

    def init(self, member: Member, **options: Any) -> Coroutine[Any, Any, AsyncPair]:
        """The ``init_pair`` of one rank, not awaited yet."""
        side, rank = member
        other = "inference" if side == "trainer" else "trainer"
        options = {"expected_world_size": self.worlds[side], "rank": rank, **options}
        return self.clients[member].init_pair(self.pair, side, other, **options)

    async def meet(self, **options: Any) -> None:
        """All ranks of both sides; ``trainer`` and ``inference`` may hold options of one side."""
        own = {side: options.pop(side, {}) for side in self.worlds}
        formed = await asyncio.gather(*(self.init(m, **{**options, **own[m[0]]}) for m in self.members))
        self.pairs = dict(zip(self.members, formed, strict=True))

    async def meet_each(self, options: Callable[[str, int], dict[str, Any]]) -> None:
        """All ranks of both sides, each with options of its own."""
        formed = await asyncio.gather(*(self.init(m, **options(*m)) for m in self.members))
        self.pairs = dict(zip(self.members, formed, strict=True))

    async def register(self, batch: str, given: Callable[[str, int], tuple[Any, dict[str, Any]]]) -> dict[Member, Any]:
        """``given(side, rank)`` -> (tensors, options); a BatchHandle or the EthaError of each rank."""

        async def one(member: Member) -> Any:
            tensors, options = given(*member)
            return await self.clients[member].register_tensors(batch, tensors, **{"pair_name": self.pair, **options})

        found = await asyncio.gather(*(one(m) for m in self.members), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, EthaError):
                raise answer
        return dict(zip(self.members, found, strict=True))

    async def move(self, handles: dict[Member, Any], source: str = "trainer", **options: Any) -> dict[Member, Any]:
        """One transfer from ``source``: a TransferResult or the EthaError of each rank."""
        own = {side: options.pop(side, {}) for side in self.worlds}
        found = await asyncio.gather(
            *(
                handle.transfer("send" if side == source else "recv", **{**options, **own[side]})
                for (side, _), handle in handles.items()
            ),
            return_exceptions=True,
        )
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, EthaError):
                raise answer
        return dict(zip(handles, found, strict=True))
