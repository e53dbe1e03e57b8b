"""Published benchmarks in their published layouts: read, asked and judged."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pa_npu.data.records import read_records
from pa_npu.errors import DataError
from pa_npu.rewards.answers import chosen_letter
from pa_npu.rewards.functions import RewardInput, math_reward

GPQA = {
    "Record ID": "rec1",
    "Question": "Which one?",
    "Correct Answer": " blue\n",
    "Incorrect Answer 1": "red",
    "Incorrect Answer 2": "green",
    "Incorrect Answer 3": "grey",
    "Subdomain": "Optics",
}


def records(path: Path, *rows: dict[str, Any]) -> list[Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_records(str(path), "data.test"))


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"question": "2+3?", "answer": "2 and 3\n#### 5"}, "2+3?", "5"),  # GSM8K
        # MATH-500
        ({"problem": "$x$", "solution": "s", "answer": "\\pi", "subject": "Algebra", "level": 2}, "$x$", "\\pi"),
        # AIME 2024
        ({"ID": "2024-I-1", "Problem": "Every day", "Solution": "long", "Answer": 204}, "Every day", "204"),
        ({"id": 60, "problem": "Every", "solution": "s", "answer": "204", "url": "u", "year": "2024"}, "Every", "204"),
        ({"question": "Find", "answer": "70"}, "Find", "70"),  # AIME 2025
        ({"id": 0, "question": "Cities", "answer": 27.0, "url": "u"}, "Cities", "27"),  # AMC 2023
        ({"id": 4, "problem": "Cities", "answer": 3.5}, "Cities", "3.5"),
    ],
)  # fmt: skip
def test_layouts_of_questions_with_an_answer(
    tmp_path: Path, row: dict[str, Any], question: str, answer: str
) -> None:
    (record,) = records(tmp_path / "set.jsonl", row)
    assert record.messages == ({"role": "user", "content": question},) and record.answer == answer


def test_gpqa_is_read_from_its_csv_with_options_in_an_order_of_its_own_that_is_always_the_same(
    tmp_path: Path,
) -> None:
    file = tmp_path / "gpqa_diamond.csv"
    rows = [GPQA | {"Question": f"Which one, {number}?\nof these"} for number in range(40)]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, GPQA)
        writer.writeheader()
        writer.writerows(rows)
    actual = list(read_records(str(file), "data.test"))
    again = list(read_records(str(file), "data.test"))
    assert [record.messages for record in actual] == [record.messages for record in again]
    for record in actual:
        lines = dict(line.split(") ") for line in record.messages[0]["content"].splitlines()[-4:])
        assert lines[record.answer] == "blue" and sorted(lines.values()) == [
            "blue",
            "green",
            "grey",
            "red",
        ]
    assert {record.answer for record in actual} == set("ABCD"), "the right one stands everywhere"
    assert actual[0].row["Subdomain"] == "Optics"


@pytest.mark.parametrize(
    "row",
    [
        # MMLU
        {"question": "Which?", "choices": ["red", "blue", "green"], "answer": 1, "subject": "x"},
        {
            "question": "Which?",
            "choices": {"text": ["red", "blue", "green"], "label": ["1", "2", "3"]},
            "answerKey": "2",
        },
    ],
)
def test_other_multiple_choices(tmp_path: Path, row: dict[str, Any]) -> None:
    (record,) = records(tmp_path / "set.jsonl", row)
    assert (
        record.messages[0]["content"] == "Which?\n\nA) red\nB) blue\nC) green"
        and record.answer == "B"
    )
    group = RewardInput(
        "",
        record.answer,
        ["It is \\boxed{B}", "It is \\boxed{C}", "B is nice, but no"],
        [1, 1, 1],
        record.row,
    )
    assert math_reward(group) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("so \\boxed{C}", "C"),
        ("so \\boxed{\\text{C}}", "C"),
        ("so \\boxed{(c)}", "C"),
        ("so \\boxed{C) blue}", "C"),
        ("so \\boxed{Carbon}", None),
        ("so \\boxed{12}", None),
        ("first \\boxed{A}, no: \\boxed{B}", "B"),
        ("#### D", "D"),
        ("The answer is (B).", "B"),
        ("Answer: **D**", "D"),
        ("The correct option is C", "C"),
        ("the answer is a matter of taste", None),
        ("A good start would be B", None),
        ("I think\nB", "B"),
        ("I think\n**(B)**", "B"),
        ("The answer is E", None),
        ("answer is A. Wait, the answer is C.", "C"),
        (r"<think>\boxed{A}</think> The answer is C", "C"),
        (r"<think>\boxed{A}", None),
        ("", None),
    ],
)
def test_the_letter_of_a_response(response: str, letter: str | None) -> None:
    assert chosen_letter(response, "ABCD") == letter


def test_a_csv_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nwhat?,5\nonly\n")
    with pytest.raises(DataError, match=r"a\.csv:3: another number of cells"):
        list(read_records(str(tmp_path / "a.csv"), "data.test"))
    (tmp_path / "b.csv").write_bytes(b"question,answer\n\xff\xfe,5\n")
    with pytest.raises(DataError, match="no CSV in UTF-8"):
        list(read_records(str(tmp_path / "b.csv"), "data.test"))
