"""A run's early end follows from its evaluations alone, in one process or over several attempts."""

from __future__ import annotations

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.sections import EvaluateConfig
from pa_npu.coordinator.evaluate import EarlyStop
from pa_npu.errors import ConfigError

VALUES = {0: 0.30, 4: 0.20, 8: 0.40, 12: 0.40, 16: 0.39, 20: 0.41, 24: 0.90}


def ends(values: dict[int, float], **wishes: float) -> tuple[int, str] | None:
    """The version at which it ends, and why."""
    stop = EarlyStop(EvaluateConfig.model_validate(wishes))
    for version, value in values.items():
        stop.observe({"version": version, "best_by": value})
        if stop.why is not None:
            return version, stop.why
    return None


@pytest.mark.parametrize(
    ("wishes", "version"),
    [
        ({"stop_at": 0.40}, 8),
        ({"stop_at": 0.401}, 20),
        ({"stop_at": 0.95}, None),
        ({"stop_at": 0.3}, 8),  # version 0 has it, and ends nothing
        ({"patience": 1}, 4),
        ({"patience": 2}, 16),  # equal is no improvement
        ({"patience": 3}, None),
        ({"patience": 2, "stop_at": 0.4}, 8),
    ],
)
def test_a_target_or_no_improvement_ends_a_run(wishes: dict[str, float], version: int | None) -> None:
    found = ends(VALUES, **wishes)
    assert (found[0] if found else None) == version


def test_it_says_why() -> None:
    assert ends(VALUES, stop_at=0.4) == (8, "accuracy is 0.400, evaluate.stop_at = 0.4")
    found = ends(VALUES, patience=2, metric="test/greedy")
    assert found is not None
    assert found[1] == "test/greedy was not above the 0.400 of version 8 in 2 evaluations, evaluate.patience = 2"


@pytest.mark.parametrize("interrupted", [4, 8, 12, 16])
def test_evaluations_of_earlier_attempts_count(interrupted: int) -> None:
    """A run that goes on from version `interrupted` is told the records before it, then evaluates that version anew."""
    for wishes in ({"stop_at": 0.401}, {"patience": 2}):
        stop = EarlyStop(EvaluateConfig.model_validate(wishes))
        for version in sorted(VALUES):
            if version < interrupted:
                stop.observe({"version": version, "best_by": VALUES[version]})
        assert stop.why is None
        again = None
        for version in sorted(VALUES):
            if version >= interrupted and again is None:
                stop.observe({"version": version, "best_by": VALUES[version]})
                again = version if stop.why else None
        expected = ends(VALUES, **wishes)
        assert expected is not None and again == expected[0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["evaluate.stop_at=0.9"], "evaluate.stop_at: 0.9: without evaluations in between"),
        (["evaluate.patience=2", "data.test=null", "schedule.evaluate_every=2"], "evaluate.patience: 2: without"),
        (["evaluate.patience=0", "schedule.evaluate_every=2"], "evaluate.patience: 0 is out of range"),
        (["evaluate.stop_at=1.5", "schedule.evaluate_every=2"], "evaluate.stop_at: 1.5 is out of range"),
    ],
)
def test_each_mistake_is_one_line(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], ["model.path=m", "data.train=a", "data.test=b", *overrides])
    assert expected in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("extra", "asked"),
    [
        ([], []),
        (["evaluate.stop_at=0.9"], [3, 6, 9]),
        (["evaluate.stop_at=0.9", "evaluate.overlap=true"], [4, 7]),
        (["evaluate.stop_at=0.9", "schedule.max_staleness=2"], [4, 7]),
    ],
)
def test_trainers_ask_whether_the_run_ends_where_an_evaluation_may_have_said_so(
    extra: list[str], asked: list[int]
) -> None:
    keys = ["model.path=m", "data.train=a", "data.test=b", "schedule.evaluate_every=3", "schedule.iterations=10"]
    config = load_config([], [*keys, *extra])
    assert [version for version in range(11) if config.may_end_at(version)] == asked
