"""One process's timeline as it grows: its last event, its landmarks, and the events of an interval.

A long run writes millions of events. Each is scanned once, as bytes; landmarks are kept, and a
place in the file for every few thousand events.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import open_plain
from pa_npu.telemetry.records import parse_object
from pa_npu.viewer.values import number

LANDMARKS = ("publish", "begin", "run", "engines", "checkpoint", "evaluate")
"""Names of the events that are kept, beside the starts of the process."""
MAX_LANDMARKS = 200_000
MAX_EVENTS = 60_000
"""Of an interval that is asked for."""
INDEX_EVERY_BYTES = 256 << 10
_MAX_LINE_BYTES = 1 << 20
_END = re.compile(rb'"end":\s*(-?[0-9.eE+]{1,40})')


class TimelineFile:
    """Reads one timeline; thread-safe. A file that has become shorter is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self._landmarks: list[dict[str, Any]] = []
        self._last: dict[str, Any] | None = None
        self._latest_s = 0.0
        # (offset, latest end of the events before it)
        self._places: list[tuple[int, float]] = []

    def landmarks(self) -> list[dict[str, Any]]:
        """Returns the starts of the process and the events of LANDMARKS, in the file's order."""
        with self._lock:
            self._scan()
            return self._landmarks

    def last(self) -> tuple[str | None, float | None]:
        """Returns the name of the last event, and the latest end of any event."""
        with self._lock:
            self._scan()
            name = self._last.get("name") if self._last else None
            return (name if isinstance(name, str) else None), self._latest_s or None

    def between(self, start_s: float, end_s: float, margin_s: float) -> list[dict[str, Any]]:
        """Returns the events that overlap the interval and end at most `margin_s` after it.

        Later ones are not found, since an event is written when it ends.
        """
        with self._lock:
            self._scan()
            first = 0
            final = self._offset
            for offset, latest_s in self._places:
                if latest_s < start_s:
                    first = offset
                elif latest_s > end_s + margin_s:
                    final = offset
                    break
        return list(self._overlapping(first, final, start_s, end_s))

    def _overlapping(
        self, first: int, final: int, start_s: float, end_s: float
    ) -> Iterator[dict[str, Any]]:
        count = 0
        for _, line in self._lines(first, final):
            event = parse_object(line)
            if event is None:
                continue
            event_start_s = number(event, "start")
            event_end_s = number(event, "end")
            if event_start_s is None or event_end_s is None:
                continue
            if event_end_s <= start_s or event_start_s >= end_s:
                continue
            yield event
            count += 1
            if count >= MAX_EVENTS:
                return

    def _scan(self) -> None:
        """Reads the lines that were written since the last scan."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_size < self._offset:
                self._reset()
        newest = b""
        for offset, line in self._lines(self._offset, None):
            if not self._places or offset - self._places[-1][0] >= INDEX_EVERY_BYTES:
                self._places.append((offset, self._latest_s))
            self._offset = offset + len(line)
            end = _END.search(line)
            if end is not None:
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
        """Yields (offset, line) for whole lines. A line that is longer than any event is left out."""
        with contextlib.suppress(OSError), open_plain(self._path) as file:
            file.seek(first)
            offset = first
            while final is None or offset < final:
                line = file.readline(_MAX_LINE_BYTES)
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < _MAX_LINE_BYTES:
                    return  # the end of the file, or a line that is being written
                if is_whole:
                    yield offset, line
                offset += len(line)


_QUOTED = tuple(f'"{name}"'.encode() for name in LANDMARKS)


def _is_landmark(line: bytes) -> bool:
    """Returns whether the line may be a landmark, before it is parsed: most lines are not."""
    return b'"process"' in line or any(name in line for name in _QUOTED)


def starts(landmarks: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the landmarks that say that the process was started."""
    return [event for event in landmarks if "process" in event]
