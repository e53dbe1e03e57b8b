"""The process of one tracker: messages in, an answer each, one JSON object per line. Imports nothing heavy of this package.

    python -m pa_npu.telemetry.trackers.worker TRACKER INPUT OUTPUT GRACE_S      descriptors of two pipes, seconds

    {"run": TrackedRun's fields}                        first       {"ready": id} or {"failed": reason}
    {"log": {name: number}, "step"}                                 {"done": true} or {"failed": reason}
    {"table": name, "columns", "rows", "step"}                      as above
    {"finish": true}                                    last        as above

What the library prints goes to the log. When the input ends without a finish (the coordinator died), the process ends the
run with the tracker by itself, in GRACE_S at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pa_npu.telemetry.trackers.protocol import TrackedRun, Tracker, find_start

_NICENESS = 10  # nobody waits for it
_WATCH_S = 1.0
_LONGEST_REASON = 300  # characters


def main() -> int:
    tracker, source, target, grace = sys.argv[1:5]
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    threading.Thread(target=_end_after, args=(os.getppid(), float(grace)), name="watch", daemon=True).start()
    with os.fdopen(int(source), "rb") as messages, os.fdopen(int(target), "wb") as answers:

        def answer(message: Mapping[str, Any]) -> None:
            answers.write(json.dumps(message).encode() + b"\n")
            answers.flush()

        run = TrackedRun(**json.loads(messages.readline())["run"])
        try:
            started = find_start(tracker)(run)
        except BaseException as error:  # a library may raise anything, also SystemExit, where it finds no key
            answer({"failed": _reason(error)})
            return 1
        answer({"ready": started.id})
        for line in messages:
            message = json.loads(line)
            answer(_attempt(lambda message=message: _handle(started, message)))  # type: ignore[misc]
            if "finish" in message:
                return 0
    return 0 if "done" in _attempt(started.finish) else 1


def _end_after(parent: int, grace_s: float) -> None:
    """Ends this process some time after the coordinator, also in the middle of a call that hangs."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    time.sleep(grace_s)
    os._exit(1)


def _handle(tracker: Tracker, message: Mapping[str, Any]) -> None:
    if "log" in message:
        tracker.log(message["step"], message["log"])
    elif "table" in message:
        tracker.table(message["step"], message["table"], message["columns"], message["rows"])
    else:
        tracker.finish()


def _attempt(action: Callable[[], None]) -> dict[str, Any]:
    try:
        action()
    except Exception as error:  # whatever the library or its server does costs this record
        return {"failed": _reason(error)}
    return {"done": True}


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the library's handlers and threads keep nobody waiting
