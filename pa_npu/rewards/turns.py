"""So many requests at once, those of the group that came first before those of all later ones, whenever they ask.

A retry, or the next test of a program, then waits for no group behind its own: what the oldest group may take follows from its own
requests, however many groups wait (ConfigTree.reward_limit_s).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """`async with turns.of(group):` around a request, with groups numbered as they come. For one event loop."""

    def __init__(self, number: int) -> None:
        self._free = number  # above 0 only where nobody waits
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._asked = itertools.count()

    @asynccontextmanager
    async def of(self, group: int) -> AsyncIterator[None]:
        await self._take(group)
        try:
            yield
        finally:
            self._give()

    async def _take(self, group: int) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (group, next(self._asked), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give()  # it had come already
            raise

    def _give(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
