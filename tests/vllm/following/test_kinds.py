"""Engines of other kinds that follow: with quantized layers, filled in another way, and with the modules of LoRA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.vllm.checkpoints import quantize
from tests.vllm.engines import Server
from tests.vllm.publishers import Publisher

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]


def follows(models: list[Path], fresh: Fresh, env: Env, logs: Path, *options: str) -> None:
    """An engine starts with the first of ``models``, takes the second and the first again."""
    right = [fresh(model, 1)[0] for model in models]
    assert right[0] != right[1]
    publisher = Publisher(models[0], env, logs / "publisher.log", name="kinds")
    try:
        publisher.put(models[0], "one")
        server = Server(models[0], 1, env, logs / "server.log", follows={"publication": "kinds"}, options=options)
        try:
            assert server.wait().version() == "one"
            assert server.answers() == right[0]
            for version, number in (("two", 1), ("three", 0)):
                publisher.put(models[number], version)
                server.until_version(version)
                assert server.answers() == right[number]
        finally:
            server.kill()
    finally:
        publisher.kill()


def test_quantized_layers(checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path, room: Path) -> None:
    models = [
        quantize(checkpoints("qwen3", seed), room / f"following-int8-{seed}", "int8-channel").path for seed in (0, 1)
    ]
    follows(models, fresh, env, logs)


def test_an_engine_with_lora(checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path) -> None:
    """Its modules are wrapped after the model was loaded, so the loaders are recorded again."""
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    follows(models, fresh, env, logs, "--enable-lora", "--max-lora-rank", "8")
