"""A picture of plans over numbers of devices: seconds of an iteration with its bounds, and tokens per second and device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pa_npu.planning.prediction.cluster_plan import ClusterPlan
from pa_npu.telemetry.plots import line_style, new_figure, save


def write_plot(plans: Sequence[ClusterPlan], path: Path | str) -> list[Path]:
    """PNG or SVG by the suffix; returns what was written. Raises UserError without matplotlib."""
    figure, (seconds, tokens) = new_figure(2)
    devices = [plan.devices for plan in plans]
    curves = (
        ("predicted", [plan.iteration_s.value for plan in plans]),
        ("separate devices, bound", [plan.separate_bound_s.value for plan in plans]),
        ("colocated", [plan.colocated_s.value for plan in plans]),
        ("perfect", [plan.perfect_s.value for plan in plans]),
    )
    for number, (name, values) in enumerate(curves):
        seconds.plot(devices, values, label=name, **{**line_style(number), "markevery": 1})
    tokens.plot(devices, [plan.tpspd.value for plan in plans], **{**line_style(0), "markevery": 1})
    for axes, label in ((seconds, "iteration (s), estimated or calibrated"), (tokens, "tokens / s / device")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("devices")
        axes.set_ylabel(label)
    seconds.legend()
    return save(figure, path)
