#!/usr/bin/env python
"""Throughput against the number of engines and of trainer replicas: one real coordinator between engines and trainers that sleep.

Engines are stand-ins (tools/stand_in.py) of a set speed, many to a process; this program plays the
trainers: replicas take their groups out of the rollout buffer as they come and sleep as long as
training one is set to take. The coordinator, its HTTP, rewards and store are real, and on a core of
their own where there are two, so that what is measured is what one coordinator carries.

    python tools/bench_scaling.py [--engines 1,2,4,8,16,32,64] [--replicas 4,8,16,32,64] [--iterations 4] [--plot NAME]
                                  [--markdown FILE] [--json FILE]

Two sweeps. Engines: work grows with them (8 groups of 8 responses of 128 tokens per engine and
iteration), and as many replicas are there as keep up. Replicas: the most engines of the first
sweep, whose work stays, while few replicas make the iteration longer.

Columns: ideal: tokens per second of the slower side alone, without border. of ideal: the measured
ones over it. coordinator: share of a core that its process used. Medians of the iterations after
the first. The plot needs matplotlib: pip install 'pa_npu[plots]'.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.load import dump_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, connect, host_store
from pa_npu.control.messages import BORDER, REPORT, TRAINERS_RUN_ON, BorderReport, TrainersRunOn
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

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.bench_elastic import report_of
from tools.hardware import processor
from tools.stand_in import HeavyTail, Speed, StandInEngine, serving

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
GROUPS_PER_ENGINE = 8
RESPONSES = 8
LENGTH = 128
# an engine has four groups at a time, a decode step takes 10 ms however many these are
WINDOW = 32
STEP_S = 0.010
STRIDE = 8
VARIANTS = 64  # distinct responses, so that engines cost little to play
TRAIN_GROUP_S = 0.08
WAIT_S = 180.0
TOKENS_OF_GROUP = RESPONSES * LENGTH


@dataclass(frozen=True)
class Row:
    """Medians. tokens_per_s: of responses."""

    sweep: str
    engines: int
    replicas: int
    iteration_s: float
    tokens_per_s: float
    coordinator: float

    @property
    def generate_s(self) -> float:
        """The least seconds that an engine takes for its groups."""
        return GROUPS_PER_ENGINE * RESPONSES / WINDOW * LENGTH * STEP_S

    @property
    def train_s(self) -> float:
        return -(-GROUPS_PER_ENGINE * self.engines // self.replicas) * TRAIN_GROUP_S

    @property
    def ideal_tokens_per_s(self) -> float:
        return (
            GROUPS_PER_ENGINE * self.engines * TOKENS_OF_GROUP / max(self.generate_s, self.train_s)
        )

    @property
    def of_ideal(self) -> float:
        return self.tokens_per_s / self.ideal_tokens_per_s


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="1,2,4,8,16,32,64", help="numbers of the first sweep")
    parser.add_argument("--replicas", default="4,8,16,32,64", help="numbers of the second sweep")
    parser.add_argument(
        "--iterations", type=int, default=4, help="of each row, the first of which is left out"
    )
    parser.add_argument(
        "--plot", type=Path, help="write a picture under this name, .png, .svg or both"
    )
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--as-engines", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--median", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.as_engines:
        asyncio.run(
            host_engines(args.as_engines, args.vocabulary, os.environ[KEY_VARIABLE], args.median)
        )
        return 0
    engines = [int(text) for text in args.engines.split(",") if text]
    replicas = [int(text) for text in args.replicas.split(",") if text]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench_scaling_") as scratch:
        directory = Path(scratch)
        make = [
            sys.executable,
            str(ROOT / "tools" / "make_tiny_model.py"),
            "--out",
            str(directory),
            "--random",
        ]
        make += ["--train-questions", "2048", "--test-questions", "1"]
        subprocess.run(make, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
        for count in engines:
            rows.append(measure(directory, "engines", count, keeping_up(count), args.iterations))
            print(" | ".join(cells(rows[-1])), flush=True)
        for count in replicas:
            rows.append(measure(directory, "replicas", max(engines), count, args.iterations))
            print(" | ".join(cells(rows[-1])), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
        )
    if args.plot:
        draw(rows, args.plot)
    if args.markdown:
        args.markdown.write_text(render(rows) + "\n", encoding="utf-8")
    return 0


def keeping_up(engines: int) -> int:
    """Replicas that train in half the time that engines generate; they divide the groups."""
    return max(1, engines // 2)


async def host_engines(count: int, vocabulary: int, key: str, median: float | None) -> None:
    """Serve so many engines, print a URL for each, and go on for ever. median: of heavy-tailed
    lengths, where these are wanted.
    """
    speed = Speed(STEP_S, 0.0, STRIDE, WINDOW)
    lengths = None if median is None else HeavyTail(median)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            engine = StandInEngine(
                speed, vocabulary, variants=VARIANTS, api_key=key, lengths=lengths
            )
            print(await stack.enter_async_context(serving(engine, HOST)), flush=True)
        await asyncio.Event().wait()


def measure(directory: Path, sweep: str, engines: int, replicas: int, iterations: int) -> Row:
    """One coordinator with so many engines and replicas."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        job = Job(directory, stack, engines, replicas)
        os.sched_setaffinity(job.coordinator.pid, {cores[0]})
        for process in [job.engines.pid, os.getpid()]:
            os.sched_setaffinity(process, set(cores[1:] or cores))
        stack.callback(os.sched_setaffinity, 0, set(cores))
        job.publish()
        job.train()
        begun_s = time.monotonic()
        used_s = cpu_seconds(job.coordinator.pid)
        for _ in range(iterations - 1):
            job.publish()
            job.train()
        job.publish()
        share = (cpu_seconds(job.coordinator.pid) - used_s) / (time.monotonic() - begun_s)
        records = job.records(iterations)[1:]
    seconds = statistics.median(record["iteration_s"] for record in records)
    tokens = statistics.median(
        record["tokens_response"] / record["iteration_s"] for record in records
    )
    return Row(sweep, engines, replicas, seconds, tokens, share)


class Job:
    """Store, engines and coordinator, which end with `stack`; the trainers are threads of this
    process.

    median: of responses with heavy-tailed lengths; None: all have LENGTH tokens. keys: sections of
    the configuration that differ.
    """

    def __init__(
        self,
        directory: Path,
        stack: contextlib.ExitStack,
        engines: int,
        replicas: int,
        median: float | None = None,
        **keys: dict[str, Any],
    ) -> None:
        self._groups = GROUPS_PER_ENGINE * engines
        self._replicas = replicas
        self._stack = stack
        self._version = -1
        self._seconds = (0.0, 0.0)
        self._run_dir = directory / f"run-{engines}-{replicas}-{secrets.token_hex(2)}"
        config = configuration(
            directory, self._run_dir, engines, replicas, ignore_eos=median is None, **keys
        )
        self._run_dir.mkdir()
        file = self._run_dir / "config.yaml"
        file.write_text(dump_config(config))
        key = secrets.token_hex(16)
        self._server = host_store(HOST, 0)
        self._channel = self._connected("")
        self._buffers = [
            RolloutBuffer(self._connected(""), "run", readers=1) for _ in range(replicas)
        ]
        for kind, topic in (("publish", MANIFEST), ("late", LATE_MANIFEST)):
            topic.put(self._channel, StageManifest(f"{kind}-0", {}), rank=0)
        played = TrainersRunOn(
            replicas,
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
        vocabulary = ModelSpec.read(config.model.path).vocab_size
        hosts = [__file__, "--as-engines", str(engines), "--vocabulary", str(vocabulary)]
        hosts += [] if median is None else ["--median", str(median)]
        self.engines = self._start("engines", hosts, {KEY_VARIABLE: key})
        roster = Roster(self._connected(ROSTER_PREFIX), key)
        assert self.engines.stdout is not None
        for _ in range(engines):
            roster.announce(self.engines.stdout.readline().decode().strip())
        store = {"PA_NPU_STORE": f"{HOST}:{self._server.port}"}
        self.coordinator = self._start(
            "coordinator",
            ["-m", "pa_npu.coordinator.main", "--config", str(file)],
            {KEY_VARIABLE: key, **store},
        )

    def _connected(self, prefix: str) -> StoreChannel:
        store = connect(HOST, self._server.port, WAIT_S)
        return StoreChannel(store, prefix) if prefix else StoreChannel(store)

    def publish(self) -> None:
        """Play the trainers' part in the next publish."""
        self._version += 1
        if self._version:
            report = report_of(self._version - 1, *self._seconds)
            REPORT.put(self._channel, report, iteration=self._version - 1)
        BORDER.put(self._channel, BorderReport(border_wait_s=0.0), version=self._version)
        READY.put(self._channel, TrainersReady(self._version), version=self._version)
        place = {"version": self._version, "attempt": 0}
        deadline = time.monotonic() + WAIT_S
        while not VERDICT.exists(self._channel, **place):
            if self.coordinator.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    "bench_scaling: no "
                    f"publish:\n{(self._run_dir / 'coordinator.out').read_text()[-3000:]}"
                )
            time.sleep(0.002)

    def train(self) -> None:
        """All replicas take the iteration's groups and "train" them."""
        waited = [0.0] * self._replicas
        count = self._groups // self._replicas

        def replica(number: int) -> None:
            buffer = self._buffers[number]
            for slot in range(count):
                waited[number] += buffer.wait(self._version, number, slot, WAIT_S)
                buffer.read(self._version, number, slot)
                buffer.done(self._version, number, slot)
                time.sleep(TRAIN_GROUP_S)

        threads = [
            threading.Thread(target=replica, args=(n,), name=f"replica {n}")
            for n in range(self._replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._seconds = statistics.fmean(waited), count * TRAIN_GROUP_S

    def records(self, count: int) -> list[dict[str, Any]]:
        """Waits for so many iterations' records and returns them."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                if len(records := read_records(self._run_dir)) >= count:
                    return list(records[:count])
            time.sleep(0.05)
        raise SystemExit(f"bench_scaling: {self._run_dir} has fewer than {count} records")

    def _start(
        self, name: str, command: Sequence[str], env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        output = (
            subprocess.PIPE if name == "engines" else (self._run_dir / f"{name}.out").open("wb")
        )
        popen = subprocess.Popen(
            [sys.executable, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
        )
        self._stack.callback(popen.wait, 10)
        self._stack.callback(popen.kill)
        return popen


def configuration(
    directory: Path,
    run_dir: Path,
    engines: int,
    replicas: int,
    *,
    ignore_eos: bool,
    **keys: dict[str, Any],
) -> Config:
    model = directory / "model"
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(run_dir), "device": "cpu"},
        "model": {"path": str(model)},
        "data": {"train": str(directory / "train.jsonl"), "max_prompt_tokens": 64},
        "rollout": {
            **{
                "engines": engines,
                "responses_per_prompt": RESPONSES,
                "max_response_tokens": LENGTH,
            },
            **{"ignore_eos": ignore_eos, "window": WINDOW},
        },
        "reward": {"functions": [{"name": "format", "pattern": "t1"}]},
        "trainer": {"devices": replicas},
        "schedule": {
            "iterations": 10_000,
            "prompts_per_iteration": GROUPS_PER_ENGINE * engines,
            "skip_zero_advantage": False,  # every group goes the whole way, whatever its rewards
        },
        "publish": {"probe_tokens": 0},
        "telemetry": {"trackers": [], "samples": 0},
    }
    return Config.model_validate(
        {name: {**tree.get(name, {}), **keys.get(name, {})} for name in tree | keys}
    )


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


HEADER = (
    "sweep",
    "engines",
    "replicas",
    "iteration s",
    "tokens/s",
    "ideal",
    "of ideal",
    "coordinator",
)


def cells(row: Row) -> tuple[str, ...]:
    rates = (f"{row.tokens_per_s:,.0f}", f"{row.ideal_tokens_per_s:,.0f}", f"{row.of_ideal:.0%}")
    return (
        row.sweep,
        str(row.engines),
        str(row.replicas),
        f"{row.iteration_s:.2f}",
        *rates,
        f"{row.coordinator:.0%} of a core",
    )


def render(rows: Sequence[Row]) -> str:
    lines = [
        f"Stand-in engines of {1000 * STEP_S:g} ms per decode step, {WINDOW} sequences in flight "
        f"on each; {GROUPS_PER_ENGINE} groups of {RESPONSES} responses of {LENGTH} tokens per "
        f"engine and iteration; {TRAIN_GROUP_S:g} s to train a group; {processor()}, "
        f"{os.cpu_count()} cores.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---|" + "---:|" * (len(HEADER) - 1),
    ]
    return "\n".join([*lines, *("| " + " | ".join(cells(row)) + " |" for row in rows)])


def draw(rows: Sequence[Row], path: Path) -> list[Path]:
    """Both sweeps beside each other, logarithmic: what was measured, and the ideal."""
    from tools.plots import line_style, new_figure, save

    figure, panels = new_figure(2, width_in=3.6, height_in=3.0)
    for panel, (sweep, title) in zip(
        panels,
        (("engines", "engines, work growing"), ("replicas", "trainer replicas")),
        strict=True,
    ):
        of_sweep = [row for row in rows if row.sweep == sweep]
        x = [getattr(row, sweep) for row in of_sweep]
        panel.plot(x, [row.tokens_per_s for row in of_sweep], label="measured", **line_style(0))
        panel.plot(x, [row.ideal_tokens_per_s for row in of_sweep], label="ideal", **line_style(1))
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(x, [str(value) for value in x])
        panel.set_xlabel(title)
        panel.set_ylabel("response tokens / s")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.legend(loc="upper left")
    return save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
