"""Adapters (LoRA) of models that read images leave the tower out unless it is trained, and their count is the planner's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pa_npu.backends.fsdp.lora import add_adapters
from pa_npu.errors import DataError
from pa_npu.families.any_model import bare_model, config_of, decoder_layers
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.memory import adapter_parameters
from pa_npu.vision.family import is_of_tower
from tests.helpers.vision import make_vision, vision_config


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("vision"), request.param)


@pytest.mark.parametrize(
    ("vision", "targets"),
    [
        ("frozen", "all-linear"),
        ("trained", "all-linear"),
        ("frozen", ["q_proj", "gate_proj"]),
        ("trained", ["q_proj", "gate_proj", "qkv"]),
    ],
)
def test_a_frozen_tower_gets_no_adapters(vision: str, targets: object, path: Path) -> None:
    config = vision_config(path, model={"vision": vision}, lora={"rank": 2, "targets": targets})
    causal = bare_model(config_of(str(path), False), False)
    with torch.device("meta"):
        add_adapters(causal, config)
    adapters = {
        name: parameter
        for name, parameter in causal.named_parameters()
        if ".lora_A.policy." in name or ".lora_B.policy." in name
    }
    assert any(is_of_tower(name) for name in adapters) == (vision == "trained")
    assert any("language_model" in name for name in adapters)
    num_trained = sum(parameter.numel() for parameter in adapters.values())
    assert num_trained == adapter_parameters(config, ModelSpec.from_config(config))


def test_a_target_that_only_a_frozen_tower_has_is_refused(path: Path) -> None:
    config = vision_config(path, lora={"rank": 2, "targets": ["q_proj", "qkv"]})
    causal = bare_model(config_of(str(path), False), False)
    with torch.device("meta"), pytest.raises(DataError) as refused:
        add_adapters(causal, config)
    line = str(refused.value)
    assert "no layer that is called 'qkv' outside of its tower, which model.vision=frozen" in line
    assert "(q_proj, k_proj," in line and "\n" not in line


def test_the_decoders_layers_are_not_the_towers_where_both_have_as_many(path: Path) -> None:
    causal = bare_model(config_of(str(path), False), False)
    assert len(causal.base_model.visual.blocks) == len(causal.base_model.language_model.layers)
    assert decoder_layers(causal) is causal.base_model.language_model.layers
