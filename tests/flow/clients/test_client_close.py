"""``close()`` of clients and handles while calls are under way: what is committed is put in place, the rest raises."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.client.memory.cpu import CpuMemory
from etha.errors import ConfigError, TransferAbortedError, TransferTimeoutError
from etha.testing import DummyTensorBusClient
from tests.flow.duets import PATIENCE, Background, Duet
from tests.flow.sides import Sides
from tests.flow.sites import Site

pytestmark = pytest.mark.ways("local")

#: Who closes what while the receiver's call is under way.
CLOSES: dict[str, Callable[[Duet], Callable[[], None]]] = {
    "client": lambda duet: duet.inference.close,
    "handle": lambda duet: duet.recv.close,
}


class Pause:
    """An ``on_commit`` that tells when it begins and returns when it may."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def plain(self) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE)

    async def coroutine(self) -> None:
        self.begun.set()
        await asyncio.to_thread(self.go.wait, PATIENCE)


@pytest.fixture
def pause() -> Iterator[Pause]:
    pause = Pause()
    yield pause
    pause.go.set()


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("what", CLOSES)
def test_close_waits_for_on_commit_and_puts_in_place_what_is_committed(
    site: Site, pair: str, pause: Pause, what: str, blocking: bool, kind: str
) -> None:
    with Duet(site, pair, atomic=True) as duet:
        on_commit = getattr(pause, kind)
        call = Background(
            (lambda: duet.recv.transfer("recv", on_commit=on_commit))
            if blocking
            else (lambda: duet.recv.transfer("recv", on_commit=on_commit, blocking=False).result(PATIENCE))
        )
        assert duet.send.transfer("send", version=3).ok, "the sender is told of the commit"
        assert pause.begun.wait(PATIENCE)
        closing = Background(CLOSES[what](duet))
        assert closing.runs() and duet.holds == "old"
        pause.go.set()
        closing.result()
        assert duet.holds == "new", "nothing is written once close() has returned"
        assert call.result().version == 3


@pytest.mark.parametrize(
    ("closed", "kind"), [("client", "plain"), ("handle", "coroutine"), ("nothing", "plain"), ("nothing", "coroutine")]
)
def test_an_on_commit_that_never_returns_is_waited_for_until_the_deadline_of_its_call(
    site: Site, pair: str, pause: Pause, closed: str, kind: str
) -> None:
    with Duet(site, pair, atomic=True) as duet:
        call = Background(lambda: duet.recv.transfer("recv", on_commit=getattr(pause, kind), timeout=1.0))
        assert duet.send.transfer("send").ok
        if closed in CLOSES:
            assert pause.begun.wait(PATIENCE)
            Background(CLOSES[closed](duet)).result()
            assert duet.holds == "new"
        with pytest.raises(TransferTimeoutError, match=r"committed.*on_commit") as caught:
            call.result()
        assert caught.value.outcome == "committed" and duet.holds == "new"


def test_without_a_deadline_an_on_commit_gets_the_clients_once_that_closes(site: Site, pair: str, pause: Pause) -> None:
    with Duet(site, pair, atomic=True, timeout=1.0) as duet:
        future = duet.recv.transfer("recv", on_commit=pause.coroutine, timeout=float("inf"), blocking=False)
        assert duet.send.transfer("send", timeout=PATIENCE).ok and pause.begun.wait(PATIENCE)
        Background(duet.inference.close).result()
        assert duet.holds == "new"
        assert isinstance(Background(future.exception).result(), TransferTimeoutError)


@pytest.mark.parametrize("what", CLOSES)
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_close_called_by_on_commit_does_not_wait_for_it(site: Site, pair: str, what: str, kind: str) -> None:
    with Duet(site, pair, atomic=True) as duet:
        returned = threading.Event()

        def plain() -> None:
            CLOSES[what](duet)()
            returned.set()

        async def coroutine() -> None:  # a blocking call from a coroutine belongs on another thread
            await asyncio.to_thread(plain)

        call = Background(lambda: duet.recv.transfer("recv", on_commit={"plain": plain, "coroutine": coroutine}[kind]))
        assert duet.send.transfer("send").ok
        assert call.result().ok and returned.is_set() and duet.holds == "new"


def test_close_called_on_the_loop_of_the_clients_begins_and_returns(site: Site, pair: str) -> None:
    """By ``progress`` or a done callback."""
    with Duet(site, pair) as duet:
        threads: list[str] = []

        def done(future: etha.TransferFuture) -> None:
            threads.append(threading.current_thread().name)
            duet.inference.close()

        future = duet.recv.transfer("recv", blocking=False)
        future.add_done_callback(done)
        assert duet.send.transfer("send").ok and future.result(PATIENCE).ok and duet.holds == "new"
        Background(duet.inference.close).result()
        assert threads == ["etha-portal"]
        with pytest.raises(ConfigError, match="closed"):
            duet.inference.status()


class Gate:
    """Copies between stages and live tensors begin when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        copy, gate = CpuMemory.copy, self

        def gated(home: CpuMemory, pairs: Any, *, live: bool) -> None:
            gate.begun.set()
            assert gate.go.wait(PATIENCE)
            copy(home, pairs, live=live)

        monkeypatch.setattr(CpuMemory, "copy", gated)
        monkeypatch.setattr(CpuMemory, "quick", lambda home, nbytes: False)


@pytest.mark.parametrize("what", CLOSES)
def test_close_waits_for_the_copy_into_the_tensors(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with Duet(site, pair, atomic=True) as duet:
        gate = Gate(monkeypatch)
        call = Background(lambda: duet.recv.transfer("recv"))
        assert duet.send.transfer("send").ok and gate.begun.wait(PATIENCE)
        closing = Background(CLOSES[what](duet))
        assert closing.runs() and call.runs()
        gate.go.set()
        closing.result()
        assert duet.holds == "new" and call.result().ok


@pytest.mark.parametrize("what", ["client", "handle"])
def test_close_while_a_snapshot_is_taken_withdraws_it(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with Duet(site, pair) as duet:
        gate = Gate(monkeypatch)
        call = Background(lambda: duet.send.transfer("send", snapshot=True))
        assert gate.begun.wait(PATIENCE)
        closing = Background(duet.trainer.close if what == "client" else duet.send.close)
        assert closing.runs()
        gate.go.set()
        closing.result()
        with pytest.raises(TransferAbortedError, match="closed") as caught:
            call.result()
        assert caught.value.outcome == "withdrawn"


def test_close_ends_the_future_of_a_snapshot_that_nobody_has_received(site: Site, pair: str) -> None:
    with Duet(site, pair) as duet:
        future = duet.send.transfer("send", snapshot=True)
        Background(duet.trainer.close).result()
        error = Background(future.exception).result()
        assert isinstance(error, TransferAbortedError) and error.outcome == "withdrawn"


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[str]:
    """The address of somebody who takes connections and says nothing."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bus,
    ):
        packets.bind(str(tmp_path / "cpu.fds"))
        bus.bind(str(tmp_path / "cpu.sock"))
        packets.listen()
        bus.listen()
        yield f"ipc://{tmp_path}/cpu.sock"


def test_close_while_a_client_connects_ends_the_call(mute: str) -> None:
    for _ in range(5):
        client = etha.TensorBusClient(agent=mute, timeout=PATIENCE, device="cpu")
        begun = threading.Event()

        def status(client: etha.TensorBusClient = client, begun: threading.Event = begun) -> Any:
            begun.set()
            return client.status()

        call = Background(status)
        assert begun.wait(PATIENCE)
        while client._aio._connecting is None and call.runs(0):
            pass
        Background(client.close).result()
        with pytest.raises(ConfigError, match="closed"):
            call.result()


def test_calls_that_wait_are_withdrawn_by_close(site: Site, pair: str) -> None:
    with Duet(site, pair) as duet:
        calls = [Background(lambda: duet.send.transfer("send")) for _ in range(5)]
        future = duet.send.transfer("send", blocking=False)
        while [b["state"] for b in duet.inference.status()["batches"] if b["pair"] == pair] != ["waiting"]:
            pass
        Background(duet.trainer.close).result()
        for error in [*(call.error() for call in calls), Background(future.exception).result()]:
            assert isinstance(error, TransferAbortedError | ConfigError), repr(error)


def test_the_dummy_puts_in_place_before_it_closes(pause: Pause) -> None:
    client = DummyTensorBusClient(device="cpu")
    client.init_pair("weights", "trainer", "inference", device_mesh=(1,), placements=[Replicate()])
    handle = client.register_tensors("policy", {"w": torch.zeros(2)}, pair_name="weights", atomic=True)
    call = Background(lambda: handle.transfer("recv", on_commit=pause.coroutine))
    assert pause.begun.wait(PATIENCE)
    closing = Background(client.close)
    assert closing.runs()
    pause.go.set()
    closing.result()
    assert call.result().ok


# ---- the async client ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["client", "handle"])
@pytest.mark.parametrize("by", ["another task", "on_commit"])
async def test_the_async_client_completes_what_is_committed(site: Site, pair: str, what: str, by: str) -> None:
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        tensors = {"trainer": torch.ones(8), "inference": torch.zeros(8)}
        handles = await sides.register("b", lambda side, rank: ({"w": tensors[side]}, {"atomic": True}))
        receiver, client = handles["inference", 0], sides.clients["inference", 0]
        paused, go = asyncio.Event(), asyncio.Event()

        async def close() -> None:
            await (client if what == "client" else receiver).close()

        async def pause() -> None:
            if by == "on_commit":
                await close()
            else:
                paused.set()
                await go.wait()

        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            receiving = group.create_task(receiver.transfer("recv", on_commit=pause))
            assert (await handles["trainer", 0].transfer("send")).ok
            if by == "another task":
                await paused.wait()
                closing = group.create_task(close())
                await sides.clients["trainer", 0].status()
                assert not closing.done() and not receiving.done()
                go.set()
                await closing
                assert torch.all(tensors["inference"] == 1)
        assert receiving.result().ok and torch.all(tensors["inference"] == 1)


async def test_close_may_be_called_on_another_loop(site: Site) -> None:
    client = site.client("trainer", 0)
    await client.status()
    await asyncio.to_thread(asyncio.run, client.close())
    with pytest.raises(ConfigError, match="closed"):
        await client.status()
