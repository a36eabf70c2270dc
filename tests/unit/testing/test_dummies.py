"""The dummies: calls of the real clients, answered at once by nobody, and faults as a test orders them."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.client.aio import AsyncBatchHandle
from etha.testing import AsyncDummyTensorBusClient, DummyTensorBusClient

MESH: dict[str, Any] = {"device_mesh": (1,), "placements": [Replicate()]}


@pytest.fixture
def client() -> Iterator[DummyTensorBusClient]:
    with DummyTensorBusClient(device="cpu") as client:
        yield client


@pytest.fixture
def careful() -> Iterator[DummyTensorBusClient]:
    with DummyTensorBusClient(device="cpu", on_error="report") as client:
        yield client


def meet(client: DummyTensorBusClient, name: str = "weights") -> etha.Pair:
    return client.init_pair(name, "trainer", "inference", **MESH)


def register(client: DummyTensorBusClient, **options: Any) -> tuple[etha.BatchHandle, torch.Tensor]:
    tensor = torch.arange(6.0)
    return client.register_tensors("policy", {"w": tensor}, pair_name="weights", **options), tensor


@pytest.mark.parametrize(
    ("real", "dummy"),
    [(etha.TensorBusClient, DummyTensorBusClient), (etha.AsyncTensorBusClient, AsyncDummyTensorBusClient)],
)
def test_signatures_are_those_of_the_real_clients(real: type, dummy: type) -> None:
    public = [name for name in dir(real) if not name.startswith("_")] + ["__init__"]
    assert "transfer" in public and "init_pair" in public
    for name in public:
        assert inspect.signature(getattr(dummy, name)) == inspect.signature(getattr(real, name)), name
    assert {name for name in dir(dummy) if not name.startswith("_")} - set(public) == {"fail_next", "lose", "announce"}


@pytest.mark.parametrize("name", ["transfer", "wait_offer", "close", "batch_id", "plan", "version", "atomic"])
def test_both_clients_say_the_same_of_transfers_and_handles(name: str) -> None:
    assert hasattr(etha.BatchHandle, name) and hasattr(AsyncBatchHandle, name)
    if name == "transfer":
        for one, other in (
            (etha.TensorBusClient.transfer, etha.AsyncTensorBusClient.transfer),
            (etha.BatchHandle.transfer, AsyncBatchHandle.transfer),
        ):
            blocking, coroutine = inspect.signature(one).parameters, inspect.signature(other).parameters
            assert set(blocking) - {"blocking"} == set(coroutine)


def test_a_pair_a_batch_and_its_transfers(client: DummyTensorBusClient) -> None:
    pair = meet(client)
    assert (pair.epoch, pair.local_world_size, pair.remote_world_size) == (1, 1, 1)
    assert meet(client) is pair, "the same call again is a no-op"
    handle, tensor = register(client)
    progress: list[tuple[int, int]] = []
    first = handle.transfer("send", version="a", progress=lambda *numbers: progress.append(numbers))
    assert (first.seq, first.version, first.bytes, first.peers, first.ok) == (1, "a", 24, (), True)
    assert handle.version == "a" and progress == [(24, 24)]
    assert client.wait_offer("policy") == etha.Offer(version="a", bytes=24)
    second = client.transfer("policy", "recv")
    assert (second.seq, second.version, second.direction) == (2, "a", "recv")
    assert torch.equal(tensor, torch.arange(6.0)), "what is received leaves the tensors as they are"
    future = client.transfer("policy", "send", blocking=False, version=7)
    assert future.result(10).seq == 3
    status = client.status()
    assert [(p["pair"], p["state"], p["epoch"]) for p in status["pairs"]] == [("weights", "formed", 1)]
    assert [(b["batch"], b["seq"], b["version"], b["bytes"]) for b in status["batches"]] == [("policy", 3, 7, 24)]
    handle.close()
    with pytest.raises(etha.RegistrationError, match="closed"):
        handle.transfer("send")


def test_it_needs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("ETHA_RUNTIME_DIR", str(tmp_path / "none"))
    before = {thread.ident for thread in threading.enumerate()}
    with DummyTensorBusClient(device="cpu") as client:
        meet(client)
        register(client, atomic=True)[0].transfer("recv")
    assert list(tmp_path.iterdir()) == []
    assert {thread.ident for thread in threading.enumerate()} <= before, "its loop's thread is gone"


def test_a_forked_child_does_not_hear_of_losses_and_is_refused(
    client: DummyTensorBusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = meet(client)
    lost = pair.lost
    assert not lost.is_set()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        for ask in (lost.is_set, lost.wait, lambda: lost.reason, lambda: pair.errored):
            with pytest.raises(etha.ConfigError, match="this pair belongs to process"):
                ask()
    assert not lost.is_set() and lost.reason is None and pair.errored is None


@pytest.mark.parametrize("timeout", [None, 0, 30])
def test_a_closed_client_has_lost_its_pairs(client: DummyTensorBusClient, timeout: float | None) -> None:
    pair = meet(client)
    client.close()
    assert pair.lost.wait(timeout) and pair.lost.is_set() and pair.lost.reason == "closed"
    assert isinstance(pair.errored, etha.PeerLostError)


async def test_a_closed_async_client_has_lost_its_pairs() -> None:
    async with AsyncDummyTensorBusClient(device="cpu") as client:
        pair = await client.init_pair("weights", "trainer", "inference", **MESH)
    assert await pair.lost == "closed" == pair.lost.reason and isinstance(pair.errored, etha.PeerLostError)


def test_what_belongs_to_a_process_is_not_pickled(client: DummyTensorBusClient) -> None:
    unused = DummyTensorBusClient(device="cpu")
    pair, handle = meet(client), register(client)[0]
    future = handle.transfer("send", blocking=False)
    for one in (client, unused, pair, pair.lost, handle, future, {"client": client}):
        with pytest.raises(TypeError, match=r"\w+ cannot be pickled: make a client in the process that uses it$"):
            pickle.dumps(one)
    future.result(10)


async def test_what_belongs_to_an_event_loop_is_not_pickled() -> None:
    async with AsyncDummyTensorBusClient(device="cpu") as client:
        pair = await client.init_pair("weights", "trainer", "inference", **MESH)
        handle = await client.register_tensors("policy", {"w": torch.zeros(4)}, pair_name="weights")
        for one in (client, pair, pair.lost, handle):
            with pytest.raises(
                TypeError, match=rf"{type(one).__name__} cannot be pickled: make a client in the process"
            ):
                pickle.dumps(one)


def test_snapshots(careful: DummyTensorBusClient) -> None:
    meet(careful)
    handle, _ = register(careful)
    results = [handle.transfer("send", snapshot=True, version=version).result(10) for version in (1, 2)]
    assert [(result.seq, result.version) for result in results] == [(1, 1), (2, 2)]
    careful.fail_next(etha.TransferAbortedError("x"))
    assert not handle.transfer("send", snapshot=True).result(10).ok
    with pytest.raises(etha.ConfigError, match="snapshot"):
        careful.transfer("policy", "recv", snapshot=True)


def test_an_on_commit_that_ends_an_iterator_is_told(client: DummyTensorBusClient) -> None:
    """StopIteration ends no coroutine: Python makes "coroutine raised StopIteration" of it."""
    meet(client)
    handle, _ = register(client, atomic=True)

    async def coroutine() -> None:
        next(iter(()))

    for on_commit in (lambda: next(iter(())), coroutine):
        with pytest.raises(etha.ConfigError, match=r"on_commit raised StopIteration.* is committed") as caught:
            handle.transfer("recv", on_commit=on_commit)
        assert isinstance(caught.value.__cause__, StopIteration)

    def broken() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        handle.transfer("recv", on_commit=broken)


def test_on_commit_runs_with_an_atomic_recv(client: DummyTensorBusClient) -> None:
    meet(client)
    reported: list[int] = []
    handle, _ = register(client, atomic=True)
    assert handle.atomic and handle.transfer("recv", version=4, on_commit=lambda: reported.append(1)).version == 4
    assert reported == [1] and handle.version == 4


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c, h: c.init_pair("weights", "same", "same"), etha.ConfigError),
        (lambda c, h: c.init_pair("bad name", "a", "b"), etha.ConfigError),
        (lambda c, h: c.init_pair("p", "a", "b", placements=[Shard(0)]), etha.ConfigError),
        (lambda c, h: c.init_pair("p", "a", "b", 2, rank=2), etha.ConfigError),
        (lambda c, h: c.register_tensors("b", {"w": torch.ones(1)}), etha.ConfigError),
        (lambda c, h: c.register_tensors("b", {"w": torch.ones(1)}, pair_name="other"), etha.ConfigError),
        (lambda c, h: c.register_tensors("b", {}, pair_name="weights", bucket_size=0), etha.ConfigError),
        (lambda c, h: c.register_tensors("b", {}, pair_name="weights", verify="all"), etha.ConfigError),
        (lambda c, h: c.register_tensors("policy", {}, pair_name="weights"), etha.RegistrationError),
        (
            lambda c, h: c.register_tensors("b", {"w": torch.ones(1, device="meta")}, pair_name="weights"),
            etha.RegistrationError,
        ),
        (lambda c, h: c.transfer("unknown", "send"), etha.RegistrationError),
        (lambda c, h: c.transfer("policy", "both"), etha.ConfigError),
        (lambda c, h: c.transfer("policy", "send", version=1.5), etha.ConfigError),
        (lambda c, h: c.transfer("policy", "recv", on_commit=print), etha.ConfigError),
        (lambda c, h: c.transfer("policy", "send", timeout=-1), etha.ConfigError),
        (lambda c, h: h.transfer("send", on_error="ignore"), etha.ConfigError),
        (lambda c, h: c.fail_next(ValueError("x")), etha.ConfigError),
        (lambda c, h: c.lose("unknown"), etha.ConfigError),
        (lambda c, h: c.lose("weights", "tired"), etha.ConfigError),
        (lambda c, h: DummyTensorBusClient(on_error="ignore"), etha.ConfigError),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_raised_whatever_was_asked_for(
    careful: DummyTensorBusClient, call: Any, error: type[Exception]
) -> None:
    meet(careful)
    handle, _ = register(careful)
    with pytest.raises(error):
        call(careful, handle)
    assert handle.transfer("send").ok, "nothing has failed"


def test_a_tensor_that_has_moved_is_a_mistake(careful: DummyTensorBusClient) -> None:
    meet(careful)
    handle, tensor = register(careful)
    tensor.data = torch.ones(7)
    with pytest.raises(etha.RegistrationError, match="has changed"):
        handle.transfer("send")


def test_a_failure_that_is_reported_skips_what_follows(careful: DummyTensorBusClient) -> None:
    pair = meet(careful)
    handle, _ = register(careful)
    careful.fail_next(etha.TransferAbortedError("disk full", torn=True))
    failed = handle.transfer("recv")
    assert isinstance(failed.error, etha.TransferAbortedError) and failed.error.torn and not failed.skipped
    assert failed.seq == 0 and pair.errored is failed.error
    skipped = careful.transfer("policy", "recv")
    assert skipped.skipped and skipped.error is failed.error
    late = careful.transfer("policy", "recv", blocking=False).result(10)
    assert late.skipped
    assert meet(careful) is pair and not pair.errored, "it stands: the same epoch"
    again = handle.transfer("recv")
    assert again.ok and again.seq == 1


def test_a_call_may_ask_otherwise_than_its_client(client: DummyTensorBusClient) -> None:
    meet(client)
    handle, _ = register(client)
    client.fail_next(etha.TransferTimeoutError("rank 3 was not ready", outcome="withdrawn"))
    assert not handle.transfer("send", on_error="report").ok
    assert handle.transfer("send").ok, "who asked to raise skips nothing"
    assert client.transfer("policy", "send", on_error="report").skipped
    future = client.transfer("policy", "send", blocking=False, on_error="report")
    assert future.exception(10) is None and future.result().skipped


def test_a_client_may_raise(client: DummyTensorBusClient) -> None:
    pair = meet(client)
    handle, _ = register(client)
    client.fail_next(etha.TransferAbortedError("first"))
    client.fail_next(etha.TransferAbortedError("second"))
    for text in ("first", "second"):
        with pytest.raises(etha.TransferAbortedError, match=text):
            handle.transfer("send")
    assert handle.transfer("send").seq == 1
    assert pair.errored is not None and pair.errored.message == "first"


@pytest.mark.parametrize("reason", ["died", "closed", "relaunched"])
def test_a_pair_is_lost_while_no_call_is_made(careful: DummyTensorBusClient, reason: Any) -> None:
    pair = meet(careful)
    handle, _ = register(careful)
    careful.lose("weights", reason)
    assert pair.lost.wait(10) and pair.lost.reason == reason
    assert isinstance(pair.errored, etha.PeerLostError) and pair.errored.reason == reason
    result = handle.transfer("send")
    assert result.skipped and result.error is pair.errored
    with pytest.raises(etha.PeerLostError, match="call init_pair"):
        handle.transfer("send", on_error="raise")
    with pytest.raises(etha.PeerLostError):
        handle.wait_offer()
    with pytest.raises(etha.PeerLostError):
        register(careful)
    formed = meet(careful)
    assert formed.epoch == 2 and formed.errored is None and pair.errored is not None
    assert handle.transfer("send").skipped, "a handle of the epoch that is over"
    assert register(careful)[0].transfer("send").ok


def test_a_peer_that_dies_in_a_transfer_loses_the_pair(careful: DummyTensorBusClient) -> None:
    pair = meet(careful)
    other = meet(careful, "other")
    handle, _ = register(careful)
    handle.transfer("send")
    careful.fail_next(etha.PeerLostError("inference rank 1 has died", reason="died", outcome="aborted"))
    failed = handle.transfer("send")
    assert isinstance(failed.error, etha.PeerLostError) and failed.error.outcome == "aborted"
    assert pair.lost.reason == "died" and not other.lost.is_set() and other.errored is None
    assert meet(careful).epoch == 2
    assert register(careful)[0].transfer("send").seq == 2, "the numbers go on"


def test_an_agent_that_dies_loses_every_pair(careful: DummyTensorBusClient) -> None:
    pairs = [meet(careful), meet(careful, "other")]
    handle, _ = register(careful)
    careful.fail_next(etha.AgentLostError("the agent has been killed"))
    failed = handle.transfer("send")
    assert isinstance(failed.error, etha.AgentLostError) and failed.error.outcome == "unknown"
    assert all(pair.lost.is_set() and isinstance(pair.errored, etha.AgentLostError) for pair in pairs)
    with pytest.raises(etha.AgentLostError, match="init_pair"):
        register(careful)
    assert meet(careful).epoch == 2
    assert register(careful)[0].transfer("send").ok


def test_a_recovery_loop(careful: DummyTensorBusClient) -> None:
    """What a user would test with it: every version arrives in the end."""
    careful.fail_next(etha.TransferTimeoutError("late", outcome="withdrawn"))
    careful.fail_next(etha.PeerLostError("dead", reason="died"))
    weights = {"w": torch.ones(3)}
    sent: list[int] = []
    epochs: list[int] = []
    pair = None
    for version in range(5):
        while version not in sent:
            if pair is None or pair.errored:
                pair = meet(careful)
                epochs.append(pair.epoch)
                handle = careful.register_tensors("policy", weights, pair_name="weights")
            if handle.transfer("send", version=version).ok:
                sent.append(version)
    assert sent == [0, 1, 2, 3, 4] and epochs == [1, 1, 2]


async def test_the_async_one() -> None:
    async with AsyncDummyTensorBusClient(device="cpu", on_error="report") as client:
        pair = await client.init_pair("weights", "trainer", "inference", 3, rank=2, **MESH)
        assert (pair.epoch, pair.local_world_size) == (1, 3)
        handle = await client.register_tensors("policy", [(torch.ones(3), "weights")])
        assert (await handle.transfer("send", version=1)).ok
        client.fail_next(etha.TransferAbortedError("x"))
        assert not (await client.transfer("policy", "send")).ok
        assert (await client.transfer("policy", "send")).skipped
        client.lose("weights", "relaunched")
        assert await pair.lost == "relaunched"
        assert pair.errored is not None and pair.errored.message == "x"
        assert (await client.init_pair("weights", "trainer", "inference", 3, rank=2, **MESH)).epoch == 2
    with pytest.raises(etha.ConfigError, match="closed"):
        await handle.transfer("send")


async def test_an_endless_loop_leaves_the_event_loop_to_others_and_can_be_cancelled() -> None:
    async with AsyncDummyTensorBusClient(device="cpu") as client:
        await client.init_pair("weights", "trainer", "inference", **MESH)
        handle = await client.register_tensors("policy", {"w": torch.ones(3)}, pair_name="weights")

        async def receive() -> None:
            while True:
                await handle.transfer("recv")

        task = asyncio.create_task(receive())
        seq = 0
        while seq < 3:
            seq = (await client.status())["batches"][0]["seq"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await handle.transfer("send")).ok, "a withdrawn call has torn nothing"


def test_a_publication_and_a_subscription_of_one_client(client: DummyTensorBusClient) -> None:
    side: dict[str, Any] = {"device_mesh": (1,), "placements": {"w": [Replicate()]}}
    source, target = torch.ones(4), torch.zeros(4)
    with client.publish("policy", {"w": source}, **side) as publication:
        with client.subscribe("policy", {"w": target}, subscriber="replica", atomic=True, **side) as subscription:
            with pytest.raises(etha.TransferTimeoutError, match="announce"):
                subscription.next(timeout=0.05)
            assert publication.put("first", wait=1) == etha.PublishedVersion(seq=1, version="first")
            assert subscription.lag == 1
            update = subscription.next()
            assert (update.seq, update.version, update.source, update.bytes) == (1, "first", "trainer", 16)
            assert (subscription.seq, subscription.version, subscription.lag) == (1, "first", 0)
            assert target.tolist() == [0.0] * 4  # nothing moves
            client.announce("policy")
            assert [one.lag for one in publication.subscribers()] == [1]
            assert (subscription.next().seq, subscription.version) == (2, None)


async def test_a_loop_over_versions_waits_for_what_a_test_announces() -> None:
    async with AsyncDummyTensorBusClient(device="cpu") as client:
        subscription = await client.subscribe(
            "policy",
            {"w": torch.zeros(4)},
            subscriber="replica",
            serve=False,
            device_mesh=(1,),
            placements={"w": [Replicate()]},
        )
        seen, first = [], asyncio.Event()

        async def follow() -> None:
            async for update in subscription:
                seen.append(update.version)
                first.set()
                if update.version == 2:
                    await subscription.close()

        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            client.announce("policy", 1)
            await first.wait()
            client.announce("policy", 2)
            await following
        assert seen == [1, 2]
