"""Router replay: engines say which experts each token took, and the trainers' routers take the same ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.objective import Objective
from pa_npu.engines.answers import with_routes
from pa_npu.engines.handing_on import joined
from pa_npu.engines.protocol import EngineError, Generation, Sampling
from pa_npu.engines.registry import check_engine_keys, engine_kind
from pa_npu.environments.single_turn import samples_of
from pa_npu.errors import ConfigError, InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_division
from pa_npu.samples.columns import RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.open_buffer import run_columns, trained_columns
from pa_npu.samples.routes import NO_ROUTE, Routes, routes, routes_of
from pa_npu.samples.types import SampleBuilder
from pa_npu.samples.wire import from_bytes, from_parts, split, to_bytes
from pa_npu.trainer.loop import consume
from tests.helpers.backend import Source, make_learner
from tests.helpers.engine_process import EngineProcess
from tests.helpers.megatron import TriModel, loaded_stage, model_config, relative_gradient_errors, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups

from pa_npu.backends.megatron.replay import replay_of  # isort: skip

EXPERTS, TAKEN, SPARSE = 8, 2, 2  # of the three layers the middle one is dense
ROUTES = routes(SPARSE, TAKEN, EXPERTS)
RUN = RunColumns.of_features([ROUTES])
REPLAY = {"router_replay": "rollout"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", layers=3, mlp_only_layers=[1])
    with single_process(model_config(path)):
        yield path


def with_random_routes(group: Group, seed: int, missing: float = 0.0) -> Group:
    """Any experts for any token, the same for the prompt of all samples; a share of the tokens has none."""
    rng = np.random.default_rng(seed)
    values = np.argsort(rng.random((len(group.tokens), SPARSE, EXPERTS)), axis=-1)[..., :TAKEN].astype(np.uint8)
    values[rng.random(len(values)) < missing] = ROUTES.column.elsewhere
    prompt, starts = group.prompt_lengths()[0], group.offsets()[:-1].tolist()
    for start in starts:
        values[start : start + prompt] = values[:prompt]
    return replace(group, columns={ROUTES.column: values})


def force(hf_model: Any, taken: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    """Let transformers' routers take [tokens, layers, k], and their own choice where an id is none. Returns what they took."""
    found: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in hf_model.model.layers if hasattr(layer.mlp, "gate")]
    for number, gate in enumerate(gates):

        def forward(hidden: torch.Tensor, gate: Any = gate, own: torch.Tensor = taken[:, number]) -> Any:
            probabilities = torch.nn.functional.linear(hidden, gate.weight).softmax(-1)
            chosen = torch.where(own < EXPERTS, own, probabilities.topk(TAKEN, -1).indices)
            found.append(chosen)
            weights = probabilities.gather(-1, chosen)
            return None, weights / weights.sum(-1, keepdim=True), chosen

        gate.forward = forward
    return found


def reference_gradients(path: Path, group: Group, weights: torch.Tensor) -> Any:
    """transformers' model, each sample alone and forced to its routes, with the gradients of the weighted sum of log-probs."""
    hf_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parts = weights.split(group.trained_lengths.tolist())
    for number, (tokens, part) in enumerate(zip(group.sequences(), parts, strict=True)):
        rows = slice(*group.offsets()[number : number + 2].tolist())
        taken = torch.from_numpy(group.columns[ROUTES.column][rows].astype(np.int64))
        force(hf_model, taken)
        sample = torch.from_numpy(tokens.astype(np.int64))[None]
        logprobs = hf_model(sample).logits[0, :-1].log_softmax(-1).gather(-1, sample[0, 1:, None]).squeeze(-1)
        (logprobs[-len(part) :] * part).sum().backward()
    return hf_model


def our_gradients(stage: TriModel, microbatch: Microbatch, weights: torch.Tensor, replays: bool) -> None:
    stage.zero_grad()
    ours = stage(
        microbatch.tokens[None],
        microbatch.layout,
        microbatch.rows,
        microbatch.targets,
        1.0,
        7,
        balance=0.0,
        replay=replay_of(microbatch) if replays else None,
    )
    (ours.logprobs * weights).sum().backward()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("recompute", "missing"), [("none", 0.0), ("full", 0.3)])
def test_gradients_are_those_of_transformers_forced_to_the_same_experts(
    recompute: str, missing: float, shared: bool, model: Path
) -> None:
    """The routers' too, through the gate weights. Tokens without routes are routed by the trainer."""
    stage = loaded_stage(model, trainer={"recompute": recompute}).train()
    group = with_random_routes(make_groups(0, 1, 4, seed=3)[0], 1, missing)
    (microbatch,) = build_microbatches(group, 4, shared, 16)
    weights = torch.randn(len(microbatch.targets), generator=torch.Generator().manual_seed(2))
    hf_model, spec = reference_gradients(model, group, weights), ModelSpec.read(str(model))
    our_gradients(stage, microbatch, weights, replays=True)
    errors = relative_gradient_errors(stage, hf_model, spec)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 5e-6, f"{worst}: relative gradient error {errors[worst]:.1e}"
    assert any("mlp.gate" in name for name in errors)
    our_gradients(stage, microbatch, weights, replays=False)
    assert max(relative_gradient_errors(stage, hf_model, spec).values()) > 0.1, "its own choice would do as well"
