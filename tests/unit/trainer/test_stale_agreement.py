"""A policy that moves on ends no run, and faults of tokens that are older than its weights end it whatever their age."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_npu.algorithm import agreement
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.errors import InvariantViolation
from pa_npu.samples.group import Group
from tests.helpers.agreement_run import DTYPES, GROUPS, RESPONSES, Change, Engine, Run, trained
from tests.helpers.models import make_model


def swapped(groups: list[Group]) -> list[Group]:
    """Two responses of one group have each other's log-probs."""
    rows = np.arange(RESPONSES)
    rows[[2, 5]] = rows[[5, 2]]
    (first,) = trained(lambda found: found[rows])(groups[1:2])
    return [groups[0], first, *groups[2:]]


CHANGES: dict[str, Change] = {
    "shifted": trained(lambda found: np.roll(found, 1, axis=1)),
    "shifted back": trained(lambda found: np.roll(found, -1, axis=1)),
    "zeros": trained(lambda found: found * 0.0),
    "swapped": swapped,
}
STALE: dict[str, dict[str, Any]] = {
    "k=1": {"max_staleness": 1},
    "k=2": {"max_staleness": 2},
    "k=4": {"max_staleness": 4},
    "k=1, two updates": {"max_staleness": 1, "updates_per_iteration": 2},
    "two updates": {"updates_per_iteration": 2},
}
IN_CI = [("k=1, two updates", "bf16")]
OLDER_FAULTS = [
    *(
        pytest.param(fault, marks=() if fault == "swapped" else pytest.mark.nightly)
        for fault in CHANGES
    ),
    "temperature",
]


def stale_run(
    model: Path,
    tmp_path: Path,
    dtype: str,
    schedule: dict[str, Any],
    fault: str | None,
    iterations: int,
) -> None:
    """The fault comes with the last iteration.

    Two updates without an old policy: ratios against the sampling one.
    """
    run = Run(
        model,
        tmp_path,
        dtype,
        schedule={**schedule, "iterations": 2 * iterations},
        algorithm={"ratio": "sampling"},
        rollout={"max_response_tokens": 48},
        optimizer={"learning_rate": 3e-4},
    )
    assert trainer_models(run.config).computed == ()
    staleness = run.config.schedule.max_staleness
    directories: list[Path] = []
    for version in range(iterations):
        directories.append(run.exported(f"hf-{version}"))
        run.learner.publish(version)
        if staleness:
            run.probe(version, Engine(directories[version], dtype))
        by, last = max(0, version - staleness), version == iterations - 1
        engine = Engine(
            directories[by], dtype, temperature=1.3 if last and fault == "temperature" else 1.0
        )
        change: Change = (
            CHANGES.get(fault or "", lambda groups: groups) if last else lambda groups: groups
        )
        consumed = run.iteration(version, engine, by, change)
    tokens = GROUPS * RESPONSES * 48
    assert (consumed.exact.n, consumed.aged.n) == (
        (0, tokens) if staleness else (tokens / 2, tokens / 2)
    )


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        pytest.param(
            schedule, dtype, marks=() if (schedule, dtype) in IN_CI else pytest.mark.nightly
        )
        for schedule in STALE
        for dtype in DTYPES
    ],
)
def test_a_policy_that_moves_on_ends_no_run(
    schedule: str, dtype: str, model: Path, tmp_path: Path
) -> None:
    stale_run(model, tmp_path, dtype, STALE[schedule], None, 6)


@pytest.mark.parametrize("knows_drift", [True, False])
def test_a_nearly_even_policy_that_moves_by_half_a_nat_in_an_update_ends_no_run(
    knows_drift: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`model` is the process's; the control does not look at tokens that agreed when new."""
    if not knows_drift:
        monkeypatch.setattr(agreement, "_MAX_DRIFT", 0.0)
    run = Run(
        make_model(tmp_path / "even"),
        tmp_path,
        schedule={"max_staleness": 1, "iterations": 4},
        algorithm={"ratio": "sampling"},
        optimizer={"learning_rate": 1e-2, "warmup_iterations": 0},
    )
    engine = Engine(run.exported("hf-0"), "fp32")
    run.learner.publish(0)
    run.probe(0, engine)
    run.iteration(0, engine)
    run.learner.publish(1)
    run.probe(1, Engine(run.exported("hf-1"), "fp32"))
    if knows_drift:
        run.iteration(1, engine, 0)
        return
    with pytest.raises(InvariantViolation, match=r"I5 agreement: in the older tokens .*=\[strays"):
        run.iteration(1, engine, 0)


@pytest.mark.parametrize("fault", OLDER_FAULTS)
def test_log_probs_that_belong_to_other_tokens_end_the_run_whatever_their_age(
    fault: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        InvariantViolation, match=r"I5 agreement: in the older tokens of training iteration 2 "
    ):
        stale_run(model, tmp_path, "bf16", STALE["k=1"], fault, 3)


@pytest.mark.parametrize("fault", OLDER_FAULTS)
def test_a_later_update_without_an_old_policy_is_judged_too(
    fault: str, model: Path, tmp_path: Path
) -> None:
    """Both updates have groups of the fault, so that the first one's tokens show it exactly."""
    with pytest.raises(InvariantViolation, match="I5 agreement: in "):
        stale_run(model, tmp_path, "bf16", STALE["two updates"], fault, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", ["k=1", "k=2", "k=4", "k=1, two updates"])
@pytest.mark.parametrize("fault", [*CHANGES, "temperature"])
def test_faults_of_older_tokens_at_every_age(
    fault: str, schedule: str, dtype: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvariantViolation, match="I5 agreement"):
        stale_run(model, tmp_path, dtype, STALE[schedule], fault, 6)
