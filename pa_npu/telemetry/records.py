"""Records: RUN/metrics.jsonl (one object per iteration), RUN/evaluations.jsonl, and files of records that never end a run.

What cannot be written is one line in the log and a count: a full disk, or a directory that is gone,
costs records. Half a line is taken back, so that what follows it, when there is room again, is
whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pa_npu.config.plain_file import open_plain, read_plain, reason
from pa_npu.errors import DataError

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
_MAX_INDEX = 2**31
_LONGEST_LINE_BYTES = 64 << 20
_LARGEST_BYTES = 1 << 30  # of a file of records; one has some 2 KiB

log = logging.getLogger(__name__)

_lock = threading.Lock()
_lost = 0
_reported: set[str] = set()


class MetricsWriter:
    """Appends records; owner closes it (context manager).

    first_iteration: the iteration a resumed run continues with. Records of it and later ones, which
    the killed run wrote after its last checkpoint, are removed, so that the file reads like that of
    a run that was never killed (I6).
    """

    def __init__(self, run_dir: Path | str, first_iteration: int = 0) -> None:
        self.run_dir = Path(run_dir)
        drop_records(self.run_dir / METRICS, "iteration", first_iteration)
        # The evaluation of version v comes before iteration v; the checkpoint that is resumed holds
        # version v.
        drop_records(self.run_dir / EVALUATIONS, "version", first_iteration)
        self._metrics = RecordFile(self.run_dir / METRICS)
        self._evaluations = RecordFile(self.run_dir / EVALUATIONS)

    def write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """One iteration, returned as written. Numbers that are not finite become null and are named
        under `non_finite`.

        What cannot be written is lost, said once in the log, and counted under `records_lost` of
        what can be written again.
        """
        lost = lost_records()
        clean = _json_ready({**record, "records_lost": lost} if lost else record)
        self._metrics.write(json_line(clean))
        return clean

    def write_evaluation(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """One evaluation, returned as written: {version, accuracy, questions, seconds, time, sets};
        version v is before iteration v."""
        clean = _json_ready(record)
        self._evaluations.write(json_line(clean))
        return clean

    def close(self) -> None:
        self._metrics.close()
        self._evaluations.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_records(run_dir: Path | str) -> list[dict[str, Any]]:
    """Returns the iteration records of a run, in order.

    Raises DataError with file:line if there are none or one is broken.
    """
    path = Path(run_dir) / METRICS
    if not path.exists():
        raise DataError(
            f"{run_dir}: has no {METRICS}, so it is no run directory, or its first iteration has "
            "not ended"
        )
    records = _read_lines(path, "iteration")
    if not records:
        raise DataError(
            f"{path}: is empty, the run ended before its first iteration; see "
            f"{Path(run_dir) / 'logs'}"
        )
    return records


def read_evaluations(run_dir: Path | str) -> list[dict[str, Any]]:
    """Returns the evaluations of a run by version; empty where it made none."""
    path = Path(run_dir) / EVALUATIONS
    return _read_lines(path, "version") if path.exists() else []


def _read_lines(path: Path, key: str) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines, up to a last line that is torn.

    Raises DataError with file:line of another one.
    """
    try:
        text = read_plain(path, _LARGEST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({reason(error)}); give the directory of a run"
        ) from None
    records = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # a run that was killed, or that is writing it, has not written it to its end
            raise DataError(f"{path}:{number}: is not JSON ({error}); remove the line") from error
        if not _has_index(record, key):
            raise DataError(
                f"{path}:{number}: is no object with an integer {key!r} of at least 0; remove the "
                "line"
            )
        records.append(record)
    return records


def iterations_of(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yields the lines of records that carry the number of their iteration, with it; half a line at
    the end is left out.

    Raises DataError where a line has none.
    """
    number = 0
    while line := file.readline(_LONGEST_LINE_BYTES):
        number += 1
        if not line.endswith(b"\n"):
            return
        text = line[:-1].decode("utf-8", "replace")
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if not _has_index(record, "iteration"):
            raise DataError(f"{file.name}:{number}: is no record of an iteration; it was changed")
        yield record["iteration"], text


class JsonLines:
    """The objects of a file of JSON lines that may still grow; what is no object, such as half a
    line at its end, is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._offset = 0
        self._records: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Returns all records so far; each call reads only what came since the last one.
        Thread-safe.
        """
        with self._lock:
            new = list(self.new())  # first: it may begin again
            self._records += new
            return self._records

    def new(self) -> Iterator[dict[str, Any]]:
        """Returns the records since the last call.

        A file that is shorter than it was, as after a resume, is read again from its beginning.
        """
        with contextlib.suppress(OSError), open_plain(self._path) as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0
                self._records = []
            file.seek(self._offset)
            while line := file.readline(_LONGEST_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < _LONGEST_LINE_BYTES:
                    break
                self._offset += len(line)
                record = parse_object(line)
                if record is not None:
                    yield record


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line of JSON; None where the line is none.

    Numbers that cannot be calculated with are null.
    """
    try:
        record = json.loads(line.decode("utf-8", "replace"), **_READABLE)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


_READABLE: dict[str, Any] = {
    "parse_constant": lambda _: None,
    "parse_float": _finite,
    # nothing of a run reaches 64 bits, and arithmetic with fractions fails beyond
    "parse_int": lambda text: int(text) if len(text) < 19 else None,
}


def drop_records(path: Path, key: str, first: int) -> None:
    """Keep the records whose `key` is below `first`, as a run that is resumed there needs it; lines
    that are none go too.

    Such as a last one that a kill cut short.
    """
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _has_index(record, key) and record[key] < first:
            kept.append(line + "\n")
    shortened = path.with_name(f"{path.name}.tmp")
    try:
        shortened.write_text("".join(kept), encoding="utf-8")
        shortened.replace(path)
    except OSError as error:
        note_lost(shortened, error)
        with contextlib.suppress(OSError):
            shortened.unlink(missing_ok=True)
        _cut_after(path, kept)


def _cut_after(path: Path, kept: Sequence[str]) -> None:
    """Cuts the file behind the kept records that stand first in it, if there is no room for a
    second file.
    """
    end = 0
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            for line, wanted in zip(file, kept, strict=False):
                if line.decode("utf-8", "replace") != wanted:
                    break
                end += len(line)
        os.truncate(path, end)


def _has_index(record: Any, key: str) -> bool:
    """Returns whether this is a record with the number by which its file is ordered."""
    value = record.get(key) if isinstance(record, dict) else None
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_INDEX


def _json_ready(record: Mapping[str, Any]) -> dict[str, Any]:
    non_finite: list[str] = []
    clean = {str(key): _plain(value, str(key), non_finite) for key, value in record.items()}
    if non_finite:
        clean["non_finite"] = non_finite
    return clean


def _plain(value: Any, path: str, non_finite: list[str]) -> Any:
    """Plain JSON types: numpy and torch scalars unpacked, numbers that JSON cannot hold replaced
    and named.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}.{number}", non_finite) for number, item in enumerate(value)]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        non_finite.append(path)
        return None
    return value


def lost_records() -> int:
    """Records that this process could not write since it began."""
    return _lost


def note_lost(subject: Path | str, error: BaseException) -> None:
    """Counts one record; the first of each file is a line in the log."""
    global _lost
    with _lock:
        _lost += 1
        first = str(subject) not in _reported
        _reported.add(str(subject))
    if first:
        why = reason(error) or type(error).__name__
        log.warning(
            "%s: cannot be written (%s); the run goes on without these records", subject, why
        )


def attempt(subject: Path | str, action: Callable[[], Any]) -> Any:
    """Returns the action's value; None, and a count, where the system refuses it."""
    try:
        return action()
    except OSError as error:
        note_lost(subject, error)
        return None


def print_line(line: str) -> None:
    """Prints a line for whoever follows the log; a log that is full loses it."""
    attempt("the log", lambda: print(line, flush=True))


def json_line(record: Any) -> str:
    """Returns one line of JSON in which no character is one that a terminal or a page would obey.

    Letters of all scripts stay readable; control characters, direction marks and other characters
    without a picture are escapes.
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
            descriptor = self._descriptor
            self._descriptor = None
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _open(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                self._path,
                os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC,
                0o666,
            )
        except OSError as error:
            note_lost(self._path, error)
            return False
        return True
