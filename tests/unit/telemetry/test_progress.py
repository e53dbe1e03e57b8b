"""The progress line shows every number of an iteration and stays aligned from line to line."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from pa_npu.telemetry.logs import setup_logging
from pa_npu.telemetry.progress import fitted, format_duration, progress_line, remaining_s

RECORD: dict[str, Any] = {
    "iteration": 2,
    "reward_mean": 0.512,
    "accuracy": 0.481,
    "loss": -0.0123,
    "kl": 0.00012,
    "entropy": 1.234,
    "grad_norm": 0.451,
    "response_length_mean": 123.4,
    "tpspd": 1234.5,
    "trainer_idle": 0.117,
    "engine_idle": 0.05,
    "publish_s": 0.12,
}


def test_the_line_shows_every_number() -> None:
    assert progress_line(RECORD, 20, 312.0) == (
        "| iteration  2 ( 3/20) | reward  0.512 acc 0.481 | loss  -0.0123 KL  0.00012 entropy  "
        "1.234 grad   0.451 | length  123.4 | TPSPD   1234.5 | idle trainer  12% engine   5% | "
        "publish   0.12 s | ETA   5m12s"
    )


def test_devices_that_decode_and_train_have_one_share_of_idle_time() -> None:
    assert "| idle device  31% |" in progress_line(RECORD | {"device_idle": 0.31}, 20, 312.0)


def test_lines_stay_aligned_whatever_the_values() -> None:
    another = {
        "iteration": 99,
        "reward_mean": -1.0,
        "accuracy": 1.0,
        "loss": 12.5,
        "kl": None,
        "entropy": 11.9,
        "grad_norm": 812.25,
        "response_length_mean": 8191.0,
        "tpspd": 31234.5,
        "trainer_idle": 1.0,
        "engine_idle": 0.0,
        "publish_s": 123.45,
    }
    lines = [
        progress_line(record, 100, eta)
        for record, eta in ((RECORD, 3.0), (another, None), ({"iteration": 0}, 1e6))
    ]
    separators = [[match.start() for match in re.finditer(r"\|", line)] for line in lines]
    assert separators[0] == separators[1] == separators[2]
    assert len({len(line) for line in lines}) == 1
    assert "KL        - " in lines[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0s"),
        (59.6, "1m00s"),
        (312, "5m12s"),
        (3600, "1h00m"),
        (11_100, "3h05m"),
        (187_200, "2d04h"),
    ],
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_estimate_ignores_a_single_slow_iteration() -> None:
    assert remaining_s([], 10) is None
    assert remaining_s([2.0, 2.0, 50.0, 2.0], 10) == 12.0
    assert remaining_s([9.0] * 5 + [1.0] * 8, 20) == 7.0
    assert remaining_s([1.0] * 4, 4) == 0.0


def test_log_lines_name_the_process_and_cannot_be_taken_for_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before = root.handlers[:]
    level = root.level
    try:
        setup_logging("trainer-3")
        setup_logging("trainer-3")
        logging.getLogger("pa_npu.trainer").warning("slow %s", "step")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(False)
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} W trainer-3 pa_npu\.trainer: slow step", line
    )


@pytest.mark.parametrize("columns", [80, 100, 160, 300])
def test_a_progress_line_leaves_out_what_does_not_fit(columns: int) -> None:
    line = progress_line(RECORD, 20, 312.0).removeprefix("| ")
    shown = fitted(line, columns)
    assert len(shown) <= columns
    assert shown.startswith("iteration  2 ( 3/20) | reward  0.512") and shown.endswith(
        "ETA   5m12s"
    )
    assert (shown == line) == (columns >= len(line))
    assert fitted("evaluation of version 3: " + "x" * 200, 80).endswith("x" * 200), (
        "other lines stay whole"
    )


def test_a_line_of_rows_says_how_far_the_data_is_and_nothing_of_rewards() -> None:
    record = {
        "iteration": 1,
        "rows": 128,
        "epoch": 0.5,
        "loss": 0.1,
        "entropy": 1.0,
        "grad_norm": 0.2,
        "learning_rate": 1e-3,
        "tokens_per_s": 500.0,
        "trainer_idle": 0.1,
    }
    line = progress_line(record, 20, 3.0)
    assert "epoch   0.50 rows   128" in line and "tokens/s      500" in line
    assert "reward" not in line and "publish" not in line
