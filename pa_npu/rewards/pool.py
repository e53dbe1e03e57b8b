"""RewardPool: rewards of finished groups from reward functions in worker processes, from asyncio.

Functions that compute run in reward.workers processes; those that wait (a judge, the sandbox, a user's `async def`) run beside
these in one process for all groups (workers.py). A worker that somebody kills changes no reward (I6), and a function that kills
its worker every time costs its group. A group's time limit runs while it is scored, not while it waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from pa_npu.config.sections import RewardConfig
from pa_npu.control.tasks import gather
from pa_npu.errors import DataError, PaNpuError
from pa_npu.rewards.functions import CONCURRENT, FunctionSpec, function_specs
from pa_npu.rewards.process import check_reward_functions
from pa_npu.rewards.types import SHAPING, RewardInput, RewardResult
from pa_npu.rewards.workers import Workers

__all__ = ["RewardInput", "RewardPool", "RewardResult", "check_reward_functions"]

WINDOW = 64  # groups that a function's failing share is taken over
LEAST = 8  # groups that must have been scored before it is judged
_NO_VERDICT_AT_ALL = 0.5  # of a judge's 0 to 1
_RIGHT_FROM = {"code": 1.0}  # what counts as right
_RIGHT_FROM_HALF = 0.5  # of a judge and of graded functions: 0.128 is no right answer

log = logging.getLogger(__name__)


class RewardPool:
    """`async with RewardPool(config.reward) as pool: result = await pool.score(group)`.

    Entering starts the workers and raises DataError where a function cannot be used. A function that raises, returns
    nonsense, crashes every worker or exceeds reward.timeout_s costs the group that reward, logged. `score` raises
    DataError when that happens too often (reward.max_failing_share), and PaNpuError when no worker can be started any more
    or the pool is closed.
    """

    def __init__(self, config: RewardConfig, run_dir: str | Path | None = None) -> None:
        self.specs = function_specs(config, run_dir)
        self.timeout_s = config.timeout_s
        self._neutral = config.judge.on_failure == "neutral"
        self._failing = FailingShare([spec.label for spec in self.specs], config.max_failing_share)
        self._weights = np.array([function.weight for function in config.functions], np.float32)
        # The verdict on a response is that of the first function that judges its content.
        self._judge = next((number for number, spec in enumerate(self.specs) if spec.name not in SHAPING), 0)
        self._count = config.workers
        self._workers: list[tuple[set[str], Workers]] = []  # with the labels of their functions

    async def __aenter__(self) -> RewardPool:
        try:
            computing = [spec for spec in self.specs if spec.name not in CONCURRENT]
            others: set[str] = {spec.label for spec in self.specs} - {spec.label for spec in computing}
            if computing:
                others |= (await self._start(computing, waits=False, count=self._count)).others
            if waiting := [spec for spec in self.specs if spec.label in others]:
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
        labels -= workers.others
        return workers

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all workers and fails what still waits. Idempotent."""
        for _, workers in self._workers:
            await workers.close()

    async def score(self, group: RewardInput) -> RewardResult:
        """Rewards of the group's G responses, in order."""
        parts = [(labels, workers) for labels, workers in self._workers if labels]
        replies = await gather([workers.score(group) for _, workers in parts])
        values: dict[str, list[float | None]] = {}
        errors: dict[str, str] = {}
        reasons: list[tuple[str, str]] = []  # (what comes of it, why)
        judging = {spec.label for spec in self.specs if spec.name in CONCURRENT}
        for (labels, _), reply in zip(parts, replies, strict=True):
            if reply.get("fatal"):
                raise DataError(reply["fatal"])
            if "failure" in reply:  # the worker did not survive it, whichever function that was
                errors.update(dict.fromkeys(labels, reply["failure"]))
                reasons.append((_outcome(judging.issuperset(labels)), reply["failure"]))
                continue
            values.update(reply["rewards"])
            errors.update(reply["errors"])
            reasons += [(_outcome(label in judging), f"{label}: {error}") for label, error in reply["errors"].items()]
        for outcome, reason in reasons:
            log.warning("rewards: %s the responses to %.80r: %s", outcome, group.prompt, reason)
        rewards = np.zeros((len(self.specs), len(group.responses)), np.float32)
        no_verdict: dict[str, int] = {}
        for row, spec in zip(rewards, self.specs, strict=True):
            found = values.get(spec.label)
            if found is None:
                found = [None if spec.name in CONCURRENT else 0.0] * len(group.responses)
            if missing := sum(value is None for value in found):
                no_verdict[spec.label] = missing
                self._refuse_where_it_ends(spec, missing, group, errors.get(spec.label, ""))
            row[:] = neutral(found)
        self._failing.note(errors)
        return RewardResult(
            total=self._weights @ rewards,
            functions={spec.label: row for spec, row in zip(self.specs, rewards, strict=True)},
            correct=rewards[self._judge] >= _RIGHT_FROM.get(self.specs[self._judge].name, _RIGHT_FROM_HALF),
            errors=tuple(reason for _, reason in reasons),
            no_verdict=no_verdict,
        )

    def _refuse_where_it_ends(self, spec: FunctionSpec, missing: int, group: RewardInput, reason: str) -> None:
        if spec.name == "judge" and not self._neutral:
            raise PaNpuError(
                f"reward.judge: {reason or f'no verdict on {missing} responses'}, to {group.prompt[:80]!r}; let its server answer, "
                f"raise reward.judge.attempts, or set reward.judge.on_failure=neutral"
            )


def neutral(values: Sequence[float | None]) -> list[float]:
    """The values, those that are missing replaced by the mean of the others: no signal. In the middle (0.5) where all are."""
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else _NO_VERDICT_AT_ALL
    return [mean if value is None else value for value in values]


def _outcome(judges: bool) -> str:
    """Says what follows a failure: a judge gives no verdict (reward.judge.on_failure decides), another function zero."""
    return "no verdict on" if judges else "zero for"


class FailingShare:
    """Ends a run whose reward functions keep failing: training on their zeros teaches nothing.

    most: the share of the last groups for which each function may fail; 1 tolerates all.
    """

    def __init__(self, labels: Sequence[str], most: float) -> None:
        self._most = most
        self._failed: dict[str, deque[bool]] = {label: deque(maxlen=WINDOW) for label in labels}

    def note(self, errors: Mapping[str, str]) -> None:
        """One scored group. errors: what went wrong, by the function's label. Raises DataError where it is too often."""
        for label, failed in self._failed.items():
            failed.append(label in errors)
            if label in errors and len(failed) >= LEAST and sum(failed) > self._most * len(failed):
                raise DataError(
                    f"reward.functions: {label} failed for {sum(failed)} of the last {len(failed)} groups, which were trained "
                    f"without it (last: {errors[label]}); correct the function, or raise reward.max_failing_share = "
                    f"{self._most:g}"
                )
