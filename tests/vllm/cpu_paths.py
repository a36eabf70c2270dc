"""Which of the CPU's instruction sets vLLM and oneDNN use: they pack weights in other ways on each.

`make test-vllm CPU=avx2` runs the tests on one that is not this machine's best. No setting of vLLM's does that: it asks
torch while it is imported, so a path is chosen once, in the process that all others are forked from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "ETHA_TEST_CPU"
#: By name: what a CPU must have, what is hidden of what it has, and oneDNN's own limit.
PATHS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "amx": ("amx_tile", (), "AVX512_CORE_AMX"),
    "avx512_bf16": ("avx512_bf16", ("amx",), "AVX512_CORE_BF16"),
    "avx512": ("avx512_f", ("amx", "avx512_bf16", "avx512_fp16"), "AVX512_CORE"),
    "avx2": ("avx2", ("amx", "avx512", "avx10"), "AVX2"),
}


def missing() -> str | None:
    """Why the path that was asked for cannot be taken on this machine; None where it can, or none was."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return None
    if wanted not in PATHS:
        raise ValueError(f"{VARIABLE}={wanted!r}: one of {', '.join(PATHS)}")
    import torch

    needed = PATHS[wanted][0]
    return None if torch.cpu.get_capabilities().get(needed) else f"this CPU has no {needed}, which {wanted!r} needs"


def bfloat16() -> bool:
    """Whether the path, or the CPU where none was asked for, has products of bfloat16."""
    import torch

    return os.environ.get(VARIABLE) not in ("avx2", "avx512") and torch.cpu.get_capabilities().get("avx512_bf16", False)


def packs() -> bool:
    """Whether vLLM keeps a packed copy of bfloat16 weights, and computes with it: oneDNN does not on AVX2."""
    import torch

    return os.environ.get(VARIABLE) != "avx2" and torch.cpu.get_capabilities().get("avx512_f", False)


def take() -> None:
    """Hide from vLLM and oneDNN what the path does not have; before either is imported."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    _, hidden, limit = PATHS[wanted]
    os.environ["ONEDNN_MAX_CPU_ISA"] = limit
    import torch

    found: Mapping[str, Any] = torch.cpu.get_capabilities()
    less = {name: has and not name.startswith(hidden) if hidden else has for name, has in found.items()}
    torch.cpu.get_capabilities = lambda: less
