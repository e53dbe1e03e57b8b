"""Timeline: what every process did when, on one clock.

Each process appends events to RUN/timeline/<process>.jsonl, one line each, so that a killed process
loses at most its last line. `pa-npu view` draws them; chrome_trace.py merges them at the end of a
run.

The clock of all processes is wall time at import plus the monotonic time since then: comparable
between processes and nodes as far as their wall clocks agree, and never running backwards.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pa_npu.telemetry.records import RecordFile

_WALL_ANCHOR_S = time.time() - time.perf_counter()
DIRECTORY = "timeline"


def now() -> float:
    """Seconds since the epoch on the timeline's clock."""
    return _WALL_ANCHOR_S + time.perf_counter()


def on_clock(perf_counter_s: float) -> float:
    """Returns a moment of this process, by time.perf_counter(), on the timeline's clock."""
    return _WALL_ANCHOR_S + perf_counter_s


class Timeline:
    """Appends the events of one process; thread-safe. `Timeline(None, name)` records nothing and
    costs nothing.

    A lane is a row under the process: things that happen one after another, inside each other, or
    side by side (requests).
    """

    def __init__(self, path: Path | str | None, process_name: str) -> None:
        # Without a buffer: an event costs a write of a few microseconds and survives SIGKILL.
        self._file = RecordFile(Path(path)) if path is not None else None
        self._write({"process": process_name, "pid": os.getpid(), "start": now()})

    @classmethod
    def for_run(cls, run_dir: Path | str, process_name: str) -> Timeline:
        """Returns the timeline of a process of a run: RUN/timeline/<process>.jsonl."""
        return cls(Path(run_dir) / DIRECTORY / f"{process_name}.jsonl", process_name)

    @contextmanager
    def span(self, name: str, /, lane: str = "main", **args: Any) -> Iterator[dict[str, Any]]:
        """Records the block's duration, also when it raises.

        Entries put into the yielded dict become arguments.
        """
        if self._file is None:
            yield args
            return
        start_s = now()
        try:
            yield args
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self.complete(name, start_s, now(), lane, **args)

    def complete(
        self, name: str, start_s: float, end_s: float, /, lane: str = "main", **args: Any
    ) -> None:
        """Records something that lasted from start_s to end_s, both from `now()`."""
        self._write(
            {
                "name": name,
                "lane": lane,
                "start": start_s,
                "end": end_s,
                **({"args": args} if args else {}),
            }
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(event, default=str, separators=(",", ":")))
