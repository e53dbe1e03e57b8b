"""Reads a run directory for the page, as plain values, while its files grow and whatever they hold."""

from __future__ import annotations

import base64
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
from pa_npu.telemetry.image_store import kept_image
from pa_npu.telemetry.progress import PREFIX
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
"""Iterations in a curve; of a longer run every second, third, ... iteration is shown."""
MAX_COLUMNS = 400
MAX_LOGS = 600
_CONFIG = "config.yaml"
_WARNING = re.compile(r"^\S+ \S+ [WEC] |\berror\b|Traceback", re.MULTILINE)
_UNDRAWN = frozenset({"iteration", "version", "time", "devices"})


def is_run_directory(directory: Path) -> bool:
    return any((directory / name).exists() for name in (_CONFIG, METRICS, "logs"))


class RunDirectory:
    """One run. Raises UserError where the directory is no run directory."""

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
        # the state of config.yaml, and the configuration that was read from it
        self._config: tuple[Any, Secrets] | None = None

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def stamp(self) -> str:
        """Returns a text that changes when a file of the page changes, and when the run's launcher
        is gone.
        """
        names = (_CONFIG, METRICS, EVALUATIONS, CHAIN, "runs_on.json", SAMPLES_DIRECTORY, RESULTS)
        watched = [self.directory / name for name in names]
        for folder in ("logs", TIMELINE):
            watched += sorted((self.directory / folder).glob("*"))[:MAX_LOGS]
        states = tuple(f"{status.st_size}.{status.st_mtime_ns}" for status in _states(watched))
        return str(hash((states, self.state()["word"])))

    def config(self) -> dict[str, Any]:
        """Returns the resolved configuration by dotted key, without secrets."""
        config = {}
        for key, value in self._secrets().config.items():
            if not key:
                continue
            is_finite = not isinstance(value, float) or math.isfinite(value)
            config[key] = value if is_finite else str(value)  # which JSON does not have
        return config

    def _secrets(self) -> Secrets:
        file = self.directory / _CONFIG
        states = [(status.st_size, status.st_mtime_ns) for status in _states([file])]
        if self._config is None or self._config[0] != states:
            self._config = (states, Secrets(read_yaml(file)))
        return self._config[1]

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of the iterations, by rising iteration."""
        return by_index(self._metrics.read(), "iteration")

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the evaluations, by rising version."""
        return [evaluation(record) for record in by_index(self._evaluations.read(), "version")]

    def overview(self) -> dict[str, Any]:
        """Returns everything but the data of a single iteration."""
        records = self.records()
        config = self.config()
        attempts = self._timeline.attempts()
        begun = [attempt.first for attempt in attempts if attempt.first is not None]
        steady_records = steady(records, begun)
        defaults = {}
        for key in all_keys():
            defaults[key.name] = None if key.required else _plain(key.default)
        return {
            "name": self.name,
            "program": f"pa_npu {pa_npu.__version__}",
            "stamp": self.stamp(),
            "now": time.time(),
            "columns": columns(records),
            "idle": {name: recent(steady_records, name) for name in IDLE},
            "marks": marks(attempts, self._timeline.checkpoints()),
            "evaluations": self.evaluations(),
            "question_versions": question_versions(self.directory),
            "advice": [asdict(advice) for advice in advise(records, config, begun)],
            "config": config,
            "facts": facts(config),
            "defaults": defaults,
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
        """Returns the values of pa_npu.viewer.state; records and config are read where they are not
        given.
        """
        records = self.records() if records is None else records
        config = self.config() if config is None else config
        return run_state(
            launcher=self._timeline.landmarks("launcher"),
            records=records,
            total=config.get("schedule.iterations"),
            newest_s=self._newest_s(),
            secrets=self._secrets(),
        )

    def chain(self, others: Sequence[RunDirectory]) -> dict[str, Any]:
        """Returns the values of pa_npu.viewer.chain, compared with other runs."""
        is_running = self.state()["word"] == "running"
        return self._chains.view([run.directory for run in others], is_running)

    def columns_between(self, first: int, last: int) -> dict[str, list[float | None]]:
        """Returns the columns of the iterations from `first` to `last`, more of them than the
        columns of the whole run show.
        """
        return columns(self.records(), first, last)

    def _newest_s(self) -> float:
        """Returns when the run wrote anything last."""
        written = [self.directory / METRICS]
        for folder in ("logs", TIMELINE):
            written += (self.directory / folder).glob("*")
        return max((status.st_mtime for status in _states(written)), default=0.0)

    def processes(self) -> list[dict[str, Any]]:
        """Returns an entry for each log or timeline: its last event and when that was, how often
        the process was started, and how many warnings its log has.
        """
        timelines = self._timeline.files()
        logs = {name.removesuffix(".log"): name for name in self._logs()}
        entries = []
        for name in sorted({*timelines, *logs})[:MAX_LOGS]:
            entry: dict[str, Any] = {
                "name": name,
                "log": logs.get(name),
                "starts": None,
                "pid": None,
                "last_event": None,
                "last_time": None,
                "warnings": 0,
                "last_line": None,
            }
            if name in timelines:
                begun = starts(timelines[name].landmarks())
                entry["last_event"], entry["last_time"] = timelines[name].last()
                if begun:
                    entry["starts"] = len(begun)
                    entry["pid"] = index(begun[-1], "pid")
            if name in logs:
                log_text = tail(self.directory / "logs" / logs[name], LOG_TAIL_BYTES)
                entry["warnings"] = len(_WARNING.findall(log_text))
                lines = log_text.splitlines()
                if lines:
                    entry["last_line"] = self._secrets().hide(lines[-1].removeprefix(PREFIX))
            entries.append(entry)
        return entries

    def log(self, name: str, max_bytes: int = LOG_TAIL_BYTES) -> str | None:
        """Returns the end of a log by its file name; None where the run has no such log."""
        if name not in self._logs():
            return None
        return self._secrets().hide(tail(self.directory / "logs" / name, max_bytes))

    def _logs(self) -> list[str]:
        """Returns the names of log files. Links are left out: they may point outside the run."""
        logs = (self.directory / "logs").glob("*.log")
        return sorted(path.name for path in logs if not path.is_symlink() and path.is_file())

    def timeline(self, iteration: int) -> dict[str, Any] | None:
        return self._timeline.iteration(iteration)

    def samples(self, iteration: int) -> dict[str, Any]:
        """Returns the kept groups of an iteration in short."""
        return samples_in_short(self.directory, iteration)

    def group(self, iteration: int, number_of_group: int) -> dict[str, Any] | None:
        """Returns a kept group whole."""
        return whole_group(self.directory, iteration, number_of_group)

    def image(self, digest: str) -> dict[str, str] | None:
        """Returns the small copy of an image in a kept sample, a PNG in base64."""
        file = kept_image(self.directory, digest)
        return None if file is None else {"png": base64.b64encode(file).decode()}

    def same_prompt(self, iteration: int, prompt: str) -> dict[str, Any] | None:
        """Returns this run's answers to a prompt of another run."""
        return same_prompt(self.directory, iteration, prompt)

    def questions(self, version: int, before: int) -> dict[str, Any] | None:
        return compare_questions(self.directory, version, before)

    def question(self, version: int, set_number: int, question: int) -> dict[str, Any] | None:
        return question_answers(self.directory, version, set_number, question)


def _states(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yields the states of the files that are still there."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.stat()


def tail(path: Path, max_bytes: int) -> str:
    """Returns the last whole lines of a text file.

    A link is not followed, since the page must show nothing of the machine but the run.
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
    """Returns a configuration as it was written; empty where it cannot be read."""
    try:
        return yaml_source.read_yaml(str(path))[0]
    except ConfigError:
        return {}


def columns(
    records: Sequence[Mapping[str, Any]], first: int = 0, last: int = 2**31
) -> dict[str, list[float | None]]:
    """Returns the numbers of the records by name, nested names dotted; None where a record has
    none. Of a long run some iterations are left out.

    first, last: the iterations that are wanted. The column `tokens_total` is what the run has
    trained until the end of an iteration.
    """
    total = 0.0
    totals = {}
    for record in records:
        total += number(record, "tokens_prompt") or 0.0
        total += number(record, "tokens_response") or 0.0
        totals[record["iteration"]] = total

    records = [record for record in records if first <= record["iteration"] <= last]
    step = -(-len(records) // MAX_POINTS) or 1
    drawn = list(records[::step])
    if records and drawn[-1] is not records[-1]:
        drawn.append(records[-1])

    names: dict[str, None] = {}  # in order of appearance
    rows = []
    for record in drawn:
        leaves = flat({key: item for key, item in record.items() if key != "engines"})
        row = {name: number(leaves, name) for name in leaves if name not in _UNDRAWN}
        names |= dict.fromkeys(name for name, value in row.items() if value is not None)
        rows.append(row)
    values: dict[str, list[float | None]] = {
        "iteration": [float(record["iteration"]) for record in drawn],
        "time": [number(record, "time") for record in drawn],
        "tokens_total": [totals[record["iteration"]] for record in drawn],
    }
    for name in list(names)[:MAX_COLUMNS]:
        values[name] = [row.get(name) for row in rows]
    return values


def evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of an evaluation that the page shows, and nothing else, whatever the
    record holds.
    """
    shown: dict[str, Any] = {
        name: number(record, name)
        for name in ("version", "accuracy", "questions", "planned", "seconds", "time")
    }
    sets = mapping(record, "sets")
    shown["sets"] = None
    if sets:
        shown["sets"] = {str(name): _set_summary(mapping(sets, name)) for name in sets}
    differences = mapping(record, "differences")
    shown["differences"] = {
        name: _difference(mapping(differences, name))
        for name in ("first", "before")
        if name in differences
    }
    return shown


def _difference(difference: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the difference from another version."""
    sets = mapping(difference, "sets")
    return {
        "version": number(difference, "version"),
        "sets": {str(name): _estimates(mapping(sets, name)) for name in sets},
    }


def _set_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        name: number(summary, name)
        for name in (
            "questions",
            "rows",
            "responses",
            "length_mean",
            "length_median",
            "length_95",
            "truncated_ratio",
        )
    }
    shown["metrics"] = _estimates(mapping(summary, "metrics"))
    return shown


def _estimates(metrics: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Returns by metric its estimate, without those that have no value or half an interval.

    A loss over rows of data is no sample of questions, so it has no interval.
    """
    estimates = {}
    for name in metrics:
        metric = mapping(metrics, name)
        estimate = {part: number(metric, part) for part in ("value", "low", "high", "questions")}
        interval = (estimate["low"], estimate["high"], estimate["questions"])
        is_whole = None not in interval or set(interval) == {None}
        if estimate["value"] is not None and is_whole:
            estimates[str(name)] = estimate
    return estimates


def by_index(records: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Returns the records that have an index in `key`, by rising index; the last one of equals."""
    last = {record[key]: record for record in records if index(record, key) is not None}
    return [last[place] for place in sorted(last)]


def _plain(value: Any) -> Any:
    """Returns a default in the form that config.yaml and JSON have."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
