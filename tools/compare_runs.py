"""Compare runs: curves of reward, accuracy, KL, entropy, length, log-prob difference and TPSPD, with bands over seeds.

    python tools/compare_runs.py RUN RUN ... [--out DIR] [--metrics reward_mean,tpspd] [--axes iteration,seconds]

RUN is a run directory. Runs that differ only in run.seed form a group; the first group is what the others are compared with.
The table goes to the terminal; with --out also DIR/comparison.png, .svg and a self-contained .html (needs matplotlib: pip
install 'pa_npu[plots]').
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pa_npu.errors import UserError
from pa_npu.telemetry import comparison_page, plots
from pa_npu.telemetry.compare import AXES, METRICS, group_runs, load_runs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where pictures and page go")
    parser.add_argument(
        "--metrics", type=_names({m.key for m in METRICS}), help="of the picture; default: all there are"
    )
    parser.add_argument(
        "--axes", type=_names(set(AXES)), default=list(AXES), help="x axes of the picture; default: all"
    )
    options = parser.parse_args(arguments)
    try:
        groups = group_runs(load_runs(options.runs))
        print(comparison_page.render_markdown(groups))
        if options.out is not None:
            metrics = comparison_page.drawable(groups)
            chosen = [m for m in metrics if options.metrics is None or m.key in options.metrics]
            if not chosen:
                raise UserError("none of the runs has what --metrics names; leave it out to draw what there is")
            written = plots.save(comparison_page.draw(groups, chosen, options.axes), options.out / "comparison")
            written.append(plots.write_text(options.out / "comparison.html", comparison_page.render_html(groups)))
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
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(sorted(known))}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
