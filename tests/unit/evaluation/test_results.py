"""Results per question: summaries against hand-counted ones, files that come back as they were, comparison of two."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.errors import DataError
from pa_npu.evaluation.harness_file import harness_results
from pa_npu.evaluation.results import (
    EvaluationProgress,
    Judged,
    compare,
    kept_versions,
    read_results,
    results_file,
    summarise,
    write_results,
)


def judged(
    question: int,
    number: int,
    correct: bool,
    *,
    name: str = "a",
    kind: str = "sample",
    final: str = "x",
) -> Judged:
    text = f"\u202e<b>{question}</b>"
    return Judged(
        name,
        question,
        "p",
        "r",
        kind,
        number,
        text,
        None if final == "-" else final,
        correct,
        float(correct),
        10 * (number + 1),
        number != 3,
    )


def four_samples(rights: list[int]) -> list[Judged]:
    return [
        judged(q, number, number < right) for q, right in enumerate(rights) for number in range(4)
    ]


def test_metrics_of_samples_and_of_the_greedy_answer() -> None:
    responses = four_samples([4, 2, 0]) + [judged(q, 0, q != 2, kind="greedy") for q in range(3)]
    (actual,) = summarise(responses).values()
    values = {name: round(metric.value, 6) for name, metric in actual.metrics.items()}
    assert values == {
        "greedy": round(2 / 3, 6),
        "avg@4": 0.5,
        "pass@2": round((1 + 5 / 6 + 0) / 3, 6),  # of two right in four, one pair of six is wrong
        "pass@4": round(2 / 3, 6),
        "maj@4": 0.5,  # of two against two, half
    }
    assert (actual.questions, actual.responses) == (
        3,
        15,
    ) and actual.truncated_ratio == pytest.approx(3 / 15)
    assert actual.length_mean == pytest.approx((3 * 100 + 3 * 10) / 15) and actual.length_95 == 40


def test_sets_are_kept_apart_in_their_order_and_uneven_samples_use_what_all_have() -> None:
    responses = [
        judged(0, 0, True, name="b", kind="greedy"),
        *four_samples([4, 0]),
        judged(2, 0, True),
    ]
    actual = summarise(responses)
    assert list(actual) == ["b", "a"] and list(actual["a"].metrics) == ["avg@1"]
    assert actual["a"].metrics["avg@1"].value == pytest.approx(2 / 3)


def test_differences_are_paired_by_question_and_over_those_that_both_have() -> None:
    before, after = four_samples([0, 2, 4]), four_samples([1, 2, 4, 0])
    actual = compare(before, after)["a"]
    assert actual["avg@4"].value == pytest.approx(0.25 / 3) and actual["avg@4"].questions == 3
    assert compare(before, [judged(0, 0, True, name="other")]) == {}


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    responses = [*four_samples([3, 1]), judged(7, 0, False, kind="greedy", final="-")]
    write_results(results_file(tmp_path, 12), responses)
    assert read_results(results_file(tmp_path, 12)) == responses and kept_versions(tmp_path) == [12]
    (tmp_path / "evaluations" / "version_000003.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="holds no results"):
        read_results(results_file(tmp_path, 3))


def test_a_run_says_what_each_version_gained_since_the_first_and_since_the_one_before(
    tmp_path: Path,
) -> None:
    """Also where an earlier attempt made the first evaluations."""
    actual = {0: four_samples([0, 2, 4]), 5: four_samples([2, 2, 4]), 10: four_samples([2, 3, 4])}
    progress = EvaluationProgress(tmp_path)
    assert progress.differences(0, actual[0]) == {}
    output = [progress.differences(version, actual[version]) for version in (5, 10)]
    for earlier in (0, 5):
        write_results(results_file(tmp_path, earlier), actual[earlier])
    assert EvaluationProgress(tmp_path).differences(10, actual[10]) == output[1]
    last = output[1]
    assert (last["first"]["version"], last["before"]["version"]) == (0, 5)
    for name, old in (("first", 0), ("before", 5)):
        expected = compare(actual[old], actual[10])["a"]
        assert last[name]["sets"] == {
            "a": {metric: asdict(value) for metric, value in expected.items()}
        }
    assert last["first"]["sets"]["a"]["avg@4"]["value"] == pytest.approx(0.75 / 3)


def test_numbers_in_lm_evals_layout_have_its_standard_errors() -> None:
    """The deviation of the questions' numbers, divided by the root of how many there are."""
    responses = four_samples([4, 2, 0]) + [judged(q, 0, q != 2, kind="greedy") for q in range(3)]
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    written = harness_results(responses, config)
    row = written["results"]["a"]
    assert row["exact_match,none"] == pytest.approx(2 / 3)
    assert row["exact_match_stderr,none"] == pytest.approx(np.std([1, 1, 0], ddof=1) / 3**0.5)
    assert row["avg@4,none"] == pytest.approx(0.5)
    assert row["avg@4_stderr,none"] == pytest.approx(np.std([1, 0.5, 0], ddof=1) / 3**0.5)
    assert written["n-samples"] == {"a": {"original": 3, "effective": 3}}
    alone = harness_results([judged(0, 0, True, kind="greedy")], config)
    assert alone["results"]["a"]["exact_match_stderr,none"] == "N/A"
