"""Whether a run is at work, finished, failed or stopped, and by what; and where it was started again or wrote a checkpoint.

finished   its launcher says so
failed     its launcher says so, with the process that is to blame, or was killed itself
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
from pa_npu.viewer.timeline import Attempt
from pa_npu.viewer.timeline_file import starts
from pa_npu.viewer.values import number, text

SILENT_S = 120.0
MAX_MARKS = 400
_RECENT = 8
"""Iterations whose median says how long the next ones take."""
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
    """Plain values. launcher: the landmarks of its timeline. records: the last ones at least.
    newest_s: of the last write.
    """
    end = read_end(launcher)
    if end is None and owner_is_gone(launcher):
        end = _KILLED
    iterations = records[-1]["iteration"] + 1 if records else 0
    seconds = [
        value
        for record in records[-_RECENT:]
        if (value := number(record, "iteration_s")) is not None
    ]
    typical_s = statistics.median(seconds) if seconds else None
    word = end.outcome if end is not None else _by_writes(newest_s, typical_s)
    total = total if isinstance(total, int) and not isinstance(total, bool) else None
    started = [
        at
        for event in starts([dict(event) for event in launcher])
        if (at := number(event, "start")) is not None
    ]
    left_s = None
    if typical_s is not None and total is not None and word == "running":
        left_s = max(0, total - iterations) * typical_s
    return {
        "word": word,
        "cause": secrets.hide(end.cause) if end is not None else "",
        "process": end.process if end is not None else "",
        "lines": [secrets.hide(line) for line in end.lines] if end is not None else [],
        "iterations": iterations,
        "total": total,
        "attempts": len(started),
        "started": started[0] if started else None,
        "ended": _ended_s(launcher, newest_s) if end is not None else None,
        "last_write": newest_s,
        "left": left_s,
    }


def _by_writes(newest_s: float, typical_s: float | None) -> str:
    """Without a recorded end only the time of the last write tells a run that works from one that
    does not.
    """
    patience_s = max(SILENT_S, 5 * (typical_s or 0.0))
    return "running" if newest_s and time.time() - newest_s < patience_s else "silent"


def _ended_s(launcher: Sequence[Mapping[str, Any]], newest_s: float) -> float:
    ends = [number(event, "end") or 0.0 for event in launcher if text(event, "name") == "run"]
    return ends[-1] if ends and ends[-1] else newest_s


def marks(attempts: Sequence[Attempt], checkpoints: Sequence[int]) -> list[dict[str, Any]]:
    """Where the run was started again, and of which versions it wrote checkpoints: {kind,
    iteration, text}.

    A checkpoint of version v is written between iterations v - 1 and v.
    """
    again = [attempt for attempt in attempts[1:] if attempt.first is not None]
    entries = [
        {
            "kind": "resume" if attempt.resumed else "restart",
            "iteration": attempt.first,
            "text": f"{'resumed' if attempt.resumed else 'restarted'} at iteration {attempt.first}",
        }
        for attempt in again[-MAX_MARKS:]
    ]
    step = -(-len(checkpoints) // MAX_MARKS) or 1
    chosen = [version for place, version in enumerate(reversed(checkpoints)) if place % step == 0]
    for version in reversed(chosen):
        words = f"checkpoint of version {version}"
        entries.append({"kind": "checkpoint", "iteration": version, "text": words})
    return entries
