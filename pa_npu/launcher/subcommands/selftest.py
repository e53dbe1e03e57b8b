"""`pa-npu selftest`: one command that shows whether a machine does what this package relies on, and leaves a folder to send."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from pa_npu.errors import FAILED, UserError
from pa_npu.launcher.selftest.folder import tidy, write_report
from pa_npu.launcher.selftest.parts import ACCEPTANCE, PARTS, Bench, Part, run_part
from pa_npu.platform import KINDS


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "pa-npu selftest [--device KIND] [--out DIR] [--only PART,...] "
        "[--acceptance MODEL DATA [--config FILE]] [key=value ...]"
    )
    parser.epilog = "parts: " + "; ".join(f"{part.name}: {part.shows}" for part in PARTS)
    parser.add_argument("--device", choices=KINDS, default="npu", help="what to test; default: npu")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for the report; default: selftest_TIME")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="PART,...",
        help="these parts alone; equal and recovers need learns",
    )
    parser.add_argument(
        "--acceptance",
        nargs=2,
        metavar=("MODEL", "DATA"),
        help="instead: a recipe's run in both modes, with what the community asks of a contributed recipe",
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="of --acceptance: the recipe; the last one wins"
    )
    parser.add_argument("--iterations", type=int, default=100, metavar="N", help="of --acceptance; default: 100")


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if wrong := [word for word in rest if "=" not in word or word.startswith("-")]:
        raise UserError(f"command line: {wrong[0]} is neither an option of selftest nor key=value; see --help")
    parts: tuple[Part, ...] = ACCEPTANCE if options.acceptance else PARTS
    names = [part.name for part in parts]
    if unknown := [name for name in options.only or () if name not in names]:
        raise UserError(f"--only: {unknown[0]} is no part; take some of {', '.join(names)}")
    if options.config and not options.acceptance:
        raise UserError("--config: goes with --acceptance alone; give the runs of the self-test single keys")
    if options.iterations < 1:
        raise UserError(f"--iterations: {options.iterations} is below 1; give how many the runs have")
    folder = (options.out or Path(time.strftime("selftest_%Y%m%d_%H%M%S"))).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out: {folder} is there already and not empty; name a new folder")
    (folder / "logs").mkdir(parents=True)
    model, data = options.acceptance or (None, None)
    bench = Bench(folder, options.device, tuple(rest), model, data, options.iterations, tuple(options.config))
    parts = tuple(part for part in parts if not options.only or part.name in options.only)
    results = []
    for part in parts:
        print(f"{part.name:<12} {part.shows} ... ", end="", flush=True)
        results.append(run_part(part, bench))
        print(f"{'passed' if results[-1].ok else 'FAILED'} ({results[-1].seconds:.0f} s)", flush=True)
        if results[-1].problem:
            print(f"{'':<12} {results[-1].problem}")
        for finding in results[-1].findings:
            if not finding.ok:
                print(f"{'':<12} {finding.what}: {finding.value:.4g}, limit {finding.limit:.4g}")
        write_report(bench, parts, results)
    tidy(bench)
    failed = [result.name for result in results if not result.ok]
    print(f"{len(results) - len(failed)} of {len(results)} parts passed; the report is {folder / 'report.md'}")
    if failed:
        print(f"send {folder} with your question; what failed: {', '.join(failed)}")
    return FAILED if failed else 0
