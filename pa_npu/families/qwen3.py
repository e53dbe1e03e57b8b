"""Qwen3: norms of queries and keys per head, and a head size of its own."""

from __future__ import annotations

from pa_npu.families.dense import DenseDecoder


class Qwen3(DenseDecoder):
    model_type, architecture = "qwen3", "Qwen3ForCausalLM"
    qk_norm = True
    default_kv_heads = 32
    default_head_dim = 128
