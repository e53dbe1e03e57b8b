"""Rows that reasoning-gym makes (data.train=reasoning_gym:NAME[,NAME...]), and its scorer of answers to them.

A row is not stored anywhere: its task, seed and number give the same question again, in every
process and at every resume. The library is an extra of this package (`pip install 'pa_npu[gym]'`).

    {"question", "answer", "metadata", "reasoning_gym": {"task", "seed", "number", "rows", "options"}}

Several names alternate: row i is of task i modulo their number.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pa_npu.config.user_code import describe
from pa_npu.config.words import choose_among
from pa_npu.errors import DataError

SCHEME = "reasoning_gym:"
COLUMN = "reasoning_gym"
"""Column of a row that says how it was made."""
DEFAULT_ROWS = 1000
_INSTALL = "install it with pip install reasoning-gym (the extra `gym` of this package)"
_CACHED_TASKS = 256
_CACHED_ENTRIES = 64


@dataclass(frozen=True)
class MadeRows:
    """How many rows are made, and from what.

    max_rows: as the configuration has it; None leaves the number to what makes them.
    seed: of the rows; the splits train and test of one seed have different rows.
    options: of each task, by its name, as reasoning-gym documents them.
    """

    max_rows: int | None = None
    seed: int = 0
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """How many rows reasoning-gym makes."""
        return self.max_rows or DEFAULT_ROWS


def are_made(path: str) -> bool:
    """Returns whether a dataset's path names tasks of reasoning-gym instead of a file."""
    return path.startswith(SCHEME)


def made_rows(
    path: str, key: str, split: str, made: MadeRows
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the location and the row of each question. Raises DataError.

    Args:
        path: `reasoning_gym:NAME[,NAME...]`.
        key: the configuration key that names it, for messages.
        split: train, test or validation, which have different rows.
    """
    names = [name.strip() for name in path.removeprefix(SCHEME).split(",")]
    if not all(names):
        raise DataError(f"{key}: {path!r} names no task; write {SCHEME}NAME or {SCHEME}NAME,NAME")
    _refuse_unknown(key, names, made.options)
    seed = _seed_of(made.seed, split)
    rows_per_task = math.ceil(made.num_rows / len(names))
    for index in range(made.num_rows):
        name = names[index % len(names)]
        recipe = {
            "task": name,
            "seed": seed,
            "number": index // len(names),
            "rows": rows_per_task,
            "options": dict(made.options.get(name, {})),
        }
        location = f"{path}: row {index + 1}"
        try:
            entry = _entry(recipe)
        except Exception as error:  # each task is other code
            raise DataError(
                f"{location}: {name} makes no question ({describe(error)}); correct its options "
                f"in {key}.task_options, or leave the task out"
            ) from None
        yield (
            location,
            {
                "question": str(entry["question"]),
                "answer": None if entry.get("answer") is None else str(entry["answer"]),
                "metadata": entry.get("metadata"),
                COLUMN: recipe,
            },
        )


def score_of(recipe: Mapping[str, Any], question: str | None, answer: str | None) -> float:
    """Returns what the row's task gives to an answer, from 0 to 1.

    Args:
        recipe: the row's column COLUMN.
        question: of the row; None does not compare it.
        answer: of a response; None if it has none.

    Raises DataError if the library here makes another question of the recipe.
    """
    entry = _entry(recipe)
    if question is not None and str(entry["question"]) != question:
        raise DataError(
            f"reasoning-gym here makes another question of {recipe['task']} than the one that was "
            "asked; use one release of it for the whole run"
        )
    try:
        return float(_task_of(recipe).score_answer(answer, entry))
    except Exception:  # some tasks fail at an answer that is none of their form
        return 0.0


def _seed_of(seed: int, split: str) -> int:
    """Returns the seed of a split: below 2**31, far from the seeds of the other splits.

    Tasks make question i from seed + i, so that neighbouring seeds share questions.
    """
    digest = hashlib.blake2b(f"{seed} {split}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**30


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"{SCHEME} needs the package reasoning-gym, which is not here ({describe(error)}); "
            f"{_INSTALL}"
        ) from None
    return reasoning_gym


def _task_of(recipe: Mapping[str, Any]) -> Any:
    """Returns the dataset of a row's task."""
    options = json.dumps(recipe["options"])
    return _cached_task(recipe["task"], recipe["seed"], recipe["rows"], options)


def _entry(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the library's entry of a row: question, answer and metadata."""
    return _cached_entry(json.dumps(recipe))


@lru_cache(maxsize=_CACHED_TASKS)
def _cached_task(name: str, seed: int, size: int, options: str) -> Any:
    return _library().create_dataset(name, seed=seed, size=size, **json.loads(options))


@lru_cache(maxsize=_CACHED_ENTRIES)  # the responses of a group are scored one after another
def _cached_entry(recipe: str) -> dict[str, Any]:
    read = json.loads(recipe)
    entry: dict[str, Any] = _task_of(read)[read["number"]]
    return entry


def _refuse_unknown(key: str, names: list[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    known = sorted(_library().factory.DATASETS)
    for name in names:
        if name not in known:
            raise DataError(
                f"{key}: reasoning-gym has no task {name!r:.80}; {choose_among(name, known)}"
            )
    for name in options:
        if name not in names:
            raise DataError(
                f"{key}: task_options names {name!r:.80}, which is not among the tasks "
                f"{', '.join(names)}; correct the name"
            )
