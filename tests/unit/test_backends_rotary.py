"""Rotary frequencies equal those of transformers for every supported scaling, others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pa_npu.backends.megatron.rotary import RotaryTable, inverse_frequencies
from pa_npu.errors import DataError
from pa_npu.families.spec import ModelSpec

SPEC = ModelSpec(
    path="somewhere",
    family="llama",
    num_layers=1,
    hidden_size=64,
    ffn_size=64,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=16,
    rope_theta=500000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=False,
    tied=False,
    max_positions=131072,
    eos_token_ids=(),
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rows_equal_transformers(scaling: dict[str, Any] | None) -> None:
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": SPEC.rope_theta}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, rope_parameters=parameters, max_position_embeddings=131072
    )
    positions = torch.tensor([0, 1, 2, 3, 2, 3, 1000, 70000])
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])

    cos, sin = RotaryTable(replace(SPEC, rope_scaling=scaling)).rows(positions, 70001, torch.float32)
    assert cos.shape == (len(positions), 1, SPEC.head_dim)
    assert torch.equal(cos[:, 0], expected_cos[0])
    assert torch.equal(sin[:, 0], expected_sin[0])


def test_the_table_grows_without_changing_its_rows() -> None:
    table = RotaryTable(SPEC)
    positions = torch.tensor([5, 255])
    before = table.rows(positions, 256, torch.float32)
    table.rows(torch.tensor([5000]), 5001, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before, table.rows(positions, 256, torch.float32), strict=True))


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0}])
def test_unsupported_or_incomplete_scaling_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"model\.path: somewhere: rope scaling"):
        inverse_frequencies(replace(SPEC, rope_scaling=scaling))
