"""PromptStream: the prompts of one dataset in seeded epochs, endless, resumable by position, those passed over left out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pa_npu.data.difficulty import Difficulty, Outcome
from pa_npu.data.prompts import Prompt
from pa_npu.errors import DataError


class TrainingStream(Protocol):
    """The source from which the coordinator takes prompts; a position in it is part of every checkpoint (I6)."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""

    def observe(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Record what an iteration's prompts were worth, all of those taken since the last call; returns numbers for its record."""

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was asked for. Raises DataError where it is of other data."""


class PromptStream:
    """Endless prompts in epochs: each epoch holds every prompt once, in an order given by (seed, epoch).

    The position counts places of epochs since the start, with the same dataset and seed it determines everything that
    follows, so a resumed run neither drops nor repeats a prompt (I6). Positions are plain integers for checkpoints;
    `state()` adds a fingerprint of the dataset, which `restore()` checks, and what `difficulty` knows of its prompts.
    least: with difficulty, the prompts that an epoch must hold, else all are asked again.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool = True,
        difficulty: Difficulty | None = None,
        least: int = 1,
    ) -> None:
        if not prompts:
            raise DataError("data.train: no prompts to stream; the dataset needs at least one")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._difficulty = difficulty
        self._least = least
        self._position = 0
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(0)
        self._passed = 0  # that were said in a record

    @property
    def position(self) -> int:
        """Places of epochs so far: prompts taken, and passed over."""
        return self._position

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; runs over into the next epoch where needed."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Prompt:
        while True:
            epoch, place = divmod(self._position, len(self._prompts))
            if epoch != self._epoch:
                self._order, self._epoch = self._epoch_order(epoch), epoch
            if place == 0 and self._difficulty is not None:
                self._difficulty.begin_epoch(self._least)
            self._position += 1
            index = int(self._order[place])
            if self._difficulty is None or not self._difficulty.passes_over(index):
                return self._prompts[index]

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        # RandomState's streams are frozen (NEP 19), so a resumed run sees the same order under any NumPy version.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self._prompts))

    def observe(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """prompts_passed: places passed over since the last call; prompts_solved, prompts_unsolved: how many are by now."""
        if self._difficulty is None:
            return {}
        for outcome in outcomes:
            self._difficulty.observe(self._index[outcome.prompt_id], outcome.right)
        passed, self._passed = self._difficulty.num_passed - self._passed, self._difficulty.num_passed
        solved, unsolved = self._difficulty.counts()
        return {"prompts_passed": passed, "prompts_solved": solved, "prompts_unsolved": unsolved}

    @cached_property
    def _index(self) -> dict[int, int]:
        return {prompt.prompt_id: index for index, prompt in enumerate(self._prompts)}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""
        known = {"difficulty": self._difficulty.state()} if self._difficulty is not None else {}
        return {"position": self._position, "fingerprint": self.fingerprint(), **known}

    def restore(self, state: int | Mapping[str, Any]) -> None:
        """Continues at a position, or at a `state()` after checking that dataset, seed and order are the same."""
        if isinstance(state, Mapping):
            if state.get("fingerprint") != self.fingerprint():
                raise DataError(
                    "data.train: prompts, run.seed or data.shuffle differ from those of the checkpoint, so its position "
                    "means other prompts; restore them, or start a new run"
                )
            if self._difficulty is not None and "difficulty" in state:  # a run without data.skip knows nothing
                self._difficulty.restore(state["difficulty"])
                self._passed = self._difficulty.num_passed
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
