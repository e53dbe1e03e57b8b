"""Files of a dataset, and what becomes of them: prompts, or one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.sections.inputs import DataConfig
from pa_npu.data.prompts import Prompt, PromptSet, load_training
from pa_npu.errors import DataError

QUESTION = {"question": "What is 12+34?", "answer": "12+34=46\n#### 46"}


def write(path: Path, *lines: Any) -> str:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return str(path)


def loaded(path: str, tokenizer: Any, **settings: Any) -> PromptSet:
    (actual,) = load_training(DataConfig(train=path, **settings), tokenizer)
    return actual


def load(path: str, tokenizer: Any, **settings: Any) -> tuple[Prompt, ...]:
    return loaded(path, tokenizer, **settings).prompts


def refusal(path: str, tokenizer: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, **settings)
    message = str(caught.value)
    assert "\n" not in message, f"not one line: {message!r}"
    return message
