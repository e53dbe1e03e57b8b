"""The reward worker process: groups in, rewards out, one JSON object per line.

    stdin   {"functions": [FunctionSpec's fields, ...]}                           first line
            {"id", "group": {prompt, answer, responses, response_tokens, row}}    one line per group
    stdout  {"concurrent": [label, ...]} or {"unusable": reason}   first line
            {"id", "rewards": {label: [G numbers]}, "errors": {label: reason}}    one line per group, in order

Functions that wait, `async def`, are named as concurrent and left to concurrent_worker.py.

The functions run in the main thread, where math-verify's signals work. They see /dev/null as standard input, and what
they print goes to standard error. The worker ends with its input, and its keeper kills it when its parent dies.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pa_npu.control.child_process import private_pipes
from pa_npu.errors import UserError
from pa_npu.rewards.answers import preload
from pa_npu.rewards.functions import CONCURRENT, FunctionSpec, build_function, call_function, is_concurrent
from pa_npu.rewards.types import RewardInput


def main() -> int:
    requests, replies = private_pipes()

    specs = [FunctionSpec(**spec) for spec in json.loads(requests.readline())["functions"]]
    try:
        built = [(spec.label, build_function(spec)) for spec in specs if spec.name not in CONCURRENT]
    except UserError as error:
        _reply(replies, {"unusable": str(error)})
        return 1
    functions = [(label, function) for label, function in built if not is_concurrent(function)]
    left = [spec.label for spec in specs if spec.label not in dict(functions)]
    if any(spec.name == "math" for spec in specs):
        preload()
    _reply(replies, {"concurrent": left})
    for line in requests:
        request = json.loads(line)
        _reply(replies, {"id": request["id"], **_score(functions, RewardInput(**request["group"]))})
    return 0


def _score(functions: list[tuple[str, Any]], group: RewardInput) -> dict[str, Any]:
    rewards, errors = {}, {}
    for label, function in functions:
        values, error = call_function(function, group)
        rewards[label] = values
        if error is not None:
            errors[label] = error
    return {"rewards": rewards, "errors": errors}


def _reply(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main())
