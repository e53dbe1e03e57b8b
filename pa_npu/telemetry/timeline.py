"""Timeline: what every process did when, on one clock, merged into RUN/timeline.json (Chrome trace format).

Each process appends events to RUN/timeline/<process>.jsonl, one line each, so that a killed process loses at most its
last line. `merge` turns them into one file for chrome://tracing or https://ui.perfetto.dev.

The clock of all processes is wall time at import plus the monotonic time since then: comparable between processes and
nodes as far as their wall clocks agree, and never running backwards.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import open_plain
from pa_npu.telemetry.record_file import RecordFile

_WALL_ANCHOR_S = time.time() - time.perf_counter()
DIRECTORY = "timeline"
MERGED = "timeline.json"


def now() -> float:
    """Seconds since the epoch on the timeline's clock."""
    return _WALL_ANCHOR_S + time.perf_counter()


def on_clock(perf_counter_s: float) -> float:
    """A moment of this process, by time.perf_counter(), on the timeline's clock."""
    return _WALL_ANCHOR_S + perf_counter_s


class Timeline:
    """Appends the events of one process; thread-safe. `Timeline(None, name)` records nothing and costs nothing.

    A lane is a row under the process: things that happen one after another or inside each other. In a lane whose events
    overlap otherwise (requests in flight), `merge` gives every event the first free row.
    """

    def __init__(self, path: Path | str | None, process_name: str) -> None:
        # Without a buffer: an event costs a write of a few microseconds and survives SIGKILL.
        self._file = RecordFile(Path(path)) if path is not None else None
        self._write({"process": process_name, "pid": os.getpid(), "start": now()})

    @classmethod
    def for_run(cls, run_dir: Path | str, process_name: str) -> Timeline:
        """The timeline of a process of a run: RUN/timeline/<process>.jsonl."""
        return cls(Path(run_dir) / DIRECTORY / f"{process_name}.jsonl", process_name)

    @contextmanager
    def span(self, name: str, /, lane: str = "main", **args: Any) -> Iterator[dict[str, Any]]:
        """Records the block's duration, also when it raises. Entries put into the yielded dict become arguments."""
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

    def complete(self, name: str, start_s: float, end_s: float, /, lane: str = "main", **args: Any) -> None:
        """Records something that lasted from start_s to end_s, both from `now()`."""
        self._write({"name": name, "lane": lane, "start": start_s, "end": end_s, **({"args": args} if args else {})})

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


def merge(run_dir: Path | str) -> Path:
    """Writes RUN/timeline.json from all RUN/timeline/*.jsonl and returns its path; its time 0 is the first event."""
    run_dir = Path(run_dir)
    processes = [(path, read_events(path)) for path in sorted((run_dir / DIRECTORY).glob("*.jsonl"))]
    origin_s = min((event["start"] for _, events in processes for event in events), default=0.0)
    trace: list[dict[str, Any]] = []
    for pid, (path, events) in enumerate(processes, start=1):
        headers = [event for event in events if "process" in event]
        name = headers[-1]["process"] if headers else path.stem
        trace.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        trace.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        trace.extend(_process_trace(pid, [event for event in events if "end" in event], origin_s))
    merged = run_dir / MERGED
    partial = merged.with_suffix(".partial")
    partial.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": trace}), encoding="utf-8")
    partial.replace(merged)
    return merged


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of one process, from RUN/timeline/<process>.jsonl. Only the last line of a stretch that a killed process wrote may be
    incomplete."""
    events = []
    with open_plain(path) as lines:
        for line in lines:
            try:
                event = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("start"), float):
                events.append(event)
    return events


def _process_trace(pid: int, events: list[dict[str, Any]], origin_s: float) -> Iterator[dict[str, Any]]:
    lanes: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        lanes.setdefault(event["lane"], []).append(event)
    tid = 0
    for lane, members in lanes.items():
        for number, row in enumerate(_rows(members)):
            tid += 1
            name = lane if number == 0 else f"{lane} ({number + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for event in row:
                yield {
                    "name": event["name"],
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "ts": round((event["start"] - origin_s) * 1e6, 3),
                    "dur": round((event["end"] - event["start"]) * 1e6, 3),
                    "args": event.get("args", {}),
                }


def _rows(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """A lane's events in rows: one if they nest properly, else as few as keep events of a row from overlapping."""
    events = sorted(events, key=lambda event: (event["start"], -event["end"]))
    if _nested(events):
        return [events]
    rows: dict[int, list[dict[str, Any]]] = {}
    ends: list[float] = []
    for event in events:
        row = next((number for number, row_end_s in enumerate(ends) if row_end_s <= event["start"]), len(ends))
        rows.setdefault(row, []).append(event)
        ends[row : row + 1] = [event["end"]]
    return list(rows.values())


def _nested(events: list[dict[str, Any]]) -> bool:
    """Whether each event lies inside or after each earlier one (events sorted by start, longest first)."""
    open_ends: list[float] = []
    for event in events:
        while open_ends and open_ends[-1] <= event["start"]:
            open_ends.pop()
        if open_ends and event["end"] > open_ends[-1]:
            return False
        open_ends.append(event["end"])
    return True
