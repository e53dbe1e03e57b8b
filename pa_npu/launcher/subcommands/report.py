"""`pa-npu report`: the throughput (TPSPD) of finished or running runs side by side, compared with the first of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from pa_npu.launcher.subcommands import configuration
from pa_npu.telemetry.report import WARMUP_ITERATIONS


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--warmup",
        type=_count,
        default=WARMUP_ITERATIONS,
        metavar="N",
        help="iterations to leave out at the beginning (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    configuration.refuse(rest)
    from pa_npu.telemetry import report

    columns = report.each_run([report.load_report(run, options.warmup) for run in options.runs])
    if options.json:
        print(json.dumps(report.as_json(columns), indent=2))
    else:
        print(report.render_text(columns))
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value
