"""Finds the teacher that a row of data is for, in a run that learns from several."""

from __future__ import annotations

from collections.abc import Sequence

from pa_npu.config.schema import Config
from pa_npu.config.words import choose_among
from pa_npu.data.prompts import Prompt
from pa_npu.errors import DataError


def teacher_number(prompt: Prompt, config: Config) -> int:
    """Returns the number of the prompt's teacher in the order of `teacher`, from 1."""
    names = list(config.teacher)
    return names.index(prompt.row[str(config.data.teacher_column)]) + 1


def check_teacher_names(prompts: Sequence[Prompt], path: str, config: Config) -> None:
    """Raises DataError for the first row that does not name one of several teachers."""
    column = config.data.teacher_column
    if column is None:
        return
    for prompt in prompts:
        name = prompt.row.get(column)
        if not isinstance(name, str) or name not in config.teacher:
            fault = "is missing" if column not in prompt.row else f"is {name!r:.60}"
            known = choose_among(str(name), list(config.teacher))
            raise DataError(
                f"data.train: {path}: row {prompt.prompt_id}: column {column} "
                f"(data.teacher_column) {fault}, which is no key of `teacher`; {known}"
            )
