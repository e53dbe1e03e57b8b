"""The process that runs a user's tool: calls in, answers out, one JSON object per line.

    stdout  {"ready": true} or {"unusable": reason}      first line
    stdin   {"call": text}        stdout  {"answer": text}, with "failure": true if the tool failed

Answers are in the order of the calls. What the function prints goes to standard error. The process
ends with its input, and its keeper kills it when its parent dies.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pa_npu.config.user_code import import_function
from pa_npu.control.worker_process import private_pipes, send
from pa_npu.errors import ConfigError

_LONGEST_REASON = 200  # characters


def main() -> int:
    calls, answers = private_pipes()
    try:
        function = import_function("tool", sys.argv[1])
    except ConfigError as error:
        send(answers, {"unusable": str(error).removeprefix("tool: ")})
        return 1
    send(answers, {"ready": True})
    for line in calls:
        send(answers, _answer(function, json.loads(line)["call"]))
    return 0


def _answer(function: Any, call: str) -> dict[str, Any]:
    try:
        answer = function(call)
        if isinstance(answer, (str, int, float)):
            text = str(answer)
            text.encode()  # raises UnicodeEncodeError for half of a surrogate pair
            return {"answer": text}
        reason = f"returned {type(answer).__name__}, not a text or a number"
    except UnicodeEncodeError:
        reason = "returned half of a surrogate pair, which is no text"
    except BaseException as error:
        # the policy reads a tool's failure as an answer, even one that would end the process
        reason = f"{type(error).__name__}: {error}"
    line = " ".join(reason.split())[:_LONGEST_REASON].encode("utf-8", "replace").decode()
    return {"answer": f"error: {line}", "failure": True}


if __name__ == "__main__":
    sys.exit(main())
