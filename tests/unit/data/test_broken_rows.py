"""A broken row or an unusable file ends in a DataError that names the place and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pa_npu.config.sections.inputs import DataConfig, Dataset
from pa_npu.data.prompts import load_prompts
from pa_npu.errors import DataError
from tests.helpers.datasets import QUESTION, refusal, write


def test_blank_lines_are_skipped_and_lines_still_counted(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION, "", QUESTION, "", '{"question": "q"}')
    assert refusal(path, tokenizer).startswith(f"{path}:5: no answer")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"question": "q", "answer": ', "not valid JSON"),
        ("[1, 2]", "a JSON list, not an object"),
        ("42", "a JSON int, not an object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"question": "q"}', "no answer (columns: question); "),
        ('{"question": "q", "answer": null}', "no answer (columns: question, answer); "),
        ('{"question": "q", "answer": "  "}', "no answer (columns: question, answer); "),
        (
            '{"question": "q", "answer": "so 5\\n#### "}',
            "no answer after #### (columns: question, answer);",
        ),
        ('{"question": "q", "answer": [5]}', "answer is [5], not a text or a number"),
        ('{"question": "q", "answer": true}', "answer is true, not a text or a number"),
        ('{"question": " ", "answer": "5"}', "question is empty"),
        ('{"question": 7, "answer": "5"}', "question is 7, not a text"),
        (
            '{"input": "q", "answer": "5"}',
            "no question, problem, prompt, messages or conversations (columns: input, answer)",
        ),
        ("{}", "no question, problem, prompt, messages or conversations (columns: none)"),
        ('{"messages": [], "answer": "5"}', "messages is [], not a list of messages"),
        ('{"messages": "q", "answer": "5"}', 'messages is "q", not a list of messages'),
        (
            '{"messages": [{"role": "user"}], "answer": "5"}',
            'each must be {"role": text, "content": text}',
        ),
        ('{"messages": [{"role": "user", "content": "q"}]}', "no answer (columns: messages); "),
        ('{"messages": [{"role": "assistant", "content": "q"}]}', "an answer but no question"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(
    line: str, expected: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "bad.jsonl", QUESTION, line, QUESTION)
    message = refusal(path, tokenizer)
    assert message.startswith(f"{path}:2: ") and expected in message, message


def test_unusable_files_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    missing = str(tmp_path / "none.jsonl")
    named = "name a JSONL or parquet file, or a directory of a dataset"
    assert refusal(missing, tokenizer) == f"data.train: {missing} does not exist; {named}"
    assert "holds no dataset" in refusal(str(tmp_path), tokenizer)
    assert "is empty" in refusal(write(tmp_path / "empty.jsonl"), tokenizer)
    assert "is empty" in refusal(write(tmp_path / "blank.jsonl", "", " "), tokenizer)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(QUESTION).encode() + b'\n{"question": "caf\xe9", "answer": "1"}\n')
    assert refusal(str(latin), tokenizer).startswith(f"{latin}:2: byte 17 is not UTF-8")
    damaged = tmp_path / "damaged.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([QUESTION] * 100), damaged)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert "unreadable parquet" in refusal(str(damaged), tokenizer)
    holes = tmp_path / "holes.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([QUESTION, {"question": "q", "answer": None}]), holes
    )
    assert refusal(str(holes), tokenizer).startswith(f"{holes}: row 2: no answer")


def test_the_key_of_the_test_set_is_named(tmp_path: Path, tokenizer: Any) -> None:
    config = DataConfig(train="train.jsonl", test=str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"^data\.test: "):
        load_prompts(Dataset(path=str(config.test)), tokenizer, config, "data.test")
