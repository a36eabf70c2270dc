"""Fifteen pairs of layouts as trainers and engines have them: python bench/pairs.py writes bench/layouts/*.json

Two files a pair, for ``etha plan``: bench/layouts/NN-source.json and NN-target.json. bf16, eight ranks a host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from models import DEEPSEEK_V3, KIMI_K2, LLAMA_8B, LLAMA_70B, QWEN_30B, Model

LAYOUTS = Path(__file__).parent / "layouts"
RANKS_PER_HOST = 8
KINDS = ("column", "row", "kv", "up", "down", "whole")

#: (mesh shape, placements) of a kind.
Cut = tuple[tuple[int, ...], list[str]]
Parallel = Callable[[str], Cut]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One line of the table; ``stages`` cut the source's layers, each stage on ranks of its own."""

    number: int
    title: str
    model: Model
    source: Parallel
    target: Parallel
    stages: int = 1
    same_ranks: bool = False


def everywhere(mesh: tuple[int, ...], *placements: str) -> Parallel:
    return lambda kind: (mesh, list(placements))


def tensor_parallel(kind: str) -> str:
    return {"column": "S(0)", "kv": "S(0)", "row": "S(1)", "up": "S(1)", "down": "S(2)", "whole": "R"}[kind]


def tp(size: int, copies: int) -> Parallel:
    return lambda kind: ((copies, size), ["R", tensor_parallel(kind)])


def tp_few_heads(size: int, copies: int, heads: int) -> Parallel:
    """Tensor parallelism over more ranks than there are KV heads: neighbours hold the same one."""

    def cut(kind: str) -> Cut:
        way = tensor_parallel(kind)
        return (copies, heads, size // heads), ["R", way, "R" if kind == "kv" else way]

    return cut


def fsdp_tp(fsdp: int, size: int) -> Parallel:
    def cut(kind: str) -> Cut:
        way = tensor_parallel(kind)
        return (fsdp, size), [f"_S(0, {size})" if way == "S(0)" else "S(0)", way]

    return cut


def fsdp_ep(fsdp: int, ep: int) -> Parallel:
    """Experts over ``ep``, each part over ``fsdp``; everything else over all ranks."""
    return lambda kind: ((fsdp, ep), [f"_S(0, {ep})", "S(0)"]) if kind in ("up", "down") else ((fsdp * ep,), ["S(0)"])


def replicated_ep(copies: int, ep: int) -> Parallel:
    """Megatron's: experts over ``ep``, ``copies`` of them; everything else on all ranks whole."""
    return lambda kind: ((copies, ep), ["R", "S(0)"]) if kind in ("up", "down") else ((copies * ep,), ["R"])


def ep_and_tp(ranks: int, ep: int, size: int) -> Parallel:
    """Experts over ``ep`` whole, the rest over ``size`` by tensor parallelism, as often as ``ranks`` has room."""
    return lambda kind: ((ranks // ep, ep), ["R", "S(0)"]) if kind in ("up", "down") else tp(size, ranks // size)(kind)


def fsdp_tp_ep(fsdp: int, size: int, ep: int) -> Parallel:
    def cut(kind: str) -> Cut:
        way = tensor_parallel(kind)
        if kind in ("up", "down"):
            return (fsdp, size, ep), [f"_S(0, {ep})", way, "S(0)"]
        return (fsdp, size, ep), [f"_S(0, {size})" if way == "S(0)" else "S(0)", way, "S(0)"]

    return cut


PAIRS = [
    Pair(number=1, title="8B, FSDP16 -> TP2 x 4", model=LLAMA_8B, source=everywhere((16,), "S(0)"), target=tp(2, 4)),
    Pair(number=2, title="8B, HSDP 2x8 -> 8 full replicas", model=LLAMA_8B, source=everywhere((2, 8), "R", "S(0)"),
         target=everywhere((8,), "R")),
    Pair(number=3, title="70B, FSDP8 x TP8 -> TP8 x 8", model=LLAMA_70B, source=fsdp_tp(8, 8), target=tp(8, 8)),
    Pair(number=4, title="70B, FSDP128 -> TP16 x 4, 8 KV heads", model=LLAMA_70B, source=everywhere((128,), "S(0)"),
         target=tp_few_heads(16, 4, 8)),
    Pair(number=5, title="70B, PP4 x DP2 x TP8 -> TP8 x 4", model=LLAMA_70B, source=tp(8, 2),
         target=tp(8, 4), stages=4),
    Pair(number=6, title="30B-A3B, FSDP32 -> TP4 x 8", model=QWEN_30B, source=everywhere((32,), "S(0)"),
         target=tp(4, 8)),
    Pair(number=7, title="30B-A3B, FSDP4 x EP8 -> EP8, DP, x 4", model=QWEN_30B, source=fsdp_ep(4, 8),
         target=replicated_ep(4, 8)),
    Pair(number=8, title="V3, PP16 x EDP2 x EP64 -> EP128, TP4, x 4", model=DEEPSEEK_V3, source=replicated_ep(2, 64),
         target=ep_and_tp(512, 128, 4), stages=16),
    Pair(number=9, title="V3, FSDP16 x EP64 -> TP16 x 16", model=DEEPSEEK_V3, source=fsdp_ep(16, 64),
         target=tp(16, 16)),
    Pair(number=10, title="K2, FSDP8 x EP32 -> EP16, TP8, x 16", model=KIMI_K2, source=fsdp_ep(8, 32),
         target=ep_and_tp(256, 16, 8)),
    Pair(number=11, title="8B, FSDP24 -> TP6 x 4, uneven", model=LLAMA_8B, source=everywhere((24,), "S(0)"),
         target=tp(6, 4)),
    Pair(number=12, title="V3, FSDP8 x TP16 x EP8 -> TP8 x 128", model=DEEPSEEK_V3, source=fsdp_tp_ep(8, 16, 8),
         target=tp(8, 128)),
    Pair(number=13, title="70B, FSDP64 -> TP8 x 8, same ranks", model=LLAMA_70B, source=everywhere((64,), "S(0)"),
         target=tp(8, 8), same_ranks=True),
    Pair(number=14, title="8B, FSDP8 -> 256 full replicas", model=LLAMA_8B, source=everywhere((8,), "S(0)"),
         target=everywhere((256,), "R")),
    Pair(number=15, title="8B, Partial 4 x FSDP8 -> TP8 x 4", model=LLAMA_8B,
         source=everywhere((4, 8), "P(sum)", "S(0)"), target=tp(8, 4)),
]  # fmt: skip


def stages_of(layers: int, count: int) -> list[range]:
    """Layers of each pipeline stage, sizes one apart at most, larger ones first."""
    bounds = [sum((layers + count - 1 - i) // count for i in range(stage)) for stage in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def side(model: Model, parallel: Parallel, name: str, stages: int = 1) -> dict[str, Any]:
    """One side as ``etha plan`` reads it."""
    layouts: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for stage, (tensor, shape, kind) in model.tensors(stages_of(model.layers, stages)):
        mesh, placements = parallel(kind)
        ranks = 1
        for size in mesh:
            ranks *= size
        of_stage = f"{kind}.{stage}" if stages > 1 else kind
        where: Any = {"shape": list(mesh), "first": stage * ranks} if stages > 1 else list(mesh)
        layouts[of_stage] = {"mesh": where, "placements": placements}
        tensors[tensor] = {"shape": list(shape), "dtype": "bfloat16", "layout": of_stage}
    return {"hosts": {"name": f"{name}-{{}}", "ranks": RANKS_PER_HOST}, "layouts": layouts, "tensors": tensors}


def sides(pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both files of a pair."""
    names = ("node", "node") if pair.same_ranks else ("train", "infer")
    both = side(pair.model, pair.source, names[0], pair.stages), side(pair.model, pair.target, names[1])
    for one in both if pair.same_ranks else ():
        one["agents"] = {"name": "gpu-{}", "ranks": 1}
    return both


def paths(pair: Pair) -> tuple[Path, Path]:
    return LAYOUTS / f"{pair.number:02}-source.json", LAYOUTS / f"{pair.number:02}-target.json"


def text(side: dict[str, Any]) -> str:
    """JSON with one line for each layout and tensor."""
    parts = []
    for key, value in side.items():
        if key in ("layouts", "tensors"):
            lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items())
            parts.append(f"  {json.dumps(key)}: {{\n{lines}\n  }}")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    LAYOUTS.mkdir(exist_ok=True)
    for pair in PAIRS:
        for path, one in zip(paths(pair), sides(pair), strict=True):
            path.write_text(text(one), encoding="utf-8")


if __name__ == "__main__":
    main()
