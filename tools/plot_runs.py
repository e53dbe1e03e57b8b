"""Draws throughput: TPSPD over time, and what the seconds of an iteration go into, as pictures and one page with the table.

    python tools/plot_runs.py RUN RUN ... --out DIR [--warmup N]

DIR gets tpspd and parts as .png and .svg, and throughput.html; tools/compare_runs.py draws curves
of several seeds.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from pa_npu.errors import BAD_INPUT, UserError
from pa_npu.telemetry.report import (
    WARMUP_ITERATIONS,
    RunReport,
    each_run,
    load_report,
    notes,
    table_rows,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import html_page, plots

PARTS = (
    "generate while trainers wait",
    "generate and train at once",
    "train alone",
    "publish and border",
    "evaluate",
    "checkpoint",
    "other",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for pictures and page"
    )
    parser.add_argument(
        "--warmup", type=int, default=WARMUP_ITERATIONS, metavar="N", help="iterations to leave out"
    )
    options = parser.parse_args(arguments)
    try:
        columns = each_run([load_report(run, options.warmup) for run in options.runs])
        written = write_plots(columns, options.out)
        written.append(html_page.write_text(options.out / "throughput.html", render_html(columns)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print("Written: " + ", ".join(map(str, written)))
    return 0


def iteration_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of one iteration by what went on; their sum is iteration_s.

    Generation and training overlap: what both took beyond their union is "at once". The union is
    the iteration without the parts that no schedule can hide (publish, evaluation, checkpoint);
    what none of these names is "other".
    """

    def seconds(key: str) -> float:
        value = record.get(key)
        return float(value) if isinstance(value, (int, float)) and value > 0 else 0.0

    total = seconds("iteration_s")
    border = seconds("publish_s")
    evaluate = seconds("evaluation_s")
    checkpoint = seconds("checkpoint_s")
    left = max(0.0, total - border - evaluate - checkpoint)
    generate = min(seconds("generate_s"), left)
    train = min(seconds("train_s"), left)
    both = max(0.0, generate + train - left)
    parts = (generate - both, both, train - both, border, evaluate, checkpoint)
    return dict(zip(PARTS, (*parts, max(0.0, total - sum(parts))), strict=True))


def draw_tpspd(columns: Sequence[RunReport]) -> Any:
    """TPSPD of every iteration over wall time."""
    figure, (panel,) = plots.new_figure(width_in=6.5, height_in=3.0)
    for number, column in enumerate(columns):
        records = column.records
        seconds = list(accumulate(float(record.get("iteration_s") or 0.0) for record in records))
        rates = [float(record.get("tpspd") or 0.0) for record in records]
        panel.plot(seconds, rates, label=column.name, **plots.line_style(number))
    panel.set_xlabel("wall time in s")
    panel.set_ylabel("tokens / s / device")
    panel.set_title("TPSPD", loc="left")
    panel.set_ylim(bottom=0)
    panel.legend(loc="best")
    return figure


def draw_parts(columns: Sequence[RunReport]) -> Any:
    """Draws the parts of an iteration's seconds: a stacked bar per column."""
    figure, (panel,) = plots.new_figure(width_in=6.5, height_in=1.2 + 0.45 * len(columns))
    parts = [mean_parts(column) for column in columns]
    base = [0.0] * len(columns)
    for number, name in enumerate(PARTS):
        widths = [part[name] for part in parts]
        if max(widths) > 0:
            panel.barh(
                range(len(columns)), widths, 0.7, left=base, label=name, **plots.bar_style(number)
            )
            base = [low + width for low, width in zip(base, widths, strict=True)]
    panel.set_yticks(range(len(columns)), [column.name for column in columns])
    panel.invert_yaxis()
    panel.set_xlabel("s of an iteration")
    panel.set_title("Seconds of an iteration", loc="left")
    figure.legend(loc="outside right upper")
    return figure


def mean_parts(report: RunReport) -> dict[str, float]:
    """Seconds by name of PARTS, means over the iterations after the warm-up."""
    dropped = int(report.values["dropped_iterations"] or 0)
    parts_of_iterations = [iteration_parts(record) for record in report.records[dropped:]]
    return {name: fmean(parts[name] for parts in parts_of_iterations) for name in PARTS}


def write_plots(columns: Sequence[RunReport], directory: Path) -> list[Path]:
    """Writes DIRECTORY/tpspd and DIRECTORY/parts, as PNG and SVG."""
    return plots.save(draw_tpspd(columns), directory / "tpspd") + plots.save(
        draw_parts(columns), directory / "parts"
    )


def render_html(columns: Sequence[RunReport]) -> str:
    """One page that needs nothing beside itself."""
    header = ["", *(column.name for column in columns)]
    table = html_page.html_table(header, [[title, *cells] for title, cells in table_rows(columns)])
    notes_html = "".join(f"<p>{html.escape(line)}</p>" for line in notes(columns))
    sections = [
        ("Throughput", table + notes_html),
        ("TPSPD over time", html_page.svg_fragment(draw_tpspd(columns))),
        ("Seconds of an iteration", html_page.svg_fragment(draw_parts(columns))),
    ]
    return html_page.html_page("Throughput", sections)


if __name__ == "__main__":
    sys.exit(main())
