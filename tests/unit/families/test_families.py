"""A family is one file: sizes as transformers reads them, every weight of its checkpoint, and nothing else to touch to add one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pa_npu.attention import PrefixLayout
from pa_npu.config.mesh import Mesh
from pa_npu.config.schema import Config
from pa_npu.errors import DataError
from pa_npu.families import spec as registry
from pa_npu.families.decoders import Llama
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.memory import trainer_memory
from tests.helpers.megatron import loaded_stage, model_config, single_process
from tests.helpers.models import FAMILIES, make_model
from tests.helpers.renamed_llama import RenamedLlama

from pa_npu.backends.megatron.weights.buckets import export_hf  # isort: skip

MINIMAL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 32,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


def parse(**changes: Any) -> ModelSpec:
    return ModelSpec.parse("m", {"model_type": "llama", **MINIMAL, **changes})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_number_of_parameters_are_those_that_transformers_writes(
    family: str, tied: bool, tmp_path: Path
) -> None:
    spec = ModelSpec.read(str(make_model(tmp_path, family, tied=tied)))
    written = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert spec.hf_tensors() == written
    assert spec.num_parameters == sum(math.prod(shape) for shape in written.values())


@pytest.mark.parametrize(
    "extra", [{}, {"num_key_value_heads": None}, {"num_key_value_heads": 8, "head_dim": 16}]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_config_json_leaves_out_is_what_transformers_takes(
    family: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    if family == "qwen3_moe":  # whose configuration refuses a null there
        extra = {key: value for key, value in extra.items() if value is not None}
    raw = {"model_type": family, **MINIMAL, **extra}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), ModelSpec.read(str(tmp_path))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.eos_token_ids == () or ours.eos_token_ids == (theirs.eos_token_id,)


def test_a_family_from_outside_is_one_file_and_one_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    registry.register(RenamedLlama())

    original = make_model(tmp_path / "llama", "llama")
    spec = ModelSpec.read(str(original))
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    raw = json.loads((original / "config.json").read_text())
    raw |= {"model_type": "renamed_llama", "architectures": ["RenamedLlamaForCausalLM"]}
    (renamed / "config.json").write_text(json.dumps(raw))
    renamed_spec = ModelSpec.read(str(renamed))
    new_names = dict(zip(spec.hf_tensors(), renamed_spec.hf_tensors(), strict=True))
    weights = load_file(original / "model.safetensors")
    save_file(
        {new_names[name]: tensor for name, tensor in weights.items()}, renamed / "model.safetensors"
    )

    tokens = torch.randint(0, 128, (1, 24), generator=torch.Generator().manual_seed(1))
    hf_model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    expected = (
        hf_model(tokens)
        .logits[0, :-1]
        .double()
        .log_softmax(-1)
        .gather(-1, tokens[0, 1:, None])
        .squeeze(-1)
    )
    with single_process(model_config(tmp_path)):
        stage = loaded_stage(renamed)
        output = stage(
            tokens, PrefixLayout.from_sequences([24]), torch.arange(23), tokens[0, 1:], 1.0, 7
        )
        export_hf(stage.policy, renamed_spec, tmp_path / "export", Mesh().place(0))
    assert (output.logprobs - expected).abs().max() < 2e-6
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[new_names[name]], tensor) for name, tensor in weights.items())

    assert renamed_spec.num_parameters == spec.num_parameters
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    assert trainer_memory(config, renamed_spec) == trainer_memory(config, spec)
    with pytest.raises(ValueError, match="registered already"):
        registry.register(Llama())


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            {
                "model_type": "mixtral",
                "architectures": ["MixtralForCausalLM"],
                "num_local_experts": 8,
                **MINIMAL,
            },
            "architecture 'mixtral', a mixture of experts, is not supported; use a model of the "
            "families qwen2, qwen3, qwen3_moe, llama",
        ),
        ({"model_type": "gemma3_text", **MINIMAL}, "architecture 'gemma3_text' is not supported"),
        ({"model_type": ["llama"], **MINIMAL}, "is not supported"),
        (MINIMAL, "architecture None is not supported"),
    ],
)
def test_other_families_are_refused_by_name_in_one_line(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        ModelSpec.parse("m", raw)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures ['LlamaForSequenceClassification']",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "code of its own (auto_map)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        (
            {"model_type": "qwen3_moe", "shared_expert_intermediate_size": 8},
            "shared experts (shared_expert_intermediate_size)",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok: 5 is more than 4",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 4}, "leave no layer with experts"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "1"}, "mlp_only_layers: '1' is not a list"),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads: 5 does not divide num_attention_heads = 32",
        ),
        ({"hidden_size": 66}, "num_attention_heads: 32 does not divide hidden_size = 66"),
        (
            {"hidden_size": 66, "head_dim": 16},
            "num_attention_heads: 32 does not divide hidden_size = 66",
        ),
        (
            {"model_type": "qwen2", "hidden_size": 66},
            "num_attention_heads: 32 does not divide hidden_size = 66",
        ),
        ({"head_dim": 7}, "head_dim: 7 is odd"),
        ({"num_hidden_layers": 2**30}, "is more than 4096"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: 2.0 is not a count"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id: -1 is not a token id"),
        ({"tie_word_embeddings": "no"}, "neither true nor false"),
    ],
)
def test_what_would_change_the_model_silently_is_one_line(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError) as caught:
        parse(**changes)
    assert (
        says in str(caught.value)
        and str(caught.value).startswith("model.path: m")
        and "\n" not in str(caught.value)
    )


def test_a_stated_head_size_may_differ_from_hidden_size_over_heads() -> None:
    assert parse(model_type="qwen3", hidden_size=66).head_dim == 128
    assert parse(model_type="qwen2", hidden_size=66, head_dim=16).head_dim == 16


def test_config_json_is_read_with_bounds(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(DataError, match="is not a regular file"):
        ModelSpec.read(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is not a regular file"):
        ModelSpec.read(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(" " * (5 * 2**20) + "{}")
    with pytest.raises(DataError, match="is larger than"):
        ModelSpec.read(str(tmp_path))
