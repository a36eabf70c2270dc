"""``etha publish`` in a process of its own: a fleet that starts without a trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate

import etha as library
from etha.publishing import Checkpointer
from tests.flow.commands.running import SECONDS, etha

SHAPES = {"w": (64, 33), "b": (7,)}


def options(names: Any = SHAPES) -> dict[str, Any]:
    """One rank has all."""
    return {
        "expected_world_size": 1,
        "rank": 0,
        "device_mesh": (1,),
        "placements": {name: [Replicate()] for name in names},
        "timeout": SECONDS,
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The tensors in ``tmp_path/model``, which two files hold."""
    directory = tmp_path / "model"
    directory.mkdir()
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors["w"] = tensors["w"].bfloat16()
    for name, tensor in tensors.items():
        save_file({name: tensor}, directory / f"{name}.safetensors", {"etha.version": '"base"'})
    return tensors


@contextmanager
def publishing(*words: str) -> Iterator[subprocess.Popen[str]]:
    """``etha publish WORDS``, whose lines can be read, until it ends with status 0."""
    command = [sys.executable, "-m", "etha", "publish", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
            out = process.communicate(timeout=SECONDS)[0]
        finally:
            process.kill()
    assert process.returncode == 0, out


def line(process: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_fleet_starts_from_a_directory_and_a_trainer_goes_on(
    runtime: Path, tmp_path: Path, checkpoint: dict[str, torch.Tensor]
) -> None:
    held = {name: library.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in checkpoint.items()}
    with library.TensorBusClient(timeout=SECONDS) as replica, library.TensorBusClient(timeout=SECONDS) as trainer:
        subscription = replica.subscribe("policy", held, subscriber="replica-7", **options())
        with publishing("policy", str(tmp_path / "model")) as process:
            said = line(process)
            assert said.startswith("published policy: 2 tensors of 4.25 kB from 2 files of"), said
            assert said.endswith("seq 1, version base")
            update = subscription.next()
            assert (update.seq, update.version, update.source) == (1, "base", "checkpoint")
            for name, tensor in checkpoint.items():
                assert torch.equal(held[name], tensor)
            assert line(process) == "replica-7 (1 rank) holds seq 1, from checkpoint"
            with pytest.raises(library.ConfigError, match="checkpoint publishes it already, and is alive"):
                trainer.publish("policy", checkpoint, **options())
            process.send_signal(signal.SIGINT)
            assert line(process) == "stopped: this host's agent keeps the version until somebody else holds it"
        with trainer.publish("policy", checkpoint, **options()) as publication:
            assert publication.put(5).seq == 2
            assert subscription.next().version == 5
            late = etha("publish", "policy", str(tmp_path / "model"))
            assert late.returncode == 1
            assert "trainer publishes it already, and is alive" in " ".join(late.stderr.split())


def test_it_leaves_once_enough_subscribers_have_received_it(
    runtime: Path, tmp_path: Path, checkpoint: dict[str, torch.Tensor]
) -> None:
    words = ("policy", str(tmp_path / "model"), "--until", "2", "--version", "12", "--publisher", "base")
    with publishing(*words) as process, library.TensorBusClient(timeout=SECONDS) as client:
        assert line(process).endswith("seq 1, version 12")
        clients = [client, library.TensorBusClient(timeout=SECONDS)]
        with clients[1]:
            for number, one in enumerate(clients):
                held = {name: library.empty(tensor.shape) for name, tensor in checkpoint.items()}
                subscription = one.subscribe("policy", held, subscriber=f"r{number}", **options())
                assert process.poll() is None
                assert subscription.next().version == 12
                assert torch.equal(held["w"], checkpoint["w"].float())
                assert line(process).startswith(f"r{number} (1 rank) holds seq 1, from ")
            assert line(process) == "2 subscribers or more have received it"
            assert process.wait(SECONDS) == 0


def test_the_agent_keeps_the_version_of_a_command_that_was_ended(
    runtime: Path, tmp_path: Path, checkpoint: dict[str, torch.Tensor]
) -> None:
    with publishing("policy", str(tmp_path / "model")) as process:
        line(process)
        for file in (tmp_path / "model").iterdir():
            file.unlink()
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in checkpoint.items()}
    with library.TensorBusClient(timeout=SECONDS) as replica:
        subscription = replica.subscribe("policy", held, subscriber="late", serve=False, **options())
        assert subscription.next().source == "checkpoint"
    for name, tensor in checkpoint.items():
        assert torch.equal(held[name], tensor)


def test_a_launch_that_takes_over_ends_the_command(
    runtime: Path, tmp_path: Path, checkpoint: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-m", "etha", "publish", "policy", str(tmp_path / "model"), "--publisher", "trainer"]
    env = {**os.environ, "ETHA_LAUNCH_ID": "first"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        try:
            line(process)
            monkeypatch.setenv("ETHA_LAUNCH_ID", "second")
            with library.TensorBusClient(timeout=SECONDS) as trainer:
                with trainer.publish("policy", checkpoint, **options()):
                    said = process.communicate(timeout=SECONDS)[0]
        finally:
            process.kill()
    assert process.returncode == 1
    assert "peer_lost" in said and "another one publishes it now" in " ".join(said.split())


def test_a_directory_that_cannot_be_published_starts_no_agent(runtime: Path, tmp_path: Path) -> None:
    shown = etha("publish", "policy", str(tmp_path / "nowhere"))
    assert shown.returncode == 1
    assert "config: " in shown.stderr and "nowhere is not there" in " ".join(shown.stderr.split())
    assert not list(runtime.rglob("*.sock"))


def test_what_a_checkpointer_wrote_starts_another_fleet(
    runtime: Path, tmp_path: Path, checkpoint: dict[str, torch.Tensor]
) -> None:
    with (
        library.TensorBusClient(timeout=SECONDS) as trainer,
        library.TensorBusClient(timeout=SECONDS) as client,
        trainer.publish("policy", checkpoint, **options()) as publication,
        Checkpointer(client, "policy", tmp_path / "run", rank=0) as checkpointer,
    ):
        publication.put("step-7")
        assert checkpointer.next().path == tmp_path / "run" / "seq-00000001"
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in checkpoint.items()}
    with (
        publishing("again", str(tmp_path / "run" / "latest"), "--until", "1") as process,
        library.TensorBusClient(timeout=SECONDS) as replica,
        replica.subscribe("again", held, subscriber="replica", serve=False, **options()) as subscription,
    ):
        assert line(process).endswith("seq 1, version step-7")
        assert subscription.next().version == "step-7"
        process.wait(SECONDS)
    for name, tensor in checkpoint.items():
        assert torch.equal(held[name], tensor)
