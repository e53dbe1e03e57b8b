"""The state of a run, and the marks of its curves: restarts and checkpoints.

finished   its launcher recorded it
failed     its launcher recorded it, with the process that is to blame, or was killed itself
stopped    a signal ended it, such as Ctrl-C
running    none of these, and something was written lately
silent     none of these, and nothing was: it hangs, or it ended on a machine that cannot be asked
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pa_npu.telemetry.run_end import RunEnd, owner_is_gone, read_end
from pa_npu.telemetry.secrets import Secrets
from pa_npu.viewer.timeline import TimelineAttempt
from pa_npu.viewer.timeline_file import starts
from pa_npu.viewer.values import number, numbers, text

SILENT_S = 120.0
MAX_MARKS = 400
_RECENT = 8
"""The median of so many iterations predicts how long the next ones take."""
_KILLED = RunEnd(
    "failed", "the launcher was killed, or ran out of memory: it is gone and could record no end"
)


def run_state(
    launcher: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    total: Any,
    newest_s: float,
    secrets: Secrets,
) -> dict[str, Any]:
    """Returns the state as plain values.

    Args:
        launcher: the landmarks of the launcher's timeline.
        records: the records of iterations, at least the last ones.
        total: schedule.iterations, as the configuration has it.
        newest_s: when the run wrote anything last.
    """
    end = read_end(launcher)
    if end is None and owner_is_gone(launcher):
        end = _KILLED
    seconds = numbers(records[-_RECENT:], "iteration_s")
    typical_s = statistics.median(seconds) if seconds else None
    started = numbers(starts(launcher), "start")
    state: dict[str, Any] = {
        "word": _word_by_writes(newest_s, typical_s),
        "cause": "",
        "process": "",
        "lines": [],
        "iterations": records[-1]["iteration"] + 1 if records else 0,
        "total": None if isinstance(total, bool) or not isinstance(total, int) else total,
        "attempts": len(started),
        "started": started[0] if started else None,
        "ended": None,
        "last_write": newest_s,
        "left": None,
    }
    if end is not None:
        state["word"] = end.outcome
        state["cause"] = secrets.hide(end.cause)
        state["process"] = end.process
        state["lines"] = [secrets.hide(line) for line in end.lines]
        state["ended"] = _ended_s(launcher, newest_s)
    elif state["word"] == "running" and typical_s is not None and state["total"] is not None:
        state["left"] = max(0, state["total"] - state["iterations"]) * typical_s
    return state


def _word_by_writes(newest_s: float, typical_s: float | None) -> str:
    """Returns "running" or "silent" for a run without a recorded end, by the time of its last
    write.
    """
    patience_s = max(SILENT_S, 5 * (typical_s or 0.0))
    return "running" if newest_s and time.time() - newest_s < patience_s else "silent"


def _ended_s(launcher: Sequence[Mapping[str, Any]], newest_s: float) -> float:
    ends = [number(event, "end") or 0.0 for event in launcher if text(event, "name") == "run"]
    return ends[-1] if ends and ends[-1] else newest_s


def marks(attempts: Sequence[TimelineAttempt], checkpoints: Sequence[int]) -> list[dict[str, Any]]:
    """Returns {kind, iteration, text} for each restart and each checkpoint.

    A checkpoint of version v is written between iterations v - 1 and v.
    """
    entries: list[dict[str, Any]] = []
    restarts = [attempt for attempt in attempts[1:] if attempt.first is not None]
    for attempt in restarts[-MAX_MARKS:]:
        words = f"{'resumed' if attempt.resumed else 'restarted'} at iteration {attempt.first}"
        kind = "resume" if attempt.resumed else "restart"
        entries.append({"kind": kind, "iteration": attempt.first, "text": words})
    step = -(-len(checkpoints) // MAX_MARKS) or 1
    for version in reversed(checkpoints[::-1][::step]):  # the newest is among them
        words = f"checkpoint of version {version}"
        entries.append({"kind": "checkpoint", "iteration": version, "text": words})
    return entries
