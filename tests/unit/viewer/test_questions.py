"""Evaluations question by question: what was gained and lost, and the answers of versions and runs to one question."""

from __future__ import annotations

from pathlib import Path

import pytest

from pa_npu.viewer import questions as viewer_questions
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import answer
from tests.helpers.finished_run import HOSTILE, QUESTIONS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory(make_run(tmp_path_factory.mktemp("questions") / "run"))


def test_each_question_has_its_number_before_and_now(run: RunDirectory) -> None:
    assert run.overview()["question_versions"] == [0, 4, 8, 12]
    compared = answer([run], "questions/12/0")
    (gsm8k,) = compared["sets"]
    assert (gsm8k["name"], gsm8k["metric"]) == ("gsm8k", "greedy")
    numbers = {question: (before, now) for question, _, before, now in gsm8k["rows"]}
    assert numbers == {
        0: (1.0, 0.0),
        **{question: (1.0, 1.0) for question in (1, 2, 3)},
        **{question: (0.0, 1.0) for question in range(4, 9)},
        9: (0.0, 0.0),
    }
    assert answer([run], "questions/5/0") is None, "no such version"
    assert {row[2] for row in answer([run], "questions/4/3")["sets"][0]["rows"]} == {None}


def test_a_question_has_the_answers_of_both_versions_and_of_other_runs(
    run: RunDirectory, tmp_path: Path
) -> None:
    second = RunDirectory(make_run(tmp_path / "other"))
    actual = answer([run, second], "question/12/0/0")
    assert (
        "What is 0?" in actual["prompt"] and HOSTILE in actual["prompt"] and actual["answer"] == "0"
    )
    assert [(one["kind"], one["final"], one["correct"]) for one in actual["answers"]] == [
        ("greedy", "-1", False)
    ]
    assert [
        (peer["run"], peer["version"], peer["answers"][0]["final"]) for peer in actual["peers"]
    ] == [("other", 12, "-1")]
    for path in ("question/12/1/0", f"question/12/0/{QUESTIONS}", "question/5/0/0"):
        assert answer([run], path) is None


def test_large_evaluations_are_bounded_and_say_so(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_questions, "MAX_QUESTIONS", 4)
    compared = answer([run], "questions/12/0")
    assert len(compared["sets"][0]["rows"]) == 4 and compared["left_out"] == QUESTIONS - 4


def test_results_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "evaluations" / "version_000012.parquet").write_bytes(b"nonsense")
    actual = answer([RunDirectory(run)], "questions/12/0")
    assert "version_000012.parquet: cannot be read" in actual["error"] and actual["sets"] == []
    assert answer([RunDirectory(run)], "question/12/0/0") is None
