"""`pa-npu report`: the throughput (TPSPD) of finished or running runs side by side, compared with the first of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pa_npu.launcher.subcommands import configuration


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--warmup",
        type=_count,
        metavar="N",
        help="iterations to drop; default: telemetry.warmup_iterations of each run",
    )
    parser.add_argument(
        "--groups",
        action="store_true",
        help="runs that differ only in their seed as one: the median of each figure, and its lowest and highest value",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="write pictures there: TPSPD over time, seconds by iteration"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write table and pictures as one page")


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    configuration.refuse(rest)
    from pa_npu.telemetry import plots, report, report_groups, throughput_page

    reports = [report.load_report(run, options.warmup) for run in options.runs]
    groups = report_groups.group_reports(reports) if options.groups else []
    written = throughput_page.write_plots(reports, options.plots) if options.plots else []
    if options.plots and groups:
        written += report_groups.write_plots(groups, options.plots)
    if options.html:
        further = report_groups.page_sections(groups) if groups else ()
        written.append(plots.write_text(options.html, throughput_page.render_html(reports, further)))
    if options.json:
        print(json.dumps(report_groups.as_json(groups) if groups else report.as_json(reports), indent=2))
    elif options.markdown:
        print(report_groups.render_markdown(groups) if groups else report.render_markdown(reports))
    else:
        print(report_groups.render_text(groups) if groups else report.render_text(reports))
    if written:
        print("\nWritten: " + ", ".join(map(str, written)), file=sys.stderr)
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value
