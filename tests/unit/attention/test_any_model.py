"""A model without a family file is what transformers has: its weights under HF names, its size, its refusals in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pa_npu.errors import DataError
from pa_npu.families.spec import ModelSpec
from pa_npu.families.wire_names import stored_tensors, wire_weights
from tests.helpers.megatron import model_config
from tests.helpers.models import OTHERS, make_model, make_other


def read(model: Path, **sections: Any) -> ModelSpec:
    return ModelSpec.from_config(model_config(model, trainer={"backend": "fsdp"}, **sections))


@pytest.mark.parametrize("kind", OTHERS)
def test_weights_have_the_names_shapes_and_values_that_transformers_writes(
    kind: str, tmp_path: Path
) -> None:
    """Fused experts are runs of a parameter, tied weights are there once."""
    written = load_file(make_other(tmp_path, kind) / "model.safetensors")
    spec = read(tmp_path)
    assert spec.hf_tensors() == {name: tuple(tensor.shape) for name, tensor in written.items()}
    assert spec.num_parameters == pytest.approx(
        sum(math.prod(tensor.shape) for tensor in written.values()), rel=1e-3
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tensors = stored_tensors(model)
    for name, weight in wire_weights(model).items():
        assert torch.equal(weight.view_of(tensors[weight.source]), written[name]), name


def test_a_family_is_read_as_its_file_has_it_and_as_transformers_has_it_where_that_refuses(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path, "qwen2")
    own = read(model)
    assert own == ModelSpec.read(str(model))
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(raw | {"use_sliding_window": True, "sliding_window": 8})
    )
    other = read(model)
    assert other.is_any and not own.is_any and other.hf_tensors() == own.hf_tensors()
    assert other.num_parameters == own.num_parameters
    assert other.definition.flops(other).per_token == pytest.approx(
        own.definition.flops(own).per_token, rel=0.01
    )
    with pytest.raises(DataError, match="sliding-window attention"):
        ModelSpec.from_config(model_config(model))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
            "set model.trust_remote_code=true",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        (
            {"architectures": ["MistralForSequenceClassification"]},
            "MistralForSequenceClassification is no causal language model",
        ),
        ({"model_type": "of nobody"}, "transformers cannot read its config.json"),
        ({"model_type": "bert"}, "no causal language model"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is not a count"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    raw = json.loads((make_other(tmp_path, "mistral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    line = str(caught.value)
    assert says in line and line.startswith("model.path: ") and ";" in line and "\n" not in line


def test_an_adapter_in_place_of_a_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match="is an adapter, no model; give the directory of the model"):
        read(tmp_path)
