"""Tiny random HF models, written with transformers, one per supported family."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tools.try_models import OTHERS, make_other  # noqa: F401

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
}


def make_model(
    directory: Path,
    family: str = "qwen2",
    *,
    tied: bool = False,
    layers: int = 2,
    seed: int = 0,
    hidden: int = 64,
    **more: object,
) -> Path:
    """Write a random model (4 heads, 2 kv heads, vocabulary 128, fp32) and return its directory.

    vLLM's CPU attention needs heads of at least 32, which qwen3 has here and the others have from
    hidden=128 on.
    """
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=128,
        **{"num_hidden_layers": layers, **extra, **more},
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # biases and norms start at constants, which would hide a mistake in their mapping
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "weight" in name or "experts" in name:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return directory
