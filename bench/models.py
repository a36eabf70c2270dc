"""The tensors of five published models: (name, shape, kind), with ``{a..b}`` in a name for all layers alike.

A kind says how a parallelism cuts a tensor: "column" and "row" of tensor parallelism, "kv" for heads that may be
fewer than ranks, "up" and "down" for the experts stacked on dim 0, "whole" for what nobody cuts but FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Tensor = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a decoder; ``layers`` of them, the first ``dense`` with one MLP each, the others with experts."""

    hidden: int
    layers: int
    vocab: int
    ffn: int = 0
    kv: int = 0
    q: int = 0
    dense: int = 0
    experts: int = 0
    expert_ffn: int = 0
    shared: bool = False
    qk_norm: int = 0
    latent: tuple[int, int, int] | None = None  # rows of q_b and kv_b, columns of o

    def tensors(self, stages: Sequence[range] | None = None) -> Iterator[tuple[int, Tensor]]:
        """(stage, tensor); every layer is on one stage, embeddings on the first, norm and head on the last."""
        stages = stages or [range(self.layers)]
        yield 0, ("embed_tokens.weight", (self.vocab, self.hidden), "column")
        for stage, layers in enumerate(stages):
            yield from ((stage, t) for t in self._layers(layers))
        yield len(stages) - 1, ("norm.weight", (self.hidden,), "whole")
        yield len(stages) - 1, ("lm_head.weight", (self.vocab, self.hidden), "column")

    def _layers(self, layers: range) -> Iterator[Tensor]:
        dense = range(layers.start, min(layers.stop, self.dense if self.experts else self.layers))
        sparse = range(max(layers.start, dense.stop if dense else self.dense), layers.stop)
        for some, body in ((layers, self._attention), (dense, self._mlp), (sparse if self.experts else (), self._moe)):
            if some:
                for name, shape, kind in body():
                    yield f"layers.{{{some[0]}..{some[-1]}}}.{name}", shape, kind

    def _attention(self) -> Iterator[Tensor]:
        h, q = self.hidden, self.q or self.hidden
        yield "input_layernorm.weight", (h,), "whole"
        yield "post_attention_layernorm.weight", (h,), "whole"
        if self.latent is None:
            yield "self_attn.q_proj.weight", (q, h), "column"
            yield "self_attn.k_proj.weight", (self.kv, h), "kv"
            yield "self_attn.v_proj.weight", (self.kv, h), "kv"
            yield "self_attn.o_proj.weight", (h, q), "row"
            if self.qk_norm:
                yield "self_attn.q_norm.weight", (self.qk_norm,), "whole"
                yield "self_attn.k_norm.weight", (self.qk_norm,), "whole"
            return
        q_b, kv_b, o = self.latent
        yield "self_attn.q_a_proj.weight", (1536, h), "whole"
        yield "self_attn.q_a_layernorm.weight", (1536,), "whole"
        yield "self_attn.q_b_proj.weight", (q_b, 1536), "column"
        yield "self_attn.kv_a_proj_with_mqa.weight", (576, h), "whole"
        yield "self_attn.kv_a_layernorm.weight", (512,), "whole"
        yield "self_attn.kv_b_proj.weight", (kv_b, 512), "column"
        yield "self_attn.o_proj.weight", (h, o), "row"

    def _mlp(self) -> Iterator[Tensor]:
        yield from self._gated("mlp", self.ffn)

    def _gated(self, name: str, ffn: int) -> Iterator[Tensor]:
        yield f"{name}.gate_proj.weight", (ffn, self.hidden), "column"
        yield f"{name}.up_proj.weight", (ffn, self.hidden), "column"
        yield f"{name}.down_proj.weight", (self.hidden, ffn), "row"

    def _moe(self) -> Iterator[Tensor]:
        yield "mlp.gate.weight", (self.experts, self.hidden), "whole"
        if self.shared:
            yield "mlp.gate.e_score_correction_bias", (self.experts,), "whole"
            yield from self._gated("mlp.shared_experts", self.expert_ffn)
        yield "mlp.experts.gate_proj", (self.experts, self.expert_ffn, self.hidden), "up"
        yield "mlp.experts.up_proj", (self.experts, self.expert_ffn, self.hidden), "up"
        yield "mlp.experts.down_proj", (self.experts, self.hidden, self.expert_ffn), "down"


LLAMA_8B = Model(hidden=4096, layers=32, vocab=128256, ffn=14336, kv=1024)
LLAMA_70B = Model(hidden=8192, layers=80, vocab=128256, ffn=28672, kv=1024)
QWEN_30B = Model(hidden=2048, layers=48, vocab=151936, q=4096, kv=512, experts=128, expert_ffn=768, qk_norm=128)
DEEPSEEK_V3 = Model(
    hidden=7168, layers=61, vocab=129280, ffn=18432, dense=3, experts=256, expert_ffn=2048, shared=True,
    latent=(24576, 32768, 16384),
)  # fmt: skip
KIMI_K2 = Model(
    hidden=7168, layers=61, vocab=163840, ffn=18432, dense=1, experts=384, expert_ffn=2048, shared=True,
    latent=(12288, 16384, 8192),
)  # fmt: skip
