"""trainer.frozen_pass=separate: the same update as together, bit for bit, with old policy and reference before the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.backends.logprob import RowScores
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.memory import _activation_bytes
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from tests.helpers.backend import Source, make_learner
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups

SHARES, RESPONSES = 2, 4
TIMES = ("wait_s", "train_s", "step_s", "memory_trainer_host_bytes", "memory_trainer_device_bytes")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


def configuration(model: Path, frozen_pass: str, stages: int = 1) -> Config:
    return model_config(
        model,
        rollout={"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        schedule={"prompts_per_iteration": 2 * SHARES, "updates_per_iteration": SHARES},
        optimizer={"learning_rate": 3e-3},
        algorithm={"kl_coef": 0.05},
        trainer={"frozen_pass": frozen_pass, "devices": stages, "pipeline_parallel": stages},
    )


def shares() -> list[list[Microbatch]]:
    groups = make_groups(0, 2 * SHARES, RESPONSES, seed=5)
    # two pieces of each group, so that a pass has several microbatches of one group
    pieces = [
        [m for g in groups[2 * s : 2 * s + 2] for m in build_microbatches(g, 2, True, 1)]
        for s in range(SHARES)
    ]
    assert all(len(microbatches) == 4 for microbatches in pieces)
    return pieces


def trained(config: Config) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """The reports of two updates, and the policy's weights after them.

    The reference is another model than the start.
    """
    learner, stage = make_learner(config)
    with torch.no_grad():
        for parameter in stage.frozen["reference"].parameters():
            parameter.mul_(1.05)
    learner.publish(0)
    reports = []
    for microbatches in shares():
        responses = learner.accumulate(Source(microbatches))
        assert len(responses) == 2 * RESPONSES, "each counted once, in whatever passes it went (I2)"
        report = asdict(learner.step().report)
        reports.append({name: value for name, value in report.items() if name not in TIMES})
    return reports, [parameter.detach().clone() for parameter in stage.policy.parameters()]


def test_separate_passes_give_the_same_update_bit_for_bit(model: Path) -> None:
    (ours, weights), (expected, same) = (
        trained(configuration(model, way)) for way in ("separate", "together")
    )
    assert ours == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert ours[0]["kl"] > 1e-4 and ours[1]["clip_ratio"] > 0, (
        "old policy and reference must show in the numbers"
    )


class Watched(Source):
    """Notes when a microbatch is taken."""

    def __init__(self, microbatches: list[Microbatch], log: list[str]) -> None:
        super().__init__(microbatches)
        self._log = log

    def __next__(self) -> Microbatch:
        microbatch = super().__next__()
        self._log.append("arrives")
        return microbatch


@pytest.mark.parametrize("way", ["separate", "together"])
def test_the_order_of_passes(model: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate: only the first pass goes along with arrivals, and the policy's pass computes
    nothing of the frozen models.
    """
    learner, stage = make_learner(configuration(model, way))
    learner.publish(0)
    log: list[str] = []
    for name, gpt in stage.gpts().items():
        gpt.register_forward_pre_hook(lambda *_, name=name: log.append(name))
    learner.accumulate(Watched(shares()[0], log))
    if way == "separate":
        assert log == ["arrives", "old"] * 4 + ["reference"] * 4 + ["policy"] * 4
    else:
        assert log == ["arrives", "old", "reference", "policy"] * 4
    learner.step()


def test_the_last_microbatch_is_known_to_the_policys_pass(model: Path) -> None:
    """Gradients begin to be reduced inside its backward."""
    from pa_npu.backends.megatron.frozen_passes import HeldMicrobatches

    source = shares()[0]

    def run(name: str, microbatches: Any, keep: Any) -> None:
        for number, microbatch in enumerate(microbatches):
            value = float(number) + (10 if name == "reference" else 0)
            keep(microbatch, RowScores(torch.full((2,), value), torch.zeros(2)))

    held = HeldMicrobatches(Source(source), ("old", "reference"), run)
    assert [held.is_last for _ in held] == [False, False, False, True]
    found = []
    for microbatch in source:
        scores = held.scores(microbatch)
        found.append([float(scores[name].logprobs[0]) for name in ("old", "reference")])
    assert np.array_equal(found, [[n, 10 + n] for n in range(4)])


def test_the_memory_plan_has_no_frozen_hidden_states_in_separate_passes(model: Path) -> None:
    spec = ModelSpec.read(str(model))
    together, separate = (
        _activation_bytes(configuration(model, way, stages=2), spec, stage=1)
        for way in ("together", "separate")
    )
    assert separate[0] < together[0], "what arrives from the stage before"
    assert separate[1] <= together[1], "hidden states at the head"
