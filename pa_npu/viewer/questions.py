"""Evaluations question by question: how two versions differ, and the responses to one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import DataError
from pa_npu.evaluation.results import (
    GREEDY,
    SAMPLE,
    Judged,
    kept_versions,
    results_file,
    values_by_question,
)
from pa_npu.telemetry.sample_store import read_table
from pa_npu.viewer.values import index, number, text

MAX_QUESTIONS = 20_000
MAX_RESPONSES = 64
"""Responses to one question that are shown."""
PROMPT_CHARACTERS = 200
MAX_CHARACTERS = 200_000
"""Of a prompt, and of a response."""
_COMPARED = ("name", "question", "kind", "number", "final", "correct", "prompt")


def question_versions(run_dir: Path) -> list[int]:
    """Returns the versions whose results per question are kept."""
    return kept_versions(run_dir)


def compare_questions(run_dir: Path, version: int, before: int) -> dict[str, Any] | None:
    """Compares two versions question by question; None where `version` is not kept.

    Returns {version, before, sets, left_out, error}. Each set has the metric that is compared
    (greedy, or the mean of its samples) and rows of [question, end of the prompt, value before,
    value now]; the value before is None where that version has not answered the question.
    """
    if version not in kept_versions(run_dir):
        return None
    comparison: dict[str, Any] = {
        "version": version,
        "before": before,
        "sets": [],
        "left_out": 0,
        "error": None,
    }
    try:
        now = _read(run_dir, version, columns=_COMPARED)
        earlier = []
        if before in kept_versions(run_dir):
            earlier = _read(run_dir, before, columns=_COMPARED)
    except DataError as error:
        comparison["error"] = str(error)
        return comparison

    room = MAX_QUESTIONS
    for name in dict.fromkeys(response.name for response in now):
        responses = [response for response in now if response.name == name]
        metric, values = _value_per_question(responses)
        metric_before, values_before = _value_per_question(
            [response for response in earlier if response.name == name]
        )
        if metric_before != metric:
            values_before = {}
        prompts = {response.question: response.prompt for response in responses}
        questions = sorted(values)[:room]
        comparison["left_out"] += len(values) - len(questions)
        room -= len(questions)
        rows = []
        for question in questions:
            end = prompts[question][-PROMPT_CHARACTERS:]
            rows.append([question, end, values_before.get(question), values[question]])
        comparison["sets"].append({"name": name, "metric": metric, "rows": rows})
    return comparison


def question_answers(
    run_dir: Path, version: int, set_number: int, question: int
) -> dict[str, Any] | None:
    """Returns a question with the responses of a version; None where there is none.

    set_number: place of the question's set in the order of the version's results.
    """
    if version not in kept_versions(run_dir):
        return None
    try:
        names = list(dict.fromkeys(row.name for row in _read(run_dir, version, columns=_COMPARED)))
        rows = read_table(results_file(run_dir, version), only=("question", question))
    except DataError:
        return None
    if set_number >= len(names):
        return None
    rows = [row for row in rows if text(row, "name") == names[set_number]]
    if not rows:
        return None
    answers = [
        {
            "kind": text(row, "kind"),
            "number": index(row, "number"),
            "text": text(row, "text")[:MAX_CHARACTERS],
            "final": text(row, "final") or None,
            "correct": row.get("correct") is True,
            "reward": number(row, "reward"),
            "length": index(row, "tokens"),
            "finished": row.get("finished") is True,
        }
        for row in rows[:MAX_RESPONSES]
    ]
    return {
        "version": version,
        "set": names[set_number],
        "question": question,
        "prompt": text(rows[0], "prompt")[:MAX_CHARACTERS],
        "answer": text(rows[0], "answer"),
        "answers": answers,
    }


def _read(run_dir: Path, version: int, columns: Sequence[str]) -> list[Judged]:
    """Returns the responses with these columns; rows that are no responses are left out."""
    rows = read_table(results_file(run_dir, version), columns=columns)
    responses = [_judged(row) for row in rows]
    return [response for response in responses if response is not None]


def _judged(row: Mapping[str, Any]) -> Judged | None:
    question = index(row, "question")
    place = index(row, "number")
    kind = row.get("kind")
    if question is None or place is None or kind not in (GREEDY, SAMPLE):
        return None
    return Judged(
        name=text(row, "name"),
        question=question,
        prompt=text(row, "prompt"),
        answer="",
        kind=kind,
        number=place,
        text="",
        final=text(row, "final") or None,
        correct=row.get("correct") is True,
        reward=0.0,
        tokens=0,
        finished=True,
    )


def _value_per_question(responses: Sequence[Judged]) -> tuple[str, dict[int, float]]:
    """Returns the metric that is shown, greedy or else the mean of the samples, and its value for
    each question; ("", {}) where there is neither.
    """
    values = values_by_question(responses)
    for metric in values:
        if metric == GREEDY or (GREEDY not in values and metric.startswith("avg@")):
            return metric, values[metric]
    return "", {}
