"""Quantized engines: versions brought in live compute the logits of fresh engines that loaded them from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm import cpu_paths
from tests.vllm.checkpoints import BLOCKS, Checkpoint, make, quantize
from tests.vllm.engines import Server
from tests.vllm.replicas import Replica, compared, different, reference
from tests.vllm.trainers import Trainer

Env = dict[str, str]
NO_BLOCKS = "vLLM's kernel for blocks of float8 needs AVX512-BF16 or AMX"
LIVE = ("int8-channel", "int8-channel-zero-point", "int8-tensor", "fp8-channel", "fp8-block")


def serialized(room: Path, how: str) -> list[Path]:
    """Two versions of a model, and each of them quantized."""
    found = []
    for seed in (0, 1):
        # vLLM's kernel for blocks takes no bias on a CPU.
        plain = make("qwen3" if how == "fp8-block" else "qwen2", room / f"plain{seed}", seed=seed, **BLOCKS).path
        found.append(quantize(plain, room / f"{how}{seed}", how).path)
    return found


def kernels(patch: pytest.MonkeyPatch | None = None) -> None:
    """Let vLLM take kernels that it has on this CPU, though they ask for another.

    That for blocks of float8 asks for AMX, and computes without it, too, where a CPU has AVX512-BF16. A tensor's one
    scale is applied by a kernel that vLLM does not have on CPUs.
    """
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    def scaled_fp8_quant(input: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    patch = patch or pytest.MonkeyPatch()
    patch.setattr(CPUFp8BlockScaledMMKernel, "is_supported", classmethod(lambda *_: (True, None)))
    patch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)


def brought_in(how: str, versions: list[Path], env: Env, logs: Path, **options: Any) -> None:
    """Bring in both versions, and the first again."""
    if "block" in how and not cpu_paths.bfloat16():
        pytest.skip(NO_BLOCKS)
    options["before"] = kernels
    fresh = [reference(version, env, logs / f"fresh{n}.log", **options) for n, version in enumerate(versions)]
    assert different(*fresh) is not None, "versions that differ"
    with Replica(versions[0], env, logs / "live.log", dummy=True, **options) as live:
        live.join(versions[0])
        for number in (0, 1, 0):
            live.send(versions[number])
            wrong = different(live.logits(), fresh[number])
            assert wrong is None, f"{how}, version {number}: {wrong}"
            for count, differs, left_out in live.run(compared):
                assert count and not differs and not left_out, f"{how}, version {number}: {differs}"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", LIVE)
def test_versions_of_a_quantized_checkpoint(how: str, workers: int, env: Env, logs: Path) -> None:
    """Tensors of 8 bits and their scales."""
    brought_in(how, serialized(logs, how), env, logs, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
def test_versions_of_an_engine_that_quantizes_what_it_loads(how: str, workers: int, env: Env, logs: Path) -> None:
    versions = [make("qwen3", logs / f"plain{seed}", seed=seed, **BLOCKS).path for seed in (0, 1)]
    brought_in(how, versions, env, logs, workers=workers, quantization=how)


def test_a_sharded_trainer_that_quantizes(env: Env, logs: Path) -> None:
    """FSDP2 over two ranks, in float32: each quantizes its rows of each weight, and the engine has two workers."""
    versions = [make("qwen3", logs / f"plain{seed}", seed=seed).path for seed in (0, 1)]
    served = [quantize(plain, logs / f"int8{seed}", "int8-channel").path for seed, plain in enumerate(versions)]
    fresh = [reference(version, env, logs / f"fresh{n}.log", workers=2) for n, version in enumerate(served)]
    server = Server(served[0], 2, env, logs / "server.log", raw_logits=True).wait()
    trainer = Trainer((2,), versions[0], server.url, env, logs, quantizes=True)
    try:
        trainer.join()
        for number in (0, 1, 0):
            trainer.send(versions[number])
            wrong = different(server.logits(), fresh[number])
            assert wrong is None, f"version {number}: {wrong}"
        trainer._all("verify")
        # A weight of 8 bits is received as such, and each worker receives what it keeps.
        sizes = {rank: (kept, of) for rank, kept, of in server.received()}
        whole = sum(tensor.nbytes for tensor in Checkpoint(served[0]).tensors().values())
        assert sorted(sizes) == [0, 1] and all(kept < 0.6 * of for kept, of in sizes.values())
        assert all(of <= 1.01 * whole for _, of in sizes.values())
    finally:
        trainer.end()
        server.kill()
