"""What one iteration's production yielded: its numbers for the iteration record, and its sample groups."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pa_npu.control.messages import Dispatched, DispatchedGroup
from pa_npu.coordinator.scoring import ScoredGroup


class Production:
    """Accumulates the groups of one iteration: all as they are scored (judge), and those that are trained (add).

    num_samples: the groups of the lowest dispatch indices, this many, are kept as samples; which ones does not depend on timing.
    """

    def __init__(self, iteration: int, num_samples: int) -> None:
        self.iteration = iteration
        self.samples: list[dict[str, Any]] = []
        self._num_samples = num_samples
        self._start_s = time.perf_counter()
        self._seconds = 0.0
        self._window = 0
        self._tail_waste = 0.0
        self._replica_imbalance = 0.0
        self._groups = 0
        self._dispatched = 0
        self._dispatched_correct = 0.0
        self._responses = 0
        self._prompt_tokens = 0
        self._sample_prompt_tokens = 0
        self._response_tokens = 0
        self._finished = 0
        self._correct = 0
        self._reward = 0.0
        self._rewards: dict[str, float] = {}
        self._errors = 0
        self._in_buffer: list[DispatchedGroup] = []

    def judge(self, group: ScoredGroup) -> None:
        """A scored group, trained or not: the policy's accuracy is over these, whatever is chosen for training."""
        self._dispatched += 1
        self._dispatched_correct += float(np.mean(group.result.correct))

    def add(self, group: ScoredGroup) -> None:
        """A group that is trained."""
        result = group.result
        self._groups += 1
        self._responses += group.num_responses
        self._prompt_tokens += group.prompt_length
        self._sample_prompt_tokens += group.prompt_length * group.num_responses
        self._response_tokens += group.num_response_tokens
        self._finished += sum(completion.finished for completion in group.completions)
        self._correct += int(sum(map(bool, result.correct)))
        self._reward += float(sum(result.total))
        for name, values in result.functions.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + float(sum(values))
        self._errors += len(result.errors)
        if group.index < self._num_samples:
            self.samples.append(_sample(group))
            self.samples.sort(key=lambda sample: sample["index"])

    def end(self, window: int, tail_waste: float, replica_imbalance: float) -> None:
        """All groups are in the buffer. window: the admission window they ended with; the others: TailMeter's, Assignment's."""
        self._seconds = time.perf_counter() - self._start_s
        self._window = window
        self._tail_waste = tail_waste
        self._replica_imbalance = replica_imbalance

    def numbers(self) -> dict[str, Any]:
        """The coordinator's part of the iteration record that does not depend on wall time between publishes."""
        responses = self._responses
        return {
            "groups": self._groups,
            "groups_dispatched": self._dispatched,
            "accuracy_dispatched": self._dispatched_correct / self._dispatched,
            "reward_mean": self._reward / responses,
            "accuracy": self._correct / responses,
            "rewards": {name: total / responses for name, total in sorted(self._rewards.items())},
            "reward_errors": self._errors,
            "response_length_mean": self._response_tokens / responses,
            "prompt_length_mean": self._prompt_tokens / self._groups,
            "truncated_ratio": 1 - self._finished / responses,
            "tokens_prompt": self._sample_prompt_tokens,
            "tokens_response": self._response_tokens,
            "generate_s": self._seconds,
            "window": self._window,
            "tail_waste": self._tail_waste,
            "replica_imbalance": self._replica_imbalance,
        }

    def put(self, group: ScoredGroup, replica: int) -> None:
        """A group is in the buffer, for this replica."""
        self._in_buffer.append(DispatchedGroup(group.index, replica, tuple(group.response_lengths)))

    def dispatched(self) -> Dispatched:
        """What trainers compare with what they have trained (I2)."""
        return Dispatched(self.iteration, self._dispatched, tuple(self._in_buffer))


def _sample(group: ScoredGroup) -> dict[str, Any]:
    return {
        "iteration": group.iteration,
        "index": group.index,
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "responses": [
            {
                "text": completion.text,
                "tokens": len(completion.tokens),
                "finish_reason": completion.finish_reason,
                "reward": float(group.result.total[number]),
                "correct": bool(group.result.correct[number]),
            }
            for number, completion in enumerate(group.completions)
        ],
        "errors": list(group.result.errors),
    }
