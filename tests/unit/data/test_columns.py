"""Columns are taken by their names or by the layout, and each that is missing or at odds is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.sections.inputs import DataConfig, Dataset, TrainingDataset
from pa_npu.data.prompts import load_prompts, load_training
from pa_npu.errors import DataError
from tests.helpers.datasets import QUESTION, load, refusal, write

VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"style": "rule", "ground_truth": 4.0},
}


def test_columns_are_taken_by_name_and_the_row_stays_as_it_was(
    tmp_path: Path, tokenizer: Any
) -> None:
    own = {"frage": "2+2?", "loesung": "so #### 4", "question": "another", "answer": "5"}
    path = write(tmp_path / "a.jsonl", own)
    (prompt,) = load(path, tokenizer, question_column="frage", answer_column="loesung")
    assert (prompt.text, prompt.answer, prompt.row) == ("<|user|>2+2?<|assistant|>", "4", own)
    (only_answer,) = load(path, tokenizer, answer_column="loesung")
    assert (only_answer.text, only_answer.answer) == ("<|user|>another<|assistant|>", "4")
    (nested,) = load(
        write(tmp_path / "v.jsonl", VERL), tokenizer, answer_column="reward_model.ground_truth"
    )
    assert (nested.text, nested.answer, nested.row) == ("<|user|>2+2?<|assistant|>", "4", VERL)
    message = refusal(path, tokenizer, question_column="fragen")
    assert message.startswith(
        f"{path}:1: no value in fragen (columns: frage, loesung, question, answer)"
    )
    assert "question_column" in message
    bad = write(tmp_path / "b.jsonl", {"frage": 7, "answer": "1"}, {"frage": " ", "answer": "1"})
    assert "frage is 7, not a text or a list of messages" in refusal(
        bad, tokenizer, question_column="frage"
    )


def test_held_out_sets_go_by_their_layout_where_they_lack_the_named_columns(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION)
    config = DataConfig(train="t", question_column="frage", answer_column="loesung")
    for key in ("evaluate.sets.gsm8k", "data.test"):
        (prompt,) = load_prompts(Dataset(path=path), tokenizer, config, key).prompts
        assert prompt.answer == "46"
    with pytest.raises(DataError, match="no value in frage"):
        load_prompts(TrainingDataset(path=path), tokenizer, config, "data.train")
    strict = Dataset(path=path, answer_column="x")
    with pytest.raises(DataError, match="no value in x"):
        load_prompts(strict, tokenizer, DataConfig(train="t"), "evaluate.sets.gsm8k")


def test_a_dataset_may_have_options_of_its_own_and_prompts_are_told_apart(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"question": f"{i}+1?", "answer": i + 1} for i in range(5)]
    first = write(tmp_path / "one.jsonl", *rows)
    second = write(tmp_path / "two.jsonl", *rows)
    config = DataConfig.model_validate(
        {
            "train": [
                {"path": first, "max_rows": 2},
                {
                    "path": second,
                    "name": "zwei",
                    "max_rows": 3,
                    "instruction": "Think.",
                    "system_prompt": "S",
                },
            ],
            "system_prompt": "all",
        }
    )
    one, two = (actual.prompts for actual in load_training(config, tokenizer))
    assert [(p.prompt_id, p.source) for p in (*one, *two)] == [
        (0, "one"),
        (1, "one"),
        (2, "zwei"),
        (3, "zwei"),
        (4, "zwei"),
    ]
    assert one[0].text == "<|system|>all<|user|>0+1?<|assistant|>"
    assert two[0].text == "<|system|>S<|user|>0+1?\nThink.<|assistant|>"
    assert (
        len(load_prompts(Dataset(path=first, max_rows=1), tokenizer, config, "data.test").prompts)
        == 1
    )


def test_columns_that_ask_different_things_are_named(tmp_path: Path, tokenizer: Any) -> None:
    asked = [{"role": "system", "content": "Box it."}, {"role": "user", "content": "2+2?"}]
    row = {"question": "2+2?", "prompt": asked, "answer": "4"}
    path = write(tmp_path / "a.jsonl", row)
    message = refusal(path, tokenizer)
    assert "question and prompt ask different things (columns: question, prompt, answer)" in message
    assert "data.question_column" in message
    (prompt,) = load(path, tokenizer, question_column="prompt")
    assert prompt.text == "<|system|>Box it.<|user|>2+2?<|assistant|>"
    (plain,) = load(path, tokenizer, question_column="question")
    assert plain.text == "<|user|>2+2?<|assistant|>"
    same = row | {
        "prompt": asked[1:],
        "messages": [asked[1], {"role": "assistant", "content": "4"}],
    }
    (prompt,) = load(write(tmp_path / "s.jsonl", same), tokenizer)
    assert prompt.text == "<|user|>2+2?<|assistant|>", (
        "the same question in several forms is no doubt"
    )


@pytest.mark.parametrize(
    ("row", "columns", "remedy"),
    [
        (VERL, "data_source, prompt, reward_model.style, ", "data.answer_column=reward_model.ground_truth"),
        ({"question": "q", "final_answer": "5", "topic": "t"}, "question, final_answer, topic", "data.answer_column=final_answer"),
        ({"prompt": "q", "solution": "5", "ability": "MATH"}, "prompt, solution, ability", "data.answer_column=solution"),
        ({"problem": "q", "solution": "First add. " * 9}, "problem, solution", "data.answer_column"),
    ],
)  # fmt: skip
def test_a_row_without_an_answer_names_its_columns_and_the_key(
    row: dict[str, Any], columns: str, remedy: str, tmp_path: Path, tokenizer: Any
) -> None:
    message = refusal(write(tmp_path / "a.jsonl", row), tokenizer)
    assert "no answer" in message and f"(columns: {columns}" in message and remedy in message, (
        message
    )
