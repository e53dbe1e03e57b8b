"""Files of records that never end a run: what cannot be written is one line in the log and a count.

A full disk, or a directory that is gone, costs records. Half a line is taken back, so that what follows it, when there is room
again, is whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_lock = threading.Lock()
_lost = 0
_said: set[str] = set()


def lost_records() -> int:
    """Records that this process could not write since it began."""
    return _lost


def note_lost(what: Path | str, error: BaseException) -> None:
    """Counts one record; the first of each file is a line in the log."""
    global _lost
    with _lock:
        _lost += 1
        first = str(what) not in _said
        _said.add(str(what))
    if first:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        log.warning("%s: cannot be written (%s); the run goes on without these records", what, reason)


def attempt(what: Path | str, action: Callable[[], Any]) -> Any:
    """The action's value; None, and a count, where the system refuses it."""
    try:
        return action()
    except OSError as error:
        note_lost(what, error)
        return None


def say(line: str) -> None:
    """Prints a line for whoever follows the log; a log that is full loses it."""
    attempt("the log", lambda: print(line, flush=True))


def json_line(record: Any) -> str:
    """One line of JSON in which no character is one that a terminal or a page would obey.

    Letters of all scripts stay readable; control characters, direction marks and other characters without a picture are escapes.
    """
    return "".join(
        character if character.isprintable() else _escaped(character)
        for character in json.dumps(record, ensure_ascii=False, allow_nan=False)
    )


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) > 126 else f"\\u{ord(character):04x}"


class RecordFile:
    """A file that lines are appended to; thread-safe. Its directory is made where it is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._closed = False
        self._open()

    def write(self, line: str) -> None:
        """Appends the line, and a line end; or counts it as lost."""
        with self._lock:
            if self._closed or (self._descriptor is None and not self._open()):
                return
            assert self._descriptor is not None
            data = line.encode("utf-8", "backslashreplace") + b"\n"
            end = None
            try:
                end = os.fstat(self._descriptor).st_size
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                note_lost(self._path, error)
                if end is not None:
                    with contextlib.suppress(OSError):  # a pipe or a device cannot be cut
                        os.ftruncate(self._descriptor, end)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _open(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            note_lost(self._path, error)
            return False
        return True
