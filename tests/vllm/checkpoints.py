"""Small models of random weights with a tokenizer, as directories that vLLM and transformers read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

#: Multiples of 128: two workers have equal halves, without padding.
VOCABULARY = 384


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights in a directory, a model's or an adapter's; ``tensors()`` by checkpoint name."""

    path: Path

    def tensors(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        adapter = self.path / "adapter_model.safetensors"
        return load_file(adapter if adapter.exists() else self.path / "model.safetensors")


#: One weight of each model is above 1 MiB: vLLM packs smaller ones in another way where a CPU has AMX.
LARGE = 4224


@dataclass(frozen=True, slots=True)
class Family:
    """``config``: transformers' class; ``vllm``: the class that vLLM computes it with.

    ``own``: what is not as in SIZES, by the configuration's names; None: it knows no such thing. ``tied``: whether its
    head is its embeddings, in each model that is tried; the first is that of a model which is made without a word.
    ``refused``: kind of trainer -> what the refusal says. ``uncompared``: parameters that verify() cannot compare, by
    the last two parts of their names. ``dummy``: whether the engine starts with weights of its own, else with a
    checkpoint's.
    """

    config: str
    vllm: str
    own: dict[str, Any] = field(default_factory=dict)
    tied: tuple[bool, ...] = (True, False)
    workers: tuple[int, ...] = (1, 2)
    refused: dict[str, str] = field(default_factory=dict)
    uncompared: frozenset[str] = frozenset()
    dummy: bool = True


BOTH, TIED, UNTIED = (False, True), (True,), (False,)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
#: With a share of experts that every token is sent to, and a first layer without any.
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
#: Latent attention, of the sizes that vLLM has on a CPU.
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
}
FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", tied=BOTH),
    "moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "decoder_sparse_step": 1},
        tied=BOTH,
    ),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", {"intermediate_size": LARGE}),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_inner": LARGE, "n_positions": 256},
    ),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": LARGE, "word_embed_proj_dim": 128, "do_layer_norm_before": True},
    ),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", {"intermediate_size": LARGE, "sliding_window": 64}),
    # An engine cannot load an untied one: vLLM looks for its head below "transformer".
    "bloom": Family("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}, tied=TIED),
    "falcon": Family(
        "FalconConfig",
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": LARGE, "head_dim": None},
    ),
    "granitemoe": Family(
        "GraniteMoeConfig", "GraniteMoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "starcoder2": Family("Starcoder2Config", "TransformersForCausalLM", {"intermediate_size": LARGE}),
    "mixtral": Family(
        "MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}, tied=UNTIED
    ),
    "deepseek2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**ROUTED, **LATENT, "q_lora_rank": None},
        tied=UNTIED,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "intermediate_size": 128},
        tied=UNTIED,
        uncompared=frozenset(f"routed_experts.{of}" for of in ("w13_weight", "w13_bias", "w2_weight", "w2_bias")),
    ),
    "mamba2": Family(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2},
        tied=BOTH,
    ),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", {"intermediate_size": LARGE}, tied=BOTH),
    "glm4": Family("Glm4Config", "Glm4ForCausalLM", {"intermediate_size": LARGE}, tied=BOTH),
    "stablelm": Family("StableLmConfig", "StablelmForCausalLM", {"intermediate_size": LARGE}, tied=BOTH),
    "cohere": Family("CohereConfig", "CohereForCausalLM", {"use_qk_norm": True, "intermediate_size": LARGE}, tied=TIED),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 64, "query_pre_attn_scalar": 32, "intermediate_size": LARGE},
        tied=TIED,
    ),
    "gptj": Family(
        "GPTJConfig",
        "GPTJForCausalLM",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_inner": LARGE, "n_positions": 256, "rotary_dim": 16},
        tied=UNTIED,
    ),
    "gpt-neox": Family(
        "GPTNeoXConfig", "TransformersForCausalLM", {"intermediate_size": LARGE, "rotary_pct": 0.5}, tied=BOTH
    ),
    "phi": Family(
        "PhiConfig",
        "TransformersForCausalLM",
        {"intermediate_size": LARGE, "partial_rotary_factor": 0.5},
        tied=UNTIED,
        dummy=False,
    ),
    "apertus": Family("ApertusConfig", "ApertusForCausalLM", {"intermediate_size": LARGE}, tied=UNTIED),
    "qwen2-moe": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
        tied=UNTIED,
    ),
    "olmoe": Family("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}, tied=UNTIED),
    "flex-olmo": Family(
        "FlexOlmoConfig", "TransformersMoEForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}, tied=UNTIED
    ),
    "ernie-moe": Family(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "glm4-moe": Family("Glm4MoeConfig", "Glm4MoeForCausalLM", {**ROUTED, "use_qk_norm": True}, tied=UNTIED),
    "deepseek3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**ROUTED, **LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc"},
        tied=UNTIED,
    ),
    "llama4": Family(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 1,
        },
        tied=UNTIED,
    ),
    "minicpm3": Family(
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        {**LATENT, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
        tied=TIED,
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 0,
            "laurel_rank": 16,
            "altup_num_inputs": 2,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.0, 0.0],
            "intermediate_size": [256, 256],
        },
        tied=TIED,
    ),
    "gemma4": Family(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
        },
        tied=TIED,
    ),
    "falcon-h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16},
        tied=UNTIED,
    ),
    "nemotron-h": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
        },
        tied=UNTIED,
    ),
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


def make(kind: str, path: Path, *, seed: int, **changes: Any) -> Checkpoint:
    """One of FAMILIES, of 2 layers, in ``path``."""
    import transformers

    path.mkdir(parents=True, exist_ok=True)
    _tokenizer(path)
    family = FAMILIES[kind]
    ids = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    wanted = {**SIZES, **ids, "tie_word_embeddings": family.tied[0], **family.own, **changes}
    config = getattr(transformers, family.config)(**{key: value for key, value in wanted.items() if value is not None})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are so small that every prompt has one answer
            parameter.add_(torch.randn_like(parameter) * 0.1) if parameter.ndim == 1 else parameter.mul_(4)
    model.save_pretrained(path)
    return Checkpoint(path)


#: Of a model whose projections are of whole blocks, for two workers, too.
BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
BLOCK = 128


#: Of a projection's weight, its tensors by the last part of their names.
Quantize = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def _int8_channel(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = (weight.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
    return {"weight": (weight.float() / scale).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}


def _int8_tensor(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().amax() / 127
    return {
        "weight": (weight.float() / scale).round().clamp(-128, 127).to(torch.int8),
        "weight_scale": scale.reshape(1),
    }


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _fp8_channel(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().amax(-1, keepdim=True) / 448
    return {"weight": _fp8(weight, scale), "weight_scale": scale}


def _fp8_tensor(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().amax() / 448
    return {"weight": _fp8(weight, scale), "weight_scale": scale}


def _fp8_block(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    scale = weight.float().abs().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).amax((1, 3)) / 448
    each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {"weight": _fp8(weight, each), "weight_scale_inv": scale}


def _static(of: Quantize, **leaves: torch.Tensor) -> Quantize:
    """The same with what is known of what comes in."""
    return lambda weight: {**of(weight), **{leaf: tensor.clone() for leaf, tensor in leaves.items()}}


def _compressed(kind: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """As compressed-tensors writes it into config.json."""
    common = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, **weights},
                "input_activations": {**common, "strategy": "token", "dynamic": True, **inputs},
            }
        },
        "ignore": ["lm_head"],
    }


_SCALE = torch.tensor([0.05], dtype=torch.float32)
#: What becomes of a projection's weight, and what config.json says of it.
QUANTIZED: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "int8-channel": (_int8_channel, _compressed("int", {"strategy": "channel"}, {})),
    "int8-channel-zero-point": (_int8_channel, _compressed("int", {"strategy": "channel"}, {"symmetric": False})),
    "int8-tensor": (_int8_tensor, _compressed("int", {"strategy": "tensor"}, {})),
    "int8-static": (
        _static(_int8_channel, input_scale=_SCALE),
        _compressed("int", {"strategy": "channel"}, {"strategy": "tensor", "dynamic": False}),
    ),
    "int8-static-zero-point": (
        _static(_int8_channel, input_scale=_SCALE, input_zero_point=torch.tensor([7], dtype=torch.int8)),
        _compressed("int", {"strategy": "channel"}, {"strategy": "tensor", "dynamic": False, "symmetric": False}),
    ),
    "fp8-channel": (_fp8_channel, _compressed("float", {"strategy": "channel"}, {})),
    "fp8-tensor": (_fp8_tensor, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-static": (
        _static(_fp8_tensor, input_scale=_SCALE.reshape(())),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8-block": (
        _fp8_block,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    ),
}


def quantize(source: Path, path: Path, how: str) -> Checkpoint:
    """The model of ``source`` with its projections quantized as QUANTIZED says, in ``path``."""
    from safetensors.torch import save_file

    shutil.copytree(source, path)
    of, said = QUANTIZED[how]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in Checkpoint(source).tensors().items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            found.update({stem + leaf: made.contiguous() for leaf, made in of(tensor).items()})
        else:
            found[name] = tensor
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": said}))
    return Checkpoint(path)


#: Modules of a layer that adapters are made for: of the fused qkv a part, of the fused gate and up all, and others.
TARGETS: dict[str, tuple[int, int]] = {
    "self_attn.q_proj": (128, 128),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (128, 256),
    "mlp.up_proj": (128, 256),
    "mlp.down_proj": (256, 128),
}


def make_adapter(path: Path, *, seed: int, rank: int = 8, alpha: int = 16) -> Checkpoint:
    """A LoRA adapter for the models of SIZES, in float32 and as peft saves it."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, (inner, outer) in TARGETS.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inner, generator=random) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(outer, rank, generator=random) * 0.2
    save_file(tensors, path / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in TARGETS]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(config))
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
