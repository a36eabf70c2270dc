"""An engine that gives the memory of its weights away between updates: the next version comes in right.

vLLM has no sleep mode on a CPU: its worker is given one here that moves every parameter, or throws it away.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from etha import TransferError
from tests.vllm.engines import Server
from tests.vllm.replicas import Replica, different, reference
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
#: Through loaders; written after all has come; written as it comes.
WAYS: tuple[dict[str, bool], ...] = ({}, {"direct": True}, {"direct": True, "atomic": False})


def moving() -> None:
    """A worker that sleeps: level 1 keeps its parameters elsewhere, level 2 nothing; it wakes up in other memory."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self: Any, level: int = 1) -> None:
        self.asleep = {}
        for name, parameter in self.model_runner.get_model().named_parameters():
            held = parameter.data
            self.asleep[name] = held.clone() if level == 1 else torch.full_like(held, 7)
            parameter.data = held.new_empty(0)

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        if tags is not None and "weights" not in tags:
            return
        for name, parameter in self.model_runner.get_model().named_parameters():
            parameter.data = self.asleep.pop(name)

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def test_the_version_after_a_sleep_is_right(checkpoints: Checkpoints, env: Env, logs: Path) -> None:
    models = [checkpoints("llama", seed) for seed in (0, 1)]
    due = [reference(model, env, logs / f"{model.name}.log", workers=2) for model in models]
    with Replica(models[0], env, logs / "live.log", workers=2, before=moving) as live:

        def check(version: int) -> None:
            live.send(models[version])
            live.wake_up("kv_cache")
            assert different(live.logits(), due[version]) is None, (way, version)

        for way in WAYS:
            reports = live.join(models[0], **way)
            assert bool(way) == any(report["direct"] for report in reports)
            check(1)
            live.sleep(1)
            with pytest.raises(Exception, match="the engine sleeps, and its weights are not there"):
                live.send(models[0])
            live.wake_up("weights")
            check(0)
            live.sleep(2)
            live.wake_up("weights")
            check(1)
            check(0)
            if way.get("atomic", True):
                live.verify()
        live.sleep(1)
        with pytest.raises(Exception, match="the engine sleeps, and its weights are not there"):
            live.join(models[1])


def test_a_trainer_that_moved_its_weights_sends_them_from_where_they_are(
    checkpoints: Checkpoints, env: Env, logs: Path
) -> None:
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    due = [reference(model, env, logs / f"{model.name}.log") for model in models]
    with Replica(models[0], env, logs / "live.log") as live:
        for info in ({}, {"module": "bf16"}, {"module": "fsdp2"}):
            live.join(models[0], **info)
            for version in (1, 0, 1):
                live.send(models[version])
                assert different(live.logits(), due[version]) is None, (info, version)
                live.move()
            live.verify()


def test_an_engine_that_is_half_awake_takes_a_version_and_answers_when_it_is_awake(
    checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path
) -> None:
    """Its trainer pauses and resumes it, and its caches are still asleep."""
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    server = Server(models[0], 1, env, logs / "server.log")
    trainer = Trainer((), models[0], server.url, env, logs)

    def ask(route: str) -> None:
        requests.post(f"{server.url}/{route}", timeout=60).raise_for_status()

    try:
        server.wait()
        trainer.join()
        trainer.send(models[0])
        ask("sleep?level=1")
        with pytest.raises(TransferError, match="the engine sleeps, and its weights are not there"):
            trainer.send(models[1])
        ask("wake_up?tags=weights")
        trainer.send(models[1], "awake")
        assert requests.get(f"{server.url}/is_paused", timeout=60).json()["is_paused"], "nothing may be computed yet"
        ask("wake_up")
        assert (server.version(), server.answers()) == ("awake", fresh(models[1], 1)[0])
    finally:
        trainer.end()
        server.kill()
