"""One iteration as rows of bars, one row per process, with the seconds and share each one waited.

An iteration lies between two publishes. Idle shares are those that pa_npu.telemetry.idle defines,
here from the spans of each process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pa_npu.telemetry import idle
from pa_npu.telemetry.run_end import engine_names
from pa_npu.telemetry.timeline import DIRECTORY
from pa_npu.viewer.timeline_file import TimelineFile, starts
from pa_npu.viewer.values import entries, index, indices, mapping, number, numbers, text

MAX_PROCESSES = 32
MAX_BARS = 12_000
MAX_FILES = 600
_MARGIN_S = 60.0
"""A span of an iteration may end so long after it, or longer: a group that is generated ahead, or
a checkpoint that is being written.
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
ROLES = "role of "
"""Prefix of lanes that show the roles of devices, beside the lanes of their engines and trainers.
"""
AROUND = frozenset({"produce", "iteration", "run", "begin", "engines"})
"""Names of spans that only hold others, and are not drawn."""


@dataclass(frozen=True)
class Span:
    """An interval of a process.

    kind: generate, train, reward, wait, publish, evaluate, step, checkpoint or other.
    ranks: for a role, the trainers on whose devices it is.
    """

    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class TimelineAttempt:
    """One start of coordinator and trainers.

    first: its first iteration; None until its first publish.
    resumed: whether the run was started again by a new launcher, rather than by its first one.
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
        """Returns the timelines by process: coordinator, launcher, trainer-0, ..."""
        if self._directory.is_dir():
            for path in sorted(self._directory.glob("*.jsonl"))[:MAX_FILES]:
                self._files.setdefault(path.stem, TimelineFile(path))
        return self._files

    def landmarks(self, process: str) -> list[dict[str, Any]]:
        """Returns the landmarks of a process; none where it has no timeline."""
        file = self.files().get(process)
        return file.landmarks() if file is not None else []

    def bounds(self) -> dict[int, tuple[float, float | None]]:
        """Returns by iteration the ends of the publishes around it, on the timeline's clock; None
        while the second one has not ended.

        Both publishes belong to one attempt, so the time in which a run was down belongs to no
        iteration. Of several attempts at an iteration the last one counts.
        """
        bounds: dict[int, tuple[float, float | None]] = {}
        before: int | None = None
        newest = -1
        for event in self.landmarks("coordinator"):
            if "process" in event:
                before = None
                continue
            version = index(mapping(event, "args"), "version")
            end_s = number(event, "end")
            if event.get("name") != "publish" or version is None or end_s is None:
                continue
            if version <= newest:  # a resumed run repeats the iterations after its checkpoint
                bounds = {i: interval for i, interval in bounds.items() if i < version}
            if before is not None and before == version - 1:
                bounds[before] = (bounds[before][0], end_s)
            bounds[version] = (end_s, None)
            before = newest = version
        return {
            iteration: interval
            for iteration, interval in bounds.items()
            if interval[1] is not None or iteration == newest
        }

    def attempts(self) -> list[TimelineAttempt]:
        """Returns the starts of coordinator and trainers in the order of time."""
        launched_s = numbers(starts(self.landmarks("launcher")), "start")
        attempts: list[TimelineAttempt] = []
        num_launched = 0
        for event in self.landmarks("coordinator"):
            if "process" in event:
                start_s = number(event, "start")
                num_before = num_launched
                num_launched = 0
                if start_s is not None:
                    num_launched = sum(at_s <= start_s for at_s in launched_s)
                resumed = bool(attempts) and num_launched > num_before
                attempts.append(TimelineAttempt(start_s, first=None, resumed=resumed))
            elif event.get("name") == "publish" and attempts and attempts[-1].first is None:
                version = index(mapping(event, "args"), "version")
                attempts[-1] = replace(attempts[-1], first=version)
        return attempts

    def checkpoints(self) -> list[int]:
        """Returns the versions whose checkpoint was begun."""
        events = self.landmarks("trainer-0")
        arguments = [
            mapping(event, "args") for event in events if event.get("name") == "checkpoint"
        ]
        return sorted(set(indices(arguments, "version")))

    def iteration(self, iteration: int) -> dict[str, Any] | None:
        """Returns rows and waits of an iteration as plain values, in seconds since its beginning;
        None where it has not begun.
        """
        bounds = self.bounds().get(iteration)
        if bounds is None:
            return None
        start_s, end_s = bounds
        until_s = float("inf")
        margin_s = 0.0
        if end_s is not None:
            until_s = end_s
            margin_s = max(_MARGIN_S, 2 * (end_s - start_s))
        names = engine_names(self.landmarks("launcher"))
        processes = {
            process: _spans(file.between(start_s, until_s, margin_s), names)
            for process, file in self.files().items()
            if process != "launcher"
        }
        if end_s is None:
            all_spans = itertools.chain.from_iterable(processes.values())
            end_s = max((span.end_s for span in all_spans), default=start_s)
        rows, left_out = _rows(processes, start_s, end_s)
        return {
            "iteration": iteration,
            "seconds": round(max(end_s - start_s, 1e-6), 6),
            "running": bounds[1] is None,
            "rows": rows,
            "left_out": left_out,
            "waits": _waits(processes, start_s, end_s),
        }


def _spans(events: Iterable[Mapping[str, Any]], engines: Mapping[str, str]) -> list[Span]:
    """Returns the spans of a process's events; `engines` has the names of engines by address."""
    spans = []
    for event in events:
        name = text(event, "name")
        lane = text(event, "lane")
        start_s = number(event, "start")
        end_s = number(event, "end")
        if not name or not lane or start_s is None or end_s is None or name in AROUND:
            continue
        if lane.startswith("engine "):
            address = lane.removeprefix("engine ")
            lane = engines.get(address, address)
            kind = "generate"
        elif lane == "microbatches":
            kind = "train"
        elif lane == "rewards":
            kind = "reward"
        else:
            kind = KINDS.get(name, "other")
        ranks = entries(mapping(event, "args"), "ranks") if lane.startswith(ROLES) else []
        integers = tuple(rank for rank in ranks if isinstance(rank, int))
        spans.append(Span(lane, kind, name, start_s, end_s, ranks=integers))
    return spans


def _row_of(process: str, lane: str) -> tuple[int, str]:
    """Returns a lane's row: its place on the page (coordinator, engines, rewards, trainers) and its
    name.
    """
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
    """Returns the rows of bars, and how many rows and bars were left out.

    A bar is [track, start, length, kind, name]. Bars of a row that overlap are on several tracks.
    """
    by_row: dict[tuple[int, str], list[Span]] = {}
    for process, spans in processes.items():
        for span in spans:
            by_row.setdefault(_row_of(process, span.lane), []).append(span)
    left_out = {"rows": max(0, len(by_row) - MAX_PROCESSES), "bars": 0}
    keys = sorted(by_row, key=lambda row: (row[0], _natural(row[1])))
    rows = []
    room = MAX_BARS
    for key in keys[:MAX_PROCESSES]:
        spans = sorted(by_row[key], key=lambda span: (span.start_s, -span.end_s))
        left_out["bars"] += max(0, len(spans) - room)
        spans = spans[:room]
        room -= len(spans)
        track_ends_s: list[float] = []
        bars = []
        for span in spans:
            track = _free_track(track_ends_s, span.start_s)
            track_ends_s[track : track + 1] = [span.end_s]
            bar_start_s = max(span.start_s, start_s)
            bar_end_s = min(span.end_s, end_s)
            offset_s = round(bar_start_s - start_s, 6)
            length_s = round(bar_end_s - bar_start_s, 6)
            bars.append([track, offset_s, length_s, span.kind, span.name])
        rows.append({"name": key[1], "tracks": max(1, len(track_ends_s)), "bars": bars})
    return rows, left_out


def _free_track(ends_s: Sequence[float], start_s: float) -> int:
    """Returns the first track whose last bar has ended at `start_s`; a new one where none has."""
    for track, end_s in enumerate(ends_s):
        if end_s <= start_s + 1e-9:
            return track
    return len(ends_s)


def _natural(name: str) -> tuple[str, int]:
    """Returns a sorting key with which engine-10 comes after engine-9."""
    head, _, last = name.rpartition("-")
    return (head, int(last)) if last.isdecimal() and len(last) < 10 else (name, 0)


def _waits(
    processes: Mapping[str, Sequence[Span]], start_s: float, end_s: float
) -> list[dict[str, Any]]:
    """Returns for each engine, trainer and shared device the seconds of each activity and its idle
    share. The remaining seconds are `other`.
    """
    coordinator = processes.get("coordinator", ())
    waits = _engine_waits(coordinator, start_s, end_s)
    for process in sorted(processes, key=_natural):
        if process.startswith("trainer"):
            waits += _trainer_waits(process, processes[process], coordinator, start_s, end_s)
    return waits[: 2 * MAX_PROCESSES]


def _engine_waits(
    coordinator: Sequence[Span], start_s: float, end_s: float
) -> list[dict[str, Any]]:
    total_s = max(end_s - start_s, 1e-6)
    evaluate = [span for span in coordinator if span.kind == "evaluate"]
    publish = [span for span in coordinator if span.kind == "publish"]
    publish_s = _covered_s(publish, start_s, end_s)
    by_engine: dict[str, list[Span]] = {}
    for span in coordinator:
        if span.kind == "generate" and not span.lane.startswith(ROLES):
            by_engine.setdefault(span.lane, []).append(span)
    waits = []
    for engine in sorted(by_engine, key=_natural):
        generate_s = _covered_s(by_engine[engine], start_s, end_s)
        busy_s = _covered_s([*by_engine[engine], *evaluate], start_s, end_s)
        parts = {
            "generate": generate_s,
            "evaluate": busy_s - generate_s,
            "publish": publish_s,
        }
        waits.append(_wait(engine, "engine", parts, idle.engine_idle(busy_s, total_s), total_s))
    return waits


def _trainer_waits(
    process: str,
    spans: Sequence[Span],
    coordinator: Sequence[Span],
    start_s: float,
    end_s: float,
) -> list[dict[str, Any]]:
    """Returns the waits of a trainer, and of its device where that decodes too."""
    total_s = max(end_s - start_s, 1e-6)

    def covered_s(selected: Iterable[Span]) -> float:
        return _covered_s(selected, start_s, end_s)

    waiting = [span for span in spans if span.kind == "wait"]
    for_groups = [span for span in waiting if span.name.startswith("wait for group")]
    groups_s = covered_s(for_groups)
    border_s = _border_wait_s(spans, start_s, end_s)
    parts = {
        "train": covered_s(span for span in spans if span.kind in ("train", "step")),
        "wait for groups": groups_s,
        "wait for engines": border_s,
        "publish": covered_s(span for span in spans if span.kind == "publish"),
        "checkpoint": covered_s(span for span in spans if span.name == "checkpoint"),
    }
    trainer_idle = idle.trainer_idle(groups_s + border_s, total_s)
    waits = [_wait(process, "trainer", parts, trainer_idle, total_s)]

    rank = _natural(process)[1]
    decodes = [span for span in coordinator if span.name == "decodes" and rank in span.ranks]
    if decodes:
        decodes_s = covered_s(decodes)
        device_parts = {"decodes": decodes_s, "trains": parts["train"]}
        device_idle = idle.device_idle(covered_s([*waiting, *decodes]), decodes_s, total_s)
        waits.append(_wait(f"device of {process}", "device", device_parts, device_idle, total_s))
    return waits


def _border_wait_s(spans: Sequence[Span], start_s: float, end_s: float) -> float:
    """Returns the seconds that a trainer waits at the border that ends the iteration.

    All of them count, as in the iteration's record, though engines are done before the trainers have
    heard of it.
    """
    trained_s = [
        span.end_s
        for span in spans
        if span.kind in ("train", "step") and start_s < span.end_s <= end_s
    ]
    waits = [span for span in spans if span.name == "wait for engines"]
    if not trained_s:
        return _covered_s(waits, start_s, end_s)
    begins_s = max(trained_s)
    next_s = min(
        (
            span.start_s
            for span in spans
            if span.start_s >= begins_s
            and (span.kind == "train" or span.name.startswith("wait for group"))
        ),
        default=float("inf"),
    )
    border = [span for span in waits if begins_s <= span.start_s < next_s]
    return _covered_s(border, begins_s, float("inf"))


def _wait(
    name: str, role: str, parts: Mapping[str, float], share: float, total_s: float
) -> dict[str, Any]:
    other_s = max(0.0, total_s - sum(parts.values()))
    return {"name": name, "role": role, "parts": dict(parts), "idle": share, "other": other_s}


def _covered_s(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Returns the seconds from `start_s` to `end_s` in which at least one of the spans goes on."""
    intervals = [(max(span.start_s, start_s), min(span.end_s, end_s)) for span in spans]
    covered_s = 0.0
    until_s = float("-inf")
    for first_s, last_s in sorted(intervals):
        covered_s += max(0.0, last_s - max(first_s, until_s))
        until_s = max(until_s, last_s)
    return covered_s
