"""Records of a made-up run, and an attempt of it: python -m tests.helpers.tracked_run TRACKER RUN FIRST LAST."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pa_npu.config.sections.operation import TelemetryConfig
from pa_npu.telemetry import trackers as feed
from pa_npu.telemetry.records import MetricsWriter, lost_records
from pa_npu.telemetry.sample_store import KeptResponse
from pa_npu.telemetry.trackers import Trackers

PATIENCE_S = 240.0  # a library that compiles itself on a busy machine


def record(iteration: int, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "version": iteration,
        "loss": 0.5,
        "reward_mean": iteration / 10,
        "time": 1.0,
        **more,
    }


def evaluation(version: int) -> dict[str, Any]:
    sets = {
        "test": {
            "metrics": {
                "greedy": {"value": 0.25, "low": 0.1, "high": 0.4},
                "pass@4": {"value": 0.5},
            }
        }
    }
    return {"version": version, "accuracy": 0.25, "sets": sets}


def response(iteration: int, index: int, text: str = "#### 4") -> KeptResponse:
    return KeptResponse(
        iteration,
        index,
        0,
        7,
        "2+2?",
        3,
        "4",
        text,
        "stop",
        0,
        1.0,
        {"math": 1.0},
        0.5,
        True,
        (),
        (1, 2),
        (-0.1, -0.2),
    )


def attempt(tracker: str, run: Path, first: int, last: int) -> None:
    feed.ANSWER_TIMEOUT_S = PATIENCE_S
    settings = TelemetryConfig(trackers=(tracker,), project="arithmetic")
    with (
        MetricsWriter(run, first) as metrics,
        Trackers(run, settings, {"run.seed": 1}, first) as trackers,
    ):
        trackers.write_evaluation(metrics.write_evaluation(evaluation(first)))
        for iteration in range(first, last):
            kept = [response(iteration, 0), response(iteration, 1, "é\n中")]
            trackers.write_iteration(metrics.write(record(iteration, loss=float(iteration))), kept)


if __name__ == "__main__":
    attempt(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    print(f"lost {lost_records()}")
