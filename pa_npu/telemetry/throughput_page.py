"""Throughput as pictures and one page: TPSPD over time, and where the seconds of every iteration went."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pa_npu.telemetry import plots
from pa_npu.telemetry.metrics import read_records
from pa_npu.telemetry.report import RunReport, labels, notes, table_rows

PARTS = (
    "generate while trainers wait",
    "generate and train at once",
    "train alone",
    "publish and border",
    "evaluate",
    "checkpoint",
    "other",
)
_MOST_BARS = 60


def iteration_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of one iteration by what went on; their sum is iteration_s.

    Generation and training overlap: what both took beyond their union is "at once". The union is the iteration without the
    parts that no schedule can hide (publish, evaluation, checkpoint); what none of these names is "other".
    """

    def seconds(key: str) -> float:
        value = record.get(key)
        return float(value) if isinstance(value, (int, float)) and value > 0 else 0.0

    total = seconds("iteration_s")
    border, evaluate, checkpoint = seconds("publish_s"), seconds("evaluation_s"), seconds("checkpoint_s")
    left = max(0.0, total - border - evaluate - checkpoint)
    generate, train = min(seconds("generate_s"), left), min(seconds("train_s"), left)
    both = max(0.0, generate + train - left)
    parts = (generate - both, both, train - both, border, evaluate, checkpoint)
    return dict(zip(PARTS, (*parts, max(0.0, total - sum(parts))), strict=True))


def draw_tpspd(reports: Sequence[RunReport]) -> Any:
    """TPSPD of every iteration over the run's own wall time, one line per run."""
    figure, (panel,) = plots.new_figure(width_in=6.5, height_in=3.0)
    for number, (label, report) in enumerate(zip(labels(reports), reports, strict=True)):
        clock, points = 0.0, []
        for record in read_records(report.directory):
            clock += float(record.get("iteration_s") or 0.0)
            points.append((clock, record.get("tpspd")))
        points = [point for point in points if isinstance(point[1], (int, float))]
        if points:
            panel.plot(*zip(*points, strict=True), label=label, **plots.line_style(number))
    panel.set_xlabel("wall time in s")
    panel.set_ylabel("tokens / s / device")
    panel.set_title("TPSPD", loc="left")
    panel.set_ylim(bottom=0)
    panel.legend(loc="best")
    return figure


def draw_parts(report: RunReport) -> Any:
    """Stacked bars, one per iteration (evenly drawn ones where there are more than 60), and what the seconds went into."""
    records = read_records(report.directory)
    step = -(-len(records) // _MOST_BARS)
    shown = records[::step]
    figure, (panel,) = plots.new_figure(width_in=6.5, height_in=3.2)
    x = [int(record.get("iteration", number * step)) for number, record in enumerate(shown)]
    parts = [iteration_parts(record) for record in shown]
    base = [0.0] * len(shown)
    for number, name in enumerate(PARTS):
        heights = [part[name] for part in parts]
        if max(heights, default=0.0) > 0:
            panel.bar(x, heights, 0.85 * step, bottom=base, label=name, **plots.bar_style(number))
            base = [low + height for low, height in zip(base, heights, strict=True)]
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("iteration" + (f" (every {step}th)" if step > 1 else ""))
    panel.set_ylabel("s")
    panel.set_title(f"{report.name}: seconds of an iteration", loc="left")
    handles, names = panel.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper")
    return figure


def write_plots(reports: Sequence[RunReport], directory: Path) -> list[Path]:
    """DIRECTORY/tpspd and DIRECTORY/parts-RUN, as PNG and SVG."""
    written = plots.save(draw_tpspd(reports), directory / "tpspd")
    for label, report in zip(labels(reports), reports, strict=True):
        name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in label)
        written += plots.save(draw_parts(report), directory / f"parts-{name}")
    return written


def render_html(reports: Sequence[RunReport], further: Sequence[tuple[str, str]] = ()) -> str:
    """One page that needs nothing beside itself. further: headings and contents, HTML already, that come first."""
    table = plots.html_table(["", *labels(reports)], [[title, *cells] for title, cells in table_rows(reports)])
    said = "".join(f"<p>{html.escape(line)}</p>" for line in notes(reports))
    sections = [*further, ("Throughput", table + said), ("TPSPD over time", plots.svg_fragment(draw_tpspd(reports)))]
    sections += [(f"Seconds of {report.name}", plots.svg_fragment(draw_parts(report))) for report in reports]
    return plots.html_page("Throughput", sections)
