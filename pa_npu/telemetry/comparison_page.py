"""The comparison of runs as text, pictures and one page: what tools/compare_runs.py prints and writes."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from pa_npu.telemetry import plots
from pa_npu.telemetry.compare import AXES, METRICS, Difference, Metric, RunGroup, curve, differences

_HEADER = ("metric", "runs", "mean", "difference", "95% interval", "largest gap, same seed")


def table(groups: Sequence[RunGroup]) -> list[tuple[str, ...]]:
    """The rows under `header`: every metric of every group over the last quarter of the iterations, against the first group."""
    return [_row(found, groups[0].label) for found in differences(groups)]


def header() -> tuple[str, ...]:
    return _HEADER


def render_markdown(groups: Sequence[RunGroup]) -> str:
    lines = ["| " + " | ".join(_HEADER) + " |", "|---|---|" + "---:|" * (len(_HEADER) - 2)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table(groups)]
    return "\n".join([*lines, "", *notes(groups)])


def notes(groups: Sequence[RunGroup]) -> list[str]:
    """What a reader must know beside the numbers."""
    members = "; ".join(f"{group.label}: {', '.join(run.name for run in group.runs)}" for group in groups)
    return [
        f"Runs by group: {members}.",
        f"Means over the last quarter of the iterations. Differences are to {groups[0].label}; the interval is Welch's, over runs.",
        "The gap is the largest difference of one iteration between runs with the same seed: 0 means equal updates.",
    ]


def draw(groups: Sequence[RunGroup], metrics: Sequence[Metric], axes: Sequence[str] = tuple(AXES)) -> Any:
    """A figure with a row per metric and a column per x axis; a band is the range over a group's runs."""
    figure, panels = plots.new_figure(len(axes), len(metrics), width_in=3.8, height_in=2.4)
    for number, panel in enumerate(panels):
        metric, axis = metrics[number // len(axes)], axes[number % len(axes)]
        for index, group in enumerate(groups):
            points = curve(group, metric.key, axis)
            if not points:
                continue
            x, mean, low, high = zip(*points, strict=True)
            style = plots.line_style(index)
            panel.plot(x, mean, label=f"{group.label} (n={len(group.runs)})", **style)
            if len(group.runs) > 1:
                panel.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
        panel.set_xlabel(AXES[axis])
        panel.set_title(metric.title, loc="left")
        panel.set_ylabel(metric.unit)
        panel.set_xlim(left=0)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=1)
    return figure


def drawable(groups: Sequence[RunGroup]) -> list[Metric]:
    """The metrics that at least one run has."""
    return [metric for metric in METRICS if any(curve(group, metric.key, "iteration") for group in groups)]


def render_html(groups: Sequence[RunGroup]) -> str:
    """One page that needs nothing beside itself."""
    sections = [("Differences", plots.html_table(_HEADER, table(groups)) + _paragraphs(notes(groups)))]
    sections += [(metric.title, plots.svg_fragment(draw(groups, [metric]))) for metric in drawable(groups)]
    return plots.html_page("Comparison of runs", sections)


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _row(found: Difference, first: str) -> tuple[str, ...]:
    unit = f" ({found.metric.unit})" if found.metric.unit else ""
    if found.label == first:
        return (found.metric.title + unit, found.label, f"{found.mean:.4g}", "", "", "")
    difference = found.mean - found.first_mean
    interval = (
        ""
        if found.half_width is None
        else f"{difference - found.half_width:+.3g} to {difference + found.half_width:+.3g}"
    )
    gap = "" if found.largest_gap is None else f"{found.largest_gap:.3g}"
    return (found.metric.title + unit, found.label, f"{found.mean:.4g}", f"{difference:+.3g}", interval, gap)
