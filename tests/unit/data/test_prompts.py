"""Rows of every layout become the prompts that engines get, whole or refused, cut or skipped where too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from pa_npu.data.prompts import first_prompt_lines
from tests.helpers.datasets import QUESTION, load, loaded, refusal, write

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


def test_gsm8k_row_gives_the_template_tokens_and_the_final_answer(
    tmp_path: Path, tokenizer: Any
) -> None:
    (prompt,) = load(write(tmp_path / "a.jsonl", QUESTION), tokenizer)
    assert prompt.text == "<|user|>What is 12+34?<|assistant|>"
    assert tokenizer.convert_ids_to_tokens(prompt.tokens.tolist()) == [
        "<|user|>",
        "What",
        "Ġis",
        "Ġ",
        "1",
        "2",
        "+",
        "3",
        "4",
        "?",
        "<|assistant|>",
    ]
    assert (prompt.answer, prompt.prompt_id, prompt.row) == ("46", 0, QUESTION)
    assert prompt.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("row", "text", "answer"),
    [
        ({"prompt": "2+2?", "answer": 4}, "<|user|>2+2?<|assistant|>", "4"),
        (
            {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},
            "<|user|>2+2?<|assistant|>",
            "4",
        ),
        ({"question": "2+2?", "answer": " x=4 "}, "<|user|>2+2?<|assistant|>", "x=4"),
        ({"problem": "2+2?", "solution": "So 4.", "answer": "4"}, "<|user|>2+2?<|assistant|>", "4"),
        (
            {"problem": "2+2?", "solution": r"So \boxed{4}."},
            "<|user|>2+2?<|assistant|>",
            r"So \boxed{4}.",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "2+2?"},
                ],
                "answer": "#### 4",
            },
            "<|system|>S<|user|>2+2?<|assistant|>",
            "4",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "2+2=4\n#### 4"},
                ]
            },
            "<|user|>2+2?<|assistant|>",
            "4",
        ),
    ],
)
def test_layouts(
    row: dict[str, Any], text: str, answer: str, tmp_path: Path, tokenizer: Any
) -> None:
    (prompt,) = load(write(tmp_path / "a.jsonl", row), tokenizer)
    assert (prompt.text, prompt.answer) == (text, answer)


def test_parquet_and_jsonl_of_the_same_rows_give_the_same_prompts(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [QUESTION, {"question": "What is 50+49?", "answer": "#### 99"}]
    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    from_parquet = load(str(table), tokenizer)
    from_jsonl = load(write(tmp_path / "a.jsonl", *rows), tokenizer)
    assert [(p.prompt_id, p.text, p.answer, p.row) for p in from_parquet] == [
        (p.prompt_id, p.text, p.answer, p.row) for p in from_jsonl
    ]


def test_system_prompt_and_instruction_are_rendered_where_they_belong(
    tmp_path: Path, tokenizer: Any
) -> None:
    own = {
        "messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}],
        "answer": "1",
    }
    path = write(tmp_path / "a.jsonl", QUESTION, own)
    settings = {"system_prompt": "Be brief.", "instruction": "End with ####."}
    first, second = load(path, tokenizer, **settings)
    assert first.text == "<|system|>Be brief.<|user|>What is 12+34?\nEnd with ####.<|assistant|>"
    assert second.text == "<|system|>own<|user|>q\nEnd with ####.<|assistant|>"
    plain, _ = load(path, tokenizer, chat_template="never", **settings)
    assert plain.text == "Be brief.\nWhat is 12+34?\nEnd with ####."


def test_overlong_prompts_are_refused_truncated_or_skipped_and_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    long = {"question": "What is 12+34+56+78?", "answer": "180"}  # 17 tokens; QUESTION has 11
    path = write(tmp_path / "a.jsonl", QUESTION, long, QUESTION, long)
    message = refusal(path, tokenizer, max_prompt_tokens=11)
    assert message.startswith(
        f"{path}:2: the prompt has 17 tokens and 1 more, more than data.max_prompt_tokens = 11"
    )
    assert "longest: 17" in message and "truncate or skip" in message

    skipped = loaded(path, tokenizer, max_prompt_tokens=11, overlong_prompt="skip")
    assert [prompt.prompt_id for prompt in skipped.prompts] == [0, 2]
    assert (skipped.num_read, skipped.num_truncated, skipped.num_skipped) == (4, 0, 2)

    truncated = loaded(path, tokenizer, max_prompt_tokens=11, overlong_prompt="truncate")
    assert [len(prompt.tokens) for prompt in truncated.prompts] == [11] * 4
    second = truncated.prompts[1].text
    assert second == "12+34+56+78?<|assistant|>"[-len(second) :]
    assert second.endswith("+34+56+78?<|assistant|>")
    assert (truncated.num_read, truncated.num_truncated, truncated.num_skipped) == (4, 2, 0)
    assert "read 4, truncated 2, skipped 0" in truncated.summary

    everything = refusal(path, tokenizer, max_prompt_tokens=3, overlong_prompt="skip")
    assert "all 4 prompts" in everything and "shortest: 11" in everything


def test_a_row_that_cannot_fit_is_not_tokenised(tmp_path: Path, tokenizer: Any) -> None:
    whole = "2 " * (1 << 20) + "the end"
    path = write(tmp_path / "a.jsonl", {"question": whole, "answer": "1"}, QUESTION)
    calls: list[int] = []

    class Counting:
        chat_template = tokenizer.chat_template

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, texts: list[str], **options: Any) -> Any:
            calls.extend(map(len, texts))
            return tokenizer(texts, **options)

    message = refusal(path, Counting())
    assert "a.jsonl:1: the prompt has at least" in message and "data.overlong_prompt" in message
    assert max(calls) < 100_000, "a row of megabytes would take seconds"
    assert len(load(path, Counting(), overlong_prompt="skip")) == 1
    cut, _ = load(path, Counting(), overlong_prompt="truncate", max_prompt_tokens=64)
    assert cut.tokens.tolist() == tokenizer("2 " * 999 + "the end<|assistant|>")["input_ids"][-64:]


def test_the_first_prompt_is_shown_as_engines_get_it(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(
        write(tmp_path / "a.jsonl", QUESTION), tokenizer, instruction="End\twith ####."
    )
    lines = first_prompt_lines(prompt, tokenizer)
    assert lines[0] == f"first prompt, {len(prompt.tokens)} tokens:"
    assert lines[1:] == ["  <|user|>What is 12+34?", "  End\\twith ####.<|assistant|>"]
    long = {"question": "\n".join(["1+1?"] * 50), "answer": "2"}
    lines = first_prompt_lines(load(write(tmp_path / "b.jsonl", long), tokenizer)[0], tokenizer)
    assert len(lines) == 14 and lines[-1] == "  ... 38 more lines"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here")
def test_gsm8k_loads_whole(tokenizer: Any) -> None:
    prompt_set = loaded(str(GSM8K / "test.jsonl"), tokenizer, max_prompt_tokens=1024)
    prompts = prompt_set.prompts
    assert len(prompts) == 1319 and prompt_set.num_read == 1319
    assert [prompt.answer for prompt in prompts[:3]] == ["18", "3", "70000"]
    texts = [tokenizer.decode(prompt.tokens) for prompt in prompts]
    assert texts == [prompt.text for prompt in prompts], "tokens must stand for the rendered text"
