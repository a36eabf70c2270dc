"""Small models of every family of the installed transformers that has experts, made of its own configurations."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

#: What configurations are told wherever they know the name.
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "d_model": 32, "d_ff": 48, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "num_hidden_layers": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "depth": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "head_dim": 8, "vocab_size": 64, "num_experts": 4,
    "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "max_position_embeddings": 64, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "out_hidden_size": 32, "vision_hidden_size": 32, "projector_hidden_size": 32, "merged_hidden_size": 64,
    "image_size": 32, "patch_size": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
#: What a family must be told besides; by the name of the configuration's class.
ALSO: dict[str, dict[str, Any]] = {
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "Dots1Config": {"n_shared_experts": 1},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [16, 8], "head_dim": None, "hidden_size": 512},
    "Gemma4TextConfig": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "enable_moe_block": True,
                         "top_k_experts": 2},
    "Glm5NextTextConfig": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}  # fmt: skip
#: What cannot be made here, and why.
UNMADE = {
    "DbrxForCausalLM": "transformers 5.19 has no rope_theta in its own configuration of it",
    "InklingForConditionalGeneration": "needs scipy",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "transformers 5.19 misses a field in its own configuration of it",
    "Qwen3OmniMoeForConditionalGeneration": "has a talker, of which the same is true",
}


def kinds() -> list[str]:
    """module:class of each model with experts: those that generate, else the family's first."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    found = []
    for file in sorted(root.glob("*/modeling_*.py")):
        source = file.read_text()
        if not re.search(r"class \w*Experts\w*\(|gate_up_proj = nn\.Parameter", source):
            continue
        names = re.findall(r"^class (\w+For(?:CausalLM|ConditionalGeneration))\(", source, re.MULTILINE)
        names = [name for name in names if "PreTrained" not in name]
        names = names or re.findall(r"^class (\w+(?<!PreTrained)Model)\(", source, re.MULTILINE)[:1]
        found += [f"{file.parent.name}.{file.stem}:{name}" for name in names]
    return found


def make(kind: str) -> Any:
    """A model of random weights, in bfloat16."""
    import torch

    module, _, name = kind.partition(":")
    found = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    config = small(found.config_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in found(config).parameters())
    assert size < 30_000_000, f"{name} has {size} elements: SMALL lacks a size of it"
    torch.manual_seed(0)
    return found(config).to(torch.bfloat16)


def small(kind: Any) -> Any:
    """A configuration of class ``kind``, and of those in it."""
    known = set(inspect.signature(kind).parameters)
    reported = {key: value for key, value in SMALL.items() if key in known}
    reported |= ALSO.get(kind.__name__, {})
    if kind.sub_configs:
        usual = kind()
        reported |= {
            key: small(type(of)).to_dict() for key in kind.sub_configs if (of := getattr(usual, key, None)) is not None
        }
    return kind(**{key: value for key, value in reported.items() if value is not None})
