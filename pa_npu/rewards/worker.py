"""The reward worker process: groups in, rewards out, one JSON object per line.

    stdin   {"functions": [FunctionSpec's fields, ...]}                           first line
            {"id", "group": {prompt, answer, responses, response_tokens, row}}    one line per group
    stdout  {"ready": "math-verify" | "numeric" | null} or {"unusable": reason}   first line
            {"id", "rewards": [[G numbers] per function], "errors": {label: reason}}  one line per group, in order

The functions run in the main thread, where math-verify's signals work. They see /dev/null as standard input, and what
they print goes to standard error. The worker ends with its input, and the kernel kills it when its parent dies.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from typing import Any

from pa_npu.errors import UserError
from pa_npu.rewards.answers import preload
from pa_npu.rewards.functions import FunctionSpec, build_function, call_function
from pa_npu.rewards.types import RewardInput

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parent", type=int, required=True, help="process id of the parent, without which this one ends"
    )
    _end_with(parser.parse_args().parent)
    requests, replies = _private_pipes()

    specs = [FunctionSpec(**spec) for spec in json.loads(requests.readline())["functions"]]
    try:
        functions = [(spec.label, build_function(spec)) for spec in specs]
    except UserError as error:
        _reply(replies, {"unusable": str(error)})
        return 1
    _reply(replies, {"ready": preload() if any(spec.name == "math" for spec in specs) else None})
    for line in requests:
        request = json.loads(line)
        _reply(replies, {"id": request["id"], **_score(functions, RewardInput(**request["group"]))})
    return 0


def _end_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies, even in the middle of a user's endless loop."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        sys.exit(0)


def _private_pipes() -> tuple[Any, Any]:
    """Takes stdin and stdout away from everything that runs in this process later, children included."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _score(functions: list[tuple[str, Any]], group: RewardInput) -> dict[str, Any]:
    rewards, errors = [], {}
    for label, function in functions:
        values, error = call_function(function, group)
        rewards.append(values)
        if error is not None:
            errors[label] = error
    return {"rewards": rewards, "errors": errors}


def _reply(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main())
