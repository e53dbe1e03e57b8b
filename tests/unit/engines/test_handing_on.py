"""A group that engines hand on: room for what it still has to write, and how often that may be without a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from pa_npu.control.tasks import gather
from pa_npu.engines.group_session import _MAX_UNASKED, GroupSession
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, Generation, Sampling

PROMPT, SIZE, LENGTH = np.arange(3, dtype=np.int32), 4, 8
SAMPLING = Sampling(LENGTH, 1.0)


class Engine:
    """Ends a response at its end, or cut after so many tokens as `cuts` says of its seed."""

    def __init__(self, name: str, cuts: Callable[[int], int | None]) -> None:
        self.name, self._cuts = name, cuts

    async def generate(
        self,
        prompt_tokens: np.ndarray,
        n: int,
        seed: int,
        sampling: Sampling,
        *,
        deadline_s: float,
        written: np.ndarray | None = None,
    ) -> list[Generation]:
        await asyncio.sleep(0)
        first = 0 if written is None else len(written)
        return [self._part(seed + i, first) for i in range(n)]

    def _part(self, seed: int, first: int) -> Generation:
        cut = self._cuts(seed)
        tokens = np.arange(first, LENGTH if cut is None else max(first, cut), dtype=np.int32)
        return Generation(
            tokens, tokens.astype(np.float32), "", "length" if cut is None else "cut", version=0
        )

    async def close(self) -> None:
        """Nothing is open."""


async def session_of(pool: EnginePool) -> GroupSession:
    lease = await pool.admit(SIZE, 400, lambda _: 64, 1.0)
    return GroupSession(pool, lease, lambda _: 64, deadline_s=1.0, again_deadline_s=1.0)


def pool_of(*engines: Engine) -> EnginePool:
    pool = EnginePool()
    for engine_index, engine in enumerate(engines):
        pool.add(engine, engine_index=engine_index)  # type: ignore[arg-type]
        pool.serve(engine, 0)  # type: ignore[arg-type]
    return pool


async def test_a_group_that_is_handed_on_takes_room_for_the_responses_that_go_on() -> None:
    held: list[tuple[int, int]] = []

    def begin(seed: int) -> int | None:
        pool.devices.move({0})
        return 5 if seed == 2 else None

    def end(seed: int) -> None:
        held.append((pool.in_flight(first), pool.in_flight(second)))

    first, second = Engine("first", begin), Engine("second", end)
    pool = pool_of(first, second)
    with await session_of(pool) as session:
        responses = await session.generate(PROMPT, SIZE, 0, SAMPLING)
        assert [len(response.tokens) for response in responses] == [LENGTH] * SIZE
        assert held == [(0, 1)], "three of its four responses had ended"
        assert session.lease.tokens == 100
        await gather([session.generate(PROMPT, 1, seed, SAMPLING) for seed in range(SIZE)])
        assert held[-1] == (0, SIZE), "more was asked for, as in a further turn"
    assert pool.num_in_flight == 0


async def test_responses_may_be_handed_on_unbegun_as_often_as_devices_change_their_roles() -> None:
    turns = iter(range(2 * _MAX_UNASKED * SIZE))

    def cut(seed: int) -> int | None:
        number = next(turns, None)
        if number is None:
            return None
        pool.devices.decode_all()
        pool.devices.move({number % 2})
        return 0

    pool = pool_of(Engine("a", cut), Engine("b", cut))
    with await session_of(pool) as session:
        session.lease.close()
        session.lease = await pool.admit(1, 100, lambda _: 64, 1.0)
        for engine_index, engine in enumerate(pool.engines):
            if engine is session.lease.engine and engine_index:
                next(turns)  # the first to rest is the one that it is on
        (response,) = await session.generate(PROMPT, 1, 0, SAMPLING)
    assert len(response.tokens) == LENGTH and next(turns, None) is None


async def test_an_engine_that_hands_on_unbegun_what_nobody_asked_it_to_is_named() -> None:
    pool = pool_of(Engine("broken", lambda seed: 0))
    with (
        await session_of(pool) as session,
        pytest.raises(EngineError, match="engine broken: it ended responses"),
    ):
        await session.generate(PROMPT, SIZE, 0, SAMPLING)
