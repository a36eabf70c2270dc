"""Where tensors lie, what devices that fail are told as, how a GPU's home ends; on the fake GPU."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import etha
from etha.bus.messages import LetGo
from etha.client.connection import AgentConnection
from etha.client.memory.base import home_name
from etha.client.memory.cpu import CpuMemory
from etha.client.memory.cuda import GpuMemory
from etha.client.memory.select import agent_of, home_of
from etha.cuda import select as cuda
from etha.cuda.driver import DeviceError
from etha.cuda.reaper import reaper
from etha.errors import AgentLostError, ConfigError, RegistrationError, TransferError
from tests.fakes.cuda import GPU0, GPU1, FakeDriver


@pytest.fixture
def gpu() -> Iterator[FakeDriver]:
    fake = FakeDriver((GPU0, GPU1))
    cuda.install_driver(fake)
    yield fake
    cuda.install_driver(None)
    gc.collect()
    fake.check()


def spoil(gpu: FakeDriver, method: str, *, sticky: bool = False) -> None:
    gpu.fail(method, DeviceError("cudaErrorLaunchFailure", f"{method} by the test", sticky=sticky))


def test_a_tensor_lies_on_its_own_device() -> None:
    assert home_name(torch.empty(3)) == "cpu" and CpuMemory().holds(torch.empty(3))
    assert home_name(torch.empty(3, device="meta")) == "meta"
    assert not CpuMemory().holds(torch.empty(3, device="meta"))


def test_a_card_that_does_not_answer(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise DeviceError("cudaErrorUnknown", "by the test")

    monkeypatch.setattr(gpu, "devices", refuse)
    with pytest.raises(ConfigError, match=r"device='cuda:0'.*cudaErrorUnknown.*etha doctor"):
        agent_of(torch.device("cuda:0"))
    with pytest.raises(ConfigError, match=rf"cuda-{GPU0}.*cudaErrorUnknown.*etha doctor"):
        home_of(f"cuda-{GPU0}")
    monkeypatch.setattr(gpu, "holds", refuse)
    with pytest.raises(RegistrationError, match=r"cudaErrorUnknown.*etha doctor"):
        home_name(torch.empty(3))


@pytest.mark.parametrize("kind", [etha.TensorBusClient, etha.AsyncTensorBusClient])
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (RuntimeError("Found no NVIDIA driver.\nMore."), "Found no NVIDIA driver"),
    ],
)
def test_a_torch_without_a_gpu(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Any], error: Exception, why: str
) -> None:
    def refuse() -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    with pytest.raises(ConfigError, match=rf"device='cuda': torch .* has no GPU here \({why}.*etha doctor.*'cpu'"):
        kind(device="cuda")
    with pytest.raises(ConfigError, match=r"device='cuda:7' is not among the 2 GPUs .*etha doctor.*'cpu'"):
        kind(device="cuda:7")


def test_errors_of_a_card_are_ethas_own(gpu: FakeDriver) -> None:
    home = GpuMemory(gpu, GPU0)
    tensor = gpu.empty(GPU0, (4,))
    spoil(gpu, "extent")
    with pytest.raises(RegistrationError, match=rf"{GPU0}.*\(4,\).*cudaErrorLaunchFailure.*etha doctor"):
        home.describe(tensor)
    spoil(gpu, "backed")
    with pytest.raises(RegistrationError, match=GPU0):
        home.backed(tensor)
    for method in ("allocate", "tensor"):
        spoil(gpu, method)
        with pytest.raises(ConfigError, match=f"{GPU0}: 512 bytes for what is received or set aside"):
            home.stage([tensor], [True])
    spoil(gpu, "launch")
    with pytest.raises(TransferError, match=f"{GPU0}: nothing is set aside") as aside:
        home.copy([(tensor, tensor)], live=False)
    assert aside.value.outcome == "withdrawn" and not aside.value.torn
    spoil(gpu, "settle")
    with pytest.raises(TransferError, match="committed, but") as late:
        home.copy([(tensor, tensor)], live=True)
    assert late.value.outcome == "unknown" and late.value.torn
    spoil(gpu, "record")
    mark = home.mark()
    with pytest.raises(TransferError, match=GPU0):
        mark.check()
    mark = home.mark()
    spoil(gpu, "reached", sticky=True)
    with pytest.raises(TransferError, match="context is lost, start this process again"):
        home.reach(mark, threading.Event())
    gpu.forgive()
    mark.end()
    mark.end()
    home.close(released=True)


def test_a_mark_that_nobody_ends_ends_with_its_last_reference(gpu: FakeDriver) -> None:
    home = GpuMemory(gpu, GPU0)
    for _ in range(3):
        home.mark()
    assert gpu.calls["record"] == 3 and gpu.calls["event"] == 1
    home.close(released=True)
    assert home.mark().event == 0


def test_a_home_that_closes_leaves_a_copy_alone_that_still_runs(gpu: FakeDriver) -> None:
    home = GpuMemory(gpu, GPU0)
    tensor = gpu.empty(GPU0, (4,)).fill_(1)
    stage = home.stage([tensor], [True])
    stage.pull([tensor])
    tensor.fill_(0)
    go, entered = threading.Event(), threading.Event()

    def behind() -> None:
        entered.set()
        go.wait()

    stream = next(s for s in gpu._streams if s not in gpu._default.values())
    gpu.launch(GPU0, stream, behind)
    thread = threading.Thread(target=stage.pull, args=([tensor.fill_(5)],))
    thread.start()
    entered.wait()
    while gpu.calls["synchronize"] < 2:
        pass
    home.close(released=True)
    assert gpu.calls["drop_stream"] == 0
    go.set()
    thread.join()
    assert gpu.calls["drop_stream"] == 1 and gpu.calls["drop_event"] == 1
    stage.push([tensor.fill_(0)])  # a transfer was committed before the client closed
    assert (tensor == 5).all() and gpu.calls["drop_stream"] == 2


def test_events_of_an_agent_that_has_not_let_go_are_kept(gpu: FakeDriver) -> None:
    home = GpuMemory(gpu, GPU0)
    mark = home.mark()
    home.close(released=False)
    mark.end()
    assert gpu.calls["drop_event"] == 0
    gpu.drop_event(mark.event)


def test_a_lost_context_does_not_keep_a_client_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeDriver((GPU0,))
    home = GpuMemory(gpu, GPU0)
    tensor = gpu.empty(GPU0, (4,))
    stage = home.stage([tensor], [True])
    stage.pull([tensor])
    home.mark().end()
    del stage
    spoil(gpu, "drop_event", sticky=True)
    home.close(released=True)
    assert reaper.drain()
    assert caplog.text.count("cudaErrorLaunchFailure") == 3  # of memory, an event and a stream
    gpu.shut()


@pytest.mark.parametrize(("timeout", "given"), [(0.5, 5.0), (12.0, 12.0), (120.0, 120.0), (math.inf, 30.0)])
def test_an_agent_is_given_time_to_let_go(monkeypatch: pytest.MonkeyPatch, timeout: float, given: float) -> None:
    asked: list[Any] = []

    class Link:
        welcome = SimpleNamespace(device="cpu")

        def __init__(self) -> None:
            self.lost: asyncio.Future[AgentLostError] = asyncio.get_running_loop().create_future()

        async def request(self, message: Any, *, timeout: float) -> None:
            asked.append((type(message), timeout))
            raise AgentLostError("by the test")

        async def close(self) -> None:
            pass

    closed: list[bool] = []
    home = SimpleNamespace(lends=True, close=lambda *, released: closed.append(released))
    monkeypatch.setattr("etha.client.connection.home_of", lambda device, gpu: home)

    async def close() -> None:
        await AgentConnection(Link(), SimpleNamespace(close=lambda: None)).close(timeout)  # type: ignore[arg-type]

    asyncio.run(close())
    assert asked == [(LetGo, given)] and closed == [False]
