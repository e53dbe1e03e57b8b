"""metrics.jsonl: one strict JSON object per iteration, also after a resume and with numbers that are not finite."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pa_npu.errors import DataError
from pa_npu.telemetry.records import METRICS, MetricsWriter, read_evaluations, read_records


def test_records_come_back_in_order_with_numpy_scalars_as_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            {
                "iteration": 0,
                "loss": np.float32(0.5),
                "engines": {"http://a": {"tokens": np.int64(7)}},
            }
        )
        writer.write({"iteration": 1, "loss": 0.25})
        assert len(read_records(tmp_path)) == 2, (
            "a record must be readable before the writer is closed"
        )
    assert read_records(tmp_path) == [
        {"iteration": 0, "loss": 0.5, "engines": {"http://a": {"tokens": 7}}},
        {"iteration": 1, "loss": 0.25},
    ]


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            {"iteration": 0, "loss": float("nan"), "rewards": {"math": float("inf")}, "kl": 0.0}
        )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / METRICS).read_text()
    assert json.loads(line, parse_constant=refuse) == {
        "iteration": 0,
        "loss": None,
        "rewards": {"math": None},
        "kl": 0.0,
        "non_finite": ["loss", "rewards.math"],
    }


def test_a_resumed_run_reads_like_one_that_was_never_killed(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for iteration in range(5):
            writer.write({"iteration": iteration, "attempt": 1})
            writer.write_evaluation({"version": iteration, "accuracy": 0.1})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"iteration": 5, "att')  # killed in the middle of a line
    with MetricsWriter(tmp_path, first_iteration=3) as writer:
        writer.write({"iteration": 3, "attempt": 2})
    assert [(r["iteration"], r["attempt"]) for r in read_records(tmp_path)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
    ]
    assert [entry["version"] for entry in read_evaluations(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no metrics.jsonl"),
        ("", "is empty"),
        ('{"iteration": 0}\n{oops\n', "metrics.jsonl:2: is not JSON"),
        ('{"loss": 0}\n', "metrics.jsonl:1: is no object with an integer 'iteration'"),
    ],
)
def test_a_bad_run_directory_is_named_with_its_line(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / METRICS).write_text(content)
    with pytest.raises(DataError, match=message):
        read_records(tmp_path)
