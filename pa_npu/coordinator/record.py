"""The iteration record: the coordinator's numbers and the trainers' report merged into one line of metrics.jsonl."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.messages import BorderReport, IterationReport, RunsOn
from pa_npu.coordinator.delivery import Produced
from pa_npu.engines.pool import EngineUse
from pa_npu.evaluation.results import (
    EvaluationProgress,
    Judged,
    kept_versions,
    results_file,
    write_results,
)
from pa_npu.planning.iteration_model.subjects import Prediction
from pa_npu.platform.memory_peaks import ResidentPeak
from pa_npu.publish.engines_hold import EnginesHold
from pa_npu.telemetry import idle
from pa_npu.telemetry.chain import lines_digest
from pa_npu.telemetry.progress import PREFIX, progress_line, remaining_s
from pa_npu.telemetry.records import (
    MetricsWriter,
    RecordFile,
    attempt,
    drop_records,
    json_line,
    print_line,
)
from pa_npu.telemetry.report import throughput
from pa_npu.telemetry.sample_store import KeptResponse, SampleStore
from pa_npu.telemetry.secrets import Secrets
from pa_npu.telemetry.trackers import FAILED_RUN_S, Trackers

SAMPLES = "samples.jsonl"
RUNS_ON = "runs_on.json"


@dataclass(frozen=True)
class RecordDigests:
    """Digests of an iteration's lines in metrics.jsonl and samples.jsonl, for the run's chain."""

    metrics: str
    samples: str


class RunRecords:
    """Writes metrics.jsonl, samples.jsonl and the progress lines. Owns its files: use `with`.

    first_iteration: records of it and later ones, which an earlier attempt wrote after its last
    checkpoint, are removed.
    piece: the text of one token.
    """

    def __init__(
        self, config: Config, first_iteration: int, piece: Callable[[int], str] = str
    ) -> None:
        self._config = config
        self._first = first_iteration
        self._seconds: list[float] = []
        self._has_said_without_gradient = False
        run_dir = Path(config.run.dir)
        self._metrics = MetricsWriter(run_dir, first_iteration)
        drop_records(run_dir / SAMPLES, "iteration", first_iteration)
        self._samples = RecordFile(run_dir / SAMPLES)
        for version in kept_versions(run_dir):
            if version >= first_iteration:
                file = results_file(run_dir, version)
                attempt(file, file.unlink)
        self._progress = EvaluationProgress(run_dir)
        self._kept = SampleStore(run_dir, first_iteration, piece)
        self._trackers = Trackers(
            run_dir, config.telemetry, tracked_config(config), first_iteration
        )
        self._memory = ResidentPeak(lambda: [os.getpid()])
        self._memory.pop_peak()

    def __enter__(self) -> RunRecords:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._metrics.close()
        self._samples.close()
        self._kept.close()
        self._trackers.close(None if kind is None else FAILED_RUN_S)

    def write_runs_on(self, runs_on: RunsOn) -> None:
        """Writes the devices and software that this attempt of the run has, and prints them."""
        file = Path(self._config.run.dir) / RUNS_ON
        attempt(file, lambda: file.write_text(json_line(asdict(runs_on)) + "\n", encoding="utf-8"))
        for line in runs_on.lines():
            print_line(PREFIX + line)
        if self._config.rollout.has_engines:
            print_line(f"{PREFIX}sending the first weights to the engines")

    def write_iteration(
        self,
        record: Mapping[str, Any],
        samples: Sequence[Mapping[str, Any]],
        kept: Sequence[KeptResponse] = (),
    ) -> RecordDigests:
        """Writes one finished iteration, and its line on the console."""
        written = self._metrics.write(
            {**record, "memory_coordinator_bytes": self._memory.pop_peak()}
        )
        self._trackers.write_iteration(written, kept)
        lines = [json_line(sample) for sample in samples]
        for line in lines:
            self._samples.write(line)
        self._kept.write(record["iteration"], kept)
        self._seconds.append(record["iteration_s"])
        if record.get("checkpoint_failed") is not None:
            print_line(
                f"| checkpoint of version {record['checkpoint_failed']} could not be written: see "
                "logs/trainer-0.log; the run goes on"
            )
        if missing := record.get("reward_no_verdict"):
            names = ", ".join(f"{name} on {count} responses" for name, count in missing.items())
            print_line(
                f"| no verdict by {names}, which count as the mean of their group's others: see "
                "logs/coordinator.log"
            )
        is_without_gradient = record.get("groups_skipped", 0) == record.get("groups")
        if is_without_gradient and not self._has_said_without_gradient:
            self._has_said_without_gradient = True
            print_line(
                f"{PREFIX}the rewards inside each group of this iteration are equal, so that its "
                "gradient is 0 and nothing is learned; said once, groups_skipped counts them"
            )
        total = self._config.schedule.iterations
        print_line(progress_line(record, total, remaining_s(self._seconds, total - self._first)))
        return RecordDigests(lines_digest([json_line(written)]), lines_digest(lines))

    def write_evaluation(self, record: Mapping[str, Any], responses: Sequence[Judged] = ()) -> None:
        """One evaluation, its results per question, and its lines on the console."""
        record = {**record, "differences": self._progress.differences(record["version"], responses)}
        self._trackers.write_evaluation(self._metrics.write_evaluation(record))
        if responses:
            write_results(results_file(self._config.run.dir, record["version"]), responses)
        part = "" if record["questions"] == record["planned"] else f" of {record['planned']}"
        print_line(
            f"| evaluation of version {record['version']}: accuracy {record['accuracy']:.3f} on "
            f"{record['questions']}{part} questions, {record['seconds']:.1f} s"
        )
        for name, numbers in record["sets"].items():
            if len(record["sets"]) > 1 or len(numbers["metrics"]) > 1:
                metrics = ", ".join(
                    f"{metric} {value['value']:.3f}" for metric, value in numbers["metrics"].items()
                )
                print_line(
                    f"|   {name}: {metrics}; {numbers['length_mean']:.0f} tokens, "
                    f"{numbers['truncated_ratio']:.0%} cut"
                )

    def write_held_out_loss(self, record: Mapping[str, Any]) -> None:
        """The loss of held-out rows under a version, and its lines on the console."""
        self._trackers.write_evaluation(self._metrics.write_evaluation(record))
        sets = ", ".join(
            f"{name} {numbers['loss']:.4f} ({_held_out_metrics(numbers)}, {numbers['rows']} rows)"
            for name, numbers in record["sets"].items()
        )
        print_line(
            f"| evaluation of version {record['version']}: loss {sets}, {record['seconds']:.1f} s"
        )


def _held_out_metrics(numbers: Mapping[str, Any]) -> str:
    """Returns the metrics of a held-out set beside its loss."""
    return ", ".join(
        f"{name.replace('_', ' ')} {metric['value']:.3f}"
        for name, metric in numbers["metrics"].items()
        if name != "loss"
    )


def tracked_config(config: Config) -> dict[str, Any]:
    """Returns the resolved configuration for trackers, by key, without secrets; of the engines'
    environment the names alone.
    """
    tree = config.model_dump(mode="json")
    tree["rollout"]["env"] = sorted(tree["rollout"]["env"])
    return Secrets(tree).config


@dataclass(frozen=True)
class BorderOutcome:
    """The state that a border left: the version that engines hold, and their counters and number."""

    held: EnginesHold
    use: dict[str, EngineUse]
    engines: int

    @property
    def publish_s(self) -> float:
        """Seconds from the trainers' readiness to the end of the publish."""
        return self.held.done_s - self.held.ready_s


@dataclass(frozen=True)
class Interval:
    """The time from one border to the next.

    evaluation: the record of an evaluation that came before the production; None where there was
    none. border: the one that began the interval. produced: the iterations that were produced in
    it.
    """

    evaluation: dict[str, Any] | None
    border: BorderOutcome
    produced: Sequence[int]


def iteration_record(
    config: Config,
    production: Produced,
    report: IterationReport,
    border: BorderReport,
    prediction: Prediction,
    start: Interval,
    end: BorderOutcome,
) -> dict[str, Any]:
    """Returns the record of one iteration, from one completed publish to the next.

    border: the publish that ends it, as trainers saw it. prediction: of the schedule controller,
    without the evaluation.
    """
    numbers = production.numbers
    evaluation = start.evaluation
    iteration_s = end.held.done_s - start.border.held.done_s
    devices = config.trainer.devices + start.border.engines * config.rollout.tensor_parallel
    tokens = {**numbers, "tokens_computed": report.training.tokens_computed}
    wait_s = report.training.wait_s + border.border_wait_s
    record = {
        **report.record(),
        **border.record(),
        "iteration": production.iteration,
        "version": production.iteration,
        **numbers,
        "iteration_s": iteration_s,
        "evaluation_s": evaluation["seconds"] if evaluation else None,
        "eval_accuracy": evaluation.get("accuracy") if evaluation else None,
        "trainer_idle": idle.trainer_idle(wait_s, iteration_s),
        **throughput(tokens, iteration_s, devices),
        "devices": devices,
        "time": time.time(),
    }
    if not config.rollout.has_engines:
        eval_loss = evaluation["loss"] if evaluation else None
        return record | {"eval_loss": eval_loss, "tokens_per_s": record["tpspd"] * devices}
    return {
        **record,
        **_border_numbers(end),
        "periodic": config.schedule.streams(production.iteration),
        "schedule": prediction.schedule,
        "predicted_s": prediction.predicted_s,
        "prediction_error": prediction.error,
        "learned": dict(prediction.learned),
        **_engine_numbers(config, start.border.use, end.use, wait_s, iteration_s, devices),
    }


def _border_numbers(end: BorderOutcome) -> dict[str, Any]:
    """Returns the times of the border that ended an iteration, and the engines' memory peaks."""
    publish = end.held
    numbers: dict[str, Any] = {
        "publish_s": end.publish_s,
        "border_load_s": publish.loaded_s - publish.ready_s,
        "border_compare_s": publish.compared_s - publish.loaded_s,
        "engine_still_s": publish.still_s,
        "border_probe_s": publish.done_s - publish.compared_s,
    }
    if publish.memory:
        peaks = {"host": publish.memory.host_bytes, "device": publish.memory.device_bytes}
        for kind, peak in peaks.items():
            if peak is not None:
                numbers[f"memory_engine_{kind}_bytes"] = peak
    return numbers


def _engine_numbers(
    config: Config,
    use_before: Mapping[str, EngineUse],
    use_after: Mapping[str, EngineUse],
    wait_s: float,
    iteration_s: float,
    devices: int,
) -> dict[str, Any]:
    """Returns what each engine did between two borders, and how long engines were idle.

    wait_s: how long the trainers waited.
    """
    busy_s = 0.0
    engines: dict[str, Any] = {}
    for name, use in use_after.items():
        before = use_before.get(name, EngineUse())  # an engine may be new
        busy_s += use.busy_s - before.busy_s
        engines[name] = {
            "requests": use.requests - before.requests,
            "tokens": use.tokens - before.tokens,
        }
        if use.settings.device is not None:
            engines[name]["device"] = use.settings.device
    mean_busy_s = busy_s / max(1, len(engines))
    numbers: dict[str, Any] = {"engine_idle": idle.engine_idle(mean_busy_s, iteration_s)}
    if use_after and all(use.shared for use in use_after.values()):
        decode_s = busy_s * config.rollout.tensor_parallel / devices
        numbers["device_idle"] = idle.device_idle(wait_s, decode_s, iteration_s)
    numbers["engines"] = engines
    return numbers
