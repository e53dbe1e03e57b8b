"""Tiny random HF models, written with transformers, one per supported family."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
}

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 16,
}
# Models without a family file by model_type, with what their configurations need beside the usual.
OTHERS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 8},
    "phi": {},
    "phi3": {},
    "glm4": {"head_dim": 32},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    "olmo2": {},
    "cohere2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.25},
    "gpt2": {"resid_pdrop": 0.1},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {
        **_LATENT,
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"q_lora_rank": 16, "first_k_dense_replace": 1},
    },
    "qwen3_next": {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 32, "head_dim": 32},
    "qwen3_5_text": {**_LINEAR, "head_dim": 32},
}


def make_other(directory: Path, kind: str, *, seed: int = 0, **changes: object) -> Path:
    """Write a random model of OTHERS, or of any model_type, as make_model does."""
    usual = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tokens = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    others = {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
    config = AutoConfig.for_model(kind, **{**usual, **others, **tokens, **OTHERS.get(kind, {}), **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "weight" in name or "experts" in name:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return directory


def make_model(
    directory: Path, family: str = "qwen2", *, tied: bool = False, layers: int = 2, seed: int = 0, hidden: int = 64
) -> Path:
    """Write a random model (4 heads, 2 kv heads, vocabulary 128, fp32) and return its directory.

    vLLM's CPU attention needs heads of at least 32, which qwen3 has here and the others have from hidden=128 on.
    """
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        **extra,
    )
    torch.manual_seed(seed)
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # biases and norms start at constants, which would hide a mistake in their mapping
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "weight" in name:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return directory
