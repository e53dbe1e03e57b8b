"""Reads a run's records for a planner: its configuration, its iterations, and when each group was where."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.errors import DataError
from pa_npu.planning.iteration_model.subjects import GroupTiming
from pa_npu.planning.prediction.workload import Shape, Workload, drawn_shapes
from pa_npu.telemetry.chrome_trace import read_spans
from pa_npu.telemetry.records import read_records
from pa_npu.telemetry.timeline import DIRECTORY

_CONFIG = "config.yaml"
_COORDINATOR = "coordinator.jsonl"
# Iterations at the beginning in which processes warm up and schedules are not yet chosen by what
# was learned: with all groups at once, say, whose prompts an engine computes in one heap, and
# slower than one by one.
_WARMUP = 3


@dataclass(frozen=True)
class Trained:
    """A microbatch on one rank: the numbers of its groups, and seconds."""

    groups: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class SeenIteration:
    """record: its line of metrics.jsonl. groups: as they were generated, with real lengths.
    trained: on any one rank.
    """

    record: Mapping[str, Any]
    groups: Sequence[GroupTiming]
    trained: Sequence[Trained]

    @property
    def iteration_s(self) -> float:
        """Evaluation left out."""
        return float(self.record["iteration_s"]) - float(self.record.get("evaluation_s") or 0.0)


@dataclass(frozen=True)
class SeenRun:
    """iterations: behind the warm-up, if there are that many. complete: of them, those with all
    groups and their lengths.
    """

    directory: Path
    config: Config
    iterations: Sequence[SeenIteration]

    @property
    def complete(self) -> list[SeenIteration]:
        return [seen for seen in self.iterations if seen.groups]

    def median(self, key: str) -> float:
        """Returns the median of a number in the records. Raises DataError where none has it."""
        values = [
            seen.record[key]
            for seen in self.iterations
            if isinstance(seen.record.get(key), (int, float))
        ]
        if not values:
            raise DataError(
                f"{self.directory}: its records have no {key}; plan from a run of this version of "
                "the program"
            )
        return float(statistics.median(values))


def read_run(directory: Path | str) -> SeenRun:
    """Raises DataError where it is no run directory or has no records."""
    directory = Path(directory)
    records = read_records(directory)
    config = load_config([str(directory / _CONFIG)])
    kept = records[min(_WARMUP, len(records) - 1) :]
    for key in ("iteration_s", "generate_s", "train_s"):
        if not all(
            isinstance(record.get(key), (int, float)) and record[key] > 0 for record in kept
        ):
            raise DataError(
                f"{directory}: a record has no {key}; plan from a run that ended its iterations"
            )
    groups = _generated(directory)
    trained = _trained(directory)
    iterations = []
    for record in kept:
        number = int(record["iteration"])
        timings = groups.get(number, [])
        whole = len(timings) >= config.schedule.prompts_per_iteration
        iterations.append(SeenIteration(record, timings if whole else (), trained.get(number, ())))
    return SeenRun(directory, config, iterations)


def seen_workload(run: SeenRun) -> Workload:
    """Take the workload of a run; from its mean lengths where its timeline does not have those of
    the groups.
    """
    shapes = [
        Shape(timing.prompt_tokens, timing.lengths, timing.computed)
        for seen in run.complete
        for timing in sorted(seen.groups, key=lambda timing: timing.index)
    ]
    by_rule = [
        seen.record.get("groups_skipped", 0) / seen.record["groups"] for seen in run.iterations
    ]
    share = statistics.fmean(by_rule)
    if shapes:
        return Workload(tuple(shapes), "measured", by_rule=share)
    mean = run.median("response_length_mean")
    prompt = run.median("prompt_length_mean")
    return Workload(drawn_shapes(run.config, prompt, mean), "calibrated", by_rule=share)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        return read_spans(path) if path.is_file() else []
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _generated(directory: Path) -> dict[int, list[GroupTiming]]:
    """By iteration; groups whose lengths are not recorded are left out.

    The last attempt's where the run was restarted.
    """
    timings: dict[int, dict[int, GroupTiming]] = {}
    events = _events(directory / DIRECTORY / _COORDINATOR)
    rewarded: dict[tuple[int, int], dict[str, Any]] = {}
    for event in events:
        number = _number(event, "reward")
        args = event["args"]
        if number is not None and isinstance(args.get("iteration"), int):
            rewarded[args["iteration"], number] = event
    for event in events:
        number = _number(event, "group")
        args = event["args"]
        lane = event["lane"]
        lengths = args.get("lengths")
        prompt = args.get("prompt")
        iteration = args.get("iteration")
        if number is None or not lane.startswith("engine ") or not _lengths(lengths):
            continue
        if not isinstance(prompt, int) or not isinstance(iteration, int):
            continue
        end_s = event["end"]
        reward = rewarded.get((iteration, number), {"end": end_s, "args": {}})
        delivered_s = max(0.0, reward["end"] - end_s)
        engine = lane.removeprefix("engine ")
        computed = _computed(reward["args"].get("computed"))
        timing = GroupTiming(
            number,
            engine,
            event["start"],
            end_s,
            prompt,
            tuple(lengths),
            delivered_s,
            computed=computed,
        )
        timings.setdefault(iteration, {})[number] = timing
    return {iteration: list(groups.values()) for iteration, groups in timings.items()}


def _computed(value: Any) -> tuple[int, tuple[int, ...]] | None:
    """Returns tokens of the prompt and of each response that engines computed anew; None where the
    record does not say.
    """
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        return None
    prompt, responses = value
    if not all(isinstance(number, int) and number >= 0 for number in (prompt, *responses)):
        return None
    return prompt, tuple(responses)


def _lengths(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and item >= 0 for item in value)
        and any(value)
    )


def _number(event: Mapping[str, Any], kind_wanted: str) -> int | None:
    kind, _, number = str(event.get("name", "")).partition(" ")
    return int(number) if kind == kind_wanted and number.isdigit() else None


def _trained(directory: Path) -> dict[int, list[Trained]]:
    """Microbatches by iteration, of the first rank that has them."""
    trained: dict[int, list[Trained]] = {}
    for path in sorted((directory / DIRECTORY).glob("trainer-*.jsonl")):
        events = _events(path)
        spans = [
            (event["start"], event["end"], event["args"]["iteration"])
            for event in events
            if event["name"] == "iteration" and isinstance(event["args"].get("iteration"), int)
        ]
        pieces = [event for event in events if event["lane"] == "microbatches"]
        pieces.sort(key=lambda event: event["start"])
        for start_s, end_s, iteration in spans:
            inside = [
                event for event in pieces if start_s <= event["start"] and event["end"] <= end_s
            ]
            numbers = [str(event["name"]).removeprefix("group ").split(", ") for event in inside]
            if (
                iteration not in trained
                and inside
                and all(text.isdigit() for texts in numbers for text in texts)
            ):
                trained[iteration] = [
                    Trained(tuple(map(int, texts)), event["end"] - event["start"])
                    for texts, event in zip(numbers, inside, strict=True)
                ]
    return trained
