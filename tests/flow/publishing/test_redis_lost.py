"""Redis is away, comes back empty, or comes back as it was: hops end well, and afterwards everything goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import etha
from etha.store.registry import Store
from tests.flow.conftest import forget_environment
from tests.flow.publishing.fleets import Cut, Fleet
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way
from tests.processes import send_signal
from tests.unit.store.server import Server, served

SHAPES = {"w": (64, 33), "b": (7,)}
ROWS, COLUMNS = Cut(world=2, dims={"w": 0}), Cut(world=2, dims={"w": 1})
#: Seconds within which a subscriber has a version: less than ``HOP_START``, for which it waits for a source in vain.
SOON = 15.0

pytestmark = pytest.mark.slow


class Disk:
    """What a server has written, which comes back when it is started again."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.server = server
        self._now, self._backup = directory / "appendonlydir", directory / "backup"

    def lose(self) -> None:
        """The server comes back with nothing. It may be away."""
        self.server.stop()
        shutil.rmtree(self._now)
        self.server.start()

    def back_up(self) -> None:
        shutil.copytree(self._now, self._backup)

    def restore(self) -> None:
        """The server comes back as it was backed up."""
        self.server.stop()
        shutil.rmtree(self._now)
        shutil.copytree(self._backup, self._now)
        self.server.start()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with served(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield Disk(server, tmp_path)


@pytest.fixture
def home(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Two hosts whose Redis the test stops."""
    forget_environment(monkeypatch)
    with open_site(Way.TCP, disk.server.url) as site:
        yield site


async def until_newest(server: Server, publication: str, seq: int) -> None:
    """Wait until Redis says that ``seq`` is the newest version."""
    async with (
        asyncio.timeout(30),
        await Store.open(server.url, "default", timeout=10) as store,
        store.changes(store.keys.publication(publication)) as changed,
    ):
        while await store.publications.newest(publication) != seq:
            await changed()


async def until_left(server: Server, publication: str, subscriber: str) -> None:
    """Wait until Redis knows no ``subscriber`` any more."""
    async with (
        asyncio.timeout(30),
        await Store.open(server.url, "default", timeout=10) as store,
        store.changes(store.keys.publication_side(publication, subscriber)) as changed,
    ):
        while (view := await store.publications.view(publication)) and any(
            one.name == subscriber for one in view.subscribers
        ):
            await changed()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still."""
    send_signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_hop_ends_well_without_redis_and_afterwards_everything_goes_on(home: Site, disk: Disk) -> None:
    async with Fleet(home, "p", {"w": (16 << 20,)}) as fleet:
        trainer = await fleet.publish(Cut())
        replica = await fleet.subscribe("replica", Cut(), atomic=True)
        await trainer.put(1)
        (subscription,) = replica.subscriptions
        stopped: list[int] = []

        def stop(done: int, total: int) -> None:
            if not stopped:
                stopped.append(done)
                disk.server.stop()

        assert (await subscription.next(progress=stop)).version == 1
        replica.check(1)
        assert stopped
        with pytest.raises(etha.RedisUnavailableError):
            await trainer.put(2, timeout=0.5)
        with pytest.raises(etha.RedisUnavailableError):
            await subscription.next(timeout=0.5)
        disk.server.start()
        await trainer.put(3)
        assert (await replica.next(timeout=SOON)).version == 3


@pytest.mark.proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fate", ["kept", "emptied"])
async def test_hops_that_run_while_redis_is_away_for_longer_than_any_lease(fate: str, home: Site, disk: Disk) -> None:
    """One from the trainer, and one that passes on what comes there."""
    outage, nbytes = 30.0, 24 << 20
    places = {"trainer": "a", "first": "b", "second": "c", "late": "b"}
    async with Fleet(home, "p", {"w": (nbytes // 4,)}, where=lambda side, rank: places[side]) as fleet:
        trainer = await fleet.publish(Cut(), fan_out=1, max_rate=nbytes / (2 * outage))
        replicas = [await fleet.subscribe(name, Cut(), atomic=True) for name in ("first", "second")]
        moving, tasks = [asyncio.Event() for _ in replicas], []
        for event, replica in zip(moving, replicas, strict=True):

            def progress(done: int, total: int, event: asyncio.Event = event) -> None:
                if done:
                    event.set()

            tasks.append(asyncio.ensure_future(replica.next(progress=progress, timeout=120)))
        await trainer.put(1)
        for event in moving:
            await event.wait()
        disk.server.stop()
        await asyncio.sleep(outage)
        assert not (ended := [task.exception() or task.result() for task in tasks if task.done()]), ended
        if fate == "emptied":
            disk.lose()
        else:
            disk.server.start()
        sources = {update.source for update in await asyncio.gather(*tasks)}
        assert sources in ({"trainer", "first"}, {"trainer", "second"})
        late = await fleet.subscribe("late", Cut(), atomic=True)
        assert (await late.next(timeout=120)).version == 1
        await trainer.put(2, timeout=120)
        for update in await asyncio.gather(*(one.next(timeout=150) for one in [*replicas, late])):
            assert update.version == 2


async def test_a_replica_that_leaves_while_redis_is_away_is_no_source_afterwards(home: Site, disk: Disk) -> None:
    async with Fleet(home, "p", SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        first = await fleet.subscribe("first", COLUMNS, atomic=True)
        second = await fleet.subscribe("second", Cut(), serve=False)
        await trainer.put(1)
        await first.next()
        disk.server.stop()
        await first.close()
        with pytest.raises(etha.RedisUnavailableError):  # for longer than an agent that leaves would wait
            await second.subscriptions[0].next(timeout=7)
        disk.server.start()
        assert (await second.next(timeout=SOON)).source == "trainer"


async def test_a_rank_that_leaves_and_comes_again_while_redis_is_away(home: Site, disk: Disk) -> None:
    """What Redis hears last is that it has come."""
    async with Fleet(home, "p", SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        first = await fleet.subscribe("first", Cut(), atomic=True)
        await trainer.put(1)
        await first.next()
        disk.server.stop()
        await first.close()
        (client,), held = first.clients, Cut().held(SHAPES, 0, 0)
        again = asyncio.ensure_future(
            client.subscribe("p", held, subscriber="first", atomic=True, timeout=60, **Cut().options(SHAPES, 0))
        )
        await client.status()
        disk.server.start()
        subscription = await again
        assert (await subscription.next(timeout=SOON)).version == 1
        await trainer.put(2)
        assert (await subscription.next(timeout=SOON)).version == 2


async def test_a_publisher_that_leaves_and_comes_again_while_redis_is_away(home: Site, disk: Disk) -> None:
    """It begins to count its puts anew."""
    async with Fleet(home, "p", SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        replica = await fleet.subscribe("replica", COLUMNS, atomic=True)
        await trainer.put(1)
        await trainer.put(2)
        await replica.next()
        disk.server.stop()
        await trainer.close()
        (client,), (held,) = trainer.clients, trainer.tensors
        again = asyncio.ensure_future(client.publish("p", held, timeout=60, **Cut().options(SHAPES, 0)))
        await client.status()
        disk.server.start()
        trainer.publications = [await again]
        assert (await trainer.put(3, timeout=30)).seq == 3
        assert (await replica.next(timeout=SOON)).version == 3


async def test_redis_is_emptied_while_a_rank_has_put_a_version_and_another_has_not(home: Site, disk: Disk) -> None:
    async with Fleet(home, "p", SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        replica = await fleet.subscribe("replica", COLUMNS, atomic=True)
        await trainer.put(1)
        await replica.next()
        await trainer.put_rank(1, 2)
        disk.lose()
        await trainer.put_rank(0, 2, timeout=30)
        assert (await replica.next(timeout=30)).version == 2
        assert (await trainer.put(3, timeout=30)).seq == 3
        assert (await replica.next(timeout=30)).version == 3


async def test_a_publisher_that_is_launched_before_the_replicas_are_back_in_an_empty_redis(
    home: Site, disk: Disk
) -> None:
    """Its first version gets a greater number than was meant when its slot was given."""
    async with Fleet(home, "p", SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        replica = await fleet.subscribe("replica", COLUMNS, atomic=True)
        for version in (1, 2, 3):
            await trainer.put(version)
        await replica.next()
        await trainer.close()
        pid = (await replica.clients[0].status())["agent"]["pid"]
        send_signal(pid, signal.SIGSTOP)
        try:
            disk.lose()
            again = await fleet.publish(ROWS)
            assert (await again.put_rank(1, 4)).seq == 1
        finally:
            os.kill(pid, signal.SIGCONT)
        await until_newest(disk.server, "p", 3)
        assert (await again.put_rank(0, 4)).seq == 4
        update = await replica.next(timeout=30)
        assert (update.seq, update.version, update.source) == (4, 4, "trainer")
        assert (await again.put(5, timeout=30)).seq == 5
        assert (await replica.next(timeout=30)).version == 5


async def test_a_replica_that_serves_nobody_follows_a_new_publisher_in_an_empty_redis(home: Site, disk: Disk) -> None:
    """Numbers go on after the one that it holds, for which it asks."""
    async with Fleet(home, "p", SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        replica = await fleet.subscribe("replica", COLUMNS, serve=False)
        for version in (1, 2, 3):
            await trainer.put(version)
        await replica.next()
        await trainer.close()
        disk.lose()
        await until_newest(disk.server, "p", 3)
        again = await fleet.publish(ROWS)
        assert (await again.put(4)).seq == 4
        assert (await replica.next(timeout=SOON)).version == 4


async def test_a_backup_that_lists_a_replica_which_has_left_since(home: Site, disk: Disk) -> None:
    async with Fleet(home, "p", SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        first = await fleet.subscribe("first", COLUMNS, atomic=True)
        second = await fleet.subscribe("second", Cut(), atomic=True)
        await trainer.put(1)
        await first.next()
        disk.back_up()
        await first.close()
        disk.restore()
        assert (await second.next(timeout=SOON)).source == "trainer"
        await trainer.put(2)
        assert (await second.next(timeout=SOON)).version == 2


async def test_a_backup_in_which_a_rank_has_not_put_what_all_have_put_since(home: Site, disk: Disk) -> None:
    async with Fleet(home, "p", SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        replica = await fleet.subscribe("replica", COLUMNS, atomic=True)
        await trainer.put(1)
        await trainer.put_rank(0, 2)
        disk.back_up()
        await trainer.put_rank(1, 2)
        await trainer.put(3)
        await replica.next()
        disk.restore()
        assert (await trainer.put(4, timeout=30)).seq == 4
        assert (await replica.next(timeout=30)).version == 4


async def test_a_publisher_on_two_hosts_serves_what_it_has_from_an_empty_redis(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two agents put back their ranks one after the other."""
    forget_environment(monkeypatch)
    with open_site(Way.THREE, disk.server.url) as site:
        async with Fleet(site, "p", SHAPES) as fleet:
            trainer = await fleet.publish(ROWS)
            await trainer.put(1)
            pid = (await trainer.clients[1].status())["agent"]["pid"]
            send_signal(pid, signal.SIGSTOP)
            try:
                disk.lose()
                await until_newest(disk.server, "p", 1)
            finally:
                os.kill(pid, signal.SIGCONT)
            late = await fleet.subscribe("late", COLUMNS, serve=False)
            assert (await late.next(timeout=30)).version == 1


@pytest.mark.parametrize("emptied", [False, True])
async def test_a_rank_leaves_before_the_agent_of_another_has_put_its_own_back(
    emptied: bool, home: Site, disk: Disk
) -> None:
    """That one is not left alone in a launch that is over. An empty Redis does not know that it is."""

    def where(side: str, rank: int) -> str:
        return "a" if side == "trainer" else f"b{rank}"

    async with Fleet(home, "p", SHAPES, where=where) as fleet:
        trainer = await fleet.publish(Cut())
        replica = await fleet.subscribe("replica", ROWS, atomic=True)
        await trainer.put(1)
        await replica.next()
        left, right = replica.subscriptions
        pid = (await replica.clients[1].status())["agent"]["pid"]
        waiting = asyncio.ensure_future(right.next(timeout=60))
        if emptied:
            with stopped(pid):
                await left.close()
                await until_left(disk.server, "p", "replica")
                disk.lose()
        else:
            disk.server.stop()
            with stopped(pid):
                await left.close()
                disk.server.start()
                await until_left(disk.server, "p", "replica")
        with pytest.raises(etha.PeerLostError, match=r"rank 0 of replica"):
            async with asyncio.timeout(30):
                await waiting


async def test_a_rank_of_a_publisher_leaves_before_the_agent_of_another_has_put_its_own_back(
    home: Site, disk: Disk
) -> None:
    def where(side: str, rank: int) -> str:
        return f"a{rank}" if side == "trainer" else "b"

    async with Fleet(home, "p", SHAPES, where=where) as fleet:
        trainer = await fleet.publish(ROWS)
        replica = await fleet.subscribe("replica", Cut(), atomic=True)
        await trainer.put(1)
        await replica.next()
        pid = (await trainer.clients[1].status())["agent"]["pid"]
        with stopped(pid):
            await trainer.publications[0].close()
            disk.lose()
        with pytest.raises(etha.PeerLostError, match=r"rank 0 of trainer"):
            await trainer.put_rank(1, 2, timeout=30)
