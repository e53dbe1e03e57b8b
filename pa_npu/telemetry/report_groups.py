"""Groups of runs in a throughput report: the median over a group's runs, and the band from their lowest to their highest value.

Runs whose configurations differ only in their seed and in where they ran form a group, as in telemetry.compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pa_npu.telemetry import plots
from pa_npu.telemetry.columns import markdown_table, text_table
from pa_npu.telemetry.compare import alike
from pa_npu.telemetry.metrics import read_records
from pa_npu.telemetry.report import Figure, RunReport, figures, notes, read_config, shown
from pa_npu.telemetry.secrets import Secrets
from pa_npu.telemetry.throughput_page import PARTS, iteration_parts


@dataclass(frozen=True)
class ReportGroup:
    """Runs that differ in their seed only."""

    label: str
    reports: Sequence[RunReport]

    @property
    def tpspd(self) -> float:
        """The median over its runs."""
        return median(report.result.throughput.tpspd for report in self.reports)


@dataclass(frozen=True)
class Band:
    """A figure over a group's runs; None where none of them has it."""

    title: str
    layout: str
    median: float | None
    low: float | None
    high: float | None

    @property
    def cell(self) -> str:
        if self.median is None or self.low == self.high:
            return shown(self.median, self.layout)
        return " ".join(
            [shown(self.median, self.layout), f"({shown(self.low, self.layout)} to {shown(self.high, self.layout)})"]
        )


def group_reports(reports: Sequence[RunReport]) -> list[ReportGroup]:
    """In order of their first run."""
    configs = {id(report): Secrets(read_config(report.directory)).config for report in reports}
    grouped = alike(reports, lambda report: configs[id(report)], lambda report: report.name)
    return [ReportGroup(label, members) for label, members in grouped]


def bands(group: ReportGroup, first: ReportGroup) -> dict[str, Band]:
    """By name, in the order of the table; the ratio is to the median TPSPD of `first`."""
    columns = [figures(report, first.tpspd, "the first group") for report in group.reports]
    return {name: _band([column[name] for column in columns]) for name in columns[0]}


def group_rows(groups: Sequence[ReportGroup]) -> list[tuple[str, list[str]]]:
    """(title, a cell per group) of every figure that a group has."""
    columns = [bands(group, groups[0]) for group in groups]
    rows = [("runs", [str(len(group.reports)) for group in groups])]
    for name, band in columns[0].items():
        if any(column[name].median is not None for column in columns):
            rows.append((band.title, [column[name].cell for column in columns]))
    return rows


def render_markdown(groups: Sequence[ReportGroup]) -> str:
    return markdown_table([group.label for group in groups], group_rows(groups), group_notes(groups))


def render_text(groups: Sequence[ReportGroup]) -> str:
    labels = [group.label for group in groups]
    return text_table("Throughput of groups of runs", labels, group_rows(groups), group_notes(groups), column_width=36)


def group_notes(groups: Sequence[ReportGroup]) -> list[str]:
    """Explains the numbers to a reader."""
    members = "; ".join(f"{group.label}: {', '.join(report.name for report in group.reports)}" for group in groups)
    said = "Medians over the runs of a group, with the lowest and the highest in brackets."
    return [f"Runs by group: {members}.", said, *notes([report for group in groups for report in group.reports])]


def as_json(groups: Sequence[ReportGroup]) -> dict[str, Any]:
    rows = [
        {
            "group": group.label,
            "runs": [report.name for report in group.reports],
            **{name: {"median": b.median, "low": b.low, "high": b.high} for name, b in bands(group, groups[0]).items()},
        }
        for group in groups
    ]
    return {"groups": rows, "notes": group_notes(groups)}


def draw_tpspd(groups: Sequence[ReportGroup]) -> Any:
    """TPSPD of every iteration over wall time: a line through the medians, a band from the lowest run to the highest."""
    figure, (panel,) = plots.new_figure(width_in=6.5, height_in=3.0)
    for number, group in enumerate(groups):
        points = tpspd_over_time(group)
        if not points:
            continue
        seconds, middle, low, high = zip(*points, strict=True)
        style = plots.line_style(number)
        panel.plot(seconds, middle, label=f"{group.label} (n={len(group.reports)})", **style)
        if len(group.reports) > 1:
            panel.fill_between(seconds, low, high, color=style["color"], alpha=0.18, linewidth=0)
    panel.set_xlabel("wall time in s, median")
    panel.set_ylabel("tokens / s / device")
    panel.set_title("TPSPD: median and range over runs", loc="left")
    panel.set_ylim(bottom=0)
    panel.legend(loc="best")
    return figure


def tpspd_over_time(group: ReportGroup) -> list[tuple[float, float, float, float]]:
    """(wall seconds, median, lowest, highest) of each iteration that all runs of the group have."""
    runs = []
    for report in group.reports:
        clock, points = 0.0, []
        for record in read_records(report.directory):
            clock += float(record.get("iteration_s") or 0.0)
            points.append((clock, float(record.get("tpspd") or 0.0)))
        runs.append(points)
    found = []
    for at in zip(*runs, strict=False):
        rates = [rate for _, rate in at]
        found.append((median(clock for clock, _ in at), median(rates), min(rates), max(rates)))
    return found


def draw_parts(groups: Sequence[ReportGroup]) -> Any:
    """Draws the parts of an iteration's seconds: a stacked bar per group, means over runs and iterations after the warm-up."""
    figure, (panel,) = plots.new_figure(width_in=6.5, height_in=1.2 + 0.45 * len(groups))
    parts = [mean_parts(group) for group in groups]
    base = [0.0] * len(groups)
    for number, name in enumerate(PARTS):
        widths = [part[name] for part in parts]
        if max(widths) > 0:
            panel.barh(range(len(groups)), widths, 0.7, left=base, label=name, **plots.bar_style(number))
            base = [low + width for low, width in zip(base, widths, strict=True)]
    panel.set_yticks(range(len(groups)), [group.label for group in groups])
    panel.invert_yaxis()
    panel.set_xlabel("s of an iteration")
    panel.set_title("Seconds of an iteration", loc="left")
    figure.legend(loc="outside right upper")
    return figure


def mean_parts(group: ReportGroup) -> dict[str, float]:
    """Seconds by name of PARTS."""
    found = [
        iteration_parts(record)
        for report in group.reports
        for record in read_records(report.directory)[report.result.dropped_iterations :]
    ]
    return {name: fmean(parts[name] for parts in found) for name in PARTS}


def write_plots(groups: Sequence[ReportGroup], directory: Path) -> list[Path]:
    """DIRECTORY/tpspd-groups and DIRECTORY/parts-groups, as PNG and SVG."""
    return plots.save(draw_tpspd(groups), directory / "tpspd-groups") + plots.save(
        draw_parts(groups), directory / "parts-groups"
    )


def page_sections(groups: Sequence[ReportGroup]) -> list[tuple[str, str]]:
    """Returns headings and contents of sections for the page of throughput_page.render_html."""
    header = ["", *(group.label for group in groups)]
    table = plots.html_table(header, [[title, *cells] for title, cells in group_rows(groups)])
    return [
        ("Groups of runs", table),
        ("TPSPD over time, by group", plots.svg_fragment(draw_tpspd(groups))),
        ("Seconds of an iteration, by group", plots.svg_fragment(draw_parts(groups))),
    ]


def _band(of_runs: Sequence[Figure]) -> Band:
    values = [figure.value for figure in of_runs if figure.value is not None]
    if not values:
        return Band(of_runs[0].title, of_runs[0].layout, None, None, None)
    return Band(of_runs[0].title, of_runs[0].layout, median(values), min(values), max(values))
