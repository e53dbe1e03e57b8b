"""Trainers and engines compute with the same numbers beside the weights (I5): what differs by a percent is named in any type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.engines.live_weights import LiveReport
from pa_npu.engines.protocol import LoadedWeights
from pa_npu.errors import InvariantViolation
from pa_npu.publish.live_memory import LiveMemoryCheck
from pa_npu.weight_transfer.computation import Computation, computation_of, disagreements
from tests.helpers.backend import make_learner
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model

FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe"]


def engine_of(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def checked(trainers: Computation, engine: Computation) -> None:
    report = LiveReport(
        {},
        [],
        msgspec.convert(msgspec.to_builtins(engine, str_keys=True), Computation, strict=False),
    )
    LiveMemoryCheck(trainers).check(0, {"http://e": LoadedWeights((0,), live=(report,))})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_computes_with_what_transformers_does(
    family: str, dtype: str, tmp_path: Path
) -> None:
    path = make_model(tmp_path / "model", family)
    config = model_config(path, model={"dtype": dtype})
    engine = computation_of(
        engine_of(path, torch.float32 if dtype == "fp32" else torch.bfloat16).modules()
    )
    with single_process(config):
        learner, _ = make_learner(config)
        trainers = learner.backend.computation()
    assert trainers.rotations and trainers.attention_scales and trainers.norm_epsilons
    assert bool(trainers.experts_per_token) == (family == "qwen3_moe")
    assert (
        engine.rotations.keys() == trainers.rotations.keys()
        and engine.attention_scales
        and engine.norm_epsilons
    )
    assert disagreements(trainers, engine) == []
    checked(trainers, engine)


def scale_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 1.001


def scale_attention(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.01


def change_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon *= 1.1


def route_otherwise(model: Any) -> None:
    model.model.layers[1].mlp.gate.top_k += 1


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "rotary base": (scale_rotation, "rotary embedding"),
    "attention scale": (scale_attention, "attention scale"),
    "epsilon": (change_epsilon, "epsilon of norms"),
    "experts": (route_otherwise, "experts per token"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_engine_computes_with_otherwise_is_named(
    fault: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = make_model(tmp_path / "model", "qwen3_moe")
    change, words = FAULTS[fault]
    trainers = computation_of(engine_of(path, dtype).modules())
    assert trainers.experts_per_token and trainers.renormalises
    model = engine_of(path, dtype)
    change(model)
    with pytest.raises(InvariantViolation, match=f"I5: engine http://e, worker 0, .*{words}"):
        checked(trainers, computation_of(model.modules()))


def test_what_one_end_does_not_say_is_not_compared() -> None:
    whole = Computation(rotations={1: [0.5, 0.5]}, attention_scales=[0.25], norm_epsilons=[1e-6])
    assert disagreements(whole, Computation()) == disagreements(Computation(), whole) == []
    assert disagreements(whole, msgspec.structs.replace(whole, rotations={2: [0.0, 0.0]})) == []
