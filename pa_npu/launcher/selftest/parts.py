"""The parts of the self-test: a table, and how one runs in a process of its own, so that a crash or a hang ends that part alone."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bench:
    """The place of a part. device: npu, cuda or cpu. overrides: key=value for every run, from the
    command line.

    model, data, iterations, configs: of --acceptance; configs are YAML files with the recipe's
    keys.
    """

    folder: Path
    device: str
    overrides: tuple[str, ...] = ()
    model: str | None = None
    data: str | None = None
    iterations: int = 100
    configs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One figure. limit: what it must stay below, or reach where `least`; None where it is only
    told.
    """

    name: str
    value: float
    limit: float | None = None
    least: bool = False
    unit: str = ""

    @property
    def ok(self) -> bool:
        if self.limit is None:
            return True
        return self.value >= self.limit if self.least else self.value <= self.limit


@dataclass(frozen=True)
class SelftestPart:
    """function: module:name, from a Bench to findings. shows: the promise that it checks. limit_s:
    when it is ended.
    """

    name: str
    function: str
    shows: str
    limit_s: float


@dataclass
class Result:
    """A part's end. problem: its last words where it failed otherwise than by a figure; see its
    log.
    """

    name: str
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None and all(finding.ok for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


_HERE = "pa_npu.launcher.selftest"
_POLL_S = 0.05
# The order is that of trust: what later parts need comes first.
PARTS = (
    SelftestPart(
        "versions",
        f"{_HERE}.numbers:versions",
        "the libraries of a supported row are here, and a device",
        120,
    ),
    SelftestPart(
        "attention",
        f"{_HERE}.numbers:attention",
        "every attention form equals dense attention in fp64",
        300,
    ),
    SelftestPart(
        "operator",
        f"{_HERE}.numbers:operator",
        "the merge operator equals its formula in fp64",
        120,
    ),
    SelftestPart(
        "collectives",
        f"{_HERE}.collectives:collectives",
        "the publish group of trainers and engines works",
        600,
    ),
    SelftestPart(
        "learns",
        f"{_HERE}.runs:learns",
        "a tiny run learns, and engine, trainer and transformers agree",
        900,
    ),
    SelftestPart(
        "equal",
        f"{_HERE}.runs:equal",
        "the synchronous run has the periodic run's weights, bit for bit",
        900,
    ),
    SelftestPart(
        "recovers",
        f"{_HERE}.runs:recovers",
        "a killed trainer and a killed engine change no weight",
        1200,
    ),
    SelftestPart(
        "speed", f"{_HERE}.runs:speed", "tokens per second per device, and GB/s of a publish", 900
    ),
)
ACCEPTANCE = (
    SelftestPart("periodic", f"{_HERE}.runs:accept_periodic", "the recipe's run, periodic", 86400),
    SelftestPart(
        "synchronous", f"{_HERE}.runs:accept_synchronous", "the same run, synchronous", 86400
    ),
)


def run_part(part: SelftestPart, bench: Bench) -> Result:
    """Runs a part in a process with a log of its own, which ends at the part's deadline with
    everything that it started.
    """
    # imports torch, for which help need not wait
    from pa_npu.launcher.process.commands import Command
    from pa_npu.launcher.process.process_tree import GRACE_S, ProcessTree

    answer = bench.folder / f"{part.name}.json"
    answer.unlink(missing_ok=True)
    asked = json.dumps({**asdict(bench), "folder": str(bench.folder)})
    start_s = time.monotonic()
    argv = (sys.executable, "-m", _HERE, part.function, asked, str(answer))
    with ProcessTree(bench.folder / "logs", GRACE_S) as tree:
        process = tree.launch(Command(part.name, argv, dict(os.environ)))
        while process.exit_code is None and time.monotonic() - start_s < part.limit_s:
            time.sleep(_POLL_S)
        code = process.exit_code
    result = Result(part.name, time.monotonic() - start_s)
    if code is None:
        result.problem = f"it was not done after {part.limit_s:g} s, and was ended"
    elif answer.is_file():
        result.findings = [Finding(**finding) for finding in json.loads(answer.read_text())]
    else:
        (last,) = process.last_lines(1) or ["nothing was written"]
        result.problem = f"it ended with code {code}: {last.strip()[:300]}"
    return result


def run_function(function: str, asked: str, answer: str) -> int:
    """Run a part here, which is the child, and write its findings."""
    request = json.loads(asked)
    many = {key: tuple(request[key]) for key in ("overrides", "configs")}
    bench = Bench(**{**request, "folder": Path(request["folder"]), **many})
    module, _, name = function.partition(":")
    findings: Sequence[Finding] = getattr(import_module(module), name)(bench)
    Path(answer).write_text(json.dumps([asdict(finding) for finding in findings]))
    return 0
