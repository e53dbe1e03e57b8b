"""Several datasets as one stream of prompts: whose turn it is follows from the weights and from how many each has given.

The turn is that of the dataset with the least (2 n + 1) / weight, n being what it has given so far (the divisor method of Webster
and Sainte-Lague, which apportions seats by votes): every stretch of prompts, and so every iteration, has the shares of the
weights up to rounding, and no random number is drawn. Each dataset has epochs of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pa_npu.config.sections import DataConfig
from pa_npu.data.prompts import Prompt, PromptSet
from pa_npu.data.stream import Outcome, PromptStream, TrainingStream
from pa_npu.errors import DataError


class Mixture:
    """names, weights, streams: one each per dataset."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], streams: Sequence[PromptStream]) -> None:
        self._names = list(names)
        self._weights = list(weights)
        self._streams = list(streams)
        self._taken = [0] * len(self._streams)

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Prompt:
        turn = min(range(len(self._streams)), key=lambda i: (2 * self._taken[i] + 1) / self._weights[i])
        self._taken[turn] += 1
        return self._streams[turn].take(1)[0]

    def observe(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """sources: by name, prompts of the iteration with their mean accuracy and reward, and the dataset's share by weight."""
        total = sum(self._weights)
        sources = {}
        for name, weight in zip(self._names, self._weights, strict=True):
            own = [outcome for outcome in outcomes if outcome.source == name]
            known = [outcome.right for outcome in own if outcome.right is not None]
            sources[name] = {
                "share": weight / total,
                "prompts": len(own),
                "accuracy": sum(known) / len(known) if known else None,
                "reward_mean": sum(outcome.reward for outcome in own) / len(own) if own else None,
            }
        return {"sources": sources}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""
        return {
            "sources": [
                {"name": name, "weight": weight, "taken": taken, **stream.state()}
                for name, weight, taken, stream in zip(
                    self._names, self._weights, self._taken, self._streams, strict=True
                )
            ]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was asked for; with other weights, as if nothing had been given by these."""
        saved = state.get("sources")
        if not isinstance(saved, list) or [one.get("name") for one in saved] != self._names:
            raise DataError(
                f"data.train: the checkpoint is of other datasets than {', '.join(self._names)}, so its position means other "
                f"prompts; restore them, or start a new run"
            )
        for stream, one in zip(self._streams, saved, strict=True):
            stream.restore(one)
        same = [one["weight"] for one in saved] == self._weights
        self._taken = [int(one["taken"]) if same else 0 for one in saved]


def training_stream(config: DataConfig, loaded: Sequence[PromptSet], seed: int) -> TrainingStream:
    """The stream of data.train: of one dataset, or of several. loaded: by dataset, as load_training."""
    streams = [PromptStream(prompts, seed, config.shuffle) for prompts in loaded]
    if len(streams) == 1:
        return streams[0]
    return Mixture([d.called for d in config.datasets], [d.weight for d in config.datasets], streams)
