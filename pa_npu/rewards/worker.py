"""A process of reward functions: groups in, rewards out, one JSON object per line.

    stdin   {"functions": [FunctionSpec's fields, ...], "waits", "timeout_s", "patience_s"}   first line
            {"id", "group": {prompt, answer, responses, response_tokens, row}}           one line per group
    stdout  {"others": [label, ...]} or {"unusable": reason}                             first line
            {"running": "own" | "users"}                             without waits, at the start of a function and as it goes on
            {"id", "rewards": {label: [G numbers or null]}, "errors": {label: reason}, "fatal":
            reason | null,
             "scored": scored_digest of the texts that were scored and these rewards}
            {"alive": true}                                                              every second, with waits

Without `waits` it runs functions that compute, one group after another, in the main thread, where
signals limit their time. With `waits` it runs the judge, the sandbox and users' `async def`, many
groups at once in one event loop; null is a response without a verdict, and a user's function has
timeout_s in which it could run (running_time.py) for a group. Functions of the other kind are named
as others and left to another process.

Functions see /dev/null as standard input, and what they print goes to standard error. The process
ends with its input, and its keeper kills it when its parent dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pa_npu.config.user_code import describe
from pa_npu.control.running_time import TimeLimit
from pa_npu.control.tasks import catch
from pa_npu.control.worker_process import private_pipes, send
from pa_npu.errors import UserError
from pa_npu.rewards.comparer import preload
from pa_npu.rewards.functions import (
    CONCURRENT,
    FunctionSpec,
    RewardInput,
    build_concurrent,
    build_function,
    call_function,
    checked_rewards,
    is_concurrent,
    is_users,
    reason_of,
    scored_digest,
)
from pa_npu.rewards.loading import watched

_ALIVE_S = 1.0
_GROUPS_AT_ONCE = 64  # of a user's function; the time of one begins when it is called

Functions = list[tuple[FunctionSpec, Any]]


def main() -> int:
    requests, replies = private_pipes()
    first = json.loads(requests.readline())

    reply = partial(send, replies)
    try:
        specs = [FunctionSpec(**fields) for fields in first["functions"]]
        built = [(spec, _built(spec, first["patience_s"], reply)) for spec in specs]
    except UserError as error:
        reply({"unusable": str(error)})
        return 1
    functions = [
        (spec, function) for spec, function in built if is_concurrent(function) == first["waits"]
    ]
    others = [spec.label for spec, function in built if is_concurrent(function) != first["waits"]]
    if first["waits"]:
        return asyncio.run(_Waiting(functions, first["timeout_s"], reply).run(requests, others))
    if any(spec.name == "math" for spec in specs):
        preload()
    reply({"others": others})
    for line in requests:
        request = json.loads(line)
        group = RewardInput(**request["group"])
        reply({"id": request["id"], **sealed(group, compute(functions, group, reply))})
    return 0


def _built(
    spec: FunctionSpec, patience_s: Sequence[float], reply: Callable[[dict[str, Any]], None]
) -> Any:
    """Returns the function that a spec names. reply: is told where a user's module stands still
    while it is imported.
    """
    if spec.name in CONCURRENT:
        return build_concurrent(spec)
    if not is_users(spec):
        return build_function(spec)
    with watched(spec.name, patience_s, lambda reason: reply({"unusable": reason})):
        return build_function(spec)


def compute(
    functions: Functions, group: RewardInput, reply: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Returns rewards and errors of functions that compute. reply: is told whose function runs."""
    rewards, errors = {}, {}
    for spec, function in functions:
        if is_users(spec):
            reply({"running": "users"})
            rewards[spec.label], error = call_function(function, group)
        else:
            reply({"running": "own"})
            rewards[spec.label], error = _score_each(function, group, reply)
        if error is not None:
            errors[spec.label] = error
    return {"rewards": rewards, "errors": errors, "fatal": None}


def _score_each(
    function: Any, group: RewardInput, reply: Callable[[dict[str, Any]], None]
) -> tuple[list[float], str | None]:
    """Returns a built-in function's rewards, response by response, so that one that fails costs no
    other its reward.
    """
    rewards: list[float] = []
    reason = None
    said_s = time.monotonic()
    for response, num_tokens in zip(group.responses, group.response_tokens, strict=True):
        alone = replace(group, responses=[response], response_tokens=[num_tokens])
        reward, error = call_function(function, alone)
        rewards += reward
        reason = reason or error
        if time.monotonic() - said_s > _ALIVE_S:
            reply({"running": "own"})
            said_s = time.monotonic()
    return rewards, reason


def sealed(group: RewardInput, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with the digest that binds it to the texts which were scored."""
    rewards = {label: _numbers(values) for label, values in answer["rewards"].items()}
    return {
        **answer,
        "rewards": rewards,
        "scored": scored_digest(group.prompt, group.responses, rewards),
    }


def _numbers(values: Any) -> list[float | None]:
    """As JSON gives them back."""
    return [None if value is None else float(value) for value in values]


class _Waiting:
    """Functions that wait, in the running event loop."""

    def __init__(
        self, functions: Functions, timeout_s: float, reply: Callable[[dict[str, Any]], None]
    ) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._reply = reply
        self._turn = asyncio.Semaphore(_GROUPS_AT_ONCE)

    async def run(self, requests: Any, others: list[str]) -> int:
        self._reply({"others": others})
        lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in requests:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, None)

        threading.Thread(target=read, name="requests", daemon=True).start()
        alive = asyncio.create_task(self._say_alive(), name="alive")
        running: set[asyncio.Task[None]] = set()
        while (line := await lines.get()) is not None:
            task = asyncio.create_task(self._score(json.loads(line)), name="group")
            running.add(task)
            task.add_done_callback(running.discard)
        for task in (alive, *running):
            task.cancel()
        for spec, function in self._functions:
            if spec.name == "judge":
                await function.close()
        return 0

    async def _score(self, request: dict[str, Any]) -> None:
        group = RewardInput(**request["group"])
        outcomes = await asyncio.gather(
            *(self._call(spec, function, group) for spec, function in self._functions)
        )
        rewards, errors, fatal = {}, {}, None
        for (spec, _), (values, error, is_fatal) in zip(self._functions, outcomes, strict=True):
            rewards[spec.label] = values
            if error is not None:
                errors[spec.label] = error
            fatal = error if is_fatal else fatal
        answer = {"rewards": rewards, "errors": errors, "fatal": fatal}
        self._reply({"id": request["id"], **sealed(group, answer)})

    async def _call(
        self, spec: FunctionSpec, function: Any, group: RewardInput
    ) -> tuple[list[float | None], str | None, bool]:
        """Its values, what went wrong, and whether that ends the run."""
        nothing: list[float | None] = [None] * len(group.responses)
        if spec.name in CONCURRENT:
            try:
                values = await function(group)
            except UserError as error:
                return nothing, str(error), True
            except Exception as error:  # a mistake of this package must not be a reward either
                return nothing, describe(error), False
            missing = sum(value is None for value in values)
            problem = (
                f"no verdict on {missing} of {len(values)} responses ({function.problem})"
                if missing
                else None
            )
            return values, problem, False
        async with self._turn:
            task = asyncio.ensure_future(catch(lambda: function(group)))
            limit = TimeLimit(os.getpid(), self._timeout_s)
            while not task.done():
                await asyncio.wait({task}, timeout=limit.look_again_s())
                if not task.done() and limit.is_over():
                    break
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            return (
                [0.0] * len(nothing),
                f"not done within reward.timeout_s = {self._timeout_s:g} s",
                False,
            )
        returned, failed = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
        if failed is not None:
            return [0.0] * len(nothing), reason_of(function, failed), False
        rewards, problem = checked_rewards(function, group, returned)
        return list(rewards), problem, False

    async def _say_alive(self) -> None:
        while True:
            self._reply({"alive": True})
            await asyncio.sleep(_ALIVE_S)


if __name__ == "__main__":
    sys.exit(main())
