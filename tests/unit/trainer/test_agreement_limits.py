"""Limits of the agreement follow the yardstick and the keys, and everything that is judged is recorded."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.algorithm.agreement import (
    CHECKS,
    limits,
)
from pa_npu.algorithm.agreement_sums import (
    UNCERTAINTY_FLOOR,
    DifferenceSums,
    difference_sums,
)
from pa_npu.config.mesh import Mesh
from pa_npu.errors import InvariantViolation
from pa_npu.trainer.agreement import FALSE_STOP_RATE, YARDSTICK_EVERY, Agreement
from tests.helpers.agreement_run import NONE, configuration
from tests.helpers.policies import probe_plan


class Fixed:
    """A learner whose rounding is known."""

    def __init__(self, *scales: float) -> None:
        self.asked = 0
        self.backend = SimpleNamespace(place=Mesh().place(0))
        self._scales = scales

    def rounding(self, microbatches: list[Any]) -> DifferenceSums | None:
        self.asked += 1
        return sums(self._scales[self.asked - 1]) if self._scales else None


def sums(scale: float, responses: int = 64) -> DifferenceSums:
    """Differences of `scale` of log-odds, without a slope but by chance."""
    z = scale * np.random.default_rng(1).standard_normal((responses, 20))
    logprobs = np.full(z.shape, -1.0)
    floor = UNCERTAINTY_FLOOR["fp32"]
    engine = logprobs - z * (1 - np.exp(logprobs) + floor)
    index = torch.arange(responses).repeat_interleave(20)
    t, e = (torch.from_numpy(values.reshape(-1)) for values in (logprobs, engine))
    entropy = torch.full_like(t, 1.5)
    return DifferenceSums(*difference_sums(t, e, entropy, index, responses, floor=floor).tolist())


def test_limits_follow_the_yardstick_which_is_measured_at_the_start_and_every_so_many_iterations(
    model: Path, tmp_path: Path
) -> None:
    learner: Any = Fixed(1e-3, 1e-4)
    config = configuration(model, tmp_path)
    agreement = Agreement(config, learner, probe_plan(config))
    found = []
    for iteration in range(5, 5 + YARDSTICK_EVERY + 1):
        agreement.measure(iteration, lambda number: [])
        found.append(agreement.check_trained(iteration, sums(1e-5), NONE).logodds_diff_limit)
    first, last = found[0], found[-1]
    assert learner.asked == 2 and found == [first] * YARDSTICK_EVERY + [last], (
        "a resumed run measures anew"
    )
    assert first is not None and last is not None and last == pytest.approx(first / 10, rel=1e-6)
    assert agreement.check_trained(99, sums(1e-6), NONE).logodds_diff_limit == last, (
        "what engines say moves no limit"
    )


def test_a_device_without_a_wider_type_has_a_stated_yardstick(model: Path, tmp_path: Path) -> None:
    learner: Any = Fixed()
    config = configuration(model, tmp_path)
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.measure(0, lambda number: [])
    assert 4e-6 < (agreement.check_trained(0, sums(1e-6), NONE).logodds_diff_limit or 0) < 2e-5
    with pytest.raises(
        InvariantViolation,
        match=r"times the trainer's own rounding, mean .difference. of log-odds = 1e-06",
    ):
        agreement.check_trained(1, sums(1e-4), NONE)


def test_without_a_margin_everything_is_recorded_and_nothing_judged(
    model: Path, tmp_path: Path
) -> None:
    learner: Any = Fixed()
    config = configuration(model, tmp_path, publish={"noise_margin": None})
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.measure(0, lambda number: [])
    assert (
        agreement.check_trained(0, sums(1.0), sums(1.0)).logodds_diff_limit is None
        and not learner.asked
    )
    agreement.check_probe(0, replace(sums(1.0), largest=5.0))


def test_an_absolute_tolerance_holds_beside_the_yardstick(model: Path, tmp_path: Path) -> None:
    learner: Any = Fixed()
    config = configuration(model, tmp_path, publish={"probe_tolerance": 0.1})
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.check_probe(0, replace(sums(1e-7), largest=0.09))
    with pytest.raises(
        InvariantViolation, match=r"difference of 0.11, more than publish.probe_tolerance = 0.1"
    ):
        agreement.check_probe(0, replace(sums(1e-7), largest=0.11))
    with pytest.raises(InvariantViolation, match="probe_tolerance"):
        agreement.check_probe(0, replace(sums(1e-7), largest=float("nan")))


def broken_by(check: str) -> DifferenceSums:
    """Sums that break this check alone."""
    found = sums(1e-5)
    slope = 0.05  # as all responses have it, so that there is no scatter
    changes: dict[str, dict[str, float]] = {
        "mean": {"odds": found.n * 1e-2},
        "square": {"square": found.n * 1e-4},
        "slope": {
            "moment": slope * found.weight,
            "moment_squared": slope**2 * found.weight_squared,
            "moment_times_weight": slope * found.weight_squared,
            "scatter_moment": slope**2 * found.scatter_weight,
            "scatter_cross": slope * found.scatter_weight,
        },
        "strays": {"strays": 1e4},
    }
    return replace(found, **changes[check])


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "drawn"])
def test_a_check_that_is_only_logged_ends_no_run_and_leaves_all_that_it_judged(
    check: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner: Any = Fixed(1e-4)
    wrong = broken_by(check)
    message = rf"I5 agreement: .*publish.only_logged=\[{check}\]"

    def judge(**publish: Any) -> Agreement:
        learner.asked = 0
        config = configuration(model, tmp_path, publish=publish)
        agreement = Agreement(config, learner, probe_plan(config))
        agreement.measure(3, lambda number: [])
        agreement.check_trained(3, wrong, NONE)
        return agreement

    with pytest.raises(InvariantViolation, match=message):
        judge()
    with pytest.raises(InvariantViolation, match=message):
        judge(only_logged=[other for other in CHECKS if other != check])
    caplog.clear()
    judge(only_logged=[check]).close()
    assert re.search(message, caplog.text)
    lines = [
        json.loads(line)
        for line in (tmp_path / "agreement" / "replica_00000.jsonl").read_text().splitlines()
    ]
    assert [line["broken"] for line in lines] == [[check]] * 3
    line = lines[-1]
    assert (line["version"], line["margin"], line["subject"]) == (3, 4.0, "training iteration 3")
    recorded, yardstick = DifferenceSums(**line["sums"]), DifferenceSums(**line["yardstick"])
    assert limits(yardstick, recorded, 4.0, FALSE_STOP_RATE).broken(recorded).keys() == {check}


def test_tokens_of_another_distribution_end_the_run_unless_that_is_only_logged(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the iteration alone, and in all together."""
    learner: Any = Fixed(1e-4)
    honest = replace(
        sums(1e-5), drawn=4000.0, surprise=50.0, surprise_squared=4000.0, entropy=4000.0
    )
    sharper = replace(honest, surprise=800.0)
    greedy = replace(honest, surprise=4000.0)

    def judge(*iterations: DifferenceSums, **sections: Any) -> None:
        config = configuration(model, tmp_path, **sections)
        agreement = Agreement(config, learner, probe_plan(config))
        for number, exact in enumerate(iterations):
            agreement.check_trained(number, exact, NONE, (8, 8))
        agreement.close()

    judge(*[honest] * 30)
    with pytest.raises(InvariantViolation, match=r"I5 agreement: in training iteration 1 the eng"):
        judge(honest, greedy)
    with pytest.raises(
        InvariantViolation, match=r"in the iterations up to \d+ the engines drew more"
    ):
        judge(*[sharper] * 30)
    judge(greedy, environment={"name": "mine:Environment"})
    judge(greedy, publish={"only_logged": ["drawn"]})
    assert "only_logged=[drawn]" in caplog.text


def test_an_agreement_is_recorded_too(model: Path, tmp_path: Path) -> None:
    learner: Any = Fixed(1e-4)
    config = configuration(model, tmp_path)
    agreement = Agreement(config, learner, probe_plan(config))
    agreement.measure(0, lambda number: [])
    agreement.check_probe(0, sums(1e-5))
    report = agreement.check_trained(0, sums(1e-5), NONE)
    lines = [
        json.loads(line)
        for line in (tmp_path / "agreement" / "replica_00000.jsonl").read_text().splitlines()
    ]
    assert [line["broken"] for line in lines] == [[], []]
    assert report.logodds_diff_mean == pytest.approx(1e-5 * math.sqrt(2 / math.pi), rel=0.1)
