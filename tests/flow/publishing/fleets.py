"""A fleet in the test's own process: a publisher and subscribers, one async client a rank, and what each must hold.

async with Fleet(site, "policy", shapes) as fleet:
    trainer = await fleet.publish(Cut(world=2, dims={"w": 0}))
    replica = await fleet.subscribe("a", Cut(world=3, dims={"w": 1}), atomic=True)
    await trainer.put(1)
    update = await replica.next()
    replica.check(1)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import etha
from tests.flow.sites import Site
from tests.flow.truth import cut, picked, whole

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a side has the tensors. ``dims``: for each tensor the dim that is cut over the ranks (None: each has all), or
    one such dim for each axis of ``mesh``; ``strided``: those whose first axis is a ``_StridedShard``, which is cut
    after the second one. ``regions``: for a tensor, in place of that, the region of each rank.

    ``transposed``: tensors whose memory is in Fortran's order. ``tied``: name -> the tensor whose memory it shares.
    """

    world: int = 1
    mesh: tuple[int, ...] = ()
    regions: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    dims: Mapping[str, int | tuple[int | None, ...] | None] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    strided: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)

    def options(self, shapes: Shapes, rank: int) -> dict[str, Any]:
        """As the client wants them."""
        return {
            "expected_world_size": self.world,
            "rank": rank,
            "shapes": dict(shapes),
            "device_mesh": self.mesh or (self.world,),
            "placements": self.placements(shapes),
            "regions": {name: regions[rank] for name, regions in self.regions.items()},
        }

    def placements(self, shapes: Shapes) -> dict[str, Any]:
        """For each tensor one of each axis of the mesh."""
        found: dict[str, Any] = {}
        for name in shapes:
            if name in self.regions:
                continue
            found[name] = [Replicate() if dim is None else Shard(dim) for dim in self._axes(name)]
            if name in self.strided:
                dim = self._axes(name)[0]
                assert dim is not None
                found[name][0] = _StridedShard(dim, split_factor=self.mesh[1])
        return found

    def held(self, shapes: Shapes, version: int, rank: int, source: Cut | None = None) -> dict[str, torch.Tensor]:
        """What ``rank`` holds of a version that ``source`` has published."""
        found: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            if name in self.tied:
                found[name] = found[self.tied[name]]
                continue
            part = self._part(whole(shape, version, (source or self).dtype(name)).to(self.dtype(name)), name, rank)
            if name in self.transposed:
                dims = range(part.dim() - 1, -1, -1)
                part = part.permute(*dims).contiguous().permute(*dims)
            found[name] = part
        return found

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor."""
        return self.dtypes.get(name, torch.float32)

    def _axes(self, name: str) -> tuple[int | None, ...]:
        dims = self.dims.get(name)
        return dims if isinstance(dims, tuple) else (dims,)

    def _part(self, full: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        if name in self.regions:
            return picked(full, self.regions[name][rank])
        mesh = self.mesh or (self.world,)
        coordinate = (rank,) if len(mesh) == 1 else (rank // mesh[1], rank % mesh[1])
        axes = list(zip(self._axes(name), mesh, coordinate, strict=True))
        for dim, parts, index in reversed(axes) if name in self.strided else axes:
            if dim is not None:
                full = cut(full, dim, parts, index)
        return full.clone()


class Fleet:
    """``where(side, rank)``: the place of a rank; by default as the site's way says."""

    def __init__(
        self, site: Site, name: str, shapes: Shapes, *, where: Callable[[str, int], str] | None = None
    ) -> None:
        self.site, self.name, self.shapes = site, name, shapes
        self._where = where or site.way.place
        self._stack = contextlib.AsyncExitStack()
        self.cut: Cut | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def publish(self, cut_: Cut, publisher: str = "trainer", **options: Any) -> Publisher:
        """All ranks of a publisher."""
        self.cut = cut_
        clients = await self._clients(publisher, cut_.world)
        tensors = [cut_.held(self.shapes, 0, rank) for rank in range(cut_.world)]
        made = await asyncio.gather(
            *(
                client.publish(self.name, held, publisher=publisher, **cut_.options(self.shapes, rank), **options)
                for rank, (client, held) in enumerate(zip(clients, tensors, strict=True))
            )
        )
        return Publisher(self, cut_, clients, tensors, list(made))

    async def subscribe(self, subscriber: str, cut_: Cut, *, mapped: bool = False, **options: Any) -> Replica:
        """All ranks of a subscriber. ``mapped``: its tensors are of ``etha.empty``."""
        clients = await self._clients(subscriber, cut_.world)
        tensors = [cut_.held(self.shapes, 0, rank) for rank in range(cut_.world)]
        for held in tensors:
            for name, tensor in held.items():
                tensor.fill_(77)
                if mapped:
                    held[name] = etha.empty(tuple(tensor.shape), dtype=tensor.dtype).fill_(77)
            held.update({name: held[first] for name, first in cut_.tied.items()})
        made = await asyncio.gather(
            *(
                client.subscribe(self.name, held, subscriber=subscriber, **cut_.options(self.shapes, rank), **options)
                for rank, (client, held) in enumerate(zip(clients, tensors, strict=True))
            )
        )
        return Replica(self, cut_, clients, tensors, list(made))

    async def _clients(self, side: str, world: int) -> list[etha.AsyncTensorBusClient]:
        found = [self.site.client(side, rank, place=self._where(side, rank), timeout=60.0) for rank in range(world)]
        for client in found:
            await self._stack.enter_async_context(client)
        # Starting an agent takes long on a busy machine; the deadlines of a test are for what comes after.
        await asyncio.gather(*(client.status(timeout=60) for client in found))
        return found


@dataclass
class Publisher:
    """All ranks of a publisher."""

    fleet: Fleet
    cut: Cut
    clients: list[etha.AsyncTensorBusClient]
    tensors: list[dict[str, torch.Tensor]]
    publications: list[etha.AsyncPublication]

    async def put(self, version: int, **options: Any) -> etha.PublishedVersion:
        """Put the tensors of ``version`` on all ranks, and overwrite them as soon as that is allowed."""
        found = await asyncio.gather(*(self.put_rank(rank, version, **options) for rank in range(self.cut.world)))
        assert len(set(found)) == 1, found
        return found[0]

    async def put_rank(self, rank: int, version: int, **options: Any) -> etha.PublishedVersion:
        """The same on one rank."""
        for name, tensor in self.cut.held(self.fleet.shapes, version, rank).items():
            self.tensors[rank][name].copy_(tensor)
        found = await self.publications[rank].put(version, **options)
        for tensor in self.tensors[rank].values():
            tensor.fill_(99)
        return found

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self.publications))


@dataclass
class Replica:
    """All ranks of a subscriber."""

    fleet: Fleet
    cut: Cut
    clients: list[etha.AsyncTensorBusClient]
    tensors: list[dict[str, torch.Tensor]]
    subscriptions: list[etha.AsyncSubscription]

    async def next(self, **options: Any) -> etha.Update:
        """``next`` on all ranks: they get the same version, and hold it."""
        found = await asyncio.gather(*(one.next(**options) for one in self.subscriptions))
        assert len({(update.seq, update.version, update.source) for update in found}) == 1, found
        assert {(one.seq, one.version) for one in self.subscriptions} == {(found[0].seq, found[0].version)}
        version = found[0].version
        assert isinstance(version, int)
        self.check(version)
        return found[0]

    def check(self, version: int) -> None:
        """Every rank holds exactly what the publisher has put as ``version``."""
        for rank, held in enumerate(self.tensors):
            expected = self.cut.held(self.fleet.shapes, version, rank, self.fleet.cut)
            for name, tensor in held.items():
                assert torch.equal(tensor, expected[name]), f"rank {rank}, {name}, version {version}"

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self.subscriptions))
