"""Writes a run's timeline as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import open_plain
from pa_npu.telemetry.timeline import DIRECTORY

MERGED = "timeline.json"


def merge(run_dir: Path | str) -> Path:
    """Writes RUN/timeline.json from all RUN/timeline/*.jsonl and returns its path; its time 0 is
    the first event.
    """
    run_dir = Path(run_dir)
    files = sorted((run_dir / DIRECTORY).glob("*.jsonl"))
    processes = [(path, read_events(path), read_spans(path)) for path in files]
    origin_s = min((span["start"] for _, _, spans in processes for span in spans), default=0.0)
    trace: list[dict[str, Any]] = []
    for pid, (path, events, spans) in enumerate(processes, start=1):
        headers = [event for event in events if isinstance(event.get("process"), str)]
        name = headers[-1]["process"] if headers else path.stem
        trace.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        trace.append(
            {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        )
        trace.extend(_process_trace(pid, spans, origin_s))
    merged = run_dir / MERGED
    partial = merged.with_suffix(".partial")
    partial.write_text(
        json.dumps({"displayTimeUnit": "ms", "traceEvents": trace}), encoding="utf-8"
    )
    partial.replace(merged)
    return merged


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of one process, from RUN/timeline/<process>.jsonl. Only the last line of a stretch
    that a killed process wrote may be incomplete."""
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


def read_spans(path: Path) -> list[dict[str, Any]]:
    """Events of one process with a beginning, an end, a name, a lane and arguments; what is no such
    event is left out.
    """
    return [event for event in read_events(path) if _is_span(event)]


def spans_of(spans: Iterable[dict[str, Any]], name: str, number: str) -> dict[int, dict[str, Any]]:
    """Returns the spans of a name by a whole number among their arguments, such as `publish` by its
    `version`.
    """
    named = (
        span for span in spans if span["name"] == name and isinstance(span["args"].get(number), int)
    )
    return {span["args"][number]: span for span in named}


def _is_span(event: dict[str, Any]) -> bool:
    event.setdefault("args", {})
    is_named = isinstance(event.get("name"), str) and isinstance(event.get("lane"), str)
    if (
        not is_named
        or not isinstance(event["args"], dict)
        or not isinstance(event.get("end"), float)
    ):
        return False
    return math.isfinite(event["start"]) and event["start"] <= event["end"] < math.inf


def _process_trace(
    pid: int, events: list[dict[str, Any]], origin_s: float
) -> Iterator[dict[str, Any]]:
    lanes: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        lanes.setdefault(event["lane"], []).append(event)
    tid = 0
    for lane, members in lanes.items():
        for number, row in enumerate(_rows(members)):
            tid += 1
            name = lane if number == 0 else f"{lane} ({number + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": tid},
            }
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
    """Returns a lane's events in rows: one if they nest properly, else as few as keep events of a
    row from overlapping.
    """
    events = sorted(events, key=lambda event: (event["start"], -event["end"]))
    if _nested(events):
        return [events]
    rows: dict[int, list[dict[str, Any]]] = {}
    ends: list[float] = []
    for event in events:
        row = next(
            (number for number, row_end_s in enumerate(ends) if row_end_s <= event["start"]),
            len(ends),
        )
        rows.setdefault(row, []).append(event)
        ends[row : row + 1] = [event["end"]]
    return list(rows.values())


def _nested(events: list[dict[str, Any]]) -> bool:
    """Returns whether each event lies inside or after each earlier one (events sorted by start,
    longest first).
    """
    open_ends: list[float] = []
    for event in events:
        while open_ends and open_ends[-1] <= event["start"]:
            open_ends.pop()
        if open_ends and event["end"] > open_ends[-1]:
            return False
        open_ends.append(event["end"])
    return True
