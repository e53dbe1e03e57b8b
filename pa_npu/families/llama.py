"""Llama 2 and 3, and other models that have their config.json."""

from __future__ import annotations

from pa_npu.families.dense import DenseDecoder


class Llama(DenseDecoder):
    model_type, architecture = "llama", "LlamaForCausalLM"
    heads_divide_hidden = True
