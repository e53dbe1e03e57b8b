"""Compare runs: curves of reward, accuracy, KL, entropy, length, log-prob difference and TPSPD, with bands over seeds.

    python tools/compare_runs.py RUN RUN ... [--out DIR] [--metrics reward_mean,tpspd] [--axes iteration,seconds]

RUN is a run directory. Runs that differ only in run.seed form a group; the first group is what the
others are compared with. The table goes to the terminal; with --out also DIR/comparison.png, .svg
and a self-contained .html (needs matplotlib: pip install 'pa_npu[plots]').
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import html_page, plots
from tools.run_curves import (
    AXES,
    METRICS,
    Difference,
    Metric,
    RunGroup,
    curve,
    differences,
    group_runs,
    load_runs,
)  # isort: skip

_HEADER = ("metric", "runs", "mean", "difference", "95% interval", "largest gap, same seed")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where pictures and page go")
    parser.add_argument(
        "--metrics",
        type=_names({m.key for m in METRICS}),
        help="of the picture; default: all there are",
    )
    parser.add_argument(
        "--axes",
        type=_names(set(AXES)),
        default=list(AXES),
        help="x axes of the picture; default: all",
    )
    options = parser.parse_args(arguments)
    try:
        groups = group_runs(load_runs(options.runs))
        print(render_markdown(groups))
        if options.out is not None:
            metrics = drawable(groups)
            chosen = [m for m in metrics if options.metrics is None or m.key in options.metrics]
            if not chosen:
                raise UserError(
                    "none of the runs has what --metrics names; leave it out to draw what there is"
                )
            written = plots.save(draw(groups, chosen, options.axes), options.out / "comparison")
            written.append(
                html_page.write_text(options.out / "comparison.html", render_html(groups))
            )
            print("\nWritten: " + ", ".join(map(str, written)))
    except UserError as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return 2
    return 0


def _names(known: set[str]):  # type: ignore[no-untyped-def]
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = sorted(set(names) - known)
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} is not one of {', '.join(sorted(known))}"
            )
        return names

    return parse


def table(groups: Sequence[RunGroup]) -> list[tuple[str, ...]]:
    """Returns the rows under `header`: every metric of every group over the last quarter of the
    iterations, against the first group.
    """
    return [_row(difference, groups[0].label) for difference in differences(groups)]


def render_markdown(groups: Sequence[RunGroup]) -> str:
    lines = ["| " + " | ".join(_HEADER) + " |", "|---|---|" + "---:|" * (len(_HEADER) - 2)]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table(groups)
    ]
    return "\n".join([*lines, "", *notes(groups)])


def notes(groups: Sequence[RunGroup]) -> list[str]:
    """Explains the numbers to a reader."""
    members = "; ".join(
        f"{group.label}: {', '.join(run.name for run in group.runs)}" for group in groups
    )
    return [
        f"Runs by group: {members}.",
        f"Means over the last quarter of the iterations. Differences are to {groups[0].label}; the "
        "interval is Welch's, over runs.",
        "The gap is the largest difference of one iteration between runs with the same seed: 0 "
        "means equal updates.",
    ]


def draw(
    groups: Sequence[RunGroup], metrics: Sequence[Metric], axes: Sequence[str] = tuple(AXES)
) -> Any:
    """Returns a figure with a row per metric and a column per x axis; a band is the range over a
    group's runs.
    """
    figure, panels = plots.new_figure(len(axes), len(metrics), width_in=3.8, height_in=2.4)
    for number, panel in enumerate(panels):
        metric = metrics[number // len(axes)]
        axis = axes[number % len(axes)]
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
    """Returns the metrics that at least one run has."""
    return [
        metric
        for metric in METRICS
        if any(curve(group, metric.key, "iteration") for group in groups)
    ]


def render_html(groups: Sequence[RunGroup]) -> str:
    """One page that needs nothing beside itself."""
    sections = [
        ("Differences", html_page.html_table(_HEADER, table(groups)) + _paragraphs(notes(groups)))
    ]
    sections += [
        (metric.title, html_page.svg_fragment(draw(groups, [metric])))
        for metric in drawable(groups)
    ]
    return html_page.html_page("Comparison of runs", sections)


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _row(measured: Difference, first: str) -> tuple[str, ...]:
    unit = f" ({measured.metric.unit})" if measured.metric.unit else ""
    if measured.label == first:
        return (measured.metric.title + unit, measured.label, f"{measured.mean:.4g}", "", "", "")
    difference = measured.mean - measured.first_mean
    interval = (
        ""
        if measured.half_width is None
        else f"{difference - measured.half_width:+.3g} to {difference + measured.half_width:+.3g}"
    )
    gap = "" if measured.largest_gap is None else f"{measured.largest_gap:.3g}"
    return (
        measured.metric.title + unit,
        measured.label,
        f"{measured.mean:.4g}",
        f"{difference:+.3g}",
        interval,
        gap,
    )


if __name__ == "__main__":
    sys.exit(main())
