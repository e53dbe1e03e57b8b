"""Results of one iteration's production: its numbers for the iteration record, and its sample groups."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pa_npu.control.messages import Dispatched, DispatchedGroup
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.variants import Variant
from pa_npu.data.stream import Outcome
from pa_npu.samples.group import Group
from pa_npu.telemetry.sample_store import SAMPLES_IN_SHORT, KeptResponse


@dataclass(frozen=True)
class Produced:
    """One iteration's production when it is over.

    numbers: the coordinator's part of the iteration record that does not depend on wall time between publishes. samples: for
    samples.jsonl. dispatched: what trainers compare with what they have trained (I2). kept: for RUN/samples; outcomes: of all
    prompts that were asked, in order of dispatch; both empty where the iteration was produced before a restart.
    """

    iteration: int
    numbers: dict[str, Any]
    samples: list[dict[str, Any]]
    dispatched: Dispatched
    kept: Sequence[KeptResponse] = ()
    outcomes: Sequence[Outcome] = ()


class Production(Variant):
    """Accumulates the groups of one iteration: all as they are scored, and those that are trained (add, put).

    num_kept: the groups of the lowest dispatch indices, this many, are kept with their tokens, and the first SAMPLES_IN_SHORT of
    these in short; which ones does not depend on timing.
    """

    def __init__(self, iteration: int, num_kept: float = 0) -> None:
        self.iteration = iteration
        self._samples: list[dict[str, Any]] = []
        self._kept: list[KeptResponse] = []
        self._num_kept = num_kept
        self._start_s = time.perf_counter()
        self._seconds = 0.0
        self._window = 0
        self._tail_waste = 0.0
        self._replica_imbalance = 0.0
        self._groups = 0
        self._outcomes: dict[int, Outcome] = {}  # by dispatch index
        self._dispatched_correct = 0.0
        self._counted: Counter[str] = Counter()
        self._responses = 0
        self._prompt_tokens = 0
        self._sample_prompt_tokens = 0
        self._response_tokens = 0
        self._finished = 0
        self._correct = 0
        self._reward = 0.0
        self._reward_deviation = 0.0
        self._rewards: dict[str, float] = {}
        self._shortest, self._longest = 0, 0
        self._errors = 0
        self._no_verdict: dict[str, int] = {}
        self._equal = 0
        self._in_buffer: list[DispatchedGroup] = []

    def scored(self, index: int, group: ScoredGroup) -> None:
        """A scored group, trained or not: the policy's accuracy is over these, whatever is chosen for training."""
        prompt, result = group.prompt, group.result
        right, reward = _mean(result.correct.tolist()), _mean(result.total.tolist())
        self._dispatched_correct += right
        if group.counted:
            self._counted.update(group.counted)
        self._outcomes[index] = Outcome(prompt.source, None if result.errors else right, reward)

    def add(self, index: int, group: ScoredGroup) -> None:
        """A group that is trained, under this number."""
        samples, result, lengths = group.samples, group.result, group.lengths
        self._groups += 1
        self._responses += len(samples)
        self._prompt_tokens += len(group.prompt.tokens)
        num_trained = sum(lengths)
        self._sample_prompt_tokens += sum(len(sample.tokens) for sample in samples) - num_trained
        self._response_tokens += num_trained
        self._shortest = min(lengths) if self._groups == 1 else min(self._shortest, *lengths)
        self._longest = max(self._longest, *lengths)
        self._finished += sum(sample.finished for sample in samples)
        self._correct += int(np.count_nonzero(result.correct))
        rewards = result.total.tolist()
        self._reward += sum(rewards)
        self._reward_deviation += _deviation(rewards)
        for name, values in result.functions.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + sum(values.tolist())
        self._errors += len(result.errors)
        for name, number in result.no_verdict.items():
            self._no_verdict[name] = self._no_verdict.get(name, 0) + number
        self._equal += not result.is_informative
        if index < min(self._num_kept, SAMPLES_IN_SHORT):
            self._samples.append(_sample(self.iteration, index, group))
            self._samples.sort(key=lambda sample: sample["index"])

    def end(self, window: int, tail_waste: float, replica_imbalance: float) -> Produced:
        """All groups are in the buffer. window: the admission window they ended with; the others: TailMeter's, Assignment's."""
        self._seconds = time.perf_counter() - self._start_s
        self._window = window
        self._tail_waste = tail_waste
        self._replica_imbalance = replica_imbalance
        dispatched = Dispatched(self.iteration, tuple(self._in_buffer))
        outcomes = tuple(self._outcomes[index] for index in sorted(self._outcomes))
        return Produced(self.iteration, self._numbers(), self._samples, dispatched, tuple(self._kept), outcomes)

    def _numbers(self) -> dict[str, Any]:
        responses, counted = self._responses, self._counted
        return {
            "groups": self._groups,
            "groups_dispatched": len(self._outcomes),
            "accuracy_dispatched": self._dispatched_correct / len(self._outcomes),
            "reward_mean": self._reward / responses,
            "reward_std": self._reward_deviation / self._groups,
            "accuracy": self._correct / responses,
            "rewards": {name: total / responses for name, total in sorted(self._rewards.items())},
            "reward_errors": self._errors,
            "reward_no_verdict": dict(self._no_verdict),
            "equal_reward_ratio": self._equal / self._groups,
            "response_length_mean": self._response_tokens / responses,
            "response_length_min": self._shortest,
            "response_length_max": self._longest,
            "prompt_length_mean": self._prompt_tokens / self._groups,
            "truncated_ratio": 1 - self._finished / responses,
            "tokens_prompt": self._sample_prompt_tokens,
            "tokens_response": self._response_tokens,
            "environment": dict(sorted(counted.items())),
            **({"unique_ratio": counted["tokens_unique"] / counted["tokens"]} if counted["tokens"] else {}),
            "generate_s": self._seconds,
            "window": self._window,
            "tail_waste": self._tail_waste,
            "replica_imbalance": self._replica_imbalance,
        }

    def put(
        self, group: Group, scored: ScoredGroup, advantages: np.ndarray, parts: Mapping[int, tuple[int, int] | None]
    ) -> None:
        """A group is in the buffer. parts: by replica which samples it trains; None: all. advantages: float32 [samples]."""
        for replica, part in parts.items():
            first, last = part or (0, len(scored.lengths))
            self._in_buffer.append(DispatchedGroup(group.index, replica, tuple(scored.lengths[first:last]), first))
        if group.index < self._num_kept:
            self._kept += _kept(self.iteration, group.index, scored, advantages)


def _mean(values: Sequence[float]) -> float:
    """numpy takes ten times as long for the few values of a group."""
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """That of a sample: divided by one less than their number."""
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _sample(iteration: int, index: int, group: ScoredGroup) -> dict[str, Any]:
    prompt, samples, result = group.prompt, group.samples, group.result
    return {
        "iteration": iteration,
        "index": index,
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "responses": [
            {
                "text": sample.text,
                "tokens": sample.num_trained,
                "finish_reason": "stop" if sample.finished else "length",
                "reward": float(result.total[number]),
                "correct": bool(result.correct[number]),
            }
            for number, sample in enumerate(samples)
        ],
        "errors": list(result.errors),
    }


def _kept(iteration: int, index: int, group: ScoredGroup, advantages: np.ndarray) -> list[KeptResponse]:
    prompt, samples, result = group.prompt, group.samples, group.result
    return [
        KeptResponse(
            iteration=iteration,
            index=index,
            response=number,
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            prompt_tokens=len(prompt.tokens),
            answer=prompt.answer,
            text=sample.text,
            finish_reason="stop" if sample.finished else "length",
            version=int(sample.versions.max()),
            reward=float(result.total[number]),
            rewards={name: float(values[number]) for name, values in result.functions.items()},
            advantage=float(advantages[number]),
            correct=bool(result.correct[number]),
            errors=tuple(result.errors),
            tokens=sample.tokens[sample.trained].tolist(),
            logprobs=sample.logprobs[sample.trained].tolist(),
            turns=[asdict(turn) for turn in sample.turns],
        )
        for number, sample in enumerate(samples)
    ]
