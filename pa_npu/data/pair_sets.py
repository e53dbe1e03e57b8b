"""Pairs that are trained: a dataset's chosen and rejected answers, tokenised, each a row behind their prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.config.sections.inputs import DataConfig, Dataset, TrainingDataset
from pa_npu.config.words import counted
from pa_npu.data.conversations import Renderer
from pa_npu.data.pair_layouts import PairContent, read_pairs
from pa_npu.data.prompts import dataset_options
from pa_npu.data.row_sets import (
    Row,
    TrainedSet,
    cut_row,
    encoded_rows,
    first_row_lines,
    max_row_tokens,
)
from pa_npu.data.row_stream import RowGroup, num_common
from pa_npu.errors import DataError

_ENCODED_TOGETHER = 256


@dataclass(frozen=True, eq=False)
class Pair:
    """One row of a dataset. Both answers are rows that begin with the prompt, with its number."""

    chosen: Row
    rejected: Row

    @property
    def rows(self) -> tuple[Row, Row]:
        return self.chosen, self.rejected

    @property
    def identity(self) -> bytes:
        """Tells this pair from another one, for the fingerprint of a dataset."""
        return self.chosen.identity + self.rejected.identity


class PairSet(TrainedSet[Pair]):
    """The usable pairs of one dataset."""

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for pair in self.items for row in pair.rows)

    @property
    def summary(self) -> str:
        chosen = [pair.chosen.num_trained for pair in self.items]
        rejected = [pair.rejected.num_trained for pair in self.items]
        num = len(self.items)
        return (
            f"{counted(num, 'pair')} {self.origin}, of which "
            f"{sum(chosen) / num:.0f} tokens of the chosen and {sum(rejected) / num:.0f} of the "
            f"rejected answer are compared, in the mean ({self.rule})"
        )

    def first_lines(self, tokenizer: Any) -> list[str]:
        """Returns the lines that show both answers of the first pair."""
        pair = self.items[0]
        lines = []
        for name, row in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            for line in first_row_lines(row, tokenizer):
                lines.append(line.replace("first row", f"{name} answer of the first pair", 1))
        return lines


def groups_of_pairs(pairs: Sequence[Pair]) -> list[RowGroup]:
    """Returns a group of each pair, the chosen row first."""
    return [RowGroup.from_rows(pair.rows) for pair in pairs]


def load_pairs(
    dataset: Dataset, tokenizer: Any, config: Config, key: str, *, first_id: int = 0
) -> PairSet:
    """Reads, renders and tokenises a dataset of pairs. Raises DataError for data that cannot be
    trained.

    Args:
        tokenizer: a transformers tokenizer.
        key: the configuration key that names the dataset, for messages.
        first_id: row_id of its first row.
    """
    is_training = isinstance(dataset, TrainingDataset)
    options = dataset_options(dataset, config.data)
    usual = ("train",) if is_training else ("test", "validation")
    read = read_pairs(dataset.path, key, options, dataset.split, usual, not is_training)
    source = dataset.called if isinstance(dataset, TrainingDataset) else ""
    renderer = Renderer(tokenizer, options)
    max_tokens = max_row_tokens(config.data, config.rollout)
    pairs: list[Pair] = []
    num_read = num_truncated = num_skipped = 0
    for content, pair in _tokenised(islice(read, dataset.max_rows), renderer, first_id, source):
        num_read += 1
        longest = max(len(row.tokens) for row in pair.rows)
        is_cut = longest > max_tokens
        if is_cut:
            pair = _cut(content, pair, max_tokens, options)
        is_equal = np.array_equal(pair.chosen.tokens, pair.rejected.tokens)
        nothing = not pair.chosen.num_trained or not pair.rejected.num_trained
        if is_cut and (nothing or is_equal or options.overlong_prompt == "skip"):
            num_skipped += 1
            continue
        if is_equal:
            raise DataError(
                f"{content.location}: chosen and rejected are the same tokens, so that neither is "
                "preferred; correct the row, or remove it"
            )
        if nothing:
            raise DataError(
                f"{content.location}: no token of one answer is left to compare (its weight is 0, "
                "or it is all that the other begins with); correct the row, or remove it"
            )
        num_truncated += is_cut
        pairs.append(pair)
    if not num_read:
        raise DataError(f"{key}: {dataset.path} is empty; it needs at least one row")
    if not pairs:
        raise DataError(
            f"{key}: all {num_read} pairs of {dataset.path} are longer than data.max_prompt_tokens "
            f"+ rollout.max_response_tokens = {max_tokens} and were skipped; raise one of them"
        )
    return PairSet(dataset.path, tuple(pairs), num_read, num_truncated, num_skipped, renderer.rule)


def _tokenised(
    read: Iterator[PairContent], renderer: Renderer, first_id: int, source: str
) -> Iterator[tuple[PairContent, Pair]]:
    """Yields every pair with its rows, some pairs at a time."""
    row_id = first_id
    while batch := list(islice(read, _ENCODED_TOGETHER)):
        contents = [content for pair in batch for content in (pair.chosen, pair.rejected)]
        texts = [renderer.text_of(content) for content in contents]
        rows = encoded_rows(texts, renderer, source)
        for number, content in enumerate(batch):
            chosen, rejected = (
                replace(row, row_id=row_id) for row in rows[2 * number : 2 * number + 2]
            )
            pair = Pair(chosen, rejected)
            yield content, _behind_beginning(pair) if content.shares_beginning else pair
            row_id += 1


def _behind_beginning(pair: Pair) -> Pair:
    """Returns the pair without the tokens that both rows begin with among those that are compared."""
    shared = num_common([row.tokens for row in pair.rows])
    rows = []
    for row in pair.rows:
        weight = row.weight.copy()
        weight[:shared] = 0
        rows.append(replace(row, weight=weight))
    return Pair(*rows)


def _cut(content: PairContent, pair: Pair, max_tokens: int, options: DataConfig) -> Pair:
    """Returns the pair with its answers cut at the limit. Raises DataError where that is refused."""
    if options.overlong_prompt == "refuse":
        longest = max(len(row.tokens) for row in pair.rows)
        raise DataError(
            f"{content.location}: an answer has {longest} tokens with its prompt, more than "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {max_tokens}; raise one of "
            "them, or set data.overlong_prompt to truncate or skip"
        )
    rows = [cut_row(row, max_tokens) if len(row.tokens) > max_tokens else row for row in pair.rows]
    return Pair(*rows)
