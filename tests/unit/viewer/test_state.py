"""The state of a run: finished, failed, stopped, running or silent, by what, and where it was started again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pa_npu.telemetry.run_end import owner_mark
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.timeline import TimelineAttempt
from pa_npu.viewer.values import share
from tests.helpers.finished_run import BEGAN_S, SECRET, end_run, make_run, resume_run


def state(directory: Path) -> dict[str, Any]:
    return RunDirectory(directory).state()


def test_a_run_that_a_signal_ended_is_stopped_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=3)
    assert state(run)["word"] == "running" and state(run)["left"] == pytest.approx(9 * 10, rel=0.05)
    end_run(run, "stopped", "SIGTERM")
    actual = state(run)
    assert (actual["word"], actual["cause"], actual["left"]) == ("stopped", "SIGTERM", None)
    assert actual["started"] == BEGAN_S - 6 and actual["ended"] == BEGAN_S + 50


def test_a_run_that_failed_says_by_what_without_secrets(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=3)
    end_run(
        run,
        "failed",
        "trainer-1 ended: killed by SIGKILL",
        "trainer-1",
        ("line", f"HF_TOKEN={SECRET}"),
    )
    actual = state(run)
    assert (actual["word"], actual["process"]) == ("failed", "trainer-1") and "SIGKILL" in actual[
        "cause"
    ]
    assert actual["lines"][0] == "line" and SECRET not in json.dumps(actual)


def test_a_run_that_was_started_again_is_at_work(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=3)
    end_run(run, "failed", "x")
    resume_run(run, 2, down_s=100.0)
    assert state(run)["word"] == "running" and state(run)["attempts"] == 2


def test_a_run_whose_launcher_was_killed_has_failed_and_one_of_elsewhere_is_silent(
    tmp_path: Path,
) -> None:
    mark = owner_mark()
    if mark is None:
        pytest.skip("processes are told apart by /proc")
    run = make_run(tmp_path / "run", iterations=3)
    launcher = run / "timeline" / "launcher.jsonl"

    def begun_by(**changes: Any) -> None:
        begin = {
            "name": "begin",
            "lane": "run",
            "start": 1.0,
            "end": 1.0,
            "args": {"owner": mark | changes},
        }
        launcher.write_text(
            json.dumps({"process": "launcher", "start": 1.0}) + "\n" + json.dumps(begin) + "\n"
        )

    begun_by()
    before = RunDirectory(run).stamp()
    assert state(run)["word"] == "running"
    begun_by(started=1)
    assert state(run)["word"] == "failed" and "killed" in state(run)["cause"]
    assert RunDirectory(run).stamp() != before
    begun_by(boot="elsewhere", started=1)
    assert state(run)["word"] == "running"
    long_ago = time.time() - 3600
    for path in (run / "metrics.jsonl", *(run / "logs").iterdir(), *(run / "timeline").iterdir()):
        os.utime(path, (long_ago, long_ago))
    assert state(run)["word"] == "silent"


def test_curves_are_marked_where_a_run_was_resumed_restarted_and_wrote_checkpoints(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run")
    resume_run(run, 8, down_s=100.0)
    resume_run(run, 9, down_s=200.0, by_launcher=True)
    actual = [(mark["kind"], mark["iteration"]) for mark in RunDirectory(run).overview()["marks"]]
    assert actual == [
        ("resume", 8),
        ("restart", 9),
        ("checkpoint", 4),
        ("checkpoint", 8),
        ("checkpoint", 12),
    ]


def test_the_time_in_which_a_run_was_down_belongs_to_no_iteration(tmp_path: Path) -> None:
    """The idle shares of the iteration before a resume are those that its record has."""
    run = make_run(tmp_path / "run")
    before = RunDirectory(run).timeline(7)
    resume_run(run, 8, down_s=3600.0)
    resumed = RunDirectory(run)
    after = resumed.timeline(7)
    assert before is not None and after is not None
    assert after["seconds"] == before["seconds"] == pytest.approx(10.0)
    assert after["waits"] == before["waits"]
    assert sorted(resumed._timeline.bounds()) == list(range(10)), (
        "those behind the checkpoint are of the first attempt"
    )
    assert resumed._timeline.attempts() == [
        TimelineAttempt(BEGAN_S - 5, 0, resumed=False),
        TimelineAttempt(BEGAN_S + 4100, 8, resumed=True),
    ]


def test_idle_is_one_number_in_tiles_timeline_and_advice(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "run"))
    overview = run.overview()
    timeline = run.timeline(6)
    assert timeline is not None
    for role in ("trainer", "engine"):
        shares = [entry["idle"] for entry in timeline["waits"] if entry["role"] == role]
        idle = sum(shares) / len(shares)
        assert (
            idle
            == pytest.approx(overview["columns"][f"{role}_idle"][6])
            == pytest.approx(overview["idle"][f"{role}_idle"])
        )
        assert share(overview["idle"][f"{role}_idle"]) in overview["advice"][0]["text"]


def test_tiles_and_advice_leave_out_the_first_iteration_of_each_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    resume_run(run, 11, down_s=60.0)
    records = (run / "metrics.jsonl").read_text().splitlines()
    warm = json.loads(records[11]) | {"trainer_idle": 0.99}
    (run / "metrics.jsonl").write_text("\n".join([*records[:11], json.dumps(warm)]) + "\n")
    overview = RunDirectory(run).overview()
    assert (
        overview["columns"]["trainer_idle"][-1] == 0.99 and overview["idle"]["trainer_idle"] == 0.4
    )
