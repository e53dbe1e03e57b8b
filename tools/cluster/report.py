"""Plans of clusters as text of 80 columns, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from pa_npu.config.words import counted
from pa_npu.planning.memory import format_bytes
from pa_npu.planning.prediction.workload import Workload
from tools.cluster.figures import Figure
from tools.cluster.plan import ClusterPlan, KnownBasis
from tools.plots import line_style, new_figure, save

_LABEL = 24
# Work grows with the devices, and an iteration should not: two sizes are alike whose iterations
# differ by no more.
FLAT = 0.10


def _response_mean(workload: Workload) -> float:
    return fmean(length for shape in workload.shapes for length in shape.lengths)


def plan_lines(basis: KnownBasis, plans: Sequence[ClusterPlan]) -> list[str]:
    """Returns the basis, the plan of the most devices in full, and how it grows."""
    largest = plans[-1]
    return [*basis_lines(basis), "", *one_plan_lines(largest), "", *growth_lines(plans)]


def basis_lines(basis: KnownBasis) -> list[str]:
    """Say what is planned from, and where that is from."""
    calibration = basis.costs
    workload = basis.workload
    known = f"every time within a factor of {1.0 + basis.relative_error:.2f}"
    engine = calibration.engine_for(basis.base, basis.spec, basis.typical)
    lines = [
        _line("device", f"{basis.typical.name}: {basis.typical.source}"),
        _line("costs", f"{calibration.origin}, {known}"),
        _line(
            "decode step",
            f"{1000 * engine.step_s:.3g} ms + {1000 * engine.sequence_s:.3g} ms a sequence",
        ),
        _line(
            "lengths",
            f"{workload.origin}: prompts {workload.prompt_mean:.0f}, responses "
            f"{_response_mean(workload):.0f} tokens",
        ),
        _line("model", f"{basis.spec.num_parameters / 1e9:.3g} billion parameters"),
    ]
    if calibration.origin != "estimated":
        lines.append(
            _line("model of an iteration", f"off by {basis.error:.1%} on the run itself (measured)")
        )
    return lines


def one_plan_lines(plan: ClusterPlan) -> list[str]:
    """Returns a plan with its parallel sizes, schedule, times, bounds and memory."""
    config = plan.config
    predicted = plan.predicted
    trainer = config.trainer
    rollout = config.rollout
    lines = [
        f"{counted(plan.devices, 'device')}",
        _line(
            "split",
            f"{counted(rollout.engines, 'engine')} x {rollout.tensor_parallel} + "
            f"{counted(trainer.devices, 'trainer rank')}",
        ),
        _line(
            "trainer ranks",
            f"TP {trainer.tensor_parallel} x PP {trainer.pipeline_parallel} x DP "
            f"{config.mesh.data}",
        ),
        _line(
            "groups",
            f"{config.schedule.prompts_per_iteration} of "
            f"{counted(rollout.responses_per_prompt, 'response')}",
        ),
        _line(
            "window",
            f"{counted(predicted.window, 'sequence')} an engine, {predicted.waves:.1f} waves",
        ),
        _line("iteration", _seconds(plan.iteration_s)),
        _line(
            "  generation, training",
            f"{predicted.generate_s:.3g} s, {predicted.train_s:.3g} s; border {predicted.border_s:.2g} s",
        ),
        _line(
            "  idle",
            f"engines {predicted.engines_idle:.0%}, trainers {predicted.trainers_idle:.0%}",
        ),
        _line("TPSPD", _range(plan.tpspd, "tokens/s per device")),
        _line("1000 updates", _range(plan.device_hours, "device-hours")),
        _line("bounds", ""),
        _line("  separate devices", f"{_seconds(plan.separate_bound_s)}, whatever the schedule"),
        _line("  colocated", f"{_seconds(plan.colocated_s)}, one after another"),
        _line("  perfect", f"{_seconds(plan.perfect_s)}, all devices always busy"),
        _line(
            "trainer memory",
            format_bytes(plan.trainer.total) + _of(plan.trainer.total, plan.device_bytes),
        ),
        _line(
            "engine memory",
            format_bytes(plan.engine.total) + _of(plan.engine.total, plan.device_bytes),
        ),
        _line("breaks first", plan.first_limit.name),
        _line("  takes", f"{_limit(plan)}, estimated"),
    ]
    for engines, ranks, seconds in plan.alternatives:
        lines.append(
            _line(
                "instead",
                f"{counted(engines, 'engine')} + {counted(ranks, 'trainer rank')}: {seconds:.3g} s",
            )
        )
    return lines


def growth_lines(plans: Sequence[ClusterPlan]) -> list[str]:
    """Returns a table over the numbers of devices."""
    lines = [
        "devices  engines  ranks TPxPPxDP   groups  iteration s   TPSPD  idle E/T  colocated  "
        "perfect",
        *(
            f"{plan.devices:7d}  "
            f"{plan.config.rollout.engines:4d}x{plan.config.rollout.tensor_parallel:<2d}  "
            f"{_layout(plan):>14s}  {plan.config.schedule.prompts_per_iteration:7d}  "
            f"{plan.iteration_s.value:11.4g}  {plan.tpspd.value:6.4g}  "
            f"{plan.predicted.engines_idle:3.0%}/{plan.predicted.trainers_idle:<3.0%}  "
            f"{plan.colocated_s.value:9.4g}  {plan.perfect_s.value:7.4g}"
            for plan in plans
        ),
    ]
    if len(plans) > 1:
        lines.append(f"flat                  {flatness(plans)}")
    return lines


def flatness(plans: Sequence[ClusterPlan]) -> str:
    """Over which sizes in a row an iteration per group and device takes as long, the largest
    against the smallest of them, and how far the others are from the nearest of these. Of several
    such rows the one with the most sizes, of larger clusters."""
    rows = [
        plans[start:end] for start in range(len(plans)) for end in range(start + 1, len(plans) + 1)
    ]
    flat = max(
        (row for row in rows if _spread(row) <= FLAT), key=lambda row: (len(row), row[-1].devices)
    )
    text = (
        f"{flat[0].devices} to {counted(flat[-1].devices, 'device')}: any two within "
        f"{_spread(flat):.1%}"
    )
    low = min(map(_per_group, flat))
    high = max(map(_per_group, flat))
    for plan in plans:
        if plan not in flat:
            nearest = high if _per_group(plan) > high else low
            text += f"; {plan.devices}: {_per_group(plan) / nearest - 1.0:+.0%}"
    return text


def _spread(plans: Sequence[ClusterPlan]) -> float:
    """Returns the largest over the smallest, less one."""
    return max(map(_per_group, plans)) / min(map(_per_group, plans)) - 1.0


def _per_group(plan: ClusterPlan) -> float:
    """Device-seconds of a group: iterations of different sizes can be compared by it."""
    return plan.iteration_s.value * plan.devices / plan.config.schedule.prompts_per_iteration


def as_json(basis: KnownBasis, plans: Sequence[ClusterPlan]) -> dict[str, Any]:
    """Everything, with origin and interval of each figure."""
    return {
        "device": asdict(basis.typical),
        "costs": {"origin": basis.costs.origin, "relative_error": basis.relative_error},
        "engine": asdict(basis.costs.engine_for(basis.base, basis.spec, basis.typical)),
        "trainer": asdict(basis.costs.trainer_for(basis.base, basis.spec, basis.typical)),
        "lengths": {
            "origin": basis.workload.origin,
            "prompt_mean": basis.workload.prompt_mean,
            "response_mean": _response_mean(basis.workload),
        },
        "plans": [_plan_json(plan) for plan in plans],
    }


def _plan_json(plan: ClusterPlan) -> dict[str, Any]:
    config = plan.config
    return {
        "devices": plan.devices,
        "keys": {
            "rollout.engines": config.rollout.engines,
            "rollout.tensor_parallel": config.rollout.tensor_parallel,
            "rollout.max_num_seqs": config.rollout.max_num_seqs,
            "trainer.devices": config.trainer.devices,
            "trainer.tensor_parallel": config.trainer.tensor_parallel,
            "trainer.pipeline_parallel": config.trainer.pipeline_parallel,
            "schedule.prompts_per_iteration": config.schedule.prompts_per_iteration,
        },
        "predicted": asdict(plan.predicted),
        "iteration_s": asdict(plan.iteration_s),
        "tpspd": asdict(plan.tpspd),
        "device_hours_per_1000_updates": asdict(plan.device_hours),
        "separate_bound_s": asdict(plan.separate_bound_s),
        "colocated_s": asdict(plan.colocated_s),
        "perfect_s": asdict(plan.perfect_s),
        "trainer_bytes": plan.trainer.total,
        "engine_bytes": plan.engine.total,
        "limits": [asdict(limit) for limit in plan.limits],
        "breaks_first": plan.first_limit.name,
        "alternatives": [
            {"engines": engines, "trainer_devices": ranks, "iteration_s": seconds}
            for engines, ranks, seconds in plan.alternatives
        ],
    }


def _line(label: str, text: str) -> str:
    return f"{label:{_LABEL}s}{text}".rstrip()


def _seconds(value: Figure) -> str:
    return _range(value, "s")


def _range(value: Figure, unit: str) -> str:
    return f"{value.value:.4g} {unit} ({value.low:.3g} to {value.high:.3g}), {value.origin}"


def _layout(plan: ClusterPlan) -> str:
    trainer = plan.config.trainer
    return f"{trainer.tensor_parallel}x{trainer.pipeline_parallel}x{plan.config.mesh.data}"


def _of(used: int, device: int | None) -> str:
    return ", estimated" if device is None else f" of {format_bytes(device)}, estimated"


def _limit(plan: ClusterPlan) -> str:
    limit = plan.first_limit
    where = "in its border" if limit.in_border else "beside it"
    return (
        f"{limit.seconds:.2g} s an iteration {where}, {limit.share(plan.iteration_s.value):.0%} "
        "of it"
    )


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
    for axes, label in (
        (seconds, "iteration (s), estimated or calibrated"),
        (tokens, "tokens / s / device"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("devices")
        axes.set_ylabel(label)
    seconds.legend()
    return save(figure, path)
