"""How a run began and ended, as events of its launcher's timeline: the launcher writes them, who shows the run reads them.

A launcher that is killed records no end. So the begin says which process it is: a reader on the
same machine sees that it is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pa_npu.telemetry.timeline import Timeline, now

Outcome = Literal["finished", "failed", "stopped"]

BEGIN = "begin"
ENGINES = "engines"
END = "run"
"""Names of the events."""
_LANE = "run"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MAX_LINES = 20
_LONGEST_LINE = 500


@dataclass(frozen=True)
class RunEnd:
    """outcome: finished, failed by itself, or stopped by a signal. cause: in words; empty where it
    finished.

    process: the one to blame, if one is. lines: the last of its log.
    """

    outcome: Outcome
    cause: str = ""
    process: str = ""
    lines: tuple[str, ...] = ()


@contextmanager
def recorded_begin(timeline: Timeline) -> Iterator[None]:
    """Records the begin, and an exception that leaves the block as the run's end."""
    start_s = now()
    timeline.complete(BEGIN, start_s, start_s, _LANE, owner=owner_mark())
    try:
        yield
    except BaseException as error:
        record_end(timeline, start_s, RunEnd("failed", str(error) or type(error).__name__))
        raise


def record_end(timeline: Timeline, start_s: float, end: RunEnd) -> None:
    """Records the end of the attempt that began at `start_s` of the timeline's clock."""
    details = {
        "outcome": end.outcome,
        "cause": end.cause[:_LONGEST_LINE],
        "process": end.process,
        "lines": [line[:_LONGEST_LINE] for line in end.lines[-_MAX_LINES:]],
    }
    timeline.complete(END, start_s, now(), _LANE, **details)


def record_engines(timeline: Timeline, urls: Sequence[str]) -> None:
    """Records under which address each engine of the attempt answers, in the order of their
    numbers.
    """
    moment_s = now()
    timeline.complete(ENGINES, moment_s, moment_s, _LANE, urls=list(urls))


def engine_names(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Address to name (engine-0, ...) of all engines that the launcher has recorded, in any
    attempt.
    """
    names: dict[str, str] = {}
    for event in events:
        urls = _arguments(event).get("urls") if event.get("name") == ENGINES else None
        for index, url in enumerate(urls if isinstance(urls, list) else []):
            if isinstance(url, str):
                names[url.rstrip("/")] = f"engine-{index}"
    return names


def last_attempt(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns the launcher's events since it was started last."""
    for index in range(len(events) - 1, -1, -1):
        if "process" in events[index]:
            return events[index:]
    return events


def read_end(events: Sequence[Mapping[str, Any]]) -> RunEnd | None:
    """Returns the end of the last attempt; None while it has none.

    One without an outcome is an earlier version's, of a good end.
    """
    for event in reversed(last_attempt(events)):
        if event.get("name") == END:
            return _end_of(_arguments(event))
    return None


def _end_of(arguments: Mapping[str, Any]) -> RunEnd:
    stated = arguments.get("outcome")
    outcome = cast(Outcome, stated) if stated in get_args(Outcome) else "finished"
    lines = arguments.get("lines")
    return RunEnd(
        outcome,
        str(arguments.get("cause") or ""),
        str(arguments.get("process") or ""),
        tuple(line for line in lines if isinstance(line, str)) if isinstance(lines, list) else (),
    )


def owner_is_gone(events: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the launcher of the last attempt ran in this machine's process space and runs
    there no more.
    """
    for event in reversed(last_attempt(events)):
        if event.get("name") == BEGIN:
            return _is_gone(_arguments(event).get("owner"))
    return False


def owner_mark() -> dict[str, Any] | None:
    """Names this process among all that have its number: number, start, boot, process space.

    None where the system has no /proc.
    """
    number = os.getpid()
    started = _start_of(number)
    place = _place()
    if started is None or place is None:
        return None
    return {"pid": number, "started": started, **place}


def _is_gone(mark: Any) -> bool:
    if not isinstance(mark, dict):
        return False
    place = _place()
    number = mark.get("pid")
    is_here = place is not None and all(mark.get(key) == value for key, value in place.items())
    if (
        not is_here
        or not isinstance(number, int)
        or isinstance(number, bool)
        or not 0 < number < 2**31
    ):
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's: it is there
    started = _start_of(number)
    return started is not None and started != mark.get("started")


def _place() -> dict[str, str] | None:
    try:
        return {"boot": _BOOT.read_text().strip(), "space": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return None


def _start_of(number: int) -> int | None:
    """Clock ticks from the boot to the process's start, field 22 of proc(5)'s stat."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(errors="replace")
        return int(text.rpartition(")")[2].split()[19])  # a program's name may have blanks in it
    except (OSError, IndexError, ValueError):
        return None


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}
