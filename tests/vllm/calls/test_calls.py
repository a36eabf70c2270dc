"""Calls of a trainer's engine in ways of a program's own: by threads, in a forked child, with other tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from etha.errors import ConfigError
from tests.vllm.fakes import Fake, digest

Env = dict[str, str]


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def fake(env: Env, logs: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """An engine without a model; this process is its trainer."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = Fake(env, logs / "fake.log")
    ends.callback(found.kill)
    return found


@contextmanager
def trainer(fake: Fake, weights: nn.Module | dict[str, torch.Tensor], **info: Any) -> Iterator[Any]:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from etha.integrations.vllm import EthaSource, EthaTrainerInitInfo

    reported = EthaTrainerInitInfo(**{"rank": 0, "world_size": 1, "timeout": 60.0, **info})
    client = HTTPVLLMWeightSyncClient(fake.url)
    engine: Any = WeightTransferTrainerFactory.trainer_init(reported, client=client, source=EthaSource(weights))
    try:
        yield engine
    finally:
        engine.shutdown()


def test_calls_of_several_threads_come_one_after_another(fake: Fake) -> None:
    with trainer(fake, {"w": torch.arange(1 << 16, dtype=torch.float32)}) as engine, ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(engine.send_weights, f"version {number}") for number in range(12)]
        calls += [threads.submit(engine.verify) for _ in range(4)]
        for call in calls:
            call.result()
        state = fake.state()
        assert sorted(state["versions"]) == sorted(f"version {number}" for number in range(12))
        assert not state["paused"]


def test_a_forked_child_is_told_and_ends(fake: Fake) -> None:
    with trainer(fake, {"w": torch.zeros(8)}) as engine:
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                engine.send_weights()
            except ConfigError:
                engine.shutdown()
                failed = 0
            finally:
                os._exit(failed)
        assert os.waitpid(child, 0)[1] == 0
        engine.send_weights("the parent's")
        assert fake.state()["version"] == "the parent's"


def test_parameters_that_others_took_the_place_of_are_sent(fake: Fake) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with trainer(fake, module) as engine:
        for number in range(3):
            other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            module.load_state_dict(other.state_dict(), assign=True)
            engine.send_weights(number)
            assert fake.state()["digest"] == digest(dict(other.state_dict()))
            engine.verify()


@pytest.mark.parametrize("change", ["new", "gone", "shape", "dtype"])
def test_other_tensors_than_the_engine_was_told_of_are_refused_by_name(fake: Fake, change: str) -> None:
    tensors = {"a": torch.zeros(8), "b": torch.ones(8)}
    with trainer(fake, tensors) as engine:
        engine.send_weights("before")
        if change == "gone":
            del tensors["b"]
        else:
            name = "c" if change == "new" else "b"
            tensors[name] = torch.ones(9 if change == "shape" else 8, dtype=torch.half if change == "dtype" else None)
        with pytest.raises(ConfigError, match=r"'[bc]' of the source is .* make another trainer engine"):
            engine.send_weights("after")
        assert fake.state()["version"] == "before"


@pytest.mark.parametrize(
    "info",
    [
        {"rank": None}, {"rank": -1}, {"timeout": 0}, {"timeout": float("inf")}, {"timeout": "5"}, {"lease": "x"},
        {"lease": float("inf")}, {"lease": -1.0}, {"adapter": "policy"},
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_meant_is_refused_by_name(info: dict[str, Any]) -> None:
    from etha.integrations.vllm import EthaSource, EthaTrainerInitInfo, EthaTrainerWeightTransferEngine

    reported = EthaTrainerInitInfo(**{"rank": 0, "world_size": 1, **info})
    (name,) = info
    client: Any = Client()
    with pytest.raises(ConfigError, match=f"^{name}="):
        EthaTrainerWeightTransferEngine.trainer_init(reported, client=client, source=EthaSource({"w": torch.zeros(2)}))


class Client:
    def start_weight_update(self) -> None:
        raise AssertionError("nobody is asked")


@pytest.mark.parametrize("client", ["http://127.0.0.1:1", ["http://127.0.0.1:1"], None])
def test_what_is_no_client_is_refused(client: Any) -> None:
    from etha.integrations.vllm import EthaSource, EthaTrainerInitInfo, EthaTrainerWeightTransferEngine

    reported = EthaTrainerInitInfo(rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"HTTPVLLMWeightSyncClient\(url\)"):
        EthaTrainerWeightTransferEngine.trainer_init(reported, client=client, source=EthaSource({"w": torch.zeros(2)}))


def test_a_source_without_tensors_is_refused() -> None:
    from etha.integrations.vllm import EthaSource, EthaTrainerInitInfo, EthaTrainerWeightTransferEngine

    reported = EthaTrainerInitInfo(rank=0, world_size=1)
    client: Any = Client()
    with pytest.raises(ConfigError, match="no tensors"):
        EthaTrainerWeightTransferEngine.trainer_init(reported, client=client, source=EthaSource({}))
