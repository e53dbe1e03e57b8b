"""The text a run ends with: accuracy before and after, throughput, and the paths of what it wrote."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from pa_npu.config.words import counted
from pa_npu.errors import DataError
from pa_npu.telemetry.metrics import EVALUATIONS, METRICS, read_evaluations, read_records
from pa_npu.telemetry.report import each_run, load_report, render_text
from pa_npu.telemetry.tpspd import number

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
    """The summary of a run directory. Raises DataError where it holds no iteration."""
    run_dir = Path(run_dir)
    records = read_records(run_dir)
    parts = [_accuracy_line(read_evaluations(run_dir), len(records))]
    try:
        parts.append(render_text(each_run([load_report(run_dir)])))
    except DataError as error:
        parts.append(f"Throughput: none ({error})")
    listing = [f"  {run_dir / name!s:<40} {meaning}" for name, meaning in _WRITTEN if (run_dir / name).exists()]
    parts.append("\n".join(["Written:", *listing]))
    parts += [line for line in (overlap_line(records), saved_publishes_line(records)) if line]
    return "\n\n".join(parts)


def saved_publishes_line(records: list[dict[str, Any]]) -> str | None:
    """How many publishes publish.divergence saved; None where every version is published."""
    borders = [record for record in records if record.get("publish_skipped") is not None]
    if not borders:
        return None
    kls = [number(record, "publish_kl") for record in borders if record.get("publish_kl") is not None]
    skipped = sum(bool(record["publish_skipped"]) for record in borders)
    largest = f"; KL from the engines' policy up to {max(kls):.3g} nats a token" if kls else ""
    return f"Publishes saved: {skipped} of {len(borders)}{largest}."


def overlap_line(records: list[dict[str, Any]]) -> str | None:
    """Compares synchronous with periodic iterations, if a run has two or more of each in turn; otherwise None.

    Only the last stretch in which they take turns is compared: before it the schedule was still being learned.
    """
    start = len(records) - 1
    while start > 0 and records[start].get("periodic") is not records[start - 1].get("periodic"):
        start -= 1
    turns = [record for record in records[start:] if record.get("periodic") is not None]
    sync, periodic = ([r for r in turns if r["periodic"] is kind] for kind in (False, True))
    if min(len(sync), len(periodic)) < _LEAST_COMPARED:
        return None
    seconds = [
        median(number(r, "iteration_s") - number(r, "evaluation_s", 0.0) for r in some) for some in (sync, periodic)
    ]
    generate_s, train_s = (median(number(r, name) for r in sync) for name in ("generate_s", "train_s"))
    gain, bound = seconds[0] / seconds[1], (generate_s + train_s) / max(generate_s, train_s)
    return (
        f"Synchronous iterations take {seconds[0]:.2f} s (generation {generate_s:.2f} s, then training {train_s:.2f} s), periodic "
        f"ones {seconds[1]:.2f} s (medians of {len(sync)} and {len(periodic)} in turn):\n"
        f"{gain:.2f}x as fast, of a possible {bound:.2f}x if the two overlapped completely: {gain / bound:.0%} of it."
    )


def _accuracy_line(records: list[dict[str, Any]], iterations: int) -> str:
    evaluations = [(record["version"], number(record, "accuracy")) for record in records]
    if not evaluations:
        return f"{counted(iterations, 'iteration')}; no evaluation (data.test is not set)"
    (first_version, first), (last_version, last) = evaluations[0], evaluations[-1]
    label = "Greedy accuracy on the held-out questions:"
    if first_version == last_version:
        return f"{label} {first:.3f} at version {first_version}; {counted(iterations, 'iteration')}"
    return f"{label} {first:.3f} before (version {first_version}), {last:.3f} after (version {last_version})"
