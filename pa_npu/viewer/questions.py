"""Evaluations question by question: what a version gained and lost against another, and the responses to one question."""

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
"""Of one question."""
PROMPT_CHARACTERS = 200
LONGEST_TEXT = 200_000
_NUMBERS = ("name", "question", "kind", "number", "final", "correct", "prompt")


def question_versions(run_dir: Path) -> list[int]:
    """Versions of which results per question are kept."""
    return kept_versions(run_dir)


def compare_questions(run_dir: Path, version: int, before: int) -> dict[str, Any] | None:
    """Every question of version `version` with its number before and now, by set: {version, before,
    sets, left_out, error}.

    A set has the metric that is compared (greedy, or the mean of its samples) and rows of
    [question, prompt's beginning, before, now]; a number is None where a version has not answered
    the question. None where the version is not kept.
    """
    if version not in kept_versions(run_dir):
        return None
    try:
        now = _read(run_dir, version, columns=_NUMBERS)
        then = _read(run_dir, before, columns=_NUMBERS) if before in kept_versions(run_dir) else []
    except DataError as error:
        return {
            "version": version,
            "before": before,
            "sets": [],
            "left_out": 0,
            "error": str(error),
        }
    sets, left_out, room = [], 0, MAX_QUESTIONS
    for name in dict.fromkeys(response.name for response in now):
        metric, values = _number_per_question(
            [response for response in now if response.name == name]
        )
        known, earlier = _number_per_question(
            [response for response in then if response.name == name]
        )
        prompts = {response.question: response.prompt for response in now if response.name == name}
        questions = sorted(values)
        left_out += max(0, len(questions) - room)
        questions = questions[:room]
        room -= len(questions)
        rows = [
            [
                place,
                prompts[place][-PROMPT_CHARACTERS:],
                earlier.get(place) if known == metric else None,
                values[place],
            ]
            for place in questions
        ]
        sets.append({"name": name, "metric": metric, "rows": rows})
    return {"version": version, "before": before, "sets": sets, "left_out": left_out, "error": None}


def question_answers(
    run_dir: Path, version: int, set_number: int, question: int
) -> dict[str, Any] | None:
    """A question with its responses by a version. set_number: in the order in which the sets appear
    in the version's results.
    """
    if version not in kept_versions(run_dir):
        return None
    try:
        names = list(dict.fromkeys(row.name for row in _read(run_dir, version, columns=_NUMBERS)))
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
            "text": text(row, "text")[:LONGEST_TEXT],
            "final": text(row, "final") or None,
            "correct": row.get("correct") is True,
            "reward": number(row, "reward"),
            "length": index(row, "tokens"),
            "finished": row.get("finished") is True,
        }
        for row in rows[:MAX_RESPONSES]
    ]
    prompt, answer = text(rows[0], "prompt")[:LONGEST_TEXT], text(rows[0], "answer")
    return {
        "version": version,
        "set": names[set_number],
        "question": question,
        "prompt": prompt,
        "answer": answer,
    } | {"answers": answers}


def _read(run_dir: Path, version: int, columns: Sequence[str]) -> list[Judged]:
    """The responses without what takes room. Rows that are none of an evaluation's are left out."""
    rows = read_table(results_file(run_dir, version), columns=columns)
    return [response for row in rows if (response := _judged(row)) is not None]


def _judged(row: Mapping[str, Any]) -> Judged | None:
    question, place, kind = index(row, "question"), index(row, "number"), row.get("kind")
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


def _number_per_question(responses: Sequence[Judged]) -> tuple[str, dict[int, float]]:
    """Greedy where there is a greedy response, else the mean of the samples; its name and the
    number of every question.
    """
    values = values_by_question(responses)
    metric = (
        GREEDY
        if GREEDY in values
        else next((name for name in values if name.startswith("avg@")), "")
    )
    return metric, values.get(metric, {})
