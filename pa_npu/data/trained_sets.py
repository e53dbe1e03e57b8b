"""The datasets of a run that trains rows of data: sequences, or pairs of which one is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pa_npu.config.schema import Config
from pa_npu.config.sections.inputs import Dataset
from pa_npu.data.pair_sets import PairSet, groups_of_pairs, load_pairs
from pa_npu.data.row_sets import RowSet, TrainedSet, load_rows, max_row_tokens
from pa_npu.data.row_stream import RowGroup, RowGroupStream, groups_of_rows
from pa_npu.data.stream import TrainingStream

RowIs = Literal["sequence", "pair"]
AnySet = TrainedSet[Any]


def load_training_rows(config: Config, tokenizer: Any, row_is: RowIs = "sequence") -> list[AnySet]:
    """Returns the training datasets, in the configuration's order, with row_ids of their own.

    Raises DataError.
    """
    loaded: list[AnySet] = []
    for number, dataset in enumerate(config.data.datasets):
        first_id = sum(known.num_read for known in loaded)
        key = config.data.key_of(number)
        loaded.append(_load(config, dataset, tokenizer, key, row_is, first_id))
    return loaded


def load_held_out_rows(
    config: Config, tokenizer: Any, row_is: RowIs = "sequence"
) -> dict[str, AnySet]:
    """Returns the held-out sets by name. Raises DataError."""
    return {
        name: _load(config, dataset, tokenizer, config.evaluate.key_of(name), row_is, 0)
        for name, dataset in config.evaluate.all_sets(config.data.test).items()
    }


def load_demonstrations(config: Config, tokenizer: Any) -> RowSet | None:
    """Returns the rows of data.demonstrations; None without any. Raises DataError."""
    dataset = config.data.demonstrated
    if dataset is None:
        return None
    limit = max_row_tokens(config.data, config.rollout)
    return load_rows(dataset, tokenizer, config.data, "data.demonstrations", max_tokens=limit)


def stream_of(
    config: Config, loaded: Sequence[AnySet], row_is: RowIs = "sequence"
) -> RowGroupStream:
    """Returns the groups of all training datasets, from the beginning."""
    items: TrainingStream[Any] = TrainingStream(config.data, loaded, config.run.seed)
    if row_is == "pair":
        return RowGroupStream(items, 1, lambda pairs, size: groups_of_pairs(pairs))
    return RowGroupStream(items, config.rollout.responses_per_prompt)


def groups_of_set(trained: AnySet, size: int) -> list[RowGroup]:
    """Returns all of a set in groups of `size` rows; a pair is a group."""
    if isinstance(trained, PairSet):
        return groups_of_pairs(trained.items)
    return groups_of_rows(trained.rows, size)


def num_items(config: Config, row_is: RowIs) -> int:
    """Returns the number of items of the datasets that an iteration takes."""
    of_group = 1 if row_is == "pair" else config.rollout.responses_per_prompt
    return config.schedule.prompts_per_iteration * of_group


def _load(
    config: Config, dataset: Dataset, tokenizer: Any, key: str, row_is: RowIs, first_id: int
) -> AnySet:
    if row_is == "pair":
        return load_pairs(dataset, tokenizer, config, key, first_id=first_id)
    limit = max_row_tokens(config.data, config.rollout)
    return load_rows(dataset, tokenizer, config.data, key, max_tokens=limit, first_id=first_id)
