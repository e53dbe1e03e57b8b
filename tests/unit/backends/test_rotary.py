"""Rotary positions equal those of transformers for every form in which a config.json may state them; other forms are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pa_npu.backends.megatron.layers import RotaryTable, inverse_frequencies
from pa_npu.errors import DataError
from pa_npu.families.shape import Rope
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
    rope=Rope(500000.0),
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=False,
    tied=False,
    max_positions=131072,
    eos_token_ids=(),
)
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"type": "linear", "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}

FORMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta beside": {"rope_theta": 5e5},
    "theta beside, scaling null": {"rope_theta": 5e5, "rope_scaling": None},
    "theta inside parameters": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "theta inside parameters, no type": {"rope_parameters": {"rope_theta": 5e5}},
    "theta inside scaling only": {
        "rope_scaling": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}
    },
    "theta inside and beside": {
        "rope_theta": 1e4,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
    "theta inside scaling and beside": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_theta": 5e5, **LINEAR},
    },
    "theta beside parameters": {"rope_theta": 5e5, "rope_parameters": LINEAR},
    "legacy type in scaling": {"rope_theta": 5e5, "rope_scaling": LINEAR},
    "legacy type in parameters": {"rope_parameters": {"rope_theta": 5e5, **LINEAR}},
    "both types": {
        "rope_parameters": {
            "rope_theta": 5e5,
            "type": "linear",
            "rope_type": "default",
            "factor": 4.0,
        }
    },
    "both objects, linear in scaling": {
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "rope_scaling": LINEAR,
    },
    "both objects, linear in parameters": {
        "rope_parameters": {"rope_theta": 5e5, **LINEAR},
        "rope_scaling": {"rope_theta": 1e5, "rope_type": "default"},
    },
    "both objects, scaling empty": {
        "rope_parameters": {"rope_theta": 5e5, **LINEAR},
        "rope_scaling": {},
    },
    "default with a factor": {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "default", "factor": 4.0},
    },
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3, legacy type": {"rope_parameters": {"rope_theta": 5e5, "type": "llama3", **LLAMA3}},
    "llama3, original positions beside": {
        "original_max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3},
    },
    "yarn, as Qwen3 documents it": {"rope_scaling": YARN},
    "yarn, legacy type": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    },
    "yarn, other turns": {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
    "yarn, not truncated": {"rope_parameters": {**YARN, "truncate": False}},
    "yarn, attention factor": {"rope_parameters": {**YARN, "attention_factor": 0.9}},
    "yarn, scales": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "llama3, original positions are all": {
        "rope_parameters": {
            "rope_theta": 5e5,
            "rope_type": "llama3",
            **LLAMA3,
            "original_max_position_embeddings": None,
        },
    },
}
del FORMS["llama3, original positions are all"]["rope_parameters"][
    "original_max_position_embeddings"
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_as_transformers_reads_it(form: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | FORMS[form]))
    positions = torch.tensor([0, 1, 2, 3, 2, 3, 1000, 70000])
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    expected_cos, expected_sin = rotary(torch.zeros(1, dtype=torch.float32), positions[None])

    cos, sin = RotaryTable(ModelSpec.read(str(tmp_path))).rows(positions, 70001, torch.float32)
    assert cos.shape == (len(positions), 1, SPEC.head_dim)
    assert torch.equal(cos[:, 0], expected_cos[0])
    assert torch.equal(sin[:, 0], expected_sin[0])


def test_the_forms_differ() -> None:
    """A control: reading one form as another would be seen."""
    tables = {
        form: tuple(inverse_frequencies(ModelSpec.parse("m", CONFIG | extra).rope, 32).tolist())
        for form, extra in FORMS.items()
    }
    assert len(set(tables.values())) == 11, tables


def test_the_table_grows_without_changing_its_rows() -> None:
    table = RotaryTable(SPEC)
    positions = torch.tensor([5, 255])
    before = table.rows(positions, 256, torch.float32)
    table.rows(torch.tensor([5000]), 5001, torch.float32)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, table.rows(positions, 256, torch.float32), strict=True)
    )


def test_every_scaling_changes_the_rows() -> None:
    rows = [
        RotaryTable(replace(SPEC, rope=rope)).rows(torch.tensor([70000]), 70001, torch.float32)[0]
        for rope in (Rope(), Rope(5e5), Rope(5e5, "linear", 4.0), Rope(5e5, "llama3", 8.0))
    ]
    assert all(not torch.equal(a, b) for index, a in enumerate(rows) for b in rows[:index])


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 40.0}},
            "beta_slow 40 is not below beta_fast 32",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope scaling 'dynamic' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            "rope scaling 'longrope' is not supported",
        ),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 4.0}}, "is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no 'low_freq_factor'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no 'factor'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "factor: 0 is not a positive number",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "is not below high_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'full_attention' layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": float("inf")}, "rope_theta: inf is not a positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling: 'yarn' is not an object"),
    ],
)
def test_unsupported_and_malformed_forms_are_one_line(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        ModelSpec.parse("somewhere", CONFIG | extra)
    assert str(caught.value).startswith("model.path: somewhere") and says in str(caught.value)
    assert "\n" not in str(caught.value)
