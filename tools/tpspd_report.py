"""Print the throughput of finished or running runs side by side.

    python tools/tpspd_report.py RUN [RUN ...] [--warmup N] [--json | --markdown]

RUN is a run directory. The last row of interest, "ratio to the first run", compares TPSPD with the first RUN given.
"""

from __future__ import annotations

import argparse
import json
import sys

from pa_npu.errors import UserError
from pa_npu.telemetry import report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Throughput (TPSPD) of runs, side by side.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--warmup",
        type=_count,
        metavar="N",
        help="iterations to drop; default: telemetry.warmup_iterations of each run",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a markdown table")
    options = parser.parse_args(arguments)
    try:
        reports = [report.load_report(run, options.warmup) for run in options.runs]
    except UserError as error:
        print(f"tpspd_report: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.as_json(reports), indent=2))
    elif options.markdown:
        print(report.render_markdown(reports))
    else:
        print(report.render_text(reports))
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


if __name__ == "__main__":
    sys.exit(main())
