"""The stream of training prompts: datasets in seeded epochs, several of them by weight, endless, resumable by position.

Of several datasets the turn is that of the one with the least (2 n + 1) / weight, n being what it
has given so far (the divisor method of Webster and Sainte-Lague, which apportions seats by votes):
every stretch of prompts, and so every iteration, has the shares of the weights up to rounding, and
no random number is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pa_npu.config.sections.inputs import DataConfig
from pa_npu.errors import DataError


@dataclass(frozen=True)
class Outcome:
    """The worth of a prompt's responses. right: the share that is correct; None where a reward
    function failed.

    reward: their mean. Both are None where nothing rewards them.
    """

    source: str
    right: float | None
    reward: float | None


class StreamItem(Protocol):
    """A prompt, or a row that is trained. identity: tells it from another one."""

    @property
    def identity(self) -> bytes: ...


Item = TypeVar("Item", bound=StreamItem)
Given = TypeVar("Given", bound=StreamItem, covariant=True)


class ItemSet(Protocol[Given]):
    """The items that a dataset gives to a stream, in its order."""

    @property
    def items(self) -> Sequence[Given]: ...


class PromptStream(Generic[Item]):
    """Endless prompts of one dataset in epochs: each holds every prompt once, in an order given by
    (seed, epoch).

    The position counts prompts since the start, with the same dataset and seed it determines
    everything that follows, so a resumed run neither drops nor repeats a prompt (I6). Positions are
    plain integers for checkpoints; `state()` adds a fingerprint of the dataset, which `restore()`
    checks.
    """

    def __init__(self, prompts: Sequence[Item], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("data.train: no prompts to stream; the dataset needs at least one")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(0)

    @property
    def first(self) -> Item:
        """The first prompt of the dataset."""
        return self._prompts[0]

    def next_items(self, num_prompts: int) -> list[Item]:
        """Returns the next prompts; runs over into the next epoch where needed."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Item:
        epoch, place = divmod(self._position, len(self._prompts))
        if epoch != self._epoch:
            self._order = self._epoch_order(epoch)
            self._epoch = epoch
        self._position += 1
        return self._prompts[int(self._order[place])]

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        # RandomState's streams are frozen (NEP 19), so a resumed run sees the same order under any
        # NumPy version.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self._prompts))

    def go_to(self, position: int) -> None:
        """Goes on with the item that comes after so many since the start."""
        self._position = position

    @property
    def epochs(self) -> float:
        """Returns how often the dataset has been gone through."""
        return self._position / len(self._prompts)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""
        return {"position": self._position, "fingerprint": self.fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was asked for, after checking that dataset, seed and order are the
        same.
        """
        if state.get("fingerprint") != self.fingerprint:
            raise DataError(
                "data.train: prompts, run.seed or data.shuffle differ from those of the "
                "checkpoint, so its position means other prompts; restore them, or start a new run"
            )
        self._position = int(state["position"])

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the prompts (or rows), their order, the seed and the shuffling."""
        digest = hashlib.blake2b(f"{self._seed} {self._shuffle}".encode(), digest_size=8)
        for prompt in self._prompts:
            digest.update(prompt.identity)
        return digest.hexdigest()


class TrainingStream(Generic[Item]):
    """The prompts of data.train, from which the coordinator takes; a position in it is part of
    every checkpoint (I6).

    loaded: by dataset, as load_training. demonstrations: the fingerprint of data.demonstrations,
    whose rows an iteration has beside its prompts; None without these.
    """

    def __init__(
        self,
        config: DataConfig,
        loaded: Sequence[ItemSet[Item]],
        seed: int,
        demonstrations: str | None = None,
    ) -> None:
        self._names = [dataset.called for dataset in config.datasets]
        self._weights = [dataset.weight for dataset in config.datasets]
        self._streams = [
            PromptStream(loaded_set.items, seed, config.shuffle) for loaded_set in loaded
        ]
        self._taken = [0] * len(self._streams)
        self._demonstrations = demonstrations

    @property
    def first(self) -> Item:
        """The first prompt of the first dataset, wherever the stream is."""
        return self._streams[0].first

    def next_items(self, num_prompts: int) -> list[Item]:
        """Returns the next prompts."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Item:
        turn = min(
            range(len(self._streams)), key=lambda i: (2 * self._taken[i] + 1) / self._weights[i]
        )
        self._taken[turn] += 1
        return self._streams[turn].next_items(1)[0]

    @property
    def epochs(self) -> float:
        """Returns how often the dataset that is furthest has been gone through."""
        return max(stream.epochs for stream in self._streams)

    def observe(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Numbers for the record of an iteration whose prompts were worth this: nothing of one
        dataset alone.

        sources: by name, prompts of the iteration with their mean accuracy and reward, and the
        dataset's share by weight.
        """
        if len(self._streams) == 1:
            return {}
        total = sum(self._weights)
        sources = {}
        for name, weight in zip(self._names, self._weights, strict=True):
            of_source = [outcome for outcome in outcomes if outcome.source == name]
            sources[name] = {
                "share": weight / total,
                "prompts": len(of_source),
                "accuracy": _mean_of_known([outcome.right for outcome in of_source]),
                "reward_mean": _mean_of_known([outcome.reward for outcome in of_source]),
            }
        return {"sources": sources}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""
        state = self._state()
        if self._demonstrations is not None:
            state["demonstrations"] = self._demonstrations
        return state

    def _state(self) -> dict[str, Any]:
        if len(self._streams) == 1:
            return self._streams[0].state()
        return {
            "sources": [
                {"name": name, "weight": weight, "taken": taken, **stream.state()}
                for name, weight, taken, stream in zip(
                    self._names, self._weights, self._taken, self._streams, strict=True
                )
            ]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was asked for. Raises DataError if that is of other data.

        If weights have changed, the new ones apply from here on, as if nothing had been taken.
        """
        if state.get("demonstrations", self._demonstrations) != self._demonstrations:
            raise DataError(
                "data.demonstrations: its rows differ from those of the checkpoint, so that the "
                "run would not go on as it was; restore them, or start a new run"
            )
        if len(self._streams) == 1:
            self._streams[0].restore(state)
            return
        saved = state.get("sources")
        if not isinstance(saved, list) or [source.get("name") for source in saved] != self._names:
            raise DataError(
                f"data.train: the checkpoint is of other datasets than {', '.join(self._names)}, "
                "so its position means other prompts; restore them, or start a new run"
            )
        for stream, source in zip(self._streams, saved, strict=True):
            stream.restore(source)
        self._taken = [0] * len(saved)
        if [source["weight"] for source in saved] == self._weights:
            self._taken = [int(source["taken"]) for source in saved]


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    """Returns the mean of those that are not None; None where all are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
