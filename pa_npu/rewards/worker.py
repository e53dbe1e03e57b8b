"""A worker process of reward functions: groups in, rewards out, one JSON object per line.

    stdin   first line       {"functions": [FunctionSpec's fields, ...], "waits", "timeout_s",
                              "patience_s"}
            for each group   {"id", "group": {prompt, answer, responses, response_tokens, row},
                              "without": [label, ...]: functions not to call}
    stdout  first line       {"others": [label, ...]} or {"unusable": reason}
            for each group   {"id", "rewards": {label: [G numbers or null]}, "errors": {label:
                              reason}, "fatal": reason | null, "scored": scored_digest of the texts
                              that were scored and these rewards}
            without waits    {"running": "own" | "users", "label"}, at the start of a function and
                              as it makes progress
            with waits       {"alive": true}, every second

Without `waits` it runs functions that compute, one group after another, in the main thread, where
signals limit their time.

With `waits` it runs the judge, the sandbox and users' `async def`, many groups at the same time in
one event loop. A response without a verdict gets null. A user's function has for each group
`timeout_s` in which it could run (running_time.py).

`others` are functions of the other kind, which another process has to run. Functions see /dev/null
as standard input, and what they print goes to standard error. The process ends with its input, and
its keeper kills it when its parent dies.
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
    functions: Functions = []
    others: list[str] = []
    for spec, function in built:
        if is_concurrent(function) == first["waits"]:
            functions.append((spec, function))
        else:
            others.append(spec.label)
    if first["waits"]:
        return asyncio.run(_Waiting(functions, first["timeout_s"], reply).run(requests, others))
    if any(spec.name in ("math", "reasoning_gym") for spec in specs):
        preload()
    reply({"others": others})
    for line in requests:
        request = json.loads(line)
        group = RewardInput(**request["group"])
        called = [(spec, f) for spec, f in functions if spec.label not in request["without"]]
        reply({"id": request["id"], **sealed(group, compute(called, group, reply))})
    return 0


def _built(
    spec: FunctionSpec, patience_s: Sequence[float], reply: Callable[[dict[str, Any]], None]
) -> Any:
    """Returns the function that a spec names.

    `reply` reports a user's module whose import makes no progress.
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
    """Returns rewards and errors of functions that compute; `reply` reports which one runs."""
    rewards: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for spec, function in functions:
        if is_users(spec):
            reply({"running": "users", "label": spec.label})
            rewards[spec.label], error = call_function(function, group)
        else:
            running = {"running": "own", "label": spec.label}
            reply(running)
            rewards[spec.label], error = _score_each(function, group, partial(reply, running))
        if error is not None:
            errors[spec.label] = error
    return {"rewards": rewards, "errors": errors, "fatal": None}


def _score_each(
    function: Any, group: RewardInput, report: Callable[[], None]
) -> tuple[list[float], str | None]:
    """Returns a built-in function's rewards, response by response.

    So one that fails costs no other its reward. `report` says that it makes progress.
    """
    rewards: list[float] = []
    reason = None
    reported_s = time.monotonic()
    for response, num_tokens in zip(group.responses, group.response_tokens, strict=True):
        alone = replace(group, responses=[response], response_tokens=[num_tokens])
        reward, error = call_function(function, alone)
        rewards += reward
        reason = reason or error
        if time.monotonic() - reported_s > _ALIVE_S:
            report()
            reported_s = time.monotonic()
    return rewards, reason


def sealed(group: RewardInput, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer with the digest that binds it to the texts that were scored."""
    rewards = {label: _numbers(values) for label, values in answer["rewards"].items()}
    return {
        **answer,
        "rewards": rewards,
        "scored": scored_digest(group.prompt, group.answer, group.responses, rewards),
    }


def _numbers(values: Any) -> list[float | None]:
    """Returns values as JSON will give them back: floats and None."""
    return [None if value is None else float(value) for value in values]


class _Waiting:
    """Runs functions that wait, in the running event loop."""

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
        alive = asyncio.create_task(self._report_alive(), name="alive")
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
        rewards: dict[str, list[float | None]] = {}
        errors: dict[str, str] = {}
        fatal: str | None = None
        for (spec, _), (values, error, is_fatal) in zip(self._functions, outcomes, strict=True):
            rewards[spec.label] = values
            if error is not None:
                errors[spec.label] = error
            if is_fatal:
                fatal = error
        answer = {"rewards": rewards, "errors": errors, "fatal": fatal}
        self._reply({"id": request["id"], **sealed(group, answer)})

    async def _call(
        self, spec: FunctionSpec, function: Any, group: RewardInput
    ) -> tuple[list[float | None], str | None, bool]:
        """Returns a function's values, what went wrong, and whether that ends the run."""
        if spec.name in CONCURRENT:
            return await _call_builtin(function, group)
        zeros: list[float | None] = [0.0] * len(group.responses)
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
            return zeros, f"not done within reward.timeout_s = {self._timeout_s:g} s", False
        if task.cancelled():
            return zeros, reason_of(function, asyncio.CancelledError()), False
        returned, failed = task.result()
        if failed is not None:
            return zeros, reason_of(function, failed), False
        rewards, problem = checked_rewards(function, group, returned)
        return list(rewards), problem, False

    async def _report_alive(self) -> None:
        while True:
            self._reply({"alive": True})
            await asyncio.sleep(_ALIVE_S)


async def _call_builtin(
    function: Any, group: RewardInput
) -> tuple[list[float | None], str | None, bool]:
    """Returns the values of the judge or the sandbox, what went wrong, and whether it is fatal."""
    nothing: list[float | None] = [None] * len(group.responses)
    try:
        values = await function(group)
    except UserError as error:
        return nothing, str(error), True
    except Exception as error:  # a mistake of this package must not be a reward either
        return nothing, describe(error), False
    problem = None
    if missing := sum(value is None for value in values):
        problem = f"no verdict on {missing} of {len(values)} responses ({function.problem})"
    return values, problem, False


if __name__ == "__main__":
    sys.exit(main())
