"""Publications of a GPU's tensors, over cards that are played: versions lie in the host's memory on both sides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.cuda.driver import DeviceError
from etha.errors import ConfigError, EthaError, RegistrationError, TransferError, TransferTimeoutError
from tests.fakes.cuda import GPU0, GPU1
from tests.flow.jobs import tell, wait_for
from tests.flow.sites import environment
from tests.flow.truth import stale, whole

from .played import Cards

ALONE: dict[str, Any] = {"expected_world_size": 1, "rank": 0, "device_mesh": (1,)}


@pytest.fixture
def cards(runtime: Path) -> Iterator[Cards]:
    """The host's agent alone: publications need no agent of a card."""
    with Cards(runtime) as cards:
        cards.start("cpu")
        yield cards


@pytest.fixture
async def clients(cards: Cards) -> AsyncIterator[tuple[etha.AsyncTensorBusClient, etha.AsyncTensorBusClient]]:
    async with cards.client("cuda:0") as a, cards.client("cuda:1") as b:
        yield a, b


def cargo(version: int) -> dict[str, torch.Tensor]:
    """Contiguous, turned, another dtype, empty; "host" stays on the host."""
    floats = (whole((96, 64)) + version) / 3
    return {
        "plain": floats,
        "turned": floats.t().contiguous().t(),
        "half": floats.to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "host": floats[:5] * 2,
    }


def held(cards: Cards, uuid: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.clone() if name == "host" else cards.tensor(t, uuid) for name, t in tensors.items()}


def options(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {**ALONE, "placements": {name: [Replicate()] for name in tensors}}


def same(found: dict[str, torch.Tensor], version: int) -> None:
    for name, wanted in cargo(version).items():
        assert torch.equal(found[name], wanted.to(found[name].dtype)), (name, version)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("serve", [False, True])
async def test_from_card_to_card(cards: Cards, clients: Any, atomic: bool, serve: bool) -> None:
    a, b = clients
    given = held(cards, GPU0, cargo(0))
    wanted = held(cards, GPU1, {name: stale(t.float()).to(t.dtype) for name, t in cargo(0).items()})
    async with (
        await a.publish("w", given, **options(given)) as publication,
        await b.subscribe("w", wanted, subscriber="s", atomic=atomic, serve=serve, **options(wanted)) as subscription,
    ):
        for version in (1, 2, 3):
            for name, tensor in cargo(version).items():
                given[name].copy_(tensor)
            await publication.put(version)
            for tensor in given.values():
                tensor.zero_()  # the version is set aside
            update = await subscription.next()
            assert (update.version, update.source) == (version, "trainer")
            same(wanted, version)


async def test_a_card_feeds_a_host_and_the_host_a_card_when_the_publisher_has_left(cards: Cards, clients: Any) -> None:
    a, b = clients
    given = held(cards, GPU0, cargo(4))
    async with cards.client("cpu") as host:
        publication = await a.publish("w", given, **options(given))
        await publication.put("four")
        plain = cargo(0)
        first = await host.subscribe("w", plain, subscriber="first", atomic=True, **options(plain))
        await first.next()
        same(plain, 4)
        await publication.close()
        wanted = held(cards, GPU1, cargo(0))
        second = await b.subscribe("w", wanted, subscriber="second", **options(wanted))
        assert (await second.next()).source == "first"
        same(wanted, 4)
        described = await b.describe_publication("w")
        assert described["half"].dtype == torch.bfloat16
        # And a host by a card.
        await first.close()
        third = await host.subscribe("w", cargo(0), subscriber="third", atomic=True, **options(plain))
        assert (await third.next()).source == "second"


async def test_a_put_comes_after_the_work_that_its_stream_had_queued(cards: Cards, clients: Any) -> None:
    a, b = clients
    given = {"w": cards.tensor(whole((64, 5)))}
    wanted = {"w": cards.tensor(stale(whole((64, 5))), GPU1)}
    publication = await a.publish("w", given, **options(given))
    subscription = await b.subscribe("w", wanted, subscriber="s", **options(wanted))
    side = cards.driver.stream(GPU0)
    cards.driver.hold(side)
    cards.driver.launch(GPU0, side, lambda: given["w"].fill_(9))
    with cards.driver.using(side):
        putting = publication.put(1)
    task = asyncio.create_task(putting)
    with pytest.raises(TransferTimeoutError):
        await subscription.next(timeout=0.5)
    assert not task.done()
    cards.driver.release(side)
    await task
    await subscription.next()
    assert (wanted["w"] == 9).all()
    cards.driver.drop_stream(side)


async def test_a_put_whose_gpu_is_behind_ends_at_its_deadline_and_the_next_is_whole(cards: Cards, clients: Any) -> None:
    a, b = clients
    given = {"w": cards.tensor(whole((64, 5)))}
    wanted = {"w": cards.tensor(stale(whole((64, 5))), GPU1)}
    publication = await a.publish("w", given, **options(given))
    subscription = await b.subscribe("w", wanted, subscriber="s", **options(wanted))
    stream = cards.driver.current_stream(GPU0)
    cards.driver.hold(stream)
    cards.driver.launch(GPU0, stream, lambda: given["w"].fill_(9))
    with pytest.raises(TransferTimeoutError, match="GPU is behind") as caught:
        await publication.put(1, timeout=0.3)
    assert caught.value.outcome == "withdrawn"
    cards.driver.release(stream)
    assert (await publication.put(2)).seq == 1
    assert (await subscription.next()).version == 2
    assert (wanted["w"] == 9).all()


async def test_a_device_that_fails_at_a_put(cards: Cards, clients: Any) -> None:
    a, _ = clients
    given = {"w": cards.tensor(whole((64, 5)))}
    publication = await a.publish("w", given, **options(given))
    cards.driver.fail("record", DeviceError("cudaErrorIllegalAddress", "by the test", sticky=False))
    with pytest.raises(TransferError, match="by the test"):
        await publication.put(1)
    assert (await publication.put(2)).seq == 1


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_device_that_fails_as_a_version_is_put_in_place(cards: Cards, clients: Any, atomic: bool) -> None:
    """The tensors may be of both versions, so the subscription says that they hold none, until it has received one."""
    a, b = clients
    given = {"w": cards.tensor(whole((64, 5)))}
    wanted = {"w": cards.tensor(stale(whole((64, 5))), GPU1)}
    publication = await a.publish("w", given, **options(given))
    subscription = await b.subscribe("w", wanted, subscriber="s", atomic=atomic, **options(wanted))
    await publication.put(1)
    await subscription.next()
    given["w"].add_(1)
    await publication.put(2)
    cards.driver.fail("record", DeviceError("cudaErrorIllegalAddress", "by the test", sticky=False))
    with pytest.raises(TransferError, match="by the test") as caught:
        await subscription.next()
    assert caught.value.torn and (subscription.version, subscription.seq) == (None, 0)
    assert await publication.holders() == frozenset()
    assert (await subscription.next()).version == 2
    assert torch.equal(wanted["w"], whole((64, 5)) + 1) and subscription.version == 2


async def test_tensors_of_another_card_are_refused_by_name(cards: Cards, clients: Any) -> None:
    a, _ = clients
    given = {"mine": cards.tensor(whole((4, 5))), "other": cards.tensor(whole((4, 5)), GPU1)}
    with pytest.raises(RegistrationError, match="'other'"):
        await a.publish("w", given, **options(given))


def blocking(uuids: Any) -> None:
    """A blocking client, whose ``put`` is of the calling thread's stream."""
    from etha.cuda import select as cuda
    from tests.fakes.cuda import FakeDriver

    driver = FakeDriver(uuids)
    cuda.install_driver(driver)
    put_blocking(driver, driver.empty(GPU0, (64, 5)))
    driver.check()


def put_blocking(driver: Any, tensor: torch.Tensor) -> None:
    """``blocking``'s only version: sevens, which a side stream is late with."""
    with (
        etha.TensorBusClient(device="cuda:0", autostart=False, timeout=20) as client,
        client.publish("w", {"w": tensor}, **options({"w": tensor})) as publication,
    ):
        side = driver.stream(GPU0)
        driver.hold(side)
        driver.launch(GPU0, side, lambda: tensor.fill_(7))
        threading.Timer(0.3, driver.release, [side]).start()
        with driver.using(side):
            publication.put(1)
        tell("put")
        wait_for("end")
        driver.drop_stream(side)


async def test_a_put_of_the_blocking_client_is_of_the_callers_stream(cards: Cards, clients: Any) -> None:
    _, b = clients
    worker = cards.worker(blocking)
    worker.expect("put")
    wanted = {"w": cards.tensor(stale(whole((64, 5))), GPU1)}
    subscription = await b.subscribe("w", wanted, subscriber="s", **options(wanted))
    await subscription.next()
    assert (wanted["w"] == 7).all()
    worker.go("end")
    assert worker.result() is None


async def test_a_default_client_of_a_machine_with_a_card_publishes_what_lies_on_the_host(cards: Cards) -> None:
    with environment(cards.env()):
        client = etha.AsyncTensorBusClient(device="cuda:0", autostart=False, timeout=20)
    async with client, cards.client("cpu") as other:
        given, wanted = {"w": whole((8, 5))}, {"w": stale(whole((8, 5)))}
        publication = await client.publish("w", given, **options(given))
        await publication.put(1)
        subscription = await other.subscribe("w", wanted, subscriber="s", serve=False, **options(wanted))
        await subscription.next()
        assert torch.equal(wanted["w"], given["w"])


@pytest.mark.parametrize("closes", ["the client", "the subscription"])
async def test_a_callback_that_closes_what_it_is_called_by(cards: Cards, clients: Any, closes: str) -> None:
    a, b = clients
    given = {"w": cards.tensor(whole((64, 5)))}
    wanted = {"w": cards.tensor(stale(whole((64, 5))), GPU1)}
    publication = await a.publish("w", given, **options(given))
    subscription = await b.subscribe("w", wanted, subscriber="s", atomic=True, **options(wanted))
    await publication.put(1)

    async def close() -> None:
        await (b if closes == "the client" else subscription).close()

    async with asyncio.timeout(10):
        await subscription.next(on_commit=close)
    assert torch.equal(wanted["w"], whole((64, 5)))


async def test_a_client_is_closed_while_a_put_waits_for_its_gpu(cards: Cards, clients: Any) -> None:
    a, _ = clients
    given = {"w": cards.tensor(whole((64, 5)))}
    publication = await a.publish("w", given, **options(given))
    stream = cards.driver.current_stream(GPU0)
    cards.driver.hold(stream)
    cards.driver.launch(GPU0, stream, lambda: given["w"].fill_(9))
    putting = asyncio.create_task(publication.put(1))
    await asyncio.sleep(0)
    closing = asyncio.create_task(a.close())
    with pytest.raises(EthaError, match="closed"):
        await putting
    cards.driver.release(stream)
    await closing


async def test_a_client_may_be_closed_on_another_loop_than_that_of_its_publications(cards: Cards) -> None:
    client = cards.client("cuda:0")
    given = {"w": cards.tensor(whole((64, 5)))}
    publication = await asyncio.to_thread(asyncio.run, client.publish("w", given, **options(given)))
    await client.close()
    with pytest.raises(ConfigError, match="this client is closed"):
        await publication.put(1)
    async with cards.client("cpu") as other:
        assert len((await other.status())["agent"]["workers"]) == 1, "the agent has nothing of it"
