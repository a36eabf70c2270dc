"""``transfer("send", snapshot=True)``: what the tensors held is sent while they change; the newest is what counts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.errors import AgentLostError, ConfigError, PeerLostError, TransferAbortedError, TransferError
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way

EVERY_WAY = pytest.mark.ways("tcp", "local", "host", "three")
#: Of all of a tensor, cut in two over rows at the source and over columns at the target.
ROWS, COLUMNS = 701, 530


def tensors(side: str, rank: int) -> dict[str, torch.Tensor]:
    """A large one that is resharded, a strided one, a whole one, an empty one."""
    rows = [(ROWS + 1) // 2, ROWS // 2][rank]
    shape = (rows, COLUMNS) if side == "trainer" else (ROWS, COLUMNS // 2)
    return {
        "w": torch.zeros(shape),
        "t": torch.zeros(shape[::-1], dtype=torch.bfloat16).t(),
        "norm": torch.zeros(257, dtype=torch.float64),
        "none": torch.zeros(0, 3),
    }


def layouts(side: str) -> dict[str, Any]:
    split = [Shard(0 if side == "trainer" else 1)]
    whole = [Replicate()]
    return {"w": split, "t": split, "norm": whole, "none": whole}


def fill(held: dict[str, torch.Tensor], value: int) -> None:
    for tensor in held.values():
        tensor.fill_(value)


def value_of(held: dict[str, torch.Tensor]) -> int:
    """The one value that all elements hold."""
    found = {float(x) for tensor in held.values() for x in tensor.unique()}
    assert len(found) == 1, f"a mixture of {sorted(found)}"
    return int(found.pop())


class Both:
    """Two ranks a side, registered; ``held`` by member."""

    def __init__(self, site: Site, pair: str, **options: Any) -> None:
        self.sides = Sides(site, pair, trainer=2, inference=2)
        self.options = options
        self.held = {member: tensors(*member) for member in self.sides.members}
        self.trainers = [m for m in self.sides.members if m[0] == "trainer"]
        self.handles: dict[Member, Any] = {}

    async def __aenter__(self) -> Both:
        await self.sides.__aenter__()
        await self.sides.meet(device_mesh=(2,), placements=[Replicate()])

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            return self.held[side, rank], {"placements": layouts(side), **self.options}

        self.handles = await self.sides.register("b", given)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.sides.__aexit__(*exc)

    async def snapshot(self, value: int, *, label: bool = True, **options: Any) -> list[etha.TransferFuture]:
        """Every trainer rank sends ``value`` and is overwritten at once."""

        async def one(member: Member) -> etha.TransferFuture:
            fill(self.held[member], value)
            version = value if label else None
            future = await self.handles[member].transfer("send", snapshot=True, version=version, **options)
            fill(self.held[member], -1)
            return future

        return list(await asyncio.gather(*map(one, self.trainers)))

    async def receive(self) -> list[etha.TransferResult]:
        receiving = [handle.transfer("recv") for (side, _), handle in self.handles.items() if side == "inference"]
        return list(await asyncio.gather(*receiving))

    def values(self) -> set[int]:
        return {value_of(self.held[m]) for m in self.held if m[0] == "inference"}


@EVERY_WAY
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
async def test_the_source_may_change_at_once(site: Site, pair: str, atomic: bool) -> None:
    async with Both(site, pair, atomic=atomic, verify="full") as both:
        for seq in (1, 2):
            futures = await both.snapshot(seq * 10)
            assert not any(future.done() for future in futures)
            received = await both.receive()
            sent = await asyncio.gather(*futures)
            assert both.values() == {seq * 10}
            assert {(r.seq, r.version, r.ok) for r in [*received, *sent]} == {(seq, seq * 10, True)}
        # What the tensors themselves hold is sent as ever, in the same batch.
        for member in both.trainers:
            fill(both.held[member], 7)
        moved = await both.sides.move(both.handles)
        assert {result.seq for result in moved.values()} == {3} and both.values() == {7}


@EVERY_WAY
@pytest.mark.parametrize("label", [True, False], ids=["labelled", "numbered"])
async def test_a_late_receiver_gets_the_newest(site: Site, pair: str, label: bool) -> None:
    async with Both(site, pair) as both:
        old = [future for value in (1, 2) for future in await both.snapshot(value, label=label)]
        new = await both.snapshot(3, label=label)
        for future in old:
            with pytest.raises(TransferAbortedError, match="superseded") as raised:
                await future
            assert raised.value.outcome == "withdrawn"
        while (await both.handles["inference", 0].wait_offer()).version != (3 if label else None):
            pass  # news of the withdrawn one is under way to the other agent
        await both.receive()
        assert both.values() == {3}
        assert [(await future).seq for future in new] == [1, 1]


@EVERY_WAY
async def test_snapshots_and_receivers_at_their_own_pace(site: Site, pair: str) -> None:
    """Ranks run ahead of each other; whatever is received is one whole version, and the last one is the last."""
    async with Both(site, pair, atomic=True) as both:
        last, seen = 25, []

        async def train(member: Member) -> None:
            futures = []
            for value in range(1, last + 1):
                fill(both.held[member], value)
                futures.append(await both.handles[member].transfer("send", snapshot=True, version=value))
                for _ in range(3 * (member[1] + 1)):  # more or less of a step
                    await asyncio.sleep(0)
            for future in futures:
                try:
                    await future
                except TransferAbortedError as error:
                    assert error.outcome == "withdrawn"

        async def serve() -> None:
            while not seen or seen[-1] < last:
                results = await both.receive()
                (value,) = both.values()
                assert {result.version for result in results} == {value}
                seen.append(value)

        async with asyncio.TaskGroup() as group:
            for member in both.trainers:
                group.create_task(train(member))
            group.create_task(serve())
        assert seen == sorted(set(seen))


@EVERY_WAY
async def test_a_future_that_is_cancelled_withdraws_the_snapshot(site: Site, pair: str) -> None:
    async with Both(site, pair) as both:
        for future in await both.snapshot(1):
            assert future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
        futures = await both.snapshot(2)
        await both.receive()
        assert both.values() == {2}
        assert [(await future).ok for future in futures] == [True, True]


async def test_a_snapshot_with_a_timeout_ends_at_it(site: Site, pair: str) -> None:
    async with Both(site, pair) as both:
        for future in await both.snapshot(1, timeout=0.2):
            with pytest.raises(etha.TransferTimeoutError, match="inference ranks 0-1"):
                await future


async def test_one_rank_with_a_snapshot_and_one_without(site: Site, pair: str) -> None:
    async with Both(site, pair) as both:
        future = await both.handles["trainer", 0].transfer("send", snapshot=True)
        with pytest.raises(TransferError, match="snapshot"):
            await both.handles["trainer", 1].transfer("send")
        with pytest.raises(TransferError, match="snapshot"):
            await future


async def test_mistakes(site: Site, pair: str) -> None:
    async with Both(site, pair) as both:
        with pytest.raises(ConfigError, match="send"):
            await both.handles["inference", 0].transfer("recv", snapshot=True)


async def test_reports_say_superseded_and_nothing_is_skipped(site: Site, pair: str) -> None:
    async with Both(site, pair) as both:
        old = await both.snapshot(1, on_error="report")
        new = await both.snapshot(2, on_error="report")
        await both.receive()
        assert [(await future).ok for future in old] == [False, False]
        assert [(await future).ok for future in new] == [True, True]
        assert all(both.sides.pairs[m].errored is None for m in both.trainers)


async def test_a_receiver_that_leaves_ends_it(site: Site, pair: str) -> None:
    async with Both(site, pair) as both:
        futures = await both.snapshot(1)
        await both.sides.clients["inference", 1].close()
        for future in futures:
            with pytest.raises(PeerLostError):
                await future
        with pytest.raises(PeerLostError):
            await both.handles["trainer", 0].transfer("send", snapshot=True)


def test_the_blocking_client(site: Site, pair: str) -> None:
    """The call returns once the source may change; the future is asked from the thread."""
    with site.blocking("trainer", 0) as sender, site.blocking("inference", 0) as receiver:
        source, target = torch.ones(300, 7), torch.zeros(300, 7)
        options: dict[str, Any] = {"expected_world_size": 1, "rank": 0, "device_mesh": (1,)}
        with ThreadPoolExecutor(2) as pool:

            def both(one: Callable[[], Any], other: Callable[[], Any]) -> list[Any]:
                return [f.result(30) for f in [pool.submit(one), pool.submit(other)]]

            both(
                lambda: sender.init_pair(pair, "trainer", "inference", placements=[Replicate()], **options),
                lambda: receiver.init_pair(pair, "inference", "trainer", placements=[Replicate()], **options),
            )
            send, recv = both(
                lambda: sender.register_tensors("b", {"w": source}, pair_name=pair),
                lambda: receiver.register_tensors("b", {"w": target}, pair_name=pair),
            )
            future = send.transfer("send", snapshot=True, version=1)
            assert isinstance(future, etha.TransferFuture) and not future.done()
            source.fill_(2)
            newer = sender.transfer("b", "send", blocking=False, snapshot=True, version=2)
            source.fill_(3)
            with pytest.raises(TransferAbortedError, match="superseded"):
                future.result(30)
            while recv.wait_offer().version != 2:
                pass  # news of the withdrawn one is under way to the other agent
            assert recv.transfer("recv").version == 2
            assert newer.result(30).version == 2
            assert target.unique().tolist() == [2]


async def test_an_agent_killed_while_a_snapshot_waits(pair: str) -> None:
    with open_site(Way.LOCAL) as site:
        async with Both(site, pair) as both:
            futures = await both.snapshot(1)
            os.kill((await both.sides.clients["trainer", 0].status())["agent"]["pid"], signal.SIGKILL)
            for future in futures:
                with pytest.raises(AgentLostError):
                    await future
            with pytest.raises((AgentLostError, PeerLostError)):
                await both.handles["trainer", 0].transfer("send", snapshot=True)
