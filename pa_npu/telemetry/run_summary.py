"""The text that a run ends with: accuracy, throughput, what was written, and what to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pa_npu.config.words import counted
from pa_npu.errors import DataError
from pa_npu.telemetry.records import EVALUATIONS, METRICS, read_evaluations, read_records
from pa_npu.telemetry.report import each_run, load_report, number, render_text

_LEAST_COMPARED = 2

# What a run directory may hold, in the order of the listing.
_WRITTEN = (
    ("config.yaml", "resolved configuration"),
    (METRICS, "one object per iteration"),
    (EVALUATIONS, "one object per evaluation"),
    ("samples.jsonl", "prompts, responses and rewards"),
    ("tensorboard", "TensorBoard events"),
    ("logs", "one log per process"),
    ("checkpoints", "checkpoints"),
    ("hf", "final weights, HF format"),
)


def summarise(run_dir: Path | str) -> str:
    """Returns the summary of a run directory. Raises DataError if it holds no iteration."""
    run_dir = Path(run_dir)
    records = read_records(run_dir)
    parts = [_accuracy_line(read_evaluations(run_dir), len(records))]
    try:
        parts.append(render_text(each_run([load_report(run_dir)])))
    except DataError as error:
        parts.append(f"Throughput: none ({error})")
    listing = [
        f"  {run_dir / name!s:<40} {meaning}"
        for name, meaning in _WRITTEN
        if (run_dir / name).exists()
    ]
    parts.append("\n".join(["Written:", *listing]))
    parts.append(f"A page with curves, timeline, samples and advice: pa-npu view {run_dir}")
    lines = (
        nothing_learned_line(records, run_dir),
        overlap_line(records),
        saved_publishes_line(records),
        by_rule_line(records),
    )
    parts += [line for line in lines if line]
    return "\n\n".join(parts)


def nothing_learned_line(records: Sequence[Mapping[str, Any]], run_dir: Path) -> str | None:
    """Says that no iteration of the run had anything to learn from, and where to look.

    Returns None if one had.

    A policy learns from the differences of rewards inside a group: where there are none, all
    advantages are zero.
    """
    if not records or any(record.get("reward_std") != 0 for record in records):
        return None
    look = f"look at responses in {run_dir / 'samples.jsonl'}"
    failures = ""
    if num_failed := sum(record.get("reward_errors") or 0 for record in records):
        failures = f"; reward functions failed in {num_failed} groups (logs/coordinator.log)"
    if all(record.get("reward_mean") == 0 for record in records):
        return (
            "Note: every reward of the run is 0, so that nothing was learned from rewards; "
            f"{look}: whether they end within rollout.max_response_tokens and state their answer "
            f"as reward.functions reads it (docs/rewards.md){failures}."
        )
    return (
        "Note: all rewards inside each group were equal, so that nothing was learned from them; "
        f"{look}: the questions are too easy or too hard for the model, or reward.functions tells "
        f"no response from another{failures}."
    )


def by_rule_line(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Says how many groups were trained by rule, and that means over tokens leave them out; None
    where all groups were computed, or none was.
    """
    skipped = sum(record.get("groups_skipped") or 0 for record in records)
    groups = sum(record.get("groups") or 0 for record in records)
    if not skipped or skipped == groups:  # nothing_learned_line says it of all of them
        return None
    return (
        f"Not computed: {skipped} of {groups} groups, whose rewards are all equal, so that they "
        "have no gradient (schedule.skip_zero_advantage). Entropy, clip ratio and differences of "
        "log-probs are means over the tokens of the others."
    )


def saved_publishes_line(records: list[dict[str, Any]]) -> str | None:
    """Says how many publishes publish.divergence saved; None if every version is published."""
    borders = [record for record in records if record.get("publish_skipped") is not None]
    if not borders:
        return None
    kls = [
        number(record, "publish_kl") for record in borders if record.get("publish_kl") is not None
    ]
    skipped = sum(bool(record["publish_skipped"]) for record in borders)
    largest = f"; KL from the engines' policy up to {max(kls):.3g} nats a token" if kls else ""
    return f"Publishes saved: {skipped} of {len(borders)}{largest}."


def overlap_line(records: list[dict[str, Any]]) -> str | None:
    """Compares synchronous with periodic iterations, if a run has two or more of each in turn;
    otherwise None.

    Only the last stretch in which they take turns is compared: before it the schedule was still
    being learned.
    """
    start = len(records) - 1
    while start > 0 and records[start].get("periodic") is not records[start - 1].get("periodic"):
        start -= 1
    turns = [record for record in records[start:] if record.get("periodic") is not None]
    synchronous = [record for record in turns if record["periodic"] is False]
    periodic = [record for record in turns if record["periodic"] is True]
    if min(len(synchronous), len(periodic)) < _LEAST_COMPARED:
        return None
    synchronous_s = _median_s(synchronous)
    periodic_s = _median_s(periodic)
    generate_s = median(number(record, "generate_s") for record in synchronous)
    train_s = median(number(record, "train_s") for record in synchronous)
    gain = synchronous_s / periodic_s
    bound = (generate_s + train_s) / max(generate_s, train_s)
    return (
        f"Synchronous iterations take {synchronous_s:.2f} s (generation {generate_s:.2f} s, then "
        f"training {train_s:.2f} s), periodic ones {periodic_s:.2f} s (medians of "
        f"{len(synchronous)} and "
        f"{len(periodic)} in turn):\n"
        f"{gain:.2f}x as fast, of a possible {bound:.2f}x if the two overlapped completely: "
        f"{gain / bound:.0%} of it."
    )


def _median_s(records: Sequence[Mapping[str, Any]]) -> float:
    """Returns the median of the iterations' seconds without their evaluations."""
    return median(
        number(record, "iteration_s") - number(record, "evaluation_s", 0.0) for record in records
    )


def _accuracy_line(records: list[dict[str, Any]], iterations: int) -> str:
    of_rows = bool(records) and "accuracy" not in records[0]
    measured = "loss" if of_rows else "accuracy"
    evaluations = [(record["version"], number(record, measured)) for record in records]
    if not evaluations:
        return f"{counted(iterations, 'iteration')}; no evaluation (data.test is not set)"
    first_version, first = evaluations[0]
    last_version, last = evaluations[-1]
    label = "Greedy accuracy on the held-out questions:"
    if of_rows:
        label = "Loss of the held-out rows, in nats a token:"
    if first_version == last_version:
        return f"{label} {first:.3f} at version {first_version}; {counted(iterations, 'iteration')}"
    return (
        f"{label} {first:.3f} before (version {first_version}), {last:.3f} after (version "
        f"{last_version})"
    )
