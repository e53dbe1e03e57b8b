"""Admission: window, order, fewest in-flight tokens first, counters, deadlines; and structured concurrency."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pa_npu.control.tasks import TaskScope, gather
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError
from pa_npu.errors import DeadlineExceeded


class Named:
    """An engine of which only the name matters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False

    async def close(self) -> None:
        self.closed = True


def pool_of(*names: str) -> EnginePool:
    return EnginePool([Named(name) for name in names])  # type: ignore[list-item]


async def test_least_in_flight_tokens_first():
    pool = pool_of("a", "b")
    order = [
        (await pool.admit(8, tokens, lambda _: 64, 1)).engine.name
        for tokens in (100, 30, 30, 30, 30)
    ]
    assert order == ["a", "b", "b", "b", "b"], "b holds 30, 60, 90 tokens against a's 100"
    assert (await pool.admit(8, 1, lambda _: 64, 1)).engine.name == "a"


async def test_window_bounds_every_engine_and_room_wakes_the_waiter():
    pool = pool_of("a", "b")
    leases = [await pool.admit(8, 10, lambda _: 16, 1) for _ in range(4)]
    waiting = asyncio.create_task(pool.admit(8, 10, lambda _: 16, 5))
    await asyncio.sleep(0)
    assert not waiting.done() and pool.num_in_flight == 32
    leases[1].close(response_tokens=5)
    assert (await waiting).engine is leases[1].engine
    assert pool.num_in_flight == 32


async def test_a_wider_window_takes_effect_at_the_next_change():
    pool, window = pool_of("a"), [8]
    lease = await pool.admit(8, 10, lambda _: window[0], 1)
    await_two = asyncio.create_task(pool.admit(8, 10, lambda _: window[0], 5))
    await asyncio.sleep(0)
    window[0] = 16
    lease.close()
    await await_two
    await pool.admit(8, 10, lambda _: window[0], 1)
    assert pool.num_in_flight == 16


async def test_idle_engine_takes_a_group_larger_than_the_window():
    pool = pool_of("a")
    assert (await pool.admit(16, 10, lambda _: 8, 1)).engine.name == "a"


async def test_admission_gives_up_at_its_deadline_and_says_what_is_in_flight():
    pool = pool_of("a")
    await pool.admit(8, 10, lambda _: 8, 1)
    with pytest.raises(
        DeadlineExceeded,
        match=r"no room for 8 sequences on any of 1 engine within 0.05 s \(8 in flight",
    ):
        await pool.admit(8, 10, lambda _: 8, 0.05)


async def test_counters_and_mean_in_flight_are_integrals_over_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("pa_npu.engines.pool.time.perf_counter", lambda: clock[0])
    pool = pool_of("a")
    before = pool.use()["a"]
    first = await pool.admit(8, 80, lambda _: 64, 1)
    clock[0] += 2
    second = await pool.admit(4, 40, lambda _: 64, 1)
    clock[0] += 2
    first.close(response_tokens=70)
    clock[0] += 4
    second.close(response_tokens=30)
    clock[0] += 10
    after = pool.use()["a"]
    assert (first.duration_s, second.duration_s, second.start_s - first.start_s) == (4, 6, 2)
    assert after.busy_s - before.busy_s == 8, "10 idle seconds do not count"
    assert (after.requests, after.tokens, after.in_flight_tokens) == (2, 100, 0)
    second.close(response_tokens=30)
    assert pool.use()["a"].tokens == 100, "closing twice counts once"


async def test_a_session_gives_room_back_when_its_block_raises():
    pool = pool_of("a")
    lease = await pool.admit(8, 10, lambda _: 8, 1)
    with (
        pytest.raises(EngineError),
        GroupSession(pool, lease, lambda _: 8, deadline_s=1, again_deadline_s=1),
    ):
        assert pool.num_in_flight == 8
        raise EngineError("dead")
    assert pool.num_in_flight == 0


async def test_pool_closes_its_engines_and_refuses_equal_names():
    async with pool_of("a", "b") as pool:
        pass
    engines: list[Any] = list(pool.engines)
    assert all(engine.closed for engine in engines)
    with pytest.raises(ValueError, match="names must differ"):
        pool_of("a", "a")


async def test_what_an_engine_lost_is_admitted_before_anything_new():
    pool = pool_of("a")
    held = await pool.admit(8, 10, lambda _: 8, 1)
    new = asyncio.create_task(pool.admit(8, 10, lambda _: 8, 5))
    await asyncio.sleep(0)
    again = asyncio.create_task(pool.admit(8, 10, lambda _: 8, 5, again=True))
    await asyncio.sleep(0)
    held.close()
    lease = await again
    assert not new.done()
    lease.close()
    await new


async def test_a_suspended_engine_is_given_nothing_and_a_failed_pool_lets_nobody_wait():
    pool = pool_of("a", "b")
    first = pool.engines[0]
    pool.suspend(first)
    assert [(await pool.admit(8, 10, lambda _: 64, 1)).engine.name for _ in range(3)] == ["b"] * 3
    pool.serve(first)
    assert (await pool.admit(8, 10, lambda _: 64, 1)).engine is first
    waiting = asyncio.create_task(pool.admit(80, 10, lambda _: 64, 60))
    await asyncio.sleep(0)
    pool.fail(EngineError("no engine is left"))
    with pytest.raises(EngineError, match="no engine is left"):
        await waiting


async def fail_after(event: asyncio.Event) -> None:
    await event.wait()
    raise EngineError("dead")


async def test_failure_of_a_task_cancels_the_others_and_interrupts_the_block():
    event, cancelled = asyncio.Event(), []

    async def another() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(EngineError, match="dead"):
        async with TaskScope() as scope:
            scope.start(another(), "other")
            scope.start(fail_after(event), "failing")
            await asyncio.sleep(0)
            event.set()
            # waits for room that only a living engine would give
            await asyncio.wait_for(asyncio.Event().wait(), 30)
    assert cancelled == [True]
    # the interruption is spent: this task goes on living
    await asyncio.sleep(0)


async def test_scope_waits_for_tasks_started_by_the_block():
    done = []

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)

    async with TaskScope() as scope:
        for number in range(3):
            scope.start(work(number), f"work {number}")
    assert done == [0, 1, 2]


async def test_failure_of_the_block_cancels_its_tasks():
    started = []

    async def work() -> None:
        started.append(True)
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="mine"):
        async with TaskScope() as scope:
            scope.start(work(), "work")
            await asyncio.sleep(0)
            raise ValueError("mine")
    assert started == [True] and len(asyncio.all_tasks()) == 1, "nothing is left running"


async def test_failure_after_the_block_is_raised_too():
    event = asyncio.Event()
    with pytest.raises(EngineError):
        async with TaskScope() as scope:
            scope.start(fail_after(event), "failing")
            event.set()


async def test_cancelling_the_owner_cancels_the_tasks():
    async def owner() -> None:
        async with TaskScope() as scope:
            scope.start(asyncio.Event().wait(), "forever")

    task = asyncio.create_task(owner())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1


async def test_gather_leaves_nothing_running():
    event = asyncio.Event()
    event.set()
    with pytest.raises(EngineError):
        await gather([asyncio.Event().wait(), fail_after(event)])
    assert len(asyncio.all_tasks()) == 1


async def test_the_end_of_a_versions_last_session_wakes_who_waits_for_it_and_a_beginning_nobody():
    """Its lease may have ended before: the session of a group that moves from engine to engine goes
    on without one.
    """
    pool, asked = EnginePool(), []

    def is_over() -> bool:
        asked.append(1)
        return not pool.writes_before(1)

    pool.count_open(0, 1)
    waiting = asyncio.create_task(pool.wait_until(is_over))
    await asyncio.sleep(0)
    pool.count_open(0, 1)
    await asyncio.sleep(0)
    assert len(asked) == 1
    for _ in range(2):
        pool.count_open(0, -1)
    await asyncio.wait_for(waiting, 5.0)
