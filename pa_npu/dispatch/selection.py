"""Which groups of an iteration are trained: all that are dispatched, or, with dynamic sampling, the first B informative ones.

DAPO, arXiv 2503.14476, eq. 11: a group whose responses are all right or all wrong has no gradient; others take its place.
A replacement is dispatched when a group turns out uninformative, never before: so at any time as many groups are dispatched as
the iteration needs if all unjudged ones are informative, hence every informative group is among the first B of dispatch
order. Nothing informative is thrown away, and neither what is trained nor how many prompts are taken depends on timing.
"""

from __future__ import annotations

import asyncio

from pa_npu.config.schema import Config
from pa_npu.errors import UserError


class Selection:
    """One iteration's dispatch indices in, and those of the groups to train out, each with its number among them, 0 .. B - 1.

    order=prompt numbers them in dispatch order, and releases a group when all before it are judged; completion as they come.
    Without dynamic sampling the number is the dispatch index.
    """

    def __init__(self, config: Config, groups: int) -> None:
        """groups: that the iteration trains, or with schedule.tokens_per_update generates."""
        schedule = config.schedule
        self._dynamic = schedule.dynamic_sampling
        self._in_order = schedule.order == "prompt"
        self._groups = groups
        self._limit = self._groups * schedule.dynamic_sampling_limit
        self._changed = asyncio.Event()
        self._waiting: dict[int, bool] = {}  # judged, not released: whether it is informative
        self._next = 0  # dispatch index that in-order release waits for
        self._released = 0
        self._judged = 0
        self.num_dispatched = 0
        self.num_discarded = 0

    @property
    def must_wait(self) -> bool:
        """Whether nothing can be dispatched before another group is judged."""
        return self.num_dispatched >= self._groups + self.num_discarded

    async def next_index(self) -> int | None:
        """The next dispatch index; waits while unjudged groups may be enough, None when they were.

        Unjudged groups end by their own deadlines, hence so does this wait. Raises UserError beyond the limit.
        """
        while True:
            if not self.must_wait:
                if self.num_dispatched >= self._limit:
                    raise UserError(
                        f"schedule.dynamic_sampling: of {self._judged} groups {self.num_discarded} were all right or all wrong, "
                        f"and {self._limit} dispatched ones cannot give {self._groups} informative ones; raise "
                        f"rollout.responses_per_prompt or schedule.dynamic_sampling_limit, or take prompts that fit the model"
                    )
                self.num_dispatched += 1
                return self.num_dispatched - 1
            if self._judged == self.num_dispatched:
                return None
            self._changed.clear()
            await self._changed.wait()

    def judge(self, index: int, informative: bool) -> list[tuple[int, int]]:
        """Takes a group's verdict and returns (dispatch index, number) of those that are to be trained and can be numbered now."""
        self._judged += 1
        self._changed.set()
        if not self._dynamic:
            return [(index, index)]
        self.num_discarded += not informative
        if not self._in_order:
            return [self._number(index)] if informative else []
        self._waiting[index] = informative
        released = []
        while self._next in self._waiting:
            first = self._next
            self._next += 1
            if self._waiting.pop(first):
                released.append(self._number(first))
        return released

    def _number(self, index: int) -> tuple[int, int]:
        self._released += 1
        return index, self._released - 1
