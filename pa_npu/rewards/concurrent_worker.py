"""The process of reward functions that wait: many groups at once in one event loop; one JSON object per line.

    stdin   {"functions": [FunctionSpec's fields, ...], "timeout_s", "trial"}       first line
            {"id", "group": RewardInput's fields}                                   one line per group
    stdout  {"ready": [label, ...], "isolation"} or {"unusable": reason}            first line; how the sandbox isolates, in a trial
            {"id", "rewards": {label: [G numbers or null]}, "errors": {label: reason}, "fatal": reason | null}   in any order
            {"alive": true}                                                         every second, while the loop turns

It runs the judge, the sandbox, and users' `async def`; null is a response without a verdict. trial: one group before a run, for
which the sandbox is tried too. A user's function has timeout_s for a group; the others have limits of their own. The process ends
with its input, and its keeper kills it when its parent dies.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

from pa_npu.config.user_code import describe
from pa_npu.control.child_process import private_pipes
from pa_npu.control.tasks import held
from pa_npu.errors import PaNpuError, UserError
from pa_npu.rewards.functions import (
    CONCURRENT,
    FunctionSpec,
    build_concurrent,
    build_function,
    checked_rewards,
    is_concurrent,
)
from pa_npu.rewards.types import RewardInput

_ALIVE_S = 1.0
_GROUPS_AT_ONCE = 64  # of a user's function; the time of one begins when it is called


def main() -> int:
    requests, replies = private_pipes()
    return asyncio.run(_Worker(replies).run(requests))


class _Worker:
    def __init__(self, replies: Any) -> None:
        self._replies = replies
        self._functions: list[tuple[FunctionSpec, Any]] = []
        self._turn = asyncio.Semaphore(_GROUPS_AT_ONCE)
        self._timeout_s = 0.0

    async def run(self, requests: Any) -> int:
        first = json.loads(requests.readline())
        self._timeout_s = first["timeout_s"]
        isolation = ""
        try:
            for spec in (FunctionSpec(**fields) for fields in first["functions"]):
                built = build_concurrent(spec) if spec.name in CONCURRENT else build_function(spec)
                if is_concurrent(built):
                    self._functions.append((spec, built))
            for spec, function in self._functions:
                if first["trial"] and spec.name == "code":
                    isolation = await function.check()
        except UserError as error:
            return self._refuse(str(error))
        except PaNpuError as error:
            said = str(error)
            return self._refuse(said if said.startswith("reward.code") else f"reward.code: {said}")
        self._reply({"ready": [spec.label for spec, _ in self._functions], "isolation": isolation})
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
        if first["trial"]:
            await asyncio.gather(*running)
        for task in (alive, *running):
            task.cancel()
        for spec, function in self._functions:
            if spec.name == "judge":
                await function.close()
        return 0

    def _refuse(self, reason: str) -> int:
        self._reply({"unusable": reason})
        return 1

    async def _score(self, request: dict[str, Any]) -> None:
        group = RewardInput(**request["group"])
        outcomes = await asyncio.gather(*(self._call(spec, function, group) for spec, function in self._functions))
        rewards, errors, fatal = {}, {}, None
        for (spec, _), (values, error, is_fatal) in zip(self._functions, outcomes, strict=True):
            rewards[spec.label] = values
            if error is not None:
                errors[spec.label] = error
            fatal = error if is_fatal else fatal
        self._reply({"id": request["id"], "rewards": rewards, "errors": errors, "fatal": fatal})

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
            problem = f"no verdict on {missing} of {len(values)} responses ({function.problem})" if missing else None
            return values, problem, False
        async with self._turn:
            task = asyncio.ensure_future(held(lambda: function(group)))
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        if not done:
            task.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            return [0.0] * len(nothing), f"not done within reward.timeout_s = {self._timeout_s:g} s", False
        returned, failed = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
        if failed is not None:
            return [0.0] * len(nothing), describe(failed), False
        rewards, problem = checked_rewards(function, group, returned)
        return list(rewards), problem, False

    async def _say_alive(self) -> None:
        while True:
            self._reply({"alive": True})
            await asyncio.sleep(_ALIVE_S)

    def _reply(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message).encode() + b"\n")
        self._replies.flush()


if __name__ == "__main__":
    sys.exit(main())
