#!/usr/bin/env python
"""TPSPD of a run that gains an engine and loses it again, without stopping: the real coordinator, the real way to join.

Engines are stand-ins (tools/stand_in.py): they sleep as long as a decode step is set to take, so
that two of them generate twice as much as one even on a small machine, and nothing but the control
path is measured. The second one is added by `pa-npu join` and removed by SIGTERM to it, in the
middle of an iteration. This program plays the
trainers: it takes groups out of the rollout buffer as replicas do, sleeps as long as training them
is set to take, and never slower than generation: the run is bound by its engines.

    python tools/bench_elastic.py [--iterations 4] [--markdown FILE] [--json FILE]

Phases: one engine; one, while the second starts; two; the iteration in which the second leaves; one
again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, connect, host_store
from pa_npu.control.messages import (
    BORDER,
    REPORT,
    TRAINERS_RUN_ON,
    AgreementReport,
    BorderReport,
    IterationReport,
    ProbeReport,
    TrainersRunOn,
    UpdateReport,
)
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.families.spec import ModelSpec
from pa_npu.publish.messages import (
    LATE_MANIFEST,
    MANIFEST,
    READY,
    VERDICT,
    StageManifest,
    TrainersReady,
)
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.telemetry.records import read_records

# a script sees its own directory only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.hardware import processor
from tools.stand_in import write_interpreter

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
TRAINERS = 2
GROUPS = 24
RESPONSES = 8
LENGTH = 96
WINDOW = 32
STEP_S = 0.004
SEQUENCE_S = 0.0002
TRAIN_GROUP_S = 0.15  # of one group on its replica; half of an iteration's groups each: 1.8 s
WAIT_S = 120.0
PHASES = (
    "one engine",
    "one, the second starts",
    "two engines",
    "two, the second leaves",
    "one again",
)


@dataclass(frozen=True)
class Row:
    """Medians over the iterations of a phase. tokens_per_s: prompt and response, as TPSPD counts
    them.
    """

    phase: str
    iterations: int
    devices: int
    iteration_s: float
    tokens_per_s: float
    tpspd: float
    engine_idle: float
    trainer_idle: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--iterations", type=int, default=4, help="of each phase with a fixed number of engines"
    )
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        job = Job(Path(directory), stack)
        rows = measure(job, arguments.iterations)
    for row in rows:
        print(" | ".join(cells(row)), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows))
    return 0


def report_of(iteration: int, wait_s: float, train_s: float) -> IterationReport:
    """Makes the report that rank 0 would send: times, and nothing learned."""
    zeros: dict[str, Any] = {name: 0 for name in UpdateReport.__dataclass_fields__}
    update = UpdateReport(**{**zeros, "wait_s": wait_s, "train_s": train_s})
    return IterationReport(iteration, update, ProbeReport(), AgreementReport())


class Job:
    """Store, coordinator and the first engine, which end with `stack`; the trainers are played by
    this process.
    """

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._env.pop(KEY_VARIABLE, None)
        self.version = -1
        # of the last iteration: waiting and training
        self._seconds: tuple[float, float] | None = None
        self._key = secrets.token_hex(16)
        model = [
            sys.executable,
            str(ROOT / "tools" / "make_tiny_model.py"),
            "--out",
            str(directory),
            "--random",
        ]
        subprocess.run(
            [*model, "--train-questions", "512", "--test-questions", "1"],
            check=True,
            timeout=WAIT_S,
            env=self._env,
        )
        self.config = configuration(directory)
        vocabulary = ModelSpec.read(self.config.model.path).vocab_size
        self._speed = [
            "--step-s",
            str(STEP_S),
            "--sequence-s",
            str(SEQUENCE_S),
            "--vocab-size",
            str(vocabulary),
        ]
        run_dir = Path(self.config.run.dir)
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text(dump_config(self.config))
        (run_dir / "api_key").touch(mode=0o600)
        (run_dir / "api_key").write_text(self._key)
        self._server = host_store(HOST, 0)
        self._channel = StoreChannel(connect(HOST, self._server.port, WAIT_S))
        self._buffer = RolloutBuffer(self._channel, "run", readers=1)
        roster = Roster(
            StoreChannel(connect(HOST, self._server.port, WAIT_S), ROSTER_PREFIX), self._key
        )
        roster.publish_config(self.config.model_dump(mode="json"))
        for kind, topic in (("publish", MANIFEST), ("late", LATE_MANIFEST)):
            topic.put(self._channel, StageManifest(f"{kind}-0", {}), rank=0)
        played = TrainersRunOn(
            TRAINERS,
            "cpu",
            "gloo",
            "",
            "",
            "played by this tool",
            "fp32",
            "none",
            "none",
            "none",
            "",
        )
        TRAINERS_RUN_ON.put(self._channel, played)
        with_key = {KEY_VARIABLE: self._key}
        engine = self._start("engine", [str(ROOT / "tools/stand_in.py"), *self._speed], with_key)
        roster.announce(wait_for_line(engine, "stand-in engine ready").split()[-1])
        with_store = with_key | {"PA_NPU_STORE": f"{HOST}:{self._server.port}"}
        self._coordinator = self._start(
            "coordinator",
            ["-m", "pa_npu.coordinator.main", "--config", str(run_dir / "config.yaml")],
            with_store,
        )

    def join(self) -> Started:
        """Start the command that adds an engine."""
        python = write_interpreter(self._directory / "python", *self._speed)
        address = f"{HOST}:{self._server.port}"
        return self._start(
            "join", ["-m", "pa_npu.launcher", "join", address, "--python", str(python)], {}
        )

    def publish(self) -> None:
        """Play the trainers' part in the next publish."""
        self.version += 1
        if self._seconds is not None:
            REPORT.put(
                self._channel,
                report_of(self.version - 1, *self._seconds),
                iteration=self.version - 1,
            )
        BORDER.put(self._channel, BorderReport(border_wait_s=0.0), version=self.version)
        READY.put(self._channel, TrainersReady(self.version), version=self.version)
        place = {"version": self.version, "attempt": 0}
        deadline = time.monotonic() + WAIT_S
        while not VERDICT.exists(self._channel, **place):
            if self._coordinator.popen.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"no publish of version {self.version}:\n{self._coordinator.log.read_text()}"
                )
            time.sleep(0.002)
        verdict = VERDICT.get(self._channel, **place)
        if not verdict.done:
            raise SystemExit(f"publish of version {self.version}: {verdict.reason}")

    def train(self, leaving: Started | None = None) -> None:
        """Take the iteration's groups and "train" them; `leaving` is asked to leave when a third of
        them has come.
        """
        waited_s = 0.0
        for slot in range(GROUPS // TRAINERS):
            if leaving is not None and slot == GROUPS // TRAINERS // 3:
                leaving.popen.send_signal(signal.SIGTERM)
            for replica in range(TRAINERS):
                waited_s += self._buffer.wait(self.version, replica, slot, WAIT_S)
                self._buffer.read(self.version, replica, slot)
                self._buffer.done(self.version, replica, slot)
            time.sleep(TRAIN_GROUP_S)  # all replicas at the same time
        self._seconds = waited_s, GROUPS // TRAINERS * TRAIN_GROUP_S

    def records(self) -> list[dict[str, Any]]:
        return list(read_records(self.config.run.dir))

    def _start(self, name: str, command: Sequence[str], env: dict[str, str]) -> Started:
        """Start a Python child. command: -m and a module, or a file, with arguments."""
        log = self._directory / f"{name}.out"
        with log.open("wb") as file:
            popen = subprocess.Popen(
                [sys.executable, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=self._env | env,
            )
        self._stack.callback(popen.wait, 10)
        self._stack.callback(popen.kill)
        return Started(popen, log)


@dataclass(frozen=True)
class Started:
    popen: subprocess.Popen[bytes]
    log: Path

    def line_with(self, text: str) -> str | None:
        """Returns the first line with `text` in it."""
        return next((line for line in self.log.read_text().splitlines() if text in line), None)


def wait_for_line(process: Started, text: str) -> str:
    deadline = time.monotonic() + WAIT_S
    while (line := process.line_with(text)) is None:
        if process.popen.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no {text!r}:\n{process.log.read_text()}")
        time.sleep(0.05)
    return line


def configuration(directory: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory / "run"), "device": "cpu"},
            "model": {"path": str(directory / "model")},
            "data": {"train": str(directory / "train.jsonl"), "max_prompt_tokens": 64},
            "rollout": {
                "engines": 1,
                "responses_per_prompt": RESPONSES,
                "max_response_tokens": LENGTH,
                "ignore_eos": True,
                "window": WINDOW,
            },
            "reward": {"functions": [{"name": "format", "pattern": "t1"}]},
            "trainer": {"devices": TRAINERS},
            "schedule": {
                "skip_zero_advantage": False,  # whatever its rewards, a group has work
                "iterations": 10_000,
                "prompts_per_iteration": GROUPS,
                "evaluate_every": 0,
            },
            "publish": {"probe_tokens": 0},
            "telemetry": {"trackers": []},
        }
    )


def measure(job: Job, iterations: int) -> list[Row]:
    """Returns rows in the order of PHASES; the first iteration of the run warms up and is in none."""
    phases: list[str] = []

    def iterate(phase: str, leaving: Started | None = None) -> None:
        job.publish()
        phases.append(phase)
        job.train(leaving)

    one_engine, starts, two_engines, leaves, one_again = PHASES
    iterate("warm-up")
    for _ in range(iterations):
        iterate(one_engine)
    joiner = job.join()
    while not joiner.line_with("joined as engine"):
        if joiner.popen.poll() is not None:
            raise SystemExit(f"the engine did not join:\n{joiner.log.read_text()}")
        iterate(starts)
    for _ in range(iterations):
        iterate(two_engines)
    iterate(leaves, joiner)
    if joiner.popen.wait(WAIT_S) != 0:
        raise SystemExit(f"the engine did not leave well:\n{joiner.log.read_text()}")
    for _ in range(iterations):
        iterate(one_again)
    job.publish()
    deadline = time.monotonic() + WAIT_S
    while len(records := job.records()) < len(phases) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [row for phase in PHASES if (row := summarise(phase, phases, records)) is not None]


def summarise(phase: str, phases: Sequence[str], records: Sequence[dict[str, Any]]) -> Row | None:
    chosen = [record for name, record in zip(phases, records, strict=True) if name == phase]
    if not chosen:
        return None

    def median(key: str) -> float:
        return float(statistics.median(record[key] for record in chosen))

    rate = statistics.median(
        (r["tokens_prompt"] + r["tokens_response"]) / r["iteration_s"] for r in chosen
    )
    return Row(
        phase=phase,
        iterations=len(chosen),
        devices=int(median("devices")),
        iteration_s=median("iteration_s"),
        tokens_per_s=float(rate),
        tpspd=median("tpspd"),
        engine_idle=median("engine_idle"),
        trainer_idle=median("trainer_idle"),
    )


HEADER = (
    "phase",
    "iterations",
    "devices",
    "iteration s",
    "tokens/s",
    "TPSPD",
    "engine idle",
    "trainer idle",
)


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.phase,
        str(row.iterations),
        str(row.devices),
        f"{row.iteration_s:.2f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.tpspd:,.0f}",
        f"{row.engine_idle:.0%}",
        f"{row.trainer_idle:.0%}",
    )


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| " + " | ".join(line) + " |"
        for line in (HEADER, ("---", *["---:"] * 7), *map(cells, rows))
    ]
    before, after, again = (next(row for row in rows if row.phase == PHASES[i]) for i in (0, 2, 4))
    step_ms = 1000 * (STEP_S + SEQUENCE_S * WINDOW)
    ideal_s = -(-GROUPS // (WINDOW // RESPONSES)) * LENGTH * step_ms / 1000
    bound = 2 * before.devices / after.devices
    return f"""# An engine joins, and leaves again

`python tools/bench_elastic.py`: the real coordinator and the real `pa-npu join`, between stand-in
engines of a fixed speed ({step_ms:.1f} ms per decode step of {WINDOW} sequences) and a process that plays {TRAINERS} trainer
devices, which need {GROUPS // TRAINERS * TRAIN_GROUP_S:.1f} s per iteration. {GROUPS} groups of {RESPONSES} responses of
{LENGTH} tokens per iteration, {WINDOW} sequences in flight per engine. Medians. {processor()},
{os.cpu_count()} cores; engines and trainers sleep, so it measures the control path, not a model.

{chr(10).join(lines)}

- One engine alone generates an iteration in {ideal_s:.2f} s at least, two in {ideal_s / 2:.2f} s; training what comes
  last is added. The run goes on while the second starts.
- Tokens per second: {after.tokens_per_s / before.tokens_per_s:.2f}x (bound 2). TPSPD counts the joined device as well:
  {after.tpspd / before.tpspd:.2f}x, where the bound is {bound:.2f}x (2 x {before.devices} / {after.devices} devices).
- After it has left, TPSPD is {again.tpspd / before.tpspd:.0%} of what it was before it came. While it leaves it finishes its
  groups, and the first engine does the rest.
- A run that is bound by its trainers gains nothing: `idle trainer` in the progress line says which it is.
"""


if __name__ == "__main__":
    sys.exit(main())
