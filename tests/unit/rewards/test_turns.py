"""GroupSemaphore: so many at once, earlier groups first whenever they ask, and a turn is never lost."""

from __future__ import annotations

import asyncio

from pa_npu.control.tasks import GroupSemaphore


async def test_the_oldest_group_has_the_next_turn_also_for_what_it_asks_for_last() -> None:
    turns, order = GroupSemaphore(1), []
    held = asyncio.Event()

    async def ask(group: int, hold: bool = False) -> None:
        async with turns.request(group):
            order.append(group)
            if hold:
                await held.wait()

    tasks = [asyncio.create_task(ask(5, hold=True))]
    await asyncio.sleep(0)
    for group in (7, 6, 7, 1, 6):  # 1 asks behind three others
        tasks.append(asyncio.create_task(ask(group)))
        await asyncio.sleep(0)
    held.set()
    await asyncio.gather(*tasks)
    assert order == [5, 1, 6, 6, 7, 7]


async def test_no_more_than_allowed_are_at_once_and_a_cancelled_one_loses_no_turn() -> None:
    turns, now, most = GroupSemaphore(2), 0, 0

    async def ask(group: int) -> None:
        nonlocal now, most
        async with turns.request(group):
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    for victim in range(6):  # while it waits, when its turn has just come, while it has it
        tasks = [asyncio.create_task(ask(group)) for group in range(6)]
        for _ in range(victim):
            await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    now, most = 0, 0
    await asyncio.wait_for(asyncio.gather(*(ask(group) for group in range(8))), 10)
    assert most == 2, "as many as in the beginning"
