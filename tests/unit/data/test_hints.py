"""A hint stands behind the question of its row, in the prompt that the policy as its own teacher scores by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.data.hints import hints_of
from pa_npu.data.prompts import load_training
from pa_npu.errors import DataError
from tests.unit.data.test_training_rows import tokenizer


def load(tmp_path: Path, rows: list[dict[str, Any]], teacher: dict[str, Any], **data: Any) -> Any:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    several = {"held": {"model": "m"}} if "teacher_column" in data else {}
    config = Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": "m", "dtype": "fp32"},
            "data": {"train": str(file), **data},
            "algorithm": {"name": "distill"},
            "teacher": {"own": teacher, **several},
        }
    )
    (loaded,) = load_training(config.data, tokenizer(), hints=hints_of(config))
    return loaded.prompts


def test_the_prompt_is_made_twice_and_the_hint_follows_the_question(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "answer": "2", "extra": {"hint": "two"}}]
    teacher = {"hint_column": "extra.hint", "hint_text": "See: {hint}!"}
    (prompt,) = load(tmp_path, rows, teacher, instruction="Briefly.")
    plain = tokenizer().decode(prompt.tokens)
    hinted = tokenizer().decode(prompt.hinted["own"])
    assert "1+1\nBriefly." in plain and "two" not in plain
    assert hinted == plain.replace("1+1\n", "1+1\nSee: two!\n")


def test_only_rows_of_the_teacher_need_a_hint(tmp_path: Path) -> None:
    rows = [
        {"question": "1+1", "answer": "2", "teacher": "own", "hint": "two"},
        {"question": "1+2", "answer": "3", "teacher": "held"},
    ]
    first, second = load(tmp_path, rows, {"hint_column": "hint"}, teacher_column="teacher")
    assert list(first.hinted) == ["own"] and not second.hinted


@pytest.mark.parametrize(
    ("row", "teacher", "line"),
    [
        ({}, {}, "no text in hint, which teacher.own.hint_column names"),
        ({"hint": 3}, {}, "no text in hint"),
        ({"hint": " "}, {}, "no text in hint"),
        ({"hint": "x" * 200}, {"max_prompt_tokens": 50}, r"own\.max_prompt_tokens = 50"),
    ],
)
def test_a_row_without_a_usable_hint_is_one_line(
    row: dict[str, Any], teacher: dict[str, Any], line: str, tmp_path: Path
) -> None:
    rows = [{"question": "1+1", "answer": "2", **row}]
    with pytest.raises(DataError, match=line):
        load(tmp_path, rows, {"hint_column": "hint", **teacher})
