"""One iteration as rows of bars: what each process did between two publishes, and who waited for whom for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.telemetry.records import JsonLines
from pa_npu.telemetry.timeline import DIRECTORY

MOST_PROCESSES = 32
MOST_BARS = 12_000
KINDS = {
    "wait for trainers": "wait",
    "wait for engines": "wait",
    "wait for group": "wait",
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
AROUND = frozenset({"produce", "iteration", "run"})


@dataclass(frozen=True)
class Span:
    """A stretch of time of a process. kind: generate, train, reward, wait, publish, evaluate, step, checkpoint. ranks: of the
    trainers whose devices have a role."""

    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    ranks: tuple[int, ...] = ()


class RunTimeline:
    """The timelines of a run's processes, read as they grow."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / DIRECTORY
        self._files: dict[str, JsonLines] = {}

    def processes(self) -> dict[str, list[dict[str, Any]]]:
        """Events by the process's name: coordinator, launcher, trainer-0, ..."""
        if self._directory.is_dir():
            for path in sorted(self._directory.glob("*.jsonl")):
                self._files.setdefault(path.stem, JsonLines(path))
        return {name: file.read() for name, file in self._files.items()}

    def bounds(self) -> dict[int, tuple[float, float | None]]:
        """Iteration to the ends of the publishes around it, on the timeline's clock; None while the second has not ended.

        After a restart the last attempt counts.
        """
        ends: dict[int, float] = {}
        for event in self.processes().get("coordinator", ()):
            version = (event.get("args") or {}).get("version") if isinstance(event.get("args"), dict) else None
            end_s = number(event, "end")
            if event.get("name") == "publish" and isinstance(version, int) and end_s is not None:
                ends = {v: time_s for v, time_s in ends.items() if v < version} | {version: end_s}
        return {version: (end_s, ends.get(version + 1)) for version, end_s in ends.items()}

    def iteration(self, iteration: int) -> dict[str, Any] | None:
        """Rows and waits of an iteration as plain values; seconds since its beginning. None where it has not begun."""
        bounds = self.bounds().get(iteration)
        if bounds is None:
            return None
        start_s, end_s = bounds
        processes = {name: _spans(events) for name, events in self.processes().items() if name != "launcher"}
        if end_s is None:
            end_s = max((span.end_s for spans in processes.values() for span in spans), default=start_s)
        inside = {
            name: [span for span in spans if span.end_s > start_s and span.start_s < end_s]
            for name, spans in processes.items()
        }
        seconds = max(end_s - start_s, 1e-6)
        rows, left_out = _rows(inside, start_s, end_s)
        return {
            "iteration": iteration,
            "seconds": round(seconds, 6),
            "running": bounds[1] is None,
            "rows": rows,
            "left_out": left_out,
            "waits": _waits(inside, start_s, end_s),
        }


def _spans(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    spans = []
    for event in events:
        name, lane, start_s, end_s = (
            event.get("name"),
            event.get("lane"),
            number(event, "start"),
            number(event, "end"),
        )
        if not isinstance(name, str) or not isinstance(lane, str) or start_s is None or end_s is None or name in AROUND:
            continue
        if lane.startswith("engine "):
            lane, kind = lane.removeprefix("engine "), "generate"
        elif lane == "microbatches":
            kind = "train"
        elif lane == "rewards":
            kind = "reward"
        else:
            kind = KINDS.get(name, "other")
        args = event.get("args")
        ranks = args.get("ranks", ()) if isinstance(args, dict) and lane.startswith(ROLES) else ()
        spans.append(Span(lane, kind, name, start_s, end_s, tuple(ranks) if isinstance(ranks, list) else ()))
    return spans


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record, None where it has none."""
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _owner(process: str, lane: str) -> tuple[int, str]:
    """Returns a row's place on the page and its name: coordinator, engines, rewards, trainers."""
    if process == "coordinator":
        return {"main": (0, "coordinator"), "evaluation": (0, "evaluation"), "rewards": (2, "rewards")}.get(
            lane, (1, lane)
        )
    return 3, process


def _rows(
    processes: Mapping[str, Sequence[Span]], start_s: float, end_s: float
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows of bars: [track, start, length, kind, name], tracks so that no two bars of a row overlap in one."""
    owners: dict[tuple[int, str], list[Span]] = {}
    for process, spans in processes.items():
        for span in spans:
            owners.setdefault(_owner(process, span.lane), []).append(span)
    rows, left_out, room = [], {"rows": max(0, len(owners) - MOST_PROCESSES), "bars": 0}, MOST_BARS
    for (_, name), spans in sorted(owners.items(), key=lambda item: (item[0][0], _natural(item[0][1])))[
        :MOST_PROCESSES
    ]:
        spans = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
        left_out["bars"] += max(0, len(spans) - room)
        spans = spans[:room]
        room -= len(spans)
        ends: list[float] = []
        bars = []
        for span in spans:
            track = next((n for n, last_s in enumerate(ends) if last_s <= span.start_s + 1e-9), len(ends))
            ends[track : track + 1] = [span.end_s]
            first_s, last_s = max(span.start_s, start_s), min(span.end_s, end_s)
            bars.append([track, round(first_s - start_s, 6), round(last_s - first_s, 6), span.kind, span.name])
        rows.append({"name": name, "tracks": max(1, len(ends)), "bars": bars})
    return rows, left_out


def _natural(name: str) -> tuple[str, int]:
    head, _, last = name.rpartition("-")
    return (head, int(last)) if last.isdigit() else (name, 0)


def _waits(processes: Mapping[str, Sequence[Span]], start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Per engine and trainer the seconds of each doing, and what is left as idle."""

    def seconds(spans: Iterable[Span]) -> float:
        return _union([(max(span.start_s, start_s), min(span.end_s, end_s)) for span in spans])

    total_s = end_s - start_s
    found = []
    coordinator = processes.get("coordinator", ())
    border = [span for span in coordinator if span.kind in ("publish", "evaluate")]
    engines = sorted({span.lane for span in coordinator if span.kind == "generate" and not span.lane.startswith(ROLES)})
    for engine in engines:
        own = [span for span in coordinator if span.kind == "generate" and span.lane == engine]
        parts = {
            "generate": seconds(own),
            "evaluate": seconds(span for span in border if span.kind == "evaluate"),
            "publish": seconds(span for span in border if span.kind == "publish"),
        }
        busy_s = seconds([*own, *border])
        found.append({"name": engine, "role": "engine", "parts": parts, "idle": max(0.0, total_s - busy_s)})
    for process, spans in sorted(processes.items(), key=lambda item: _natural(item[0])):
        if not process.startswith("trainer"):
            continue
        parts = {
            "train": seconds(span for span in spans if span.kind in ("train", "step")),
            "wait for groups": seconds(span for span in spans if span.name == "wait for group"),
            "wait for engines": seconds(span for span in spans if span.name == "wait for engines"),
            "publish": seconds(span for span in spans if span.kind == "publish"),
            "checkpoint": seconds(span for span in spans if span.name == "checkpoint"),
        }
        busy_s = seconds(spans)
        found.append({"name": process, "role": "trainer", "parts": parts, "idle": max(0.0, total_s - busy_s)})
        # a trainer that waits while its device decodes is not idle
        decodes = [span for span in coordinator if span.name == "decodes" and _natural(process)[1] in span.ranks]
        if decodes:
            works = [span for span in spans if span.kind != "wait"]
            parts = {"decodes": seconds(decodes), "trains": parts["train"]}
            idle_s = max(0.0, total_s - seconds([*decodes, *works]))
            found.append({"name": f"device of {process}", "role": "device", "parts": parts, "idle": idle_s})
    return found[: 2 * MOST_PROCESSES]


def _union(stretches: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(stretches):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
