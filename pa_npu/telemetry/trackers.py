"""Experiment trackers: the iteration records and samples of a run in TensorBoard, wandb, SwanLab, MLflow or trackio.

RunRecords ──append──> RUN/trackers/records.jsonl ──read──> thread of a tracker ──> its library (tracker_libraries.py)

Nothing that a library does holds or ends the run. The file is the queue, so no record waits in
memory. A record that a tracker fails to take is counted (records_lost), and the first loss of each
is said in the log and on the console. Threads are daemons, which the end of the run waits for with
one deadline; the coordinator's process then ends without what libraries do at exit. What a tracker
was not given stays in the file, and a resumed run gives it first. What it was given is not given
again, except to TensorBoard, which can take back.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pa_npu.config.sections.operation import TelemetryConfig
from pa_npu.telemetry.records import (
    JsonLines,
    RecordFile,
    attempt,
    drop_records,
    json_line,
    note_lost,
    print_line,
)
from pa_npu.telemetry.sample_store import SAMPLES_IN_SHORT, KeptResponse, reward_names
from pa_npu.telemetry.secrets import flat
from pa_npu.telemetry.tracker_libraries import TRACKERS, Identity, TrackedRun, Tracker

DIRECTORY = "trackers"
RECORDS = "records.jsonl"
"""The file in DIRECTORY that is read: {"kind": iteration or version, "step": its number, "log":
..., "table": ...}.
"""

ANSWER_TIMEOUT_S = 60.0
"""Deadline of a tracker's answer, and at the end of the run of all it still has to take; then the
run ends without it.
"""
LONGEST_TEXT = 4096  # characters of a prompt or a response in a table
# how long a run that has failed, and is to be started again, waits for its trackers
FAILED_RUN_S = 2.0
_LOOK_S = 0.2
_LONGEST_REASON = 300  # characters
_CAN_TAKE_BACK = frozenset({"tensorboard"})
_ID_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 21  # within what each of the trackers takes

# Names of numbers in trackers, by field of the iteration record: as TRL's GRPOTrainer or verl's PPO
# trainer calls them, or pa_npu/FIELD; docs/trackers.md has the table. "a.*" is every field of a,
# whose name takes the place of the asterisk.
NAMES: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "reward_mean": "train/reward",
        "reward_std": "train/reward_std",
        "rewards.*": "train/rewards/*/mean",
        "equal_reward_ratio": "train/frac_reward_zero_std",
        "loss": "train/loss",
        "kl": "train/kl",
        "entropy": "train/entropy",
        "clip_ratio": "train/clip_ratio/region_mean",
        "grad_norm": "train/grad_norm",
        "learning_rate": "train/learning_rate",
        "response_length_mean": "train/completions/mean_length",
        "response_length_min": "train/completions/min_length",
        "response_length_max": "train/completions/max_length",
        "truncated_ratio": "train/completions/clipped_ratio",
        "logprob_diff_mean": "train/sampling/sampling_logp_difference/mean",
        "logprob_diff_max": "train/sampling/sampling_logp_difference/max",
        "importance_weight_mean": "train/sampling/importance_sampling_ratio/mean",
        "iteration_s": "train/step_time",
    },
    "verl": {
        "reward_mean": "critic/score/mean",
        "rewards.*": "reward/*/mean",
        "loss": "actor/loss",
        "policy_loss": "actor/pg_loss",
        "kl": "actor/kl_loss",
        "entropy": "actor/entropy",
        "clip_ratio": "actor/pg_clipfrac",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "response_length_mean": "response_length/mean",
        "response_length_min": "response_length/min",
        "response_length_max": "response_length/max",
        "truncated_ratio": "response_length/clip_ratio",
        "prompt_length_mean": "prompt_length/mean",
        "logprob_k3": "rollout_corr/k3_kl",
        "importance_weight_mean": "rollout_corr/rollout_is_mean",
        "iteration_s": "timing_s/step",
        "generate_s": "timing_s/gen",
        "train_s": "timing_s/update_actor",
        "publish_s": "timing_s/update_weights",
        "evaluation_s": "timing_s/testing",
        "checkpoint_s": "timing_s/save_checkpoint",
        "tpspd": "perf/throughput",
    },
}
_EVALUATION = {"trl": "eval/{set}/{metric}", "verl": "val-core/{set}/acc/{metric}"}
_STEP = {"trl": "train/global_step", "verl": "training/global_step"}
_SAMPLES_TABLE = {"trl": "completions", "verl": "train/generations"}
_NOT_NUMBERS_OF_A_CURVE = frozenset({"iteration", "version", "time", "non_finite"})

T = TypeVar("T")


class Trackers:
    """All trackers of a run. Owner closes it (context manager). config: of the run, flat; values
    that are secret left out.

    first_iteration: as MetricsWriter's; what an earlier attempt appended of it and later ones is
    removed.
    """

    def __init__(
        self,
        run_dir: Path | str,
        telemetry: TelemetryConfig,
        config: Mapping[str, Any],
        first_iteration: int = 0,
    ) -> None:
        self._feeds: list[_Feed] = []
        self._names = telemetry.metric_names
        if telemetry.trackers:
            path = Path(run_dir) / DIRECTORY / RECORDS
            drop_records(path, "step", first_iteration)
            self._file = RecordFile(path)
            self._feeds = [
                _Feed(name, Path(run_dir), telemetry, config, first_iteration)
                for name in telemetry.trackers
            ]

    def write_iteration(self, record: Mapping[str, Any], kept: Sequence[KeptResponse] = ()) -> None:
        """One finished iteration with its kept samples; returns at once."""
        message = {
            "kind": "iteration",
            "step": int(record["iteration"]),
            "log": tracked(record, self._names),
        }
        if rows := [row for row in kept if row.index < SAMPLES_IN_SHORT]:
            message["table"] = _table(_SAMPLES_TABLE[self._names], record["iteration"], rows)
        self._write(message)

    def write_evaluation(self, record: Mapping[str, Any]) -> None:
        """One evaluation; returns at once."""
        log = tracked_evaluation(record, self._names)
        self._write({"kind": "version", "step": int(record["version"]), "log": log})

    def close(self, limit_s: float | None = None) -> None:
        """Waits until everything is where it belongs, all trackers together at most
        ANSWER_TIMEOUT_S, or limit_s.
        """
        deadline_s = time.monotonic() + (ANSWER_TIMEOUT_S if limit_s is None else limit_s)
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(deadline_s)
        if self._feeds:
            self._file.close()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else FAILED_RUN_S)

    def _write(self, message: Mapping[str, Any]) -> None:
        if self._feeds:
            self._file.write(json_line(message))
        for feed in self._feeds:
            feed.look()


class _Feed:
    """The thread of one tracker. A tracker that cannot begin gets nothing in this attempt."""

    def __init__(
        self,
        tracker: str,
        run_dir: Path,
        telemetry: TelemetryConfig,
        config: Mapping[str, Any],
        first: int,
    ) -> None:
        self._tracker = tracker
        self._records = run_dir / DIRECTORY / RECORDS
        self._file = run_dir / DIRECTORY / f"{tracker}.json"
        self._identity = self._read(telemetry.project, run_dir.resolve().name)
        if tracker in _CAN_TAKE_BACK:
            chosen = {
                key: min(getattr(self._identity, key), first - 1)
                for key in ("iteration", "version")
            }
            self._identity = replace(self._identity, **chosen)
        self._run = TrackedRun(self._identity, run_dir / DIRECTORY, first, config)
        self._ending = threading.Event()
        self._since_s: float | None = None  # the library was called, and has not returned
        self._said = False
        self._thread = threading.Thread(target=self._serve, name=f"tracker {tracker}", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Counts a call that has taken too long; the tracker goes on when it returns."""
        since_s = self._since_s
        if since_s is not None and time.monotonic() - since_s > ANSWER_TIMEOUT_S:
            self._since_s = None
            self._lose(f"no answer within {ANSWER_TIMEOUT_S:g} s")

    def end(self) -> None:
        """Notes that no more messages come."""
        self._ending.set()

    def join(self, deadline_s: float) -> None:
        """Waits for the tracker to have taken all of them, until the deadline."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._lose("the run ended before it had taken everything")

    def _serve(self) -> None:
        tracker = self._called(lambda: TRACKERS[self._tracker][0](self._run))
        if tracker is None:
            return
        self._keep(id=tracker.id, known=True)
        for message in self._messages():
            if getattr(self._identity, message["kind"]) < message["step"]:
                self._keep(**{message["kind"]: message["step"]})
                self._called(lambda message=message: _deliver(tracker, message))  # type: ignore[misc]
        self._called(tracker.finish)

    def _called(self, call: Callable[[], T]) -> T | None:
        """Calls the library; None, and a count, where it raises."""
        self._since_s = time.monotonic()
        try:
            return call()
        except (
            BaseException
        ) as error:  # a library may raise anything, also SystemExit, where it finds no key
            self._lose(" ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON])
            return None
        finally:
            self._since_s = None

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yields all messages of the file, and those that are appended until the end."""
        file = JsonLines(self._records)
        while True:
            # asked first: what was written before the end is read after it
            ended = self._ending.wait(_LOOK_S)
            yield from file.new()
            if ended:
                return

    def _read(self, project: str, name: str) -> Identity:
        """Returns what an earlier attempt kept; a new run, or a file that cannot be read, gets a
        new id.
        """
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Identity)
        except (OSError, msgspec.DecodeError):
            return Identity(
                "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH)), project, name
            )

    def _keep(self, **changes: Any) -> None:
        self._identity = replace(self._identity, **changes)
        attempt(self._file, self._write_identity)

    def _write_identity(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(json_line(asdict(self._identity)) + "\n", encoding="utf-8")
        partial.replace(self._file)

    def _lose(self, reason: str) -> None:
        note_lost(f"telemetry.trackers: {self._tracker}", RuntimeError(reason))
        if not self._said:
            self._said = True
            print_line(
                f"| tracker {self._tracker}: {reason}; the run goes on, see logs/coordinator.log"
            )


def _deliver(tracker: Tracker, message: Mapping[str, Any]) -> None:
    tracker.log(message["step"], message["log"])
    if "table" in message:
        tracker.table(message["step"], **message["table"])


def tracked(record: Mapping[str, Any], names: str) -> dict[str, float]:
    """Returns the numbers of an iteration record under their names of NAMES; what is not a finite
    number is left out.
    """
    numbers = {
        _named(field, NAMES[names]): float(value)
        for field, value in flat(record).items()
        if _is_number(value) and field not in _NOT_NUMBERS_OF_A_CURVE
    }
    return {_STEP[names]: float(record["iteration"])} | numbers


def tracked_evaluation(record: Mapping[str, Any], names: str) -> dict[str, float]:
    """Returns the numbers of an evaluation record: of each set its metrics."""
    values = {_STEP[names]: float(record["version"])}
    for name, numbers in record.get("sets", {}).items():
        for metric, value in numbers["metrics"].items():
            if _is_number(value["value"]):
                values[_EVALUATION[names].format(set=name, metric=metric)] = float(value["value"])
    return values


def _named(field: str, names: Mapping[str, str]) -> str:
    section, _, label = field.partition(".")
    if label and (pattern := names.get(f"{section}.*")):
        return pattern.replace("*", label)
    return names.get(field) or f"pa_npu/{field.replace('.', '/')}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _table(name: str, iteration: int, rows: Sequence[KeptResponse]) -> dict[str, Any]:
    functions = reward_names(rows)
    columns = [
        "step",
        "prompt",
        "completion",
        "answer",
        *functions,
        "reward",
        "advantage",
        "correct",
        "tokens",
    ]
    cells = [
        [
            iteration,
            _text(row.prompt),
            _text(row.text),
            _text(row.answer),
            *(row.rewards.get(function) for function in functions),
            row.reward,
            row.advantage,
            row.correct,
            len(row.tokens),
        ]
        for row in rows
    ]
    return {"name": name, "columns": columns, "rows": cells}


def _text(text: str) -> str:
    """Returns a text without its middle, if it is long: a reward reads the end. No half surrogates."""
    clean = text.encode("utf-8", "replace").decode()
    if len(clean) <= LONGEST_TEXT:
        return clean
    return f"{clean[: LONGEST_TEXT // 2]} [...] {clean[-LONGEST_TEXT // 2 :]}"
