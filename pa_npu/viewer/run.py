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
from pa_npu.errors import ConfigError, UserError
from pa_npu.evaluation.results import DIRECTORY as RESULTS
from pa_npu.telemetry.chain import CHAIN
from pa_npu.telemetry.records import EVALUATIONS, METRICS, JsonLines
from pa_npu.telemetry.sample_store import SAMPLES_DIRECTORY, sample_iterations
from pa_npu.telemetry.secrets import Secrets, flat
from pa_npu.telemetry.timeline import DIRECTORY as TIMELINE
from pa_npu.viewer.advice import IDLE, advise, recent, steady
from pa_npu.viewer.chain import ChainViews
from pa_npu.viewer.facts import facts
from pa_npu.viewer.questions import compare_questions, question_answers, question_versions
from pa_npu.viewer.samples import same_prompt, samples_in_short, whole_group
from pa_npu.viewer.state import marks, run_state
from pa_npu.viewer.timeline import RunTimeline
from pa_npu.viewer.timeline_file import starts
from pa_npu.viewer.values import index, mapping, number

LOG_TAIL_BYTES = 256 << 10
MAX_POINTS = 2000
"""Iterations that curves are drawn of; a longer run shows every second, third, ..."""
MAX_COLUMNS = 400
MAX_LOGS = 600
_CONFIG = "config.yaml"
_WARNING = re.compile(r"^\S+ \S+ [WEC] |\berror\b|Traceback", re.MULTILINE)
_UNDRAWN = frozenset({"iteration", "version", "time", "devices"})


def is_run_directory(directory: Path) -> bool:
    return any((directory / name).exists() for name in (_CONFIG, METRICS, "logs"))


class RunDirectory:
    """One run. Raises UserError where the directory is none of a run."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(
                f"{directory}: is not a directory; give a run directory, as in runs/grpo_tiny"
            )
        if not is_run_directory(self.directory):
            raise UserError(
                f"{directory}: holds no config.yaml, {METRICS} or logs, so it is no run directory"
            )
        self._metrics = JsonLines(self.directory / METRICS)
        self._evaluations = JsonLines(self.directory / EVALUATIONS)
        self._timeline = RunTimeline(self.directory)
        self._chains = ChainViews(self.directory)
        # the configuration, and the state of the file that it is from
        self._known: tuple[Any, Secrets] | None = None

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def stamp(self) -> str:
        """Changes when a file changes that the page is made from, and when the run's launcher is
        gone.
        """
        watched = [
            self.directory / name for name in (_CONFIG, METRICS, EVALUATIONS, CHAIN, "runs_on.json")
        ]
        watched += [self.directory / folder for folder in (SAMPLES_DIRECTORY, RESULTS)]
        for folder in ("logs", TIMELINE):
            watched += sorted((self.directory / folder).glob("*"))[:MAX_LOGS]
        seen = tuple(f"{status.st_size}.{status.st_mtime_ns}" for status in _states(watched))
        return str(hash((seen, self.state()["word"])))

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
        file = self.directory / _CONFIG
        states = [(status.st_size, status.st_mtime_ns) for status in _states([file])]
        if self._known is None or self._known[0] != states:
            self._known = (states, Secrets(read_yaml(file)))
        return self._known[1]

    def records(self) -> list[dict[str, Any]]:
        return by_index(self._metrics.read(), "iteration")

    def evaluations(self) -> list[dict[str, Any]]:
        return [evaluation(record) for record in by_index(self._evaluations.read(), "version")]

    def overview(self) -> dict[str, Any]:
        """Everything but what belongs to a single iteration."""
        records, config, evaluations = self.records(), self.config(), self.evaluations()
        attempts = self._timeline.attempts()
        begun = [attempt.first for attempt in attempts if attempt.first is not None]
        kept = steady(records, begun)
        return {
            "name": self.name,
            "program": f"pa_npu {pa_npu.__version__}",
            "stamp": self.stamp(),
            "now": time.time(),
            "columns": columns(records),
            "idle": {name: recent(kept, name) for name in IDLE},
            "marks": marks(attempts, self._timeline.checkpoints()),
            "evaluations": evaluations,
            "question_versions": question_versions(self.directory),
            "advice": [asdict(advice) for advice in advise(records, config, begun)],
            "config": config,
            "facts": facts(config),
            "defaults": {
                key.name: None if key.required else _plain(key.default) for key in all_keys()
            },
            "meaning": {key.name: key.description for key in all_keys()},
            "processes": self.processes(),
            "state": self.state(records, config),
            "sample_iterations": sample_iterations(self.directory),
            "timeline_iterations": sorted(self._timeline.bounds()),
        }

    def state(
        self,
        records: Sequence[Mapping[str, Any]] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As pa_npu.viewer.state has it."""
        launcher = self._timeline.landmarks("launcher")
        records = self.records() if records is None else records
        config = self.config() if config is None else config
        total = config.get("schedule.iterations")
        return run_state(launcher, records, total, self._newest(), self._secrets())

    def chain(self, others: Sequence[RunDirectory]) -> dict[str, Any]:
        """As pa_npu.viewer.chain has it."""
        is_running = self.state()["word"] == "running"
        return self._chains.view([other.directory for other in others], is_running)

    def columns_between(self, first: int, last: int) -> dict[str, list[float | None]]:
        """The columns of some iterations, of which more are shown than of the whole run."""
        return columns(self.records(), first, last)

    def _newest(self) -> float:
        written = [
            path for folder in ("logs", TIMELINE) for path in (self.directory / folder).glob("*")
        ]
        return max(
            (status.st_mtime for status in _states([self.directory / METRICS, *written])),
            default=0.0,
        )

    def processes(self) -> list[dict[str, Any]]:
        """One entry per log or timeline: what it did last, when, how often it was started, what its
        log warns of.
        """
        timelines = self._timeline.files()
        logs = {name.removesuffix(".log"): self.directory / "logs" / name for name in self._logs()}
        processes, secrets = [], self._secrets()
        for name in sorted({*timelines, *logs})[:MAX_LOGS]:
            begun, last, last_s = [], None, None
            if name in timelines:
                begun = starts(timelines[name].landmarks())
                last, last_s = timelines[name].last()
            log_text = tail(logs[name], LOG_TAIL_BYTES) if name in logs else ""
            lines = log_text.splitlines()
            processes.append(
                {
                    "name": name,
                    "log": logs[name].name if name in logs else None,
                    "starts": len(begun) or None,
                    "pid": index(begun[-1], "pid") if begun else None,
                    "last_event": last,
                    "last_time": last_s,
                    "warnings": len(_WARNING.findall(log_text)),
                    "last_line": secrets.hide(lines[-1]) if lines else None,
                }
            )
        return processes

    def log(self, name: str, max_bytes: int = LOG_TAIL_BYTES) -> str | None:
        """The end of a log by its file name; None where the run has no such log."""
        if name not in self._logs():
            return None
        return self._secrets().hide(tail(self.directory / "logs" / name, max_bytes))

    def _logs(self) -> list[str]:
        """Files alone: what a link points to is not the run's."""
        logs = (self.directory / "logs").glob("*.log")
        return sorted(path.name for path in logs if not path.is_symlink() and path.is_file())

    def timeline(self, iteration: int) -> dict[str, Any] | None:
        return self._timeline.iteration(iteration)

    def samples(self, iteration: int) -> dict[str, Any]:
        """The kept groups of an iteration in short."""
        return samples_in_short(self.directory, iteration)

    def group(self, iteration: int, number_of_group: int) -> dict[str, Any] | None:
        """One of them whole."""
        return whole_group(self.directory, iteration, number_of_group)

    def same_prompt(self, iteration: int, prompt: str) -> dict[str, Any] | None:
        """This run's answers to a prompt of another run."""
        return same_prompt(self.directory, iteration, prompt)

    def questions(self, version: int, before: int) -> dict[str, Any] | None:
        return compare_questions(self.directory, version, before)

    def question(self, version: int, set_number: int, question: int) -> dict[str, Any] | None:
        return question_answers(self.directory, version, set_number, question)


def _states(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Returns those of the files that are still there."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.stat()


def tail(path: Path, max_bytes: int) -> str:
    """The last lines of a text file, whole ones.

    A link is not followed: whoever shows a run shows nothing else of the machine.
    """
    try:
        with open_plain(path, follow_links=False) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except OSError:
        return ""
    if size > max_bytes:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration as it was written; empty where it cannot be read."""
    try:
        return yaml_source.read_yaml(str(path))[0]
    except ConfigError:
        return {}


def columns(
    records: Sequence[Mapping[str, Any]], first: int = 0, last: int = 2**31
) -> dict[str, list[float | None]]:
    """Numbers of the records by name, nested ones dotted; None where a record has none. Long runs
    are thinned out.

    first, last: iterations. `tokens_total` is what the run has trained until the end of an
    iteration.
    """
    total, totals = 0.0, {}
    for record in records:
        total += (number(record, "tokens_prompt") or 0.0) + (
            number(record, "tokens_response") or 0.0
        )
        totals[record["iteration"]] = total
    records = [record for record in records if first <= record["iteration"] <= last]
    step = -(-len(records) // MAX_POINTS) or 1
    kept = [
        record
        for place, record in enumerate(records)
        if place % step == 0 or place == len(records) - 1
    ]
    rows = []
    for record in kept:
        leaves = flat({key: item for key, item in record.items() if key != "engines"})
        rows.append({name: value for name in leaves if (value := number(leaves, name)) is not None})
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _UNDRAWN))[
        :MAX_COLUMNS
    ]
    values: dict[str, list[float | None]] = {
        "iteration": [float(record["iteration"]) for record in kept]
    }
    values["time"] = [number(record, "time") for record in kept]
    values["tokens_total"] = [totals[record["iteration"]] for record in kept]
    return values | {name: [row.get(name) for row in rows] for name in names}


def evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation with what the page shows of it and nothing else, whatever somebody has written
    in its place.
    """
    sets = mapping(record, "sets")
    shown: dict[str, Any] = {
        name: number(record, name)
        for name in ("version", "accuracy", "questions", "planned", "seconds", "time")
    }
    shown["sets"] = None
    if sets:
        shown["sets"] = {str(name): _set_summary(mapping(sets, name)) for name in sets}
    differences = mapping(record, "differences")
    shown["differences"] = {
        name: {
            "version": number(mapping(differences, name), "version"),
            "sets": {
                str(set_): _estimates(mapping(mapping(mapping(differences, name), "sets"), set_))
                for set_ in mapping(mapping(differences, name), "sets")
            },
        }
        for name in ("first", "before")
        if name in differences
    }
    return shown


def _set_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    numbers = (
        "questions",
        "responses",
        "length_mean",
        "length_median",
        "length_95",
        "truncated_ratio",
    )
    return {name: number(summary, name) for name in numbers} | {
        "metrics": _estimates(mapping(summary, "metrics"))
    }


def _estimates(metrics: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """By metric; without those that have no value and interval."""
    estimates = {
        str(name): {
            part: number(mapping(metrics, name), part)
            for part in ("value", "low", "high", "questions")
        }
        for name in metrics
    }
    return {name: estimate for name, estimate in estimates.items() if None not in estimate.values()}


def by_index(records: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Records with a number, by number; of several with one, the last."""
    valid = [record for record in records if index(record, key) is not None]
    return sorted(
        {record[key]: record for record in valid}.values(), key=lambda record: record[key]
    )


def _plain(value: Any) -> Any:
    """A default as JSON holds it, in the form that config.yaml has it."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
