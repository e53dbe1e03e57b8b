"""The process of one tracker: follows RUN/trackers/records.jsonl. Imports nothing heavy of this package.

    python -m pa_npu.telemetry.trackers.follow TRACKER RUN TIMEOUT_S

The first line of its input holds TrackedRun's other fields; the end of the input is the end of the run, also where the coordinator
was killed. Then it takes what is left and ends the run with the tracker, where nobody waits for it in TIMEOUT_S at most. What the
library prints goes to the log. A call that takes longer than TIMEOUT_S ends the process; what it was given is not given again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pa_npu.telemetry.trackers.identity import DIRECTORY, EXPLAINED, RECORDS, KeptIdentity
from pa_npu.telemetry.trackers.protocol import TrackedRun, Tracker, find_start

_NICENESS = 10  # nobody waits for it
_LOOK_S = 0.2
_LONGEST_REASON = 300  # characters
_PARENT = os.getppid()


def main() -> int:
    name, run_dir, timeout = sys.argv[1:4]
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    identity = KeptIdentity(run_dir, name)
    watch = _Watch(identity, float(timeout))
    given = json.loads(os.fdopen(0, "rb", buffering=0, closefd=False).readline())
    run = TrackedRun(**given, run_dir=run_dir, id=identity.value.id, resumed=identity.value.known)
    try:
        with watch:
            tracker = find_start(name)(run)
    except BaseException as error:  # a library may raise anything, also SystemExit, where it finds no key
        identity.lose(_reason(error))
        return EXPLAINED
    identity.update(id=tracker.id, known=True)
    for message in _follow(Path(run_dir) / DIRECTORY / RECORDS):
        if not identity.value.lacks(message):
            continue
        identity.update(**{message["kind"]: message["step"]})
        try:
            with watch:
                _deliver(tracker, message)
            identity.update(delivered=identity.value.delivered + 1)
        except Exception as error:  # whatever the library or its server does costs this record
            identity.lose(_reason(error))
    with watch:
        tracker.finish()
    return 0


class _Watch:
    """Ends this process in the middle of a call that hangs, or some time after the coordinator."""

    def __init__(self, identity: KeptIdentity, timeout_s: float) -> None:
        self._identity = identity
        self._timeout_s = timeout_s
        self._since_s: float | None = None
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def __enter__(self) -> None:
        self._since_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since_s = None

    def _run(self) -> None:
        orphan_s: float | None = None
        while True:
            time.sleep(_LOOK_S)
            now_s, since_s = time.monotonic(), self._since_s
            if since_s is not None and now_s - since_s > self._timeout_s:
                self._identity.lose(f"no answer within {self._timeout_s:g} s")
                os._exit(EXPLAINED)
            if os.getppid() != _PARENT:
                orphan_s = orphan_s or now_s
                if now_s - orphan_s > self._timeout_s:
                    os._exit(1)


def _follow(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all messages of the file, and those that are appended until the input ends."""
    while not path.exists():
        if _ended():
            return
    with path.open("rb") as file:
        while True:
            ended = _ended()  # asked first: what was written before the end is read after it
            while line := file.readline():
                if not line.endswith(b"\n"):
                    file.seek(-len(line), os.SEEK_CUR)
                    break
                yield json.loads(line)
            if ended:
                return


def _ended() -> bool:
    """Waits a moment for the end of the input, which has nothing else to say; some process may hold it open for a dead parent."""
    return bool(select.select([0], [], [], _LOOK_S)[0]) or os.getppid() != _PARENT


def _deliver(tracker: Tracker, message: Mapping[str, Any]) -> None:
    tracker.log(message["step"], message["log"])
    if "table" in message:
        tracker.table(message["step"], **message["table"])


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the library's handlers and threads keep nobody waiting
