"""Rows that are trained as they are: a dataset's conversations and texts, tokenised, with the weight of every token.

    messages                an assistant's messages are trained, unless their weight is 0
    prompt, completion      the completion is; texts are joined as they are, messages by the template
    question, answer        as a user's and an assistant's message; what prompts of a run with
                            engines are made of (data/records.py) is there too
    text                    all of it is

`weight` in an assistant's message, or as a column of the row, is that of its tokens: 0 is not
trained. How a conversation becomes text, and which of it the assistant wrote, is in
conversations.py.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from pa_npu.config.sections.inputs import DataConfig, Dataset, TrainingDataset
from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.config.words import counted
from pa_npu.data.conversations import Renderer, TrainedText, Written
from pa_npu.data.prompts import dataset_options
from pa_npu.data.row_layouts import read_conversations
from pa_npu.data.stream import StreamItem
from pa_npu.errors import HIGHLIGHT, DataError, printable

_SHOWN_TOKENS = 400
_ENCODED_TOGETHER = 512


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence to train. T tokens.

    row_id: its number in the dataset, from 0; of several datasets, as if they were one behind the
    other. tokens: int32 [T]. weight: float32 [T], 0 where a token is not trained. text: what the
    tokens were made of, of which the first prompt_characters stand before the first trained one.
    finished: not cut at a limit. source: what its dataset is called.
    """

    row_id: int
    tokens: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]
    text: str
    prompt_characters: int
    finished: bool = True
    source: str = ""

    @property
    def identity(self) -> bytes:
        """Tells this row from another one, for the fingerprint of a dataset."""
        tokens = np.asarray(self.tokens, "<i4").tobytes()
        return tokens + np.asarray(self.weight, "<f4").tobytes() + f"\n{self.row_id}\n".encode()

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.weight))


Item = TypeVar("Item", bound=StreamItem)


@dataclass(frozen=True, eq=False)
class TrainedSet(ABC, Generic[Item]):
    """The usable items of one dataset, in its order. num_read = len(items) + num_skipped.

    items: what a stream gives of the set: rows, or pairs of them. rule: how trained tokens were
    told from others.
    """

    path: str
    items: tuple[Item, ...]
    num_read: int
    num_truncated: int
    num_skipped: int
    rule: str

    @property
    @abstractmethod
    def rows(self) -> tuple[Row, ...]:
        """All sequences of the set."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """One line for logs and the dry run."""

    @abstractmethod
    def first_lines(self, tokenizer: Any) -> list[str]:
        """Shows which tokens of the first item are trained."""

    @property
    def origin(self) -> str:
        """Returns where the items come from, and how many rows of the dataset became none."""
        return (
            f"from {self.path} (read {self.num_read}, truncated {self.num_truncated}, skipped "
            f"{self.num_skipped})"
        )


class RowSet(TrainedSet[Row]):
    """The usable rows of one dataset."""

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.items

    def first_lines(self, tokenizer: Any) -> list[str]:
        return first_row_lines(self.items[0], tokenizer)

    @property
    def summary(self) -> str:
        lengths = [len(row.tokens) for row in self.rows]
        trained = sum(row.num_trained for row in self.rows)
        return (
            f"{counted(len(lengths), 'row')} {self.origin}, {min(lengths)} to "
            f"{counted(max(lengths), 'token')}, mean {sum(lengths) / len(lengths):.0f}; "
            f"{trained / sum(lengths):.0%} of them are trained ({self.rule})"
        )


def load_rows(
    dataset: Dataset,
    tokenizer: Any,
    config: DataConfig,
    key: str,
    *,
    max_tokens: int,
    first_id: int = 0,
) -> RowSet:
    """Reads, renders and tokenises a dataset of rows that are trained. Raises DataError for data
    that cannot be trained.

    Args:
        tokenizer: a transformers tokenizer.
        key: the configuration key that names the dataset, for messages.
        max_tokens: of a row; data.overlong_prompt says what happens to longer ones.
        first_id: row_id of its first row.
    """
    is_training = isinstance(dataset, TrainingDataset)
    options = dataset_options(dataset, config)
    usual = ("train",) if is_training else ("test", "validation")
    read = read_conversations(dataset.path, key, options, dataset.split, usual, not is_training)
    source = dataset.called if isinstance(dataset, TrainingDataset) else ""
    renderer = Renderer(tokenizer, options)
    rows: list[Row] = []
    num_read = num_truncated = num_skipped = 0
    shortest = sys.maxsize
    for text in _texts(islice(read, dataset.max_rows), renderer):
        row = _row(text, first_id + num_read, source)
        num_read += 1
        if len(row.tokens) > max_tokens:
            shortest = min(shortest, len(row.tokens))
            if options.overlong_prompt == "refuse":
                raise DataError(
                    f"{text.location}: the row has {len(row.tokens)} tokens, more than "
                    f"data.max_prompt_tokens + rollout.max_response_tokens = {max_tokens}; raise "
                    "one of them, or set data.overlong_prompt to truncate or skip"
                )
            row = cut_row(row, max_tokens)
            if options.overlong_prompt == "skip" or not row.num_trained:
                num_skipped += 1
                continue
            num_truncated += 1
        if not row.num_trained:
            raise DataError(
                f"{text.location}: no token of the row is trained ({text.why_nothing}); correct "
                "the row, or remove it"
            )
        rows.append(row)
    if not num_read:
        raise DataError(f"{key}: {dataset.path} is empty; it needs at least one row")
    if not rows:
        raise DataError(
            f"{key}: all {num_read} rows of {dataset.path} are longer than data.max_prompt_tokens "
            f"+ rollout.max_response_tokens = {max_tokens} and were skipped; raise one of them "
            f"(shortest: {shortest})"
        )
    return RowSet(dataset.path, tuple(rows), num_read, num_truncated, num_skipped, renderer.rule)


def max_row_tokens(data: DataConfig, rollout: RolloutConfig) -> int:
    """Returns the length of the longest row that is trained: a prompt and a response together."""
    return data.max_prompt_tokens + rollout.max_response_tokens


MARKS = ("[[", "]]")
"""Stand around trained tokens where a row is shown."""


def first_row_lines(row: Row, tokenizer: Any) -> list[str]:
    """Shows which tokens of a row are trained: its text, with MARKS around them, and HIGHLIGHT for
    terminals.
    """
    pieces: list[str] = []
    begin = HIGHLIGHT[0] + MARKS[0]
    end_mark = MARKS[1] + HIGHLIGHT[1]
    shown = min(len(row.tokens), _SHOWN_TOKENS)
    for start, end in _stretches(row.weight[:shown] != 0):
        text = str(tokenizer.decode(row.tokens[start:end].tolist()))
        text = "\n".join(printable(line) for line in text.split("\n"))
        pieces.append(f"{begin}{text}{end_mark}" if row.weight[start] else text)
    lines = "".join(pieces).split("\n")
    more = []
    if shown < len(row.tokens):
        more = [f"  ... {counted(len(row.tokens) - shown, 'more token')}"]
    return [
        f"first row, {counted(len(row.tokens), 'token')}, of which {row.num_trained} are trained, "
        f"between {MARKS[0]} and {MARKS[1]}:",
        *(f"  {line}" for line in lines),
        *more,
    ]


def _stretches(trained: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Bounds of runs of tokens that are all trained, or all not."""
    changes = np.flatnonzero(np.diff(trained)) + 1
    bounds = [0, *changes.tolist(), len(trained)]
    return list(pairwise(bounds))


@dataclass(frozen=True)
class _EncodedRow:
    location: str
    text: str
    tokens: list[int]
    offsets: list[tuple[int, int]]
    written: tuple[Written, ...]
    why_nothing: str


def _texts(read: Iterator[Any], renderer: Renderer) -> Iterator[_EncodedRow]:
    """Yields every row with its tokens, some rows at a time."""
    while batch := list(islice(read, _ENCODED_TOGETHER)):
        texts = [renderer.text_of(conversation) for conversation in batch]
        yield from _encoded(texts, renderer)


def encoded_rows(texts: Sequence[TrainedText], renderer: Renderer, source: str) -> list[Row]:
    """Returns the texts as rows, numbered from 0."""
    return [_row(text, number, source) for number, text in enumerate(_encoded(texts, renderer))]


def _encoded(texts: Sequence[TrainedText], renderer: Renderer) -> Iterator[_EncodedRow]:
    encodings = renderer.encode(texts)
    for text, (tokens, offsets) in zip(texts, encodings, strict=True):
        yield _EncodedRow(text.location, text.text, tokens, offsets, text.written, text.why_nothing)


def _row(text: _EncodedRow, row_id: int, source: str) -> Row:
    """Returns a text as a row. A token is trained if a character of it is to be trained; the first
    one follows from nothing.
    """
    tokens = np.array(text.tokens, np.int32)
    offsets = np.array(text.offsets, np.int64).reshape(-1, 2)
    weight = np.zeros(len(tokens), np.float32)
    for written in text.written:
        inside = (offsets[:, 1] > written.start) & (offsets[:, 0] < written.end)
        weight[inside] = written.weight
    weight[:1] = 0
    first = int(np.argmax(weight != 0)) if len(tokens) else 0
    prompt_characters = int(offsets[first, 0]) if weight.any() else len(text.text)
    return Row(row_id, tokens, weight, text.text, prompt_characters, source=source)


def cut_row(row: Row, max_tokens: int) -> Row:
    """Returns the first tokens of a row."""
    return Row(
        row.row_id,
        row.tokens[:max_tokens],
        row.weight[:max_tokens],
        row.text,
        row.prompt_characters,
        finished=False,
        source=row.source,
    )
