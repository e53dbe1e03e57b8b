"""RewardPool: scores finished groups by reward functions in worker processes, from asyncio.

    score(group) ──> waiting ──> worker ──> its reply
                        ▲           │
                        └───────────┘ the worker died, or was killed because a user's function took
                                      too long: the group is scored again (worker_processes.py)

Functions that compute run in reward.workers processes (worker.py), each with one group at a time.
Functions that wait (a judge, the sandbox, a user's `async def`) run in one further process, which
has all groups at the same time and reports every second that its event loop turns.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pa_npu.config.sections.reward import MAX_REWARD, RewardConfig
from pa_npu.control.tasks import gather
from pa_npu.errors import DataError, InvariantViolation, PaNpuError
from pa_npu.rewards.functions import (
    CONCURRENT,
    SHAPING,
    FunctionSpec,
    RewardInput,
    RewardResult,
    function_specs,
    scored_digest,
)
from pa_npu.rewards.worker_processes import Workers

WINDOW = 64  # groups over which a function's share of failures is taken
LEAST = 8  # groups that must have been scored before a function is judged
_NEUTRAL_SCORE = 0.5  # in the middle of a judge's 0 to 1
_RIGHT_FROM = {"code": 1.0}  # the reward from which on a response is right
_RIGHT_FROM_HALF = 0.5  # of a judge and of graded functions: 0.128 is no right answer

log = logging.getLogger(__name__)


class RewardPool:
    """`async with RewardPool(config.reward) as pool: result = await pool.score(group)`.

    Entering starts the workers and raises DataError if a function cannot be used. A function that
    raises, returns nonsense, crashes every worker or exceeds reward.timeout_s costs the group that
    reward, with a warning. `score` raises DataError if that happens too often (FailureLimit), and
    PaNpuError if no worker can be started any more or the pool is closed.
    """

    def __init__(
        self, config: RewardConfig, run_dir: str | Path | None = None, max_response_tokens: int = 0
    ) -> None:
        self.specs = function_specs(config, run_dir, max_response_tokens)
        self.timeout_s = config.timeout_s
        self._neutral = config.judge.on_failure == "neutral"
        self._failure_limit = FailureLimit([spec.label for spec in self.specs])
        self._weights = np.array([function.weight for function in config.functions])
        # A response is correct if the first function says so that scores its content, not its form.
        of_content = [number for number, spec in enumerate(self.specs) if spec.name not in SHAPING]
        self._correctness_index = of_content[0] if of_content else 0
        self._num_workers = config.workers
        self._workers: list[tuple[set[str], Workers]] = []  # with the labels of their functions

    async def __aenter__(self) -> RewardPool:
        try:
            computing = [spec for spec in self.specs if spec.name not in CONCURRENT]
            labels = {spec.label for spec in self.specs if spec.name in CONCURRENT}
            if computing:
                workers = await self._start(computing, waits=False, count=self._num_workers)
                labels |= workers.other_kind  # a user's `async def`
            waiting = [spec for spec in self.specs if spec.label in labels]
            if waiting:
                await self._start(waiting, waits=True, count=1)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, specs: Sequence[FunctionSpec], *, waits: bool, count: int) -> Workers:
        workers = Workers(specs, self.timeout_s, waits=waits, count=count)
        labels = {spec.label for spec in specs}
        self._workers.append((labels, workers))
        await workers.start()
        labels -= workers.other_kind
        return workers

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all workers and fails groups that still wait. May be called again."""
        for _, workers in self._workers:
            await workers.close()

    async def replies(self, group: RewardInput) -> list[tuple[set[str], dict[str, Any]]]:
        """Returns the replies of both kinds of workers to a group, with their functions' labels.

        Raises DataError if a reply ends the run.
        """
        parts = [(labels, workers) for labels, workers in self._workers if labels]
        scoring = [workers.score(group) for _, workers in parts]
        if len(scoring) == 1:
            # A task would cost as much as the rest of the hand-over.
            replies = [await scoring[0]]
        else:
            replies = await gather(scoring)
        for reply in replies:
            _check_reply(group, reply)
        return [(labels, reply) for (labels, _), reply in zip(parts, replies, strict=True)]

    async def score(self, group: RewardInput) -> RewardResult:
        """Returns the rewards of the group's G responses, in order."""
        values: dict[str, list[float | None]] = {}
        errors: dict[str, str] = {}  # by label
        reasons: list[str] = []
        concurrent_labels = {spec.label for spec in self.specs if spec.name in CONCURRENT}

        def note_failure(reason: str, *, gets_zero: bool) -> None:
            outcome = "zero for" if gets_zero else "no verdict on"
            log.warning("rewards: %s the responses to %.80r: %s", outcome, group.prompt, reason)
            reasons.append(reason)

        for labels, reply in await self.replies(group):
            if "failures" in reply:  # no worker survived the group
                errors.update(reply["failures"])
                for reason in dict.fromkeys(reply["failures"].values()):
                    note_failure(reason, gets_zero=not concurrent_labels.issuperset(labels))
                continue
            values.update(reply["rewards"])
            errors.update(reply["errors"])
            for label, error in reply["errors"].items():
                note_failure(f"{label}: {error}", gets_zero=label not in concurrent_labels)

        rewards = np.zeros((len(self.specs), len(group.responses)), np.float32)
        no_verdict: dict[str, int] = {}
        for row, spec in zip(rewards, self.specs, strict=True):
            scores = values.get(spec.label)
            if scores is None:
                missing_score = None if spec.name in CONCURRENT else 0.0
                scores = [missing_score] * len(group.responses)
            if missing := sum(score is None for score in scores):
                no_verdict[spec.label] = missing
                if spec.name == "judge" and not self._neutral:
                    reason = errors.get(spec.label) or f"no verdict on {missing} responses"
                    raise PaNpuError(
                        f"reward.judge: {reason}, to {group.prompt[:80]!r}; let its server answer, "
                        "or set reward.judge.on_failure=neutral"
                    )
            row[:] = neutral(scores)

        total = self._weights @ rewards.astype(np.float64)
        if (largest := float(np.abs(total).max(initial=0.0))) > MAX_REWARD:
            reason = f"a weighted sum of {largest:g} is beyond {MAX_REWARD:g}"
            for spec in self.specs:
                errors.setdefault(spec.label, reason)
            note_failure(reason, gets_zero=True)
            total = np.zeros_like(total)
        total = total.astype(np.float32)
        self._failure_limit.record(errors)
        right_from = _RIGHT_FROM.get(self.specs[self._correctness_index].name, _RIGHT_FROM_HALF)
        return RewardResult(
            total=total,
            functions={spec.label: row for spec, row in zip(self.specs, rewards, strict=True)},
            correct=rewards[self._correctness_index] >= right_from,
            errors=tuple(reasons),
            no_verdict=no_verdict,
            scored=scored_digest(group.prompt, group.answer, group.responses, total.tolist()),
        )


def _check_reply(group: RewardInput, reply: Mapping[str, Any]) -> None:
    """Raises if a reply ends the run, or belongs to other texts than the group's (I7)."""
    if reply.get("fatal"):
        raise DataError(reply["fatal"])
    if "rewards" not in reply:
        return
    if reply["scored"] != scored_digest(
        group.prompt, group.answer, group.responses, reply["rewards"]
    ):
        raise InvariantViolation(
            "I7 rewards: a reward worker answered for other texts, or with another reference "
            f"answer, than the {len(group.responses)} responses to {group.prompt[:80]!r} that it "
            "was given, or what it answered was changed on its way"
        )


def neutral(values: Sequence[float | None]) -> list[float]:
    """Returns the values, with the mean of the known ones in place of those that are missing.

    So a missing value gives no signal. All are 0.5 if none is known.
    """
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else _NEUTRAL_SCORE
    return [mean if value is None else value for value in values]


class FailureLimit:
    """Ends a run whose reward functions fail for most of the last groups.

    Training on their zeros teaches nothing.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._failed: dict[str, deque[bool]] = {label: deque(maxlen=WINDOW) for label in labels}

    def record(self, errors: Mapping[str, str]) -> None:
        """Records one scored group. `errors`: the failures, by the function's label.

        Raises DataError if a function fails too often.
        """
        for label, failed in self._failed.items():
            failed.append(label in errors)
            if label in errors and len(failed) >= LEAST and 2 * sum(failed) > len(failed):
                raise DataError(
                    f"reward.functions: {label} failed for {sum(failed)} of the last {len(failed)} "
                    f"groups, which were trained without it (last: {errors[label]}); correct the "
                    "function"
                )
