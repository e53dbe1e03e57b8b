"""The real coordinator with demonstrations: periodic, synchronous and resumed runs train the same groups in the same slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.coordinator_run import (
    GROUPS,
    RESPONSES,
    Run,
    coordinator_run,
    write_inputs,
)

pytestmark = pytest.mark.timeout(240)

ITERATIONS, SAVED, SHOWN = 3, 1, 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def sections(inputs: Path, stream: bool = True, **checkpoint: Any) -> dict[str, dict[str, Any]]:
    demonstrations = {
        "path": str(inputs / "train.jsonl"),
        "weight": 0.5,
        "share": SHOWN / GROUPS,
    }
    return {
        "data": {"demonstrations": demonstrations},
        "schedule": {"iterations": ITERATIONS, "order": "prompt", "stream": stream},
        "checkpoint": {"every": SAVED, **checkpoint},
    }


def trained(run: Run) -> dict[int, list[tuple[int, bytes, bytes, bytes]]]:
    """By iteration, what each slot trained: number, tokens, components, advantages."""
    return {
        iteration: [
            (
                group.index,
                group.tokens.tobytes(),
                group.component.tobytes(),
                group.advantages.tobytes(),
            )
            for group in groups
        ]
        for iteration, groups in run.trained.items()
    }


def test_periodic_synchronous_and_resumed_runs_train_the_same(inputs: Path, tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("periodic", "synchronous", "resumed")]
    for directory in directories:
        directory.mkdir()
    periodic_dir, synchronous_dir, resumed_dir = directories
    with coordinator_run(periodic_dir, inputs, **sections(inputs)) as run:
        run.play()
        periodic = trained(run)
        for groups in run.trained.values():
            shown = [group for group in groups if not group.written.any()]
            assert [group.index for group in shown] == list(range(SHOWN))
            assert all(group.num_samples == RESPONSES for group in shown)
            for group in shown:
                assert group.weight is not None
                assert set(np.unique(group.weight[group.trained])) == {0.5}
        for record in run.records.values():
            assert record["groups"] == GROUPS
            assert record["demonstrations"]["rows"] == SHOWN * RESPONSES
        with coordinator_run(
            resumed_dir, inputs, **sections(inputs, load=str(run.checkpoint))
        ) as resumed:
            resumed.play(SAVED)
            again = trained(resumed)
    assert sorted(periodic) == list(range(ITERATIONS))
    assert again == {iteration: periodic[iteration] for iteration in range(SAVED, ITERATIONS)}
    with coordinator_run(synchronous_dir, inputs, **sections(inputs, stream=False)) as run:
        run.play()
        assert trained(run) == periodic
    assert periodic[0][0][1] != periodic[1][0][1], "negative control: other rows every time"
