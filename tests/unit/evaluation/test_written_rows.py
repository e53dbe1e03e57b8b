"""Answers of a model become rows of the supervised stage, which are known by their digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.inputs import DataConfig
from pa_npu.data.row_layouts import Conversation, read_conversations
from pa_npu.errors import DataError
from pa_npu.evaluation.results import Judged
from pa_npu.evaluation.written_rows import about_file, check_written_rows, write_rows
from tests.helpers.models import make_model

QUESTIONS: list[dict[str, Any]] = [
    {"question": "1+1?", "answer": "#### 2"},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]},
    {"prompt": [{"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "It "}]},
]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": str(make_model(tmp_path / "model"))},
            "data": {"train": "t"},
            "evaluate": {"sets": {"sums": str(questions)}},
        }
    )


def answer(question: int, text: str, *, finished: bool = True, correct: bool = True) -> Judged:
    return Judged(
        name="sums",
        question=question,
        prompt="",
        answer="",
        kind="greedy",
        number=0,
        text=text,
        final=None,
        correct=correct,
        reward=0.0,
        tokens=3,
        finished=finished,
    )


def test_answers_are_read_back_as_conversations_that_the_questions_began(
    config: Config, tmp_path: Path
) -> None:
    file = tmp_path / "rows" / "rows.jsonl"
    answers = [answer(2, "is 6"), answer(0, "2"), answer(1, "4", correct=False)]
    answers += [answer(0, "2 and", finished=False)]
    written = write_rows(file, config, answers, fingerprint="f", only_correct=False)
    assert (written.rows, written.cut, written.wrong) == (3, 1, 0)
    options = DataConfig(train=str(file))
    read = list(read_conversations(str(file), "data.train", options, None, ("train",), False))
    output = []
    for row in read:
        assert isinstance(row, Conversation)
        output.append([(message["role"], message["content"]) for message in row.messages])
    assert output == [
        [("user", "3+3?"), ("assistant", "It is 6")],
        [("user", "1+1?"), ("assistant", "2")],
        [("system", "Add."), ("user", "2+2?"), ("assistant", "4")],
    ]
    chosen = write_rows(file, config, answers, fingerprint="f", only_correct=True)
    assert (chosen.rows, chosen.cut, chosen.wrong) == (2, 1, 1)
    assert "left out: 1 without an end, 1 wrong" in chosen.line(file)


def test_rows_that_were_changed_are_not_those_that_the_model_wrote(
    config: Config, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, config, [answer(0, "2")], fingerprint="f", only_correct=False)
    about = check_written_rows(str(file), "data.train")
    assert (
        about is not None
        and about["model"] == config.model.path
        and about["rows"] == 1
        and about["fingerprint"] == "f"
    )
    file.write_text(file.read_text().replace("2", "3"))
    with pytest.raises(DataError, match=r"data\.train: .* is not what .* wrote, by the digest"):
        check_written_rows(str(file), "data.train")
    about_file(file).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        check_written_rows(str(file), "data.train")
    about_file(file).unlink()
    assert check_written_rows(str(file), "data.train") is None


def test_nothing_to_write_is_one_line(config: Config, tmp_path: Path) -> None:
    cut = [answer(0, "2", finished=False)]
    with pytest.raises(DataError, match="1 without an end and 0 wrong; raise"):
        write_rows(tmp_path / "rows.jsonl", config, cut, fingerprint="f", only_correct=True)
