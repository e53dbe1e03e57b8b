"""I5 at far positions: log-probs that differ only there are found in every eighth of long responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.algorithm.agreement_sums import DifferenceSums
from pa_npu.algorithm.microbatch_agreement import NUM_STRETCHES
from pa_npu.algorithm.model_outputs import Logprobs, Outputs
from pa_npu.algorithm.objective import Objective
from pa_npu.errors import InvariantViolation
from pa_npu.samples.microbatch import Microbatch, pack
from pa_npu.trainer.agreement import Agreement
from tests.helpers.megatron import model_config
from tests.helpers.stems import long_group
from tests.unit.trainer.test_agreement_limits import Fixed, configuration, probe_plan

LENGTHS = (1200, 1050, 900, 700)


def judged(model: Path, microbatch: Microbatch, error: torch.Tensor) -> dict[str, DifferenceSums]:
    """What a first microbatch is judged by, where the trainers' log-probs are off by `error`."""
    seen: dict[str, DifferenceSums] = {}
    objective = Objective(
        model_config(model, rollout={"responses_per_prompt": len(LENGTHS)}),
        torch.device("cpu"),
        judge_first=lambda sums, where: seen.update({where: sums}),
    )
    values = (microbatch.engine_logprobs + error).requires_grad_()
    entropy = torch.full_like(microbatch.engine_logprobs, 4.0)
    objective.loss(microbatch, Outputs(Logprobs(values, None), entropy, {}))
    return seen


def test_each_eighth_of_long_responses_is_judged_by_itself(model: Path, tmp_path: Path) -> None:
    microbatch = pack([long_group(4, LENGTHS)], True, 1)
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    stretch = max(LENGTHS) // NUM_STRETCHES
    seen = judged(model, microbatch, 0.3 * (places >= 7 * stretch))
    starts = [number * stretch for number in range(NUM_STRETCHES)]
    assert list(seen) == ["", *(f"tokens of responses from {start:,} on" for start in starts)]
    whole, *stretches = seen.values()
    assert sum(sums.n for sums in stretches) == whole.n == sum(LENGTHS)
    assert stretches[-1].n == max(LENGTHS) - starts[-1]
    assert [sums.absolute > 0 for sums in stretches] == [False] * 7 + [True]
    assert stretches[-1].odds_mean > 20 * whole.odds_mean, "far tokens are few of all"

    learner: Any = Fixed(2e-3)
    config = configuration(model, tmp_path)
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.measure(0, lambda number: [])
    near = stretches[0]
    agreement.check_first(0, near, "tokens of responses from 0 on")
    with pytest.raises(
        InvariantViolation,
        match="probe after publishing version 0, tokens of responses from 1,050 on, engine and",
    ):
        agreement.check_first(0, stretches[-1], list(seen)[-1])


def test_short_responses_are_judged_together(model: Path) -> None:
    microbatch = pack([long_group(4, [300, 200])], True, 1)
    assert list(judged(model, microbatch, torch.zeros(500))) == [""]
