"""Evaluation beside training on real vLLM: it takes the engines when they are free, and gives them back for the next weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pa_npu.evaluation.results import read_results, results_file
from pa_npu.telemetry.chrome_trace import read_events
from tests.helpers.launched import Launched, settings

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
ITERATIONS, QUESTIONS = 4, 8
LATE_S = 0.5  # of a cancelled evaluation: its requests are given up, its record is written


def test_an_overlapped_evaluation_ends_before_the_next_weights_and_answers_by_its_version(
    tiny: Path, tmp_path: Path
) -> None:
    more = [
        "schedule.evaluate_every=1",
        "evaluate.overlap=true",
        "evaluate.samples=2",
        "schedule.prompts_per_iteration=16",
    ]
    keys = settings(
        tiny, tmp_path / "run", rollout__backend="vllm", schedule__iterations=ITERATIONS
    )
    launched = Launched(tmp_path, "run", *keys, *more)
    try:
        assert launched.popen.wait(900) == 0, launched.output
    finally:
        launched.close()
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == list(range(ITERATIONS))
    assert all(record["evaluation_s"] is None for record in records), (
        "no iteration stood still for one"
    )

    evaluations = [
        json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()
    ]
    by_version = {record["version"]: record for record in evaluations}
    assert by_version.keys() <= set(range(ITERATIONS + 1)) and len(by_version) == len(evaluations)
    last = by_version[ITERATIONS]
    assert last["questions"] == last["planned"] == QUESTIONS, "the last version in full"
    assert len(by_version) > 1, "and at least one beside training"
    for version, record in by_version.items():
        responses = read_results(results_file(run, version))
        assert len(responses) == 3 * record["questions"] <= 3 * QUESTIONS, (
            f"a greedy answer and two samples, version {version}"
        )

    events = [
        event for path in sorted((run / "timeline").glob("*.jsonl")) for event in read_events(path)
    ]
    spans = {
        name: {event["args"]["version"]: event for event in events if event.get("name") == name}
        for name in ("evaluate", "publish")
    }
    for version in by_version.keys() - {ITERATIONS}:
        ends_s = spans["evaluate"][version]["end"]
        assert ends_s < spans["publish"][version + 1]["start"] + LATE_S, (
            f"version {version} delayed a publish"
        )
