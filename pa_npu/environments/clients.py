"""FromClients: samples that other programs write, through the coordinator's API (environment.name=clients).

Every prompt of the run is offered to clients (POST /v1/tasks), which sample from whatever engine they have and give samples back
(PUT /v1/tasks/ID). What they give is scored, checked and trained as anything else. They must sample from the weights of the version
that the API names, and say so; log-probs are those of the distribution that they sampled from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentContext, Generate
from pa_npu.errors import DeadlineExceeded, UserError
from pa_npu.samples.types import Sample


@dataclass(frozen=True)
class Work:
    """A prompt that wants num_samples samples."""

    number: int
    prompt: Prompt
    num_samples: int


class FromClients:
    """environment.timeout_s: the longest that a prompt waits for its samples."""

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("clients")
        self._timeout_s = context.timeout_s
        self.max_response_tokens = context.max_response_tokens
        self._numbers = count()
        self._waiting: dict[int, Work] = {}  # nobody has it yet
        self._given: dict[int, Work] = {}
        self._answers: dict[int, asyncio.Future[list[Sample]]] = {}
        self._offered = asyncio.Event()

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        work = Work(next(self._numbers), prompt, num_samples)
        answer = self._answers[work.number] = asyncio.get_running_loop().create_future()
        self._waiting[work.number] = work
        self._offered.set()
        try:
            return await asyncio.wait_for(answer, self._timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"no client has written the samples of prompt {prompt.prompt_id} within {self._timeout_s:g} s; start one, or raise "
                f"environment.timeout_s"
            ) from None
        finally:
            for place in (self._waiting, self._given, self._answers):
                place.pop(work.number, None)

    async def take(self, most: int, wait_s: float) -> list[Work]:
        """Up to `most` prompts that no client has; each to one client. Empty after wait_s."""
        if not self._waiting:
            self._offered.clear()
            try:
                await asyncio.wait_for(self._offered.wait(), wait_s)
            except asyncio.TimeoutError:
                return []
        taken = list(self._waiting.values())[:most]
        for work in taken:
            self._given[work.number] = self._waiting.pop(work.number)
        return taken

    def find(self, number: int) -> Work:
        """Work that was taken and is not answered. Raises UserError."""
        if number not in self._given:
            raise UserError(
                f"work {number} is not waiting for samples: it was never given out, is answered, or too late"
            )
        return self._given[number]

    def answer(self, number: int, samples: Sequence[Sample]) -> None:
        """The samples of work that was taken. Raises UserError where it is not, or where there are too few or too many."""
        work = self.find(number)
        if len(samples) != work.num_samples:
            raise UserError(f"work {number} wants {work.num_samples} samples, not {len(samples)}")
        self._given.pop(number)
        if not self._answers[number].done():
            self._answers[number].set_result(list(samples))

    def give_back(self, number: int) -> None:
        """Somebody else may take it."""
        self._waiting[number] = self._given.pop(self.find(number).number)
        self._offered.set()

    @property
    def state(self) -> dict[str, int]:
        """Prompts that wait for a client, and for a client's samples."""
        return {"waiting": len(self._waiting), "given": len(self._given)}
