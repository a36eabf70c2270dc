"""Small models of random weights with a tokenizer, as directories that vLLM and transformers read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

#: Multiples of 128: two workers have equal halves, without padding.
VOCABULARY = 384


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights in a directory; ``tensors()`` by checkpoint name."""

    path: Path

    def tensors(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.path / "model.safetensors")


def make(kind: str, path: Path, *, seed: int, **changes: Any) -> Checkpoint:
    """A "qwen3", "llama" or "moe" of 2 layers in ``path``."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    path.mkdir(parents=True, exist_ok=True)
    _tokenizer(path)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind == "qwen3",
        **changes,
    }
    torch.manual_seed(seed)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are so small that every prompt has one answer
            parameter.add_(torch.randn_like(parameter) * 0.1) if parameter.ndim == 1 else parameter.mul_(4)
    model.save_pretrained(path)
    return Checkpoint(path)


def _tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog. "] * 20, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)
