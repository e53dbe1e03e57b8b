"""Qwen2 and Qwen2.5, and what was distilled into them: biases on queries, keys and values."""

from __future__ import annotations

from pa_npu.families.dense import DenseDecoder


class Qwen2(DenseDecoder):
    model_type, architecture = "qwen2", "Qwen2ForCausalLM"
    qkv_bias = True
    default_kv_heads = 32
