"""The process that runs a user's tool: calls in, answers out, one JSON object per line.

    stdout  {"ready": true} or {"unusable": reason}      first line
    stdin   {"call": text}        stdout  {"answer": text}, in order

What the function prints goes to standard error. The process ends with its input, and its keeper kills it when its parent dies.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pa_npu.config.user_code import import_function
from pa_npu.control.child_process import private_pipes
from pa_npu.errors import ConfigError

_LONGEST_REASON = 200  # characters


def main() -> int:
    calls, answers = private_pipes()
    try:
        function = import_function("tool", sys.argv[1])
    except ConfigError as error:
        _write(answers, {"unusable": str(error).removeprefix("tool: ")})
        return 1
    _write(answers, {"ready": True})
    for line in calls:
        _write(answers, {"answer": _answer(function, json.loads(line)["call"])})
    return 0


def _answer(function: Any, call: str) -> str:
    try:
        return str(function(call))
    except Exception as error:  # a tool's failure is what the policy reads
        return "error: " + " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]


def _write(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
