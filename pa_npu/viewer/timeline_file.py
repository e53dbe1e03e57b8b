"""One process's timeline as it grows: what it did last, the events that a run is divided by, and any stretch of it on demand.

A long run writes millions of events. All of them are looked at once, as bytes; kept are landmarks,
and a place in the file for every few thousand events.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import open_plain
from pa_npu.telemetry.records import parse_object
from pa_npu.viewer.values import number

LANDMARKS = ("publish", "begin", "run", "engines", "checkpoint", "evaluate")
"""Names of the events that are kept, beside those that say that the process was started."""
MAX_LANDMARKS = 200_000
MAX_EVENTS = 60_000
"""Of a stretch that is asked for."""
INDEX_EVERY_BYTES = 256 << 10
_LONGEST_LINE_BYTES = 1 << 20
_END = re.compile(rb'"end":\s*(-?[0-9.eE+]{1,40})')


class TimelineFile:
    """Thread-safe. A file that is shorter than it was is read again from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self._landmarks: list[dict[str, Any]] = []
        self._last: dict[str, Any] | None = None
        self._latest_s = 0.0
        # offset, and the latest end of any event before it
        self._places: list[tuple[int, float]] = []

    def landmarks(self) -> list[dict[str, Any]]:
        """The starts of the process and the events of LANDMARKS, in the order of the file."""
        with self._lock:
            self._scan()
            return self._landmarks

    def last(self) -> tuple[str | None, float | None]:
        """The name of the last event, and when the process ended anything last."""
        with self._lock:
            self._scan()
            name = self._last.get("name") if self._last else None
            return (name if isinstance(name, str) else None), self._latest_s or None

    def between(self, start_s: float, end_s: float, margin_s: float) -> list[dict[str, Any]]:
        """Events that overlap the stretch.

        They are written when they end: those that end within `margin_s` behind it are seen.
        """
        with self._lock:
            self._scan()
            first = 0
            for offset, latest_s in self._places:
                if latest_s >= start_s:
                    break
                first = offset
            final = next(
                (offset for offset, latest_s in self._places if latest_s > end_s + margin_s),
                self._offset,
            )
        return list(self._overlapping(first, final, start_s, end_s))

    def _overlapping(
        self, first: int, final: int, start_s: float, end_s: float
    ) -> Iterator[dict[str, Any]]:
        count = 0
        for _, line in self._lines(first, final):
            event = parse_object(line)
            if event is None:
                continue
            event_start_s, event_end_s = number(event, "start"), number(event, "end")
            if (
                event_start_s is None
                or event_end_s is None
                or event_end_s <= start_s
                or event_start_s >= end_s
            ):
                continue
            yield event
            count += 1
            if count >= MAX_EVENTS:
                return

    def _scan(self) -> None:
        """Looks at what came since the last look."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_size < self._offset:
                self._reset()
        newest = b""
        for offset, line in self._lines(self._offset, None):
            if not self._places or offset - self._places[-1][0] >= INDEX_EVERY_BYTES:
                self._places.append((offset, self._latest_s))
            self._offset = offset + len(line)
            if end := _END.search(line):
                with contextlib.suppress(ValueError):
                    self._latest_s = max(self._latest_s, min(float(end[1]), 1e12))
                newest = line
            if _is_landmark(line) and len(self._landmarks) < MAX_LANDMARKS:
                event = parse_object(line)
                if event is not None and ("process" in event or event.get("name") in LANDMARKS):
                    self._landmarks.append(event)
        if newest:
            self._last = parse_object(newest) or self._last

    def _lines(self, first: int, final: int | None) -> Iterator[tuple[int, bytes]]:
        """Whole lines and where they begin. A line that is longer than any event is left out."""
        with contextlib.suppress(OSError), open_plain(self._path) as file:
            file.seek(first)
            offset = first
            while (final is None or offset < final) and (
                line := file.readline(_LONGEST_LINE_BYTES)
            ):
                if not line.endswith(b"\n"):
                    if len(line) < _LONGEST_LINE_BYTES:
                        return
                    offset += len(line)
                    continue
                yield offset, line
                offset += len(line)


def _is_landmark(line: bytes) -> bool:
    """Whether it may be one, before it is parsed: most lines are not."""
    return b'"process"' in line or any(name in line for name in _QUOTED)


_QUOTED = tuple(f'"{name}"'.encode() for name in LANDMARKS)


def starts(landmarks: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in landmarks if "process" in event]
