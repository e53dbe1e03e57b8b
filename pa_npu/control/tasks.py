"""Structured concurrency for Python 3.10: tasks never outlive the block that started them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")
# The launcher kills what is left after 5 s (GRACE_S of its process tree).
LONGEST_S = 4.0


class TaskScope:
    """A block that ends when all tasks started in it have ended.

    Usage: `async with TaskScope() as scope:`. The first failure cancels all other tasks and is
    raised. It also interrupts the block itself, so that a dispatcher that waits for room does not
    wait for a dead engine.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._owner: Any = None
        self._interrupted = False
        self._in_block = False

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        if self._failure is not None:
            # asyncio.wait_for of Python 3.10 and 3.11 can swallow the interruption
            coroutine.close()
            raise self._failure
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def __aenter__(self) -> TaskScope:
        self._owner = asyncio.current_task()
        self._in_block = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._in_block = False
        try:
            if error is None and self._failure is None:
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
        finally:
            # tasks are left only if something failed, or if this task itself is cancelled
            await cancel(self._tasks)
        if self._failure is not None and (error is None or self._interrupted):
            if self._interrupted and hasattr(self._owner, "uncancel"):
                self._owner.uncancel()  # since Python 3.11
            raise self._failure

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._failure is not None:
            return
        self._failure = error
        for remaining in self._tasks:
            remaining.cancel()
        if self._in_block and self._owner is not None:
            self._interrupted = True
            self._owner.cancel()


async def gather(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Does what asyncio.gather does, and leaves nothing running.

    The first failure cancels the other tasks and is raised.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def gather_both(first: Awaitable[T], second: Awaitable[S]) -> tuple[T, S]:
    """Does both at the same time. The first failure cancels the other and is raised."""
    tasks = (asyncio.ensure_future(first), asyncio.ensure_future(second))
    try:
        await asyncio.gather(*tasks)
        return tasks[0].result(), tasks[1].result()
    finally:
        await cancel(tasks)


async def guarded(work: Awaitable[T], *guards: Awaitable[object]) -> T:
    """Returns the result of `work`, or raises what a guard raises before.

    A guard that returns is ignored. Nothing is left running.
    """
    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(guard) for guard in guards]
    left: set[asyncio.Future[Any]] = {working, *watching}
    try:
        while not working.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                for guard in done:
                    guard.result()
        return await working
    finally:
        await cancel([working, *watching])


async def catch(call: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Runs a user's code and returns its result, or the exception that it raises.

    Raised in a task, SystemExit would end the event loop and with it all groups.
    """
    try:
        return await call(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits for their end. What they raise meanwhile is dropped.

    The task that calls this is left out. If the caller is cancelled, that cancellation is raised
    once the tasks have ended.
    """
    unfinished = []
    for task in tasks:
        if not task.done():
            unfinished.append(task)
        elif not task.cancelled():
            task.exception()  # which asyncio would log if nobody had asked for it
    if not unfinished:
        return
    unfinished = [task for task in unfinished if task is not asyncio.current_task()]
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)


class GroupSemaphore:
    """Limits the requests that run at once; requests of earlier groups go before those of later ones.

    Usage: `async with semaphore.request(group):`, with groups numbered in their order, in one event
    loop. A retry, or the next test of a program, waits for no later group. So the time that the
    oldest group needs follows from its own requests, however many groups wait
    (Deadlines.reward_limit_s).
    """

    def __init__(self, number: int) -> None:
        self._free = number  # above 0 only if no request waits
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def request(self, group: int) -> AsyncIterator[None]:
        """Waits until a request of this group may run, and keeps its place during the block."""
        await self._acquire(group)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, group: int) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (group, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the turn had come already
            raise

    def _release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def run_until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Runs the work in an event loop of the main thread; SIGTERM cancels it and ends the process.

    The launcher stops all processes of a run as soon as one fails or the run is over, which may be
    right after an iteration. The cancelled work closes every file that it owns, and then the
    process ends by SIGTERM. LONGEST_S after the first SIGTERM, or at a second one, the process ends
    in any case.
    """
    terminated = False

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            loop.remove_signal_handler(signal.SIGTERM)  # a second SIGTERM has its usual effect
            timer = threading.Timer(LONGEST_S, _end)
            timer.daemon = True
            timer.start()
            assert task is not None
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, terminate)
        await work

    try:
        asyncio.run(watched())
    except BaseException:
        if not terminated:
            raise  # after SIGTERM it is a consequence of cancelling
    if terminated:
        _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
