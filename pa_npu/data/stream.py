"""PromptStream: the prompts of one dataset in seeded epochs, endless, resumable by position."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pa_npu.data.prompts import Prompt
from pa_npu.errors import DataError


@dataclass(frozen=True)
class Outcome:
    """The worth of a prompt's responses. right: the share that is correct; None where a reward function failed.

    reward: their mean.
    """

    source: str
    right: float | None
    reward: float


class TrainingStream(Protocol):
    """The source from which the coordinator takes prompts; a position in it is part of every checkpoint (I6)."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""

    def observe(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Numbers for the record of an iteration whose prompts were worth this."""

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was asked for. Raises DataError where it is of other data."""


class PromptStream:
    """Endless prompts in epochs: each epoch holds every prompt once, in an order given by (seed, epoch).

    The position counts prompts since the start, with the same dataset and seed it determines everything that
    follows, so a resumed run neither drops nor repeats a prompt (I6). Positions are plain integers for checkpoints;
    `state()` adds a fingerprint of the dataset, which `restore()` checks.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("data.train: no prompts to stream; the dataset needs at least one")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(0)

    @property
    def position(self) -> int:
        """Prompts taken so far."""
        return self._position

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; runs over into the next epoch where needed."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Prompt:
        epoch, place = divmod(self._position, len(self._prompts))
        if epoch != self._epoch:
            self._order, self._epoch = self._epoch_order(epoch), epoch
        self._position += 1
        return self._prompts[int(self._order[place])]

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        # RandomState's streams are frozen (NEP 19), so a resumed run sees the same order under any NumPy version.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self._prompts))

    def observe(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Nothing that the record does not say anyway."""
        return {}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""
        return {"position": self._position, "fingerprint": self.fingerprint()}

    def restore(self, state: int | Mapping[str, Any]) -> None:
        """Continues at a position, or at a `state()` after checking that dataset, seed and order are the same."""
        if isinstance(state, Mapping):
            if state.get("fingerprint") != self.fingerprint():
                raise DataError(
                    "data.train: prompts, run.seed or data.shuffle differ from those of the checkpoint, so its position "
                    "means other prompts; restore them, or start a new run"
                )
            state = int(state["position"])
        if state < 0:
            raise ValueError(f"a position counts prompts taken and cannot be {state}")
        self._position = state

    def fingerprint(self) -> str:
        """Changes with the prompts' tokens or answers, their order, the seed and the shuffling."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{self._seed} {self._shuffle}".encode(), digest_size=8)
        for prompt in self._prompts:
            digest.update(np.asarray(prompt.tokens, "<i4").tobytes())
            digest.update(f"\n{prompt.prompt_id}\n{prompt.answer}\n".encode())
        return digest.hexdigest()
