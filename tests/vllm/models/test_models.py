"""What the engine computes with after an update, in models that make something else of it than others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from etha.errors import TransferError
from tests.vllm import cpu_paths
from tests.vllm.replicas import Replica, different, reference, settle_nothing

Checkpoints = Callable[[str, int], Path]
Env = dict[str, str]


def test_a_tensor_that_the_first_rank_copies_and_the_second_computes_with(
    checkpoints: Checkpoints, env: Env, logs: Path
) -> None:
    """GPT-OSS on two workers, whose second sets a bias to zero; the trainer's float32 is not what the first keeps."""
    model = checkpoints("gpt-oss", 1)
    fresh = reference(model, env, logs / "fresh.log", workers=2)
    with Replica(model, env, logs / "live.log", workers=2, dummy=True) as live:
        live.join(model, dtype=torch.float32)
        live.send(model)
        wrong = different(live.logits(), fresh)
        assert wrong is None, wrong


def test_verify_finds_what_a_checksum_of_parameters_cannot(checkpoints: Checkpoints, env: Env, logs: Path) -> None:
    """A tied head is a packed copy beside the parameter: without its repair the engine computes with the old one."""
    versions = [checkpoints("qwen2", seed) for seed in (0, 1)]
    fresh = reference(versions[1], env, logs / "fresh.log", workers=2)
    with Replica(versions[0], env, logs / "live.log", workers=2, dummy=True) as live:
        live.join(versions[0])
        live.send(versions[0])
        live.verify()
        live.run(settle_nothing)
        live.send(versions[1])
        assert (different(live.logits(), fresh) is None) is not cpu_paths.packs()
        if not cpu_paths.packs():
            live.verify()
            return
        with pytest.raises(TransferError, match=r"1 of \d+ parameters are not the trainer's: lm_head\.weight: \d+ of"):
            live.verify()
        before = live.logits()
        with pytest.raises(TransferError, match=r"lm_head\.weight"):
            live.verify()
        assert different(live.logits(), before) is None, "verify changes nothing"
