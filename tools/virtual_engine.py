"""A continuous-batching engine in virtual time, exact but for the rounding of events to whole decode steps.

All sequences that live decode one token per step, so in units of steps each is a job of unit speed.
An engine is therefore a clock of steps, which advances at 1 / (step_s + sequence_s * living) per
second and stands still while prompts are computed, and a heap of the clock's values at which
sequences end.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from pa_npu.planning.iteration_model.subjects import EngineSpeed

T = TypeVar("T")

# Sequences whose ends differ by less, in steps, end together: far below a step, far above rounding.
_SAME_STEP = 1e-6


class _Job(Generic[T]):
    __slots__ = ("job", "left", "sequences", "tokens")

    def __init__(self, job: T, sequences: int, tokens: float) -> None:
        self.job = job
        self.sequences = sequences
        self.left = sequences
        self.tokens = tokens


class VirtualEngine(Generic[T]):
    """Jobs (T, one per group) with some sequences each. What it has in flight is counted as
    EnginePool does: whole groups.

    next_s: when the next sequence ends if nothing is added; inf when idle.
    """

    def __init__(self, speed: EngineSpeed, max_num_seqs: float = math.inf) -> None:
        self._step_s = speed.step_s
        self._sequence_s = speed.sequence_s
        self._prompt_token_s = speed.prompt_token_s
        self._max_num_seqs = max_num_seqs
        # prompts_s: still to be spent on prompts
        self._now_s = 0.0
        self._steps = 0.0
        self._prompts_s = 0.0
        self._living = 0
        self._ends: list[tuple[float, int]] = []  # (clock, job number)
        self._queue: deque[tuple[float, int]] = deque()  # (length, job number), no place yet
        self._jobs: dict[int, _Job[T]] = {}
        self._count = 0
        self.in_flight_sequences = 0
        self.in_flight_tokens = 0.0
        self.next_s = math.inf

    def add(
        self,
        job: T,
        now_s: float,
        prompt_tokens: int,
        lengths: Sequence[float],
        expected_tokens: float,
    ) -> None:
        """A group begins: sequences that have no place wait in the engine's own queue."""
        self._advance(now_s)
        number = self._count
        self._count = self._count + 1
        self._jobs[number] = _Job(job, len(lengths), expected_tokens)
        self.in_flight_sequences += len(lengths)
        self.in_flight_tokens += expected_tokens
        self._prompts_s += self._prompt_token_s * prompt_tokens
        for length in lengths:
            if self._living < self._max_num_seqs:
                self._begin(length, number)
            else:
                self._queue.append((length, number))
        self._set_next()

    def end_some(self) -> list[T]:
        """To be called at next_s: the sequences that end then, and which jobs are complete with
        them.
        """
        self._advance(self.next_s)
        self._steps = max(self._steps, self._ends[0][0])
        complete: list[T] = []
        limit = self._steps + _SAME_STEP
        while self._ends and self._ends[0][0] <= limit:
            _, number = heapq.heappop(self._ends)
            self._living -= 1
            if self._queue:
                self._begin(*self._queue.popleft())
            job = self._jobs[number]
            job.left -= 1
            if job.left:
                continue
            del self._jobs[number]
            self.in_flight_sequences -= job.sequences
            self.in_flight_tokens -= job.tokens
            complete.append(job.job)
        self._set_next()
        return complete

    def _begin(self, length: float, number: int) -> None:
        self._living += 1
        heapq.heappush(self._ends, (self._steps + max(length, 1e-3), number))

    def _advance(self, now_s: float) -> None:
        seconds = now_s - self._now_s
        self._now_s = now_s
        if not self._living:
            self._prompts_s = 0.0
            return
        if self._prompts_s:
            spent = min(self._prompts_s, seconds)
            self._prompts_s -= spent
            seconds -= spent
        self._steps += seconds / self._step_time()

    def _set_next(self) -> None:
        if not self._ends:
            self.next_s = math.inf
            return
        self.next_s = (
            self._now_s + self._prompts_s + (self._ends[0][0] - self._steps) * self._step_time()
        )

    def _step_time(self) -> float:
        return self._step_s + self._sequence_s * self._living
