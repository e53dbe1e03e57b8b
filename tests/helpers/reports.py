"""Reports as trainers send them, for tests that play the trainers, and reports as plain numbers, for tests that compare them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pa_npu.control.messages import (
    AgreementReport,
    IterationReport,
    ProbeReport,
    TrainersRunOn,
    UpdateReport,
)


def trainers_run_on(fallback: str = "") -> TrainersRunOn:
    """Makes the description of trainers that a test plays."""
    kernel = {"attention": "auto", "kernel": "cpu-flash", "merge": "torch", "fallback": fallback}
    return TrainersRunOn(
        2, "cpu", "gloo", "3.11.0", "2.13.0", "megatron-core 0.12.1", "fp32", **kernel
    )


def numbers(*reports: Any) -> dict[str, float]:
    """The fields of reports under the names of metrics.jsonl, those that are None left out."""
    return {
        name: value
        for report in reports
        for name, value in asdict(report).items()
        if value is not None
    }


def update_report(**fields: Any) -> UpdateReport:
    """With these fields; the others are 0, or None where they may be."""
    zeros = {
        name: int(name.startswith("tokens")) * 10 for name in UpdateReport.__dataclass_fields__
    }
    optional = {name: None for name, kind in UpdateReport.__annotations__.items() if "None" in kind}
    floats = {
        name: float(value)
        for name, value in zeros.items()
        if "float" in UpdateReport.__annotations__[name]
    }
    return UpdateReport(**{**zeros, **floats, **optional, **fields})


def iteration_report(iteration: int, **fields: Any) -> IterationReport:
    """Makes the report that rank 0 sends after an iteration. fields: of UpdateReport."""
    return IterationReport(iteration, update_report(**fields), ProbeReport(), AgreementReport())
