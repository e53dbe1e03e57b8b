"""Reads a run directory for the page: plain values, from its files only, as they grow and whatever state they are in."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pa_npu
from pa_npu.config import yaml_source
from pa_npu.config.keys import all_keys
from pa_npu.config.plain_file import open_plain
from pa_npu.errors import ConfigError, DataError, UserError
from pa_npu.telemetry.records import EVALUATIONS, METRICS, JsonLines
from pa_npu.telemetry.sample_store import read_samples, sample_iterations
from pa_npu.telemetry.secrets import Secrets, flat
from pa_npu.viewer.advice import advise
from pa_npu.viewer.timeline import RunTimeline, number

LOG_TAIL_BYTES = 256 << 10
MOST_POINTS = 2000
"""Iterations that curves are drawn of; a longer run shows every second, third, ..."""
SILENT_S = 120.0
_WARNING = re.compile(r"^\S+ \S+ [WEC] |\berror\b|Traceback", re.MULTILINE)
_UNDRAWN = frozenset({"iteration", "version", "time", "devices"})


class RunDirectory:
    """One run. Raises UserError where the directory is none of a run."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(f"{directory}: is not a directory; give a run directory, as in runs/grpo_tiny")
        if not any((self.directory / name).exists() for name in ("config.yaml", METRICS, "logs")):
            raise UserError(f"{directory}: holds no config.yaml, {METRICS} or logs, so it is no run directory")
        self._metrics = JsonLines(self.directory / METRICS)
        self._evaluations = JsonLines(self.directory / EVALUATIONS)
        self._timeline = RunTimeline(self.directory)

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def stamp(self) -> str:
        """Changes when a file changes that the page is made from."""
        watched = [self.directory / name for name in ("config.yaml", METRICS, EVALUATIONS, "runs_on.json")]
        for folder in ("logs", "timeline", "samples"):
            watched += sorted((self.directory / folder).glob("*"))
        return str(hash(tuple(f"{status.st_size}.{status.st_mtime_ns}" for status in _states(watched))))

    def config(self) -> dict[str, Any]:
        """The resolved configuration by dotted key, without secrets."""
        leaves = self._secrets().config.items()
        # JSON has no numbers that are not finite
        return {
            key: str(value) if value in (math.inf, -math.inf) or value != value else value
            for key, value in leaves
            if key
        }

    def _secrets(self) -> Secrets:
        return Secrets(read_yaml(self.directory / "config.yaml"))

    def records(self) -> list[dict[str, Any]]:
        return _by_index(self._metrics.read(), "iteration")

    def evaluations(self) -> list[dict[str, Any]]:
        return _by_index(self._evaluations.read(), "version")

    def overview(self) -> dict[str, Any]:
        """Everything but what belongs to a single iteration."""
        records, config, evaluations = self.records(), self.config(), self.evaluations()
        return {
            "name": self.name,
            "program": f"pa_npu {pa_npu.__version__}",
            "stamp": self.stamp(),
            "now": time.time(),
            "columns": columns(records),
            "evaluations": evaluations,
            "advice": [asdict(advice) for advice in advise(records, config)],
            "config": config,
            "defaults": {key.name: None if key.required else _plain(key.default) for key in all_keys()},
            "meaning": {key.name: key.description for key in all_keys()},
            "processes": self.processes(),
            "state": self.state(records, config),
            "sample_iterations": sample_iterations(self.directory),
            "timeline_iterations": sorted(self._timeline.bounds()),
        }

    def state(self, records: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
        """Says whether the run is finished, running or silent, by its files and when they were last written."""
        launcher = self._timeline.processes().get("launcher", [])
        begun = [index for index, event in enumerate(launcher) if "process" in event]
        ended = any(event.get("name") == "run" for event in launcher[begun[-1] if begun else 0 :])
        newest = self._newest()
        total = config.get("schedule.iterations")
        silent_s = max(SILENT_S, 5 * (number(records[-1], "iteration_s") or 0.0) if records else SILENT_S)
        written = "running" if newest and time.time() - newest < silent_s else "silent"
        return {
            "word": "finished" if ended else written,
            "last_write": newest,
            "iterations": records[-1]["iteration"] + 1 if records else 0,
            "total": total if isinstance(total, int) else None,
            "attempts": len(begun),
        }

    def _newest(self) -> float:
        written = [path for folder in ("logs", "timeline") for path in (self.directory / folder).glob("*")]
        return max((status.st_mtime for status in _states([self.directory / METRICS, *written])), default=0.0)

    def processes(self) -> list[dict[str, Any]]:
        """One entry per log or timeline: what it did last, when, how often it was started, what its log warns of."""
        timelines = self._timeline.processes()
        logs = {name.removesuffix(".log"): self.directory / "logs" / name for name in self._logs()}
        found, secrets = [], self._secrets()
        for name in sorted({*timelines, *logs}):
            events = timelines.get(name, [])
            starts = [event for event in events if "process" in event]
            spans = [event for event in events if isinstance(event.get("name"), str)]
            text = tail(logs[name], LOG_TAIL_BYTES) if name in logs else ""
            lines = text.splitlines()
            found.append(
                {
                    "name": name,
                    "log": logs[name].name if name in logs else None,
                    "starts": len(starts) or None,
                    "pid": starts[-1].get("pid") if starts else None,
                    "last_event": spans[-1]["name"] if spans else None,
                    "last_time": max((number(event, "end") or 0.0 for event in spans), default=0.0) or None,
                    "warnings": len(_WARNING.findall(text)),
                    "last_line": secrets.hide(lines[-1]) if lines else None,
                }
            )
        return found

    def log(self, name: str, most_bytes: int = LOG_TAIL_BYTES) -> str | None:
        """The end of a log by its file name; None where the run has no such log."""
        if name not in self._logs():
            return None
        return self._secrets().hide(tail(self.directory / "logs" / name, most_bytes))

    def _logs(self) -> list[str]:
        """Files alone: what a link points to is not the run's."""
        return sorted(path.name for path in (self.directory / "logs").glob("*.log") if not path.is_symlink())

    def timeline(self, iteration: int) -> dict[str, Any] | None:
        return self._timeline.iteration(iteration)

    def samples(self, iteration: int) -> dict[str, Any]:
        """The kept groups of an iteration with their responses."""
        groups: list[dict[str, Any]] = []
        problem: str | None = None
        if iteration in sample_iterations(self.directory):
            try:
                groups = _groups(read_samples(self.directory, iteration))
            except DataError as error:
                problem = str(error)
        return {"iteration": iteration, "groups": groups, "error": problem}


def _states(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Returns those of the files that are still there."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.stat()


def tail(path: Path, most_bytes: int) -> str:
    """The last lines of a text file, whole ones. A link is not followed: whoever shows a run shows nothing else of the machine."""
    try:
        with open_plain(path, follow_links=False) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError:
        return ""
    if size > most_bytes:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration as it was written; empty where it cannot be read."""
    try:
        return yaml_source.read_yaml(str(path))[0]
    except ConfigError:
        return {}


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Numbers of the records by name, nested ones dotted; None where a record has none. Long runs are thinned out."""
    step = -(-len(records) // MOST_POINTS) or 1
    kept = [record for index, record in enumerate(records) if index % step == 0 or index == len(records) - 1]
    rows = [
        {
            name: value
            for name, value in flat({key: item for key, item in record.items() if key != "engines"}).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for record in kept
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in _UNDRAWN)
    found: dict[str, list[float | None]] = {"iteration": [float(record["iteration"]) for record in kept]}
    found["time"] = [number(record, "time") for record in kept]
    return found | {name: [row.get(name) for row in rows] for name in names}


def _by_index(records: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Records with a number, by number; of several with one, the last."""
    valid = [r for r in records if isinstance(r.get(key), int) and not isinstance(r[key], bool) and r[key] >= 0]
    return sorted({record[key]: record for record in valid}.values(), key=lambda record: record[key])


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    shared = ("index", "prompt_id", "prompt", "prompt_tokens", "answer", "errors")
    apart = {*shared, "iteration", "response", "tokens", "turns"}
    groups: dict[int, dict[str, Any]] = {}
    for row in rows:
        group = groups.setdefault(
            row["index"], {**{name: row[name] for name in shared}, "responses": [], "sessions": []}
        )
        response = {name: value for name, value in row.items() if name not in apart}
        for name in ("logprobs", "trainer_logprobs"):
            if response[name] is not None:
                response[name] = [round(value, 7) for value in response[name]]
        _grow(group["sessions"], row.get("turns") or (), len(group["responses"]))
        group["responses"].append(response | {"length": len(row["tokens"])})
    return list(groups.values())


def _grow(sessions: list[dict[str, Any]], turns: Sequence[Mapping[str, Any]], response: int) -> None:
    """Adds a branch to the trees of a group's sessions, whose turns are in the order in which they are drawn.

    A turn's tokens are those of the response that trains it, from `start` to `end`; responses: the branches that hold it.
    """
    parent, start = None, 0
    for turn in turns:
        number, reward = turn["number"], turn["reward"]
        if not sessions or sessions[-1]["session"] != turn["session"]:
            sessions.append({"session": turn["session"], "turns": []})
        known = next((one for one in sessions[-1]["turns"] if one["number"] == number), None)
        if known is None:
            known = {"number": number, "parent": parent, "shown": turn["shown"], "reward": reward, "responses": []}
            sessions[-1]["turns"].append(known)
        if turn["trained"]:
            known |= {"response": response, "start": start, "end": start + turn["written"]}
            start += turn["written"]
        known["responses"].append(response)
        parent = number


def _plain(value: Any) -> Any:
    """A default as JSON holds it, in the form that config.yaml has it."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
