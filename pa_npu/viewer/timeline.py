"""One iteration as rows of bars: what each process did between two publishes, and who waited for whom for how long.

Idle shares are those of pa_npu.telemetry.idle, here from the spans of each process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.telemetry import idle
from pa_npu.telemetry.run_end import engine_names
from pa_npu.telemetry.timeline import DIRECTORY
from pa_npu.viewer.timeline_file import TimelineFile, starts
from pa_npu.viewer.values import entries, index, mapping, number, text

MAX_PROCESSES = 32
MAX_BARS = 12_000
MAX_FILES = 600
_MARGIN_S = 60.0
"""How long behind an iteration a span of it may end at least: groups that are generated ahead,
checkpoints that are written.
"""
KINDS = {
    "wait for trainers": "wait",
    "wait for engines": "wait",
    "wait for group": "wait",
    "wait for groups": "wait",
    "publish": "publish",
    "probe": "publish",
    "evaluate": "evaluate",
    "step": "step",
    "checkpoint": "checkpoint",
    "checkpoint write": "checkpoint",
    "decodes": "generate",
    "trains": "train",
}
# Lanes that show what devices are for, beside what engines and trainers on them do.
ROLES = "role of "
# Spans that hold others say nothing of their own.
AROUND = frozenset({"produce", "iteration", "run", "begin", "engines"})


@dataclass(frozen=True)
class Span:
    """A stretch of time of a process. kind: generate, train, reward, wait, publish, evaluate, step,
    checkpoint. ranks: of the trainers whose devices have a role."""

    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """Coordinator and trainers of one start. resumed: by somebody who started the run again, not by
    its own launcher.

    first: its first iteration; None until its first publish.
    """

    start_s: float | None
    first: int | None
    resumed: bool


class RunTimeline:
    """The timelines of a run's processes, read as they grow."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / DIRECTORY
        self._files: dict[str, TimelineFile] = {}

    def files(self) -> dict[str, TimelineFile]:
        """By the process's name: coordinator, launcher, trainer-0, ..."""
        if self._directory.is_dir():
            for path in sorted(self._directory.glob("*.jsonl"))[:MAX_FILES]:
                self._files.setdefault(path.stem, TimelineFile(path))
        return self._files

    def landmarks(self, process: str) -> list[dict[str, Any]]:
        file = self.files().get(process)
        return file.landmarks() if file is not None else []

    def bounds(self) -> dict[int, tuple[float, float | None]]:
        """Iteration to the ends of the publishes around it, on the timeline's clock; None while the
        second has not ended.

        Both publishes are of one attempt: the time in which a run was down belongs to no iteration.
        Of several attempts at an iteration the last counts.
        """
        bounds: dict[int, tuple[float, float | None]] = {}
        before: int | None = None
        newest = -1
        for event in self.landmarks("coordinator"):
            if "process" in event:
                before = None
                continue
            version, end_s = index(mapping(event, "args"), "version"), number(event, "end")
            if event.get("name") != "publish" or version is None or end_s is None:
                continue
            if version <= newest:  # a resumed run does again what came after its checkpoint
                bounds = {
                    iteration: pair for iteration, pair in bounds.items() if iteration < version
                }
            if before is not None and before == version - 1:
                bounds[before] = (bounds[before][0], end_s)
            bounds[version] = (end_s, None)
            before = newest = version
        return {
            iteration: pair
            for iteration, pair in bounds.items()
            if pair[1] is not None or iteration == newest
        }

    def attempts(self) -> list[Attempt]:
        """The starts of coordinator and trainers in the order of time."""
        launched = [
            at
            for event in starts(self.landmarks("launcher"))
            if (at := number(event, "start")) is not None
        ]
        attempts: list[Attempt] = []
        used = 0
        for event in self.landmarks("coordinator"):
            if "process" in event:
                start_s = number(event, "start")
                known = sum(1 for at in launched if start_s is not None and at <= start_s)
                attempts.append(Attempt(start_s, None, resumed=bool(attempts) and known > used))
                used = known
            elif event.get("name") == "publish" and attempts and attempts[-1].first is None:
                last = attempts[-1]
                attempts[-1] = Attempt(
                    last.start_s, index(mapping(event, "args"), "version"), last.resumed
                )
        return attempts

    def checkpoints(self) -> list[int]:
        """Versions of which a checkpoint was begun."""
        events = self.landmarks("trainer-0")
        versions = [
            index(mapping(event, "args"), "version")
            for event in events
            if event.get("name") == "checkpoint"
        ]
        return sorted({version for version in versions if version is not None})

    def iteration(self, iteration: int) -> dict[str, Any] | None:
        """Rows and waits of an iteration as plain values; seconds since its beginning.

        None where it has not begun.
        """
        bounds = self.bounds().get(iteration)
        if bounds is None:
            return None
        start_s, end_s = bounds
        until_s = end_s if end_s is not None else float("inf")
        margin_s = max(_MARGIN_S, 2 * (until_s - start_s)) if end_s is not None else 0.0
        names = engine_names(self.landmarks("launcher"))
        inside = {
            process: _spans(file.between(start_s, until_s, margin_s), names)
            for process, file in self.files().items()
            if process != "launcher"
        }
        if end_s is None:
            end_s = max(
                (span.end_s for spans in inside.values() for span in spans), default=start_s
            )
        rows, left_out = _rows(inside, start_s, end_s)
        return {
            "iteration": iteration,
            "seconds": round(max(end_s - start_s, 1e-6), 6),
            "running": bounds[1] is None,
            "rows": rows,
            "left_out": left_out,
            "waits": _waits(inside, start_s, end_s),
        }


def _spans(events: Iterable[Mapping[str, Any]], engines: Mapping[str, str]) -> list[Span]:
    """engines: name by address."""
    spans = []
    for event in events:
        name, lane = text(event, "name"), text(event, "lane")
        start_s, end_s = number(event, "start"), number(event, "end")
        if not name or not lane or start_s is None or end_s is None or name in AROUND:
            continue
        if lane.startswith("engine "):
            address = lane.removeprefix("engine ")
            lane, kind = engines.get(address, address), "generate"
        elif lane == "microbatches":
            kind = "train"
        elif lane == "rewards":
            kind = "reward"
        else:
            kind = KINDS.get(name, "other")
        ranks = entries(mapping(event, "args"), "ranks") if lane.startswith(ROLES) else []
        whole = tuple(rank for rank in ranks if isinstance(rank, int))
        spans.append(Span(lane, kind, name, start_s, end_s, whole))
    return spans


def _owner(process: str, lane: str) -> tuple[int, str]:
    """Returns a row's place on the page and its name: coordinator, engines, rewards, trainers."""
    if process != "coordinator":
        return 3, process
    places = {
        "main": (0, "coordinator"),
        "evaluation": (0, "evaluation"),
        "rewards": (2, "rewards"),
    }
    return places.get(lane, (1, lane))


def _rows(
    processes: Mapping[str, Sequence[Span]], start_s: float, end_s: float
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows of bars: [track, start, length, kind, name], tracks so that no two bars of a row overlap
    in one.
    """
    owners: dict[tuple[int, str], list[Span]] = {}
    for process, spans in processes.items():
        for span in spans:
            owners.setdefault(_owner(process, span.lane), []).append(span)
    left_out = {"rows": max(0, len(owners) - MAX_PROCESSES), "bars": 0}
    drawn = sorted(owners.items(), key=lambda item: (item[0][0], _natural(item[0][1])))[
        :MAX_PROCESSES
    ]
    rows, room = [], MAX_BARS
    for (_, name), unsorted in drawn:
        spans = sorted(unsorted, key=lambda span: (span.start_s, -span.end_s))
        left_out["bars"] += max(0, len(spans) - room)
        spans = spans[:room]
        room -= len(spans)
        ends: list[float] = []
        bars = []
        for span in spans:
            track = next(
                (n for n, last_s in enumerate(ends) if last_s <= span.start_s + 1e-9), len(ends)
            )
            ends[track : track + 1] = [span.end_s]
            first_s, last_s = max(span.start_s, start_s), min(span.end_s, end_s)
            bars.append(
                [
                    track,
                    round(first_s - start_s, 6),
                    round(last_s - first_s, 6),
                    span.kind,
                    span.name,
                ]
            )
        rows.append({"name": name, "tracks": max(1, len(ends)), "bars": bars})
    return rows, left_out


def _natural(name: str) -> tuple[str, int]:
    head, _, last = name.rpartition("-")
    return (head, int(last)) if last.isdecimal() and len(last) < 10 else (name, 0)


def _waits(
    processes: Mapping[str, Sequence[Span]], start_s: float, end_s: float
) -> list[dict[str, Any]]:
    """Per engine, trainer and shared device: the seconds of each doing, and its idle share.

    Time that is left is other work.
    """
    total_s = max(end_s - start_s, 1e-6)

    def seconds(spans: Iterable[Span]) -> float:
        return _union([(max(span.start_s, start_s), min(span.end_s, end_s)) for span in spans])

    waits = []
    coordinator = processes.get("coordinator", ())
    publish = [span for span in coordinator if span.kind == "publish"]
    evaluate = [span for span in coordinator if span.kind == "evaluate"]
    generate = [
        span for span in coordinator if span.kind == "generate" and not span.lane.startswith(ROLES)
    ]
    for engine in sorted({span.lane for span in generate}, key=_natural):
        groups = [span for span in generate if span.lane == engine]
        busy_s = seconds([*groups, *evaluate])
        parts = {
            "generate": seconds(groups),
            "evaluate": busy_s - seconds(groups),
            "publish": seconds(publish),
        }
        waits.append(_wait(engine, "engine", parts, idle.engine_idle(busy_s, total_s), total_s))
    for process, spans in sorted(processes.items(), key=lambda item: _natural(item[0])):
        if not process.startswith("trainer"):
            continue
        waiting = [span for span in spans if span.kind == "wait"]
        parts = {
            "train": seconds(span for span in spans if span.kind in ("train", "step")),
            "wait for groups": seconds(
                span for span in waiting if span.name.startswith("wait for group")
            ),
            "wait for engines": seconds(
                span for span in waiting if span.name == "wait for engines"
            ),
            "publish": seconds(span for span in spans if span.kind == "publish"),
            "checkpoint": seconds(span for span in spans if span.name == "checkpoint"),
        }
        waits.append(
            _wait(process, "trainer", parts, idle.trainer_idle(seconds(waiting), total_s), total_s)
        )
        decodes = [
            span
            for span in coordinator
            if span.name == "decodes" and _natural(process)[1] in span.ranks
        ]
        if decodes:
            wait_s = seconds([*waiting, *decodes])
            share = idle.device_idle(wait_s, seconds(decodes), total_s)
            shared = {"decodes": seconds(decodes), "trains": parts["train"]}
            waits.append(_wait(f"device of {process}", "device", shared, share, total_s))
    return waits[: 2 * MAX_PROCESSES]


def _wait(
    name: str, role: str, parts: Mapping[str, float], share: float, total_s: float
) -> dict[str, Any]:
    other_s = max(0.0, total_s - sum(parts.values()))
    return {"name": name, "role": role, "parts": dict(parts), "idle": share, "other": other_s}


def _union(stretches: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(stretches):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
