#!/usr/bin/env python
"""How close periodic asynchrony comes to its bound with rollout.window=auto: sync against periodic, alternating inside each run.

Real vLLM engines and one real trainer rank, each pinned to a core. With Tg the seconds of
generation and Tt those of training per iteration, a synchronous iteration takes Tg + Tt and a
perfectly overlapped one max(Tg, Tt). Rows vary

  lengths   equal: every response has the same length (ignore_eos). heavy: lognormal, exp(0.6 a + 0.4 b) times the median, a of the
            prompt and b of the response, cut at four times the mean; every prompt comes again, so
            that its length can be learned.
  groups    of 8 responses in an iteration.
  engines   one, or two, which share a core where the machine has no third.
  Tg : Tt   balanced, engine-bound (2 : 1) and trainer-bound (1 : 2). Tt is set through the prompt length, which costs the trainer
            (separate sequences) and hardly the engine (prefix cache). fixed-16 has prompts of 128
            instead.

With --paced devices take as long as asked and hardly a core (tools/paced/): one for each engine and
for the trainer, on a machine of any size. Tt is set through the trainer's speed then, and all
prompts have 128 tokens.

A run alternates iteration by iteration (schedule.compare_iterations): even ones are synchronous,
odd ones periodic, each with the schedule that the controller chooses for its kind. Tg and Tt are
medians of the synchronous ones, which have the window that generates fastest; where cores are as
few as engines and trainers, training takes longer beside generation, which is given too. The table
has, over max(Tg, Tt): periodic iterations without border; with --constant the best of further runs
with constant windows; the optimum, the best of a family of schedules simulated with the speeds that
the run learned and with all lengths known; these speeds; and how far the model's predictions were
off.

    python tools/bench_schedule.py [--iterations 16] [--rows equal-16,...] [--constant 16,32,64] [--json FILE] [--markdown FILE]
    python tools/bench_schedule.py --simulate             # what any schedule can reach, by the engine's speed; no engines, a minute
    python tools/bench_schedule.py --colocated            # each row also with placement.colocate: in turns, and with roles
    python tools/bench_schedule.py --paced 45,0.75,0.2 --devices 4 --replica 1,2    # turns, roles and every split of them
    python tools/bench_schedule.py --paced 18,0.045,0.01 --devices 4 --virtual    # the same in virtual time
    python tools/bench_schedule.py --paced 18,0.045,0.01 --devices 4 --virtual --unsteady 0.1 --order prompt
    python tools/bench_schedule.py --max-num-seqs 32      # engines whose memory holds 32 sequences
    python tools/bench_schedule.py --paced 12,0.5,0.12    # devices of this speed: ms a step, a sequence, a token of a prompt
    python tools/bench_schedule.py --engine-args=--block-size,128    # rollout.extra_args
    python tools/bench_schedule.py --shared-prompt        # P=512, R=64, G=8 with attention.shared_prompt on and off
    python tools/bench_schedule.py --staleness 0,1,2      # schedule.max_staleness at 1, 2, 4 and 16 waves, Tg = Tt, equal lengths
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pa_npu.config.load import load_config
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.schedule import ORDERS, Schedule, dispatch_order, same_windows
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.environments.protocol import EnvironmentContext, Generate, write
from pa_npu.launcher.placement import free_ports
from pa_npu.planning.iteration_model.flow import backwards_turns
from pa_npu.planning.iteration_model.subjects import EngineSpeed, VirtualCluster, VirtualGroup
from pa_npu.planning.prediction.costs import computed_prompt_tokens
from pa_npu.platform.typical import HOST_PREFIX_BLOCK
from pa_npu.samples.types import Sample, SampleBuilder
from pa_npu.telemetry.records import read_records

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import virtual_devices
from tools.hardware import processor
from tools.optimum import optimum_s
from tools.processes import end_on_sigterm, reason_of, serve, started
from tools.simulate import simulate

ROOT = Path(__file__).resolve().parent.parent
RESPONSES = 8
MAX_NUM_SEQS = 256
# iterations, three of each kind: nothing is known in the first, and heavy lengths come again in the
# third
WARMUP = 6
MAX_PROMPT = 2048
PACED_PROMPT = 128
EPOCH = 2  # iterations after which prompts come again
PROMPT_SIGMA = 0.6
RESPONSE_SIGMA = 0.4
MAX_OF_MEAN = 4
# Of the family of schedules whose best is the optimum: shares of the trainers' time, of the widest
# window, and waves.
SLACKS = (1.0, 0.95, 0.85)
SHARES = (1.0, 0.75, 0.5, 0.375, 0.25)
WAVES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Case:
    """ratio: Tg / Tt aimed at. prompt: the length that is given instead, in tokens; then the ratio
    is that of paced devices. most: of heavy lengths, over their mean. spread: of their logarithms,
    over what is usual. epoch: iterations after which prompts of heavy lengths come again."""

    name: str
    groups: int
    ratio: float = 1.0
    heavy: bool = False
    engines: int = 1
    prompt: int | None = None
    max_of_mean: float = MAX_OF_MEAN
    spread: float = 1.0
    epoch: int = EPOCH


def _cases() -> Iterator[Case]:
    yield Case("fixed-16", 16, 1.3, prompt=128)
    for engines, groups, heavy in itertools.product((1, 2), (16, 64), (False, True)):
        for bound, ratio in (("", 1.0), ("-engine-bound", 2.0), ("-trainer-bound", 0.5)):
            name = f"{'heavy' if heavy else 'equal'}-{groups}{bound}{'-two-engines' if engines == 2 else ''}"
            yield Case(name, groups, ratio, heavy, engines)
    yield Case("equal-128-two-engines", 128, engines=2)  # as many per engine as equal-64


CASES = tuple(_cases())

# Of --devices, with groups for 1, 2, 3 and 4 replicas: as answers of 200 with a limit of 1,024, and
# with the longest 1 : 8.
SHARED = (
    Case("equal", 24),
    Case("answers", 24, heavy=True, max_of_mean=1024 / 200, epoch=1),
    Case("heavy-tails", 24, heavy=True, max_of_mean=8, spread=1.25, epoch=1),
)
# iterations: nothing is known in the first, and roles change for the first time in the second
SHARED_WARMUP = 3


@dataclass(frozen=True)
class Row:
    """Medians, in seconds. generate_s, train_s: Tg, Tt. border_s: what no schedule can hide, left
    out of all but sync_s and periodic_s. constant_s: the best constant window's; optimum_s:
    simulated with all lengths known. errors: of predictions.
    step_ms, sequence_ms: what a decode step takes and what each sequence adds, as learned.

    overlapped_train_s: Tt of the periodic iterations, in which the engine's core has no time for
    what serves both.
    cores_busy: share of the machine's cores, during the run.

    turns_s, roles_s: iterations, border included, of as many engines as devices and as many
    replicas, one of each on a device: all decode, then all train; and with roles that follow the
    work.
    """

    name: str
    groups: int
    prompt_tokens: int
    generate_s: float
    train_s: float
    border_s: float
    sync_s: float
    periodic_s: float
    optimum_s: float
    errors: list[float]
    schedule: str
    step_ms: float
    sequence_ms: float
    overlapped_train_s: float
    cores_busy: float
    constant_s: float | None = None
    constant_window: int | None = None
    turns_s: float | None = None
    roles_s: float | None = None

    @property
    def longer_s(self) -> float:
        return max(self.generate_s, self.train_s)

    @property
    def over_bound(self) -> float:
        return (self.periodic_s - self.border_s) / self.longer_s

    @property
    def over_overlapped_bound(self) -> float:
        """With training as long as it takes beside generation: what is left of it is waiting."""
        return (self.periodic_s - self.border_s) / max(self.generate_s, self.overlapped_train_s)


def _pace(text: str) -> EngineSpeed:
    try:
        step_s, sequence_s, prompt_token_s = (float(number) / 1000 for number in text.split(","))
    except ValueError:
        step_s = sequence_s = prompt_token_s = math.nan
    if not all(0 <= seconds < math.inf for seconds in (step_s, sequence_s, prompt_token_s)):
        raise argparse.ArgumentTypeError(f"{text} is not three numbers, as in 12,0.5,0.12")
    return EngineSpeed(step_s, sequence_s, prompt_token_s)


def default_args(**overrides: Any) -> argparse.Namespace:
    """Returns what Bench takes, for other benchmarks: the defaults here, but for what is given."""
    return argparse.Namespace(**vars(make_parser().parse_args([])) | overrides)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--iterations", type=int, default=16, help=f"per run, {WARMUP} of warm-up included; even"
    )
    parser.add_argument("--response", type=int, default=64, help="mean tokens of a response")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=MAX_NUM_SEQS,
        help="sequences that an engine's memory holds (rollout.max_num_seqs)",
    )
    parser.add_argument(
        "--paced",
        type=_pace,
        help="ms that a decode step, a sequence in it and a token of a prompt take; devices sleep",
    )
    parser.add_argument(
        "--engine-args", default="", help="further arguments of the engines (rollout.extra_args)"
    )
    parser.add_argument("--rows", help="which rows, by name; all by default")
    parser.add_argument(
        "--constant", default="", help="constant windows to run beside it, a run each, in sequences"
    )
    parser.add_argument(
        "--colocated",
        action="store_true",
        help="also engines and trainers on the same devices, both on all of them, in turns and "
        "with roles that follow the work",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        help="paced devices to have turns, roles and every split on instead",
    )
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="of --devices: in virtual time, with the run's own coordinator",
    )
    parser.add_argument(
        "--replica", default="1", help="of --devices: devices of a replica, a run of rows each"
    )
    parser.add_argument(
        "--order",
        choices=("completion", "prompt"),
        default="completion",
        help="of --devices: schedule.order",
    )
    parser.add_argument(
        "--unsteady",
        type=float,
        default=0.0,
        help="of --virtual: how much engines differ, by the standard deviation of the logarithm of "
        "their decode steps, drawn anew for each iteration",
    )
    parser.add_argument(
        "--shared-prompt",
        action="store_true",
        help="measure attention.shared_prompt on and off instead",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="print the optimum by the engine's speed, in virtual time",
    )
    parser.add_argument(
        "--staleness",
        default="",
        help="measure these values of schedule.max_staleness over waves instead",
    )
    parser.add_argument(
        "--waves",
        default="1,2,4,16",
        help="of --staleness: an iteration's sequences over the window",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    known = SHARED if args.devices else CASES
    args.rows = args.rows or ",".join(
        case.name for case in known if case.engines == 1 or not args.colocated
    )
    unknown = set(args.rows.split(",")) - {case.name for case in known}
    if unknown:
        parser.error(
            f"--rows: {', '.join(sorted(unknown))} not among "
            f"{', '.join(case.name for case in known)}"
        )
    cases = [case for case in known if case.name in args.rows.split(",")]
    if args.colocated and any(case.engines > 1 for case in cases):
        parser.error(
            "--colocated: two engines and a trainer are three devices, among which groups cannot "
            "be divided; see --devices"
        )
    if args.devices and args.iterations <= SHARED_WARMUP:
        parser.error(f"--iterations: {args.iterations} is not above {SHARED_WARMUP}")
    if args.virtual and not args.devices:
        parser.error("--virtual: only rows of --devices are run in virtual time")
    if args.unsteady and not args.virtual:
        parser.error("--unsteady: only engines in virtual time are as unsteady as asked")
    if args.devices and not args.paced:
        parser.error("--devices: only paced devices are as many as asked; give --paced")
    if args.devices:
        return measure_shared(args, cases)
    if args.iterations <= WARMUP + 1 or args.iterations % 2:
        parser.error(f"--iterations: {args.iterations} is not an even number above {WARMUP + 1}")

    if args.paced and (args.shared_prompt or args.simulate or args.staleness):
        parser.error(
            "--paced is for rows alone, without --shared-prompt, --simulate and --staleness"
        )

    end_on_sigterm()
    if args.simulate:
        print(simulated(args.response, args.max_num_seqs))
        return 0
    if args.staleness:
        return measure_staleness(args)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench_schedule_") as scratch:
        bench = Bench(Path(scratch), args)
        for engines in sorted({1} if args.shared_prompt else {case.engines for case in cases}):
            with bench.engines(engines):
                if args.shared_prompt:
                    rows += bench.shared_prompt_rows()
                else:
                    rows += bench.schedule_rows([case for case in cases if case.engines == engines])
    publish_rows(rows, render(rows, args), args)
    return 0


def publish_rows(rows: Sequence[Any], table: str, args: argparse.Namespace) -> None:
    """Print the table, and write it and the rows where the arguments say so."""
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")


@dataclass(frozen=True)
class StaleRow:
    """Medians, in seconds, of iterations whose window has both an iteration produced and one
    trained. waves: of an iteration.
    """

    staleness: int
    waves: int
    generate_s: float
    train_s: float
    border_s: float
    iteration_s: float

    @property
    def over_bound(self) -> float:
        return (self.iteration_s - self.border_s) / max(self.generate_s, self.train_s)


def measure_staleness(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="bench_schedule_") as scratch:
        bench = Bench(Path(scratch), args)
        with bench.engines(1):
            waves = [int(text) for text in args.waves.split(",")]
            staleness = [int(text) for text in args.staleness.split(",")]
            rows = bench.stale_rows(waves, staleness)
    publish_rows(rows, render_stale(rows, args), args)
    return 0


@dataclass(frozen=True)
class SharedRow:
    """Median seconds of an iteration, border included, on as many devices: in turns, with roles,
    and with so many of them engines.

    floor_s: the longest response alone, or all decoding (of full engines) and training over the
    devices. reach_s: the same where one replica's devices decode as long as the longest response
    takes alone, and the others until the first group is there.
    errors: of the predictions of roles at the border, which do not know the lengths to come.
    simulated: the row in virtual time, which knows them; None for one that is.
    """

    name: str
    replica: int
    turns_s: float
    roles_s: float
    splits_s: dict[int, float]
    floor_s: float
    reach_s: float
    errors: list[float]
    changes: float
    cores_busy: float
    simulated: SharedRow | None = None

    @property
    def simulation_errors(self) -> list[float]:
        """How far the simulation is from the seconds in turns, with roles and of every split."""
        virtual = self.simulated
        if virtual is None:
            return []
        pairs = [(self.turns_s, virtual.turns_s), (self.roles_s, virtual.roles_s)]
        pairs += [(seconds, virtual.splits_s[count]) for count, seconds in self.splits_s.items()]
        return [abs(simulated_s / seconds - 1) for seconds, simulated_s in pairs]

    @property
    def best_split_s(self) -> float:
        return min(self.splits_s.values())


def measure_shared(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    end_on_sigterm()
    rows: list[SharedRow] = []
    with tempfile.TemporaryDirectory(prefix="bench_schedule_") as scratch:
        bench = (VirtualBench if args.virtual else Bench)(Path(scratch), args)
        with bench.engines(args.devices):
            for case, replica in itertools.product(cases, map(int, args.replica.split(","))):
                row = bench.shared_row(case, replica)
                if not args.virtual:
                    row = replace(
                        row, simulated=VirtualBench(Path(scratch), args).shared_row(case, replica)
                    )
                rows.append(row)
                print(f"# {row}", file=sys.stderr, flush=True)
    publish_rows(rows, render_shared(rows, args), args)
    return 0


class HeavyTailed:
    """The environment of heavy rows: single turns whose lengths are drawn, not sampled. options:
    median and limit in tokens, and the spread."""

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("tools.bench_schedule:HeavyTailed", ("median", "limit", "spread"))
        self._median = float(context.options["median"])
        self._limit = int(context.options["limit"])
        self._spread = float(context.options.get("spread", 1.0))
        self._visits: dict[int, int] = {}

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Generate) -> list[Sample]:
        visit = self._visits.get(prompt.prompt_id, 0)
        self._visits[prompt.prompt_id] = visit + 1
        lengths = drawn_lengths(
            prompt.prompt_id, visit, num_samples, self._median, self._limit, self._spread
        )
        pending = [
            generate(prompt.tokens, sample=i, max_tokens=length) for i, length in enumerate(lengths)
        ]
        samples = []
        for (generation,) in await _all(pending):
            sample = SampleBuilder(prompt.tokens)
            write(sample, generation)
            samples.append(sample.finish(True, generation.text))
        return samples


async def _all(pending: Sequence[Any]) -> list[Any]:
    import asyncio

    return list(await asyncio.gather(*pending))


def drawn_lengths(
    prompt_id: int, visit: int, count: int, median: float, limit: int, spread: float = 1.0
) -> list[int]:
    """Draws the lengths of the responses to a prompt when it comes for the `visit`-th time."""
    of_prompt = np.random.default_rng([prompt_id, 1]).standard_normal()
    of_response = np.random.default_rng([prompt_id, visit, 2]).standard_normal(count)
    drawn = median * np.exp(spread * (PROMPT_SIGMA * of_prompt + RESPONSE_SIGMA * of_response))
    return [int(n) for n in np.clip(np.round(drawn), 1, limit)]


def median_for(mean: float, limit: int, spread: float = 1.0) -> float:
    """Returns the median with which cut lengths have this mean, by bisection over a large sample."""
    rng = np.random.default_rng(0)
    draw = np.exp(
        spread
        * (PROMPT_SIGMA * rng.standard_normal(20000) + RESPONSE_SIGMA * rng.standard_normal(20000))
    )
    low = 1.0
    high = 2.0 * mean
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.minimum(middle * draw, limit).mean() < mean else (low, middle)
        )
    return low


class Bench:
    """The same engines for all rows with as many; a trainer and a coordinator per run."""

    def __init__(self, scratch: Path, args: argparse.Namespace) -> None:
        self._scratch = scratch
        self._args = args
        self._runs = 0
        self._beside = int(args.colocated)  # engines on the trainer's device, the last
        self._urls: list[str] = []
        self._dedicated = 0
        self._model = scratch / "tiny" / "model"
        self._environment = {**os.environ, KEY_VARIABLE: secrets.token_hex(16)}
        if args.paced:
            self._environment["PACED_ENGINE"] = ",".join(map(str, astuple(args.paced)))
        hidden, layers = ("64", "2") if args.paced else ("192", "4")
        command = [
            sys.executable,
            "tools/make_tiny_model.py",
            "--out",
            str(self._model.parent),
            "--random",
        ]
        command += ["--hidden", hidden, "--layers", layers]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    @contextlib.contextmanager
    def engines(self, count: int) -> Iterator[None]:
        self._dedicated = count
        count += self._beside
        first = free_ports("127.0.0.1", 1)[0]
        ports = [first + i for i in range(count)]  # as the launcher counts
        self._urls = [f"http://127.0.0.1:{port}" for port in ports]
        log = self._scratch / f"engines{count}.log"
        settings = [
            f"placement.port={ports[0] - 1}",
            f"run.dir={self._scratch / f'engines{count}'}",
        ]
        settings.append(f"rollout.engines={count}")
        if self._beside and not self._args.paced:
            settings.append(
                f"placement.devices={[*self._engine_cores(), *[self._trainer_core()] * 2]}".replace(
                    " ", ""
                )
            )
        with started(self._command("engines", settings), log, self._environment) as process:
            if not serve(process, self._urls, 300 * count):
                raise SystemExit(
                    f"bench_schedule: no engine: {reason_of(log)}\n{log.read_text()[-2000:]}"
                )
            yield

    def schedule_rows(self, cases: list[Case]) -> list[Row]:
        if not self._args.paced and any(case.prompt is None for case in cases):
            measured = {prompt: self._calibrate(prompt) for prompt in (32, 256)}
            group_generate_s = statistics.mean(generate for generate, _ in measured.values())
            train_at = {prompt: train for prompt, (_, train) in measured.items()}
        rows = []
        for case in cases:
            if self._args.paced:
                prompt = PACED_PROMPT
                self._environment["PACED_TRAINER"] = str(self._paced_token_s(case))
            else:
                prompt = case.prompt or self._prompt_for(group_generate_s / case.ratio, train_at)
            row = self._measure(case, prompt, [])
            if self._args.colocated:
                turns_s, roles_s = (
                    self._colocated_s(case, prompt, streams) for streams in ("false", "true")
                )
                row = replace(row, turns_s=turns_s, roles_s=roles_s)
            for window in [int(text) for text in self._args.constant.split(",") if text]:
                constant = self._measure(case, prompt, [f"rollout.window={window}"])
                seconds = constant.periodic_s - constant.border_s
                if row.constant_s is None or seconds < row.constant_s:
                    row = replace(row, constant_s=seconds, constant_window=window)
                # generation of the best constant window is what the bound is made of
                row = replace(row, generate_s=min(row.generate_s, constant.generate_s))
            rows.append(row)
            print(f"# {row.over_bound:.3f} {row}", file=sys.stderr, flush=True)
        return rows

    def _colocated_s(self, case: Case, prompt: int, streams: str) -> float:
        """Returns an iteration of an engine and a replica on each device, border included."""
        engines = len(self._urls)
        settings = [
            "placement.colocate=true",
            f"schedule.stream={streams}",
            f"rollout.engines={engines}",
            f"rollout.attach=[{','.join(self._urls)}]",
            f"trainer.devices={engines}",
            f"placement.devices={list(range(engines))}".replace(" ", ""),
        ]
        records = self._records(case, prompt, self._args.iterations, settings)[WARMUP:]
        return statistics.median(record["iteration_s"] for record in records)

    def shared_row(self, case: Case, replica: int) -> SharedRow:
        """Returns a row of runs on all devices, `replica` of which are a replica of the trainer."""
        args = self._args
        devices = self._args.devices
        token_s = devices * self._paced_token_s(
            replace(case, engines=devices)
        )  # of a device, as fast together as engines are
        self._environment["PACED_TRAINER"] = str(token_s / replica)
        iterations = range(SHARED_WARMUP, args.iterations)
        busy = []

        def records(engines: int, *overrides: str) -> list[dict[str, Any]]:
            beside = "placement.colocate=true" in overrides
            settings = [
                f"rollout.engines={engines}",
                f"rollout.attach=[{','.join(self._urls[:engines])}]",
                f"trainer.devices={devices if beside else devices - engines}",
                f"trainer.tensor_parallel={replica}",
                f"schedule.order={args.order}",
                *overrides,
            ]
            psutil.cpu_percent()
            records = self._records(case, PACED_PROMPT, args.iterations, settings)[SHARED_WARMUP:]
            busy.append(psutil.cpu_percent() / 100)
            print(
                f"# {case.name}, R = {replica}, {engines} engines {overrides}: "
                f"{[r['iteration_s'] for r in records]}",
                file=sys.stderr,
            )
            return records

        def seconds(records: list[dict[str, Any]]) -> float:
            return statistics.median(record["iteration_s"] for record in records)

        turns = records(devices, "placement.colocate=true", "schedule.stream=false")
        roles = records(devices, "placement.colocate=true", "schedule.stream=true")
        engines = [count for count in range(1, devices) if not (devices - count) % replica]
        return SharedRow(
            case.name,
            replica,
            seconds(turns),
            seconds(roles),
            {count: seconds(records(count, "schedule.stream=true")) for count in engines},
            statistics.median(self._floor_s(case, number, token_s, 0) for number in iterations),
            statistics.median(
                self._floor_s(case, number, token_s, replica) for number in iterations
            ),
            [
                record["prediction_error"]
                for record in roles
                if record["prediction_error"] is not None
            ],
            statistics.mean(record["role_changes"] for record in roles),
            max(busy),
        )

    def _floor_s(self, case: Case, iteration: int, token_s: float, alone: int) -> float:
        """alone: devices that decode until the longest response ends, of which the others train as
        soon as a group is there; 0: all decoding is of full engines."""
        pace = self._args.paced
        lengths = self._lengths(case, iteration)
        tokens = sum(map(sum, lengths))
        max_sequences = min(self._args.max_num_seqs, case.groups * RESPONSES)
        decoding_s = tokens * (pace.step_s / max_sequences + pace.sequence_s)
        training_s = token_s * (tokens + case.groups * RESPONSES * PACED_PROMPT)
        token_alone_s = pace.step_s + pace.sequence_s
        devices = self._args.devices
        longest_s, first_s = (end(map(max, lengths)) * token_alone_s for end in (max, min))
        if alone:
            decoding_s = max(decoding_s, alone * longest_s + (devices - alone) * first_s)
        return max(longest_s, (decoding_s + training_s) / devices)

    def stale_rows(self, waves: Sequence[int], staleness: Sequence[int]) -> list[StaleRow]:
        """Tg and Tt are those of synchronous iterations with the same window."""
        case = Case("staleness", 16)
        rows = []
        measured = {prompt: self._calibrate(prompt) for prompt in (32, 256)}
        group_generate_s = statistics.mean(generate for generate, _ in measured.values())
        prompt = self._prompt_for(
            group_generate_s, {prompt: train for prompt, (_, train) in measured.items()}
        )
        iterations = self._args.iterations
        for number in waves:
            window = [f"rollout.window={case.groups * RESPONSES // number}"]
            sync = self._records(case, prompt, iterations, [*window, "schedule.stream=false"])[
                WARMUP:
            ]
            generate_s, train_s = (
                statistics.median(r[key] for r in sync) for key in ("generate_s", "train_s")
            )
            for k in staleness:
                settings = [
                    *window,
                    f"schedule.max_staleness={k}",
                    "algorithm.importance_sampling=token",
                ]
                # the first windows produce several iterations, the last ones none
                records = self._records(case, prompt, iterations, settings)[
                    max(2, k) : iterations - k
                ]
                border_s, iteration_s = (
                    statistics.median(r[key] for r in records)
                    for key in ("publish_s", "iteration_s")
                )
                rows.append(StaleRow(k, number, generate_s, train_s, border_s, iteration_s))
                print(f"# {rows[-1].over_bound:.3f} {rows[-1]}", file=sys.stderr, flush=True)
        return rows

    def shared_prompt_rows(self) -> list[Row]:
        return [
            self._measure(
                Case(f"shared_prompt={flag}", 16), 512, [f"attention.shared_prompt={flag}"]
            )
            for flag in ("false", "true")
        ]

    def _calibrate(self, prompt: int) -> tuple[float, float]:
        """Tg and Tt of a group in synchronous iterations of 32."""
        records = self._records(Case("calibration", 32), prompt, 6, ["schedule.stream=false"])[2:]
        return (
            statistics.median(r["generate_s"] for r in records) / 32,
            statistics.median(r["train_s"] for r in records) / 32,
        )

    def _paced_token_s(self, case: Case) -> float:
        """Returns the speed of a paced trainer: seconds per token of prompts and responses with
        which Tg / Tt is the case's ratio.
        """
        cluster = VirtualCluster(
            {str(n): self._args.paced for n in range(case.engines)}, self._args.max_num_seqs
        )
        lengths = self._lengths(case, 0)
        tokens = sum(RESPONSES * PACED_PROMPT + sum(group) for group in lengths)
        computed = computed_prompt_tokens(PACED_PROMPT, RESPONSES, HOST_PREFIX_BLOCK)
        return shortest_generation_s(cluster, lengths, computed) / case.ratio / tokens

    def _prompt_for(self, train_s: float, train_at: dict[int, float]) -> int:
        """Returns the prompt length at which training takes train_s, by the line through two
        measured ones.
        """
        (p0, t0), (p1, t1) = sorted(train_at.items())
        prompt = p0 + (train_s - t0) * (p1 - p0) / (t1 - t0)
        return int(min(max(prompt, 8), MAX_PROMPT))

    def _measure(self, case: Case, prompt: int, overrides: list[str]) -> Row:
        settings = [
            "rollout.window=auto",
            f"schedule.compare_iterations={self._args.iterations}",
            *overrides,
        ]
        psutil.cpu_percent()  # the next one is of the time since this one
        every = self._records(case, prompt, self._args.iterations, settings)
        cores_busy = psutil.cpu_percent() / 100
        records = every[WARMUP:]
        sync, periodic = ([r for r in records if r["iteration"] % 2 == odd] for odd in (0, 1))
        return Row(
            case.name,
            case.groups,
            prompt,
            statistics.median(r["generate_s"] for r in sync),
            statistics.median(r["train_s"] for r in sync),
            statistics.median(r["publish_s"] for r in periodic),
            statistics.median(r["iteration_s"] for r in sync),
            statistics.median(r["iteration_s"] for r in periodic),
            statistics.median(
                self._optimum_s(case, prompt, r, every[-1]["learned"]) for r in periodic
            ),
            [r["prediction_error"] for r in periodic if r["prediction_error"] is not None],
            periodic[-1]["schedule"],
            1000 * every[-1]["learned"]["decode_step_s"],
            1000 * every[-1]["learned"]["decode_sequence_s"],
            statistics.median(r["train_s"] for r in periodic),
            cores_busy,
        )

    def _optimum_s(
        self, case: Case, prompt: int, record: dict[str, Any], learned: dict[str, float]
    ) -> float:
        """Returns the iteration of a record with all lengths known; the optimizer's step is in
        train_s of the record and here.
        """
        speed = EngineSpeed(
            learned["decode_step_s"], learned["decode_sequence_s"], learned["prompt_token_s"]
        )
        cluster = VirtualCluster(
            {str(n): speed for n in range(case.engines)},
            self._args.max_num_seqs,
            step_s=record["step_s"],
        )
        lengths = self._lengths(case, record["iteration"])
        tokens = [RESPONSES * prompt + sum(group) for group in lengths]
        train_s = (record["train_s"] - record["step_s"]) / sum(tokens)
        groups = [
            VirtualGroup(i, prompt, tuple(map(float, group)), train_s * count, count)
            for i, (group, count) in enumerate(zip(lengths, tokens, strict=True))
        ]
        return best_known_s(cluster, groups)

    def _lengths(self, case: Case, iteration: int) -> list[list[int]]:
        """Draws the lengths of an iteration's groups, by index: prompts come in order, and again
        after EPOCH iterations.
        """
        if not case.heavy:
            return [[self._args.response] * RESPONSES] * case.groups
        first = iteration % case.epoch * case.groups
        visit = iteration // case.epoch
        median, limit = self._heavy(case)
        return [
            drawn_lengths(first + i, visit, RESPONSES, median, limit, case.spread)
            for i in range(case.groups)
        ]

    def _heavy(self, case: Case) -> tuple[float, int]:
        limit = round(case.max_of_mean * self._args.response)
        return median_for(self._args.response, limit, case.spread), limit

    def _records(
        self, case: Case, prompt: int, iterations: int, overrides: list[str]
    ) -> list[dict[str, Any]]:
        """Returns the iteration records of one run."""
        return read_records(self.run(case, prompt, iterations, overrides))

    def run(
        self, case: Case, prompt: int, iterations: int, overrides: Sequence[str], *, seed: int = 0
    ) -> Path:
        """One run on the engines that are there; its directory, which stays as long as `scratch`.
        seed: of its prompts, none being those of no other run."""
        self._runs += 1
        run_dir = self._scratch / f"run{self._runs}"
        data = self._scratch / f"prompts{self._runs}.jsonl"
        write_prompts(
            data,
            prompt,
            case.groups * (case.epoch if case.heavy else iterations),
            seed or self._runs,
        )
        settings = [
            f"run.dir={run_dir}",
            f"data.train={data}",
            f"schedule.iterations={iterations}",
            f"schedule.prompts_per_iteration={case.groups}",
            "schedule.skip_zero_advantage=false",  # the same work whatever the rewards
            f"rollout.attach=[{','.join(self._urls[: self._dedicated])}]",
            f"rollout.max_response_tokens={self._args.response}",
            *overrides,
        ]
        if case.heavy:
            median, limit = self._heavy(case)
            settings += [
                f"rollout.max_response_tokens={limit}",
                "environment.name=tools.bench_schedule:HeavyTailed",
                f"environment.options={{median: {median}, limit: {limit}, spread: {case.spread}}}",
            ]
        result = subprocess.run(
            self._command("run", settings),
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise SystemExit(
                f"bench_schedule: a run failed:\n{(result.stdout + result.stderr)[-3000:]}"
            )
        return run_dir

    def _engine_cores(self) -> list[int]:
        """Those of engines alone; engines that have no core each share the first."""
        has_spare_core = len(os.sched_getaffinity(0)) > self._dedicated
        return list(range(self._dedicated)) if has_spare_core else [0] * self._dedicated

    def _trainer_core(self) -> int:
        return max(self._engine_cores()) + 1

    def _command(self, action: str, settings: list[str]) -> list[str]:
        engines = self._dedicated
        extra = self._args.engine_args.split(",") if self._args.engine_args else []
        common = {
            "run.device": "cpu",
            "model.path": self._model,
            "model.dtype": "fp32",
            "data.train": self._model.parent / "train.jsonl",
            "data.chat_template": "never",
            "data.shuffle": "false",
            "data.max_prompt_tokens": MAX_PROMPT,
            "rollout.engines": engines,
            "rollout.responses_per_prompt": RESPONSES,
            "rollout.max_response_tokens": round(
                max(case.max_of_mean for case in SHARED) * self._args.response
            ),
            "rollout.max_num_seqs": self._args.max_num_seqs,
            "rollout.ignore_eos": "true",
            "attention.shared_prompt": "false",
            "checkpoint.export_hf": "false",
            "telemetry.trackers": "[]",
        }
        if self._args.paced:
            extra += ["--worker-cls", "tools.paced.engine.PacedWorker"]
            common |= {"trainer.backend": "tools.paced.trainer:BACKEND"}
        else:
            common["placement.devices"] = str(
                [*self._engine_cores(), self._trainer_core()]
            ).replace(" ", "")
        common["rollout.extra_args"] = json.dumps(extra)
        keys = [f"{key}={value}" for key, value in common.items()]
        return [sys.executable, "-m", "pa_npu.launcher", action, *keys, *settings]


class VirtualBench(Bench):
    """The same runs in virtual time (tools/virtual_devices.py)."""

    def __init__(self, scratch: Path, args: argparse.Namespace) -> None:
        self._scratch = scratch
        self._args = args
        self._environment = {}
        self._urls = []

    @contextlib.contextmanager
    def engines(self, count: int) -> Iterator[None]:
        yield

    def _records(
        self, case: Case, prompt: int, iterations: int, overrides: list[str]
    ) -> list[dict[str, Any]]:
        limit = max(max(map(max, self._lengths(case, number))) for number in range(iterations))
        keys = [
            "model.path=none",
            "data.train=none",
            f"schedule.iterations={iterations}",
            f"schedule.prompts_per_iteration={case.groups}",
            "schedule.skip_zero_advantage=false",  # the same work whatever the rewards
            f"rollout.responses_per_prompt={RESPONSES}",
            f"rollout.max_response_tokens={limit}",
            f"rollout.max_num_seqs={self._args.max_num_seqs}",
            *(setting for setting in overrides if not setting.startswith("rollout.attach")),
        ]
        token_s = float(self._environment["PACED_TRAINER"])
        lengths = functools.partial(self._lengths, case)
        return virtual_devices.run(
            load_config([], keys),
            self._args.paced,
            token_s,
            prompt,
            lengths,
            iterations,
            unsteady=self._args.unsteady,
        )


def best_known_s(cluster: VirtualCluster, groups: Sequence[VirtualGroup]) -> float:
    """Returns the shortest iteration over a family of schedules that know every length.

    The one found by running time backwards, sequence by sequence (with equal lengths on one engine
    no schedule ends earlier); turns that leave trainers 0 to 15% of slack; constant windows of
    every useful size in every order of dispatch.
    """
    names = tuple(cluster.engines)
    share = math.ceil(len(groups) / len(names))
    max_groups = cluster.max_num_seqs // RESPONSES
    held = min(max_groups, share)
    windows = same_windows(names, held * RESPONSES)
    ends_s = [optimum_s(cluster, groups, windows)]
    for slack in SLACKS:
        order, turns = backwards_turns(cluster, groups, held * len(names), slack)
        ends_s.append(simulate(cluster, groups, Schedule("", order, (windows,), turns)).end_s)
    longest = [group.longest for group in groups]
    for places, name in itertools.product(place_levels(share, min(share, 2 * max_groups)), ORDERS):
        constant = Schedule(
            "", tuple(dispatch_order(name, longest)), (same_windows(names, places * RESPONSES),)
        )
        ends_s.append(simulate(cluster, groups, constant).end_s)
    return min(ends_s)


def place_levels(share: int, max_groups: int) -> list[int]:
    """Groups in flight per engine worth trying, falling: shares of the most, and what cuts an
    engine's share into even waves.
    """
    levels = {max(1, math.ceil(max_groups * part)) for part in SHARES}
    levels |= {places for waves in WAVES if (places := math.ceil(share / waves)) <= max_groups}
    return sorted(levels, reverse=True)


def shortest_generation_s(
    cluster: VirtualCluster, lengths: Sequence[Sequence[int]], prompt: int
) -> float:
    """Over constant windows, groups of these lengths in the order longest first."""
    groups = [
        VirtualGroup(i, prompt, tuple(map(float, group)), 1e-9, 1.0)
        for i, group in enumerate(lengths)
    ]
    names = tuple(cluster.engines)
    share = math.ceil(len(groups) / len(names))
    max_groups = min(share, 2 * cluster.max_num_seqs // RESPONSES)
    order = tuple(dispatch_order("longest-first", [group.longest for group in groups]))
    windows = [
        same_windows(names, places * RESPONSES) for places in place_levels(share, max_groups)
    ]
    return min(simulate(cluster, groups, Schedule("", order, (w,))).generated_s for w in windows)


def simulated(response: int, max_num_seqs: int = MAX_NUM_SEQS) -> str:
    """Returns a table of best_known_s over max(Tg, Tt), Tg of the constant window that generates
    fastest, for one engine.

    Only the ratio matters of what a decode step takes and what each sequence adds: with step_s = 0
    an engine is as fast with one group in flight as with all, and groups that come one after
    another cost nothing.
    """
    sequence_s = 2.5e-4
    limit = MAX_OF_MEAN * response
    cases = [case for case in CASES if case.engines == 1 and case.prompt is None]
    lines = [
        f"| step / sequence | {' | '.join(case.name for case in cases)} |",
        "|---:" * (len(cases) + 1) + "|",
    ]
    for ratio in (4, 8, 12, 16, 20, 24, 32):
        cluster = VirtualCluster({"0": EngineSpeed(ratio * sequence_s, sequence_s)}, max_num_seqs)
        cells = []
        for case in cases:
            median = median_for(response, limit)
            lengths = [
                drawn_lengths(i, 0, RESPONSES, median, limit)
                if case.heavy
                else [response] * RESPONSES
                for i in range(case.groups)
            ]
            generate_s = shortest_generation_s(cluster, lengths, 0)
            per_token = generate_s / case.ratio / sum(map(sum, lengths))
            groups = [
                VirtualGroup(i, 0, tuple(map(float, group)), per_token * sum(group), 1.0)
                for i, group in enumerate(lengths)
            ]
            cells.append(
                f"{best_known_s(cluster, groups) / max(generate_s, generate_s / case.ratio):.2f}"
            )
        lines.append(f"| {ratio} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_prompts(path: Path, length: int, count: int, seed: int) -> None:
    """Prompts of exactly `length` tokens (one letter is one token), all different, so that none is
    in the prefix cache.
    """
    rng = random.Random(seed)
    letters = "bcdfghjkmpqvwxz"  # rare pairs, which the tokenizer does not merge
    with path.open("w") as file:
        for _ in range(count):
            text = "".join(rng.choice(letters) for _ in range(length))
            file.write(json.dumps({"question": text, "answer": "#### 0"}) + "\n")


def render(rows: list[Row], args: argparse.Namespace) -> str:
    cores = f"{len(os.sched_getaffinity(0))} cores ({processor()})"
    if args.paced:
        step, sequence, prompt = (f"{1000 * seconds:g}" for seconds in astuple(args.paced))
        busy = max(r.cores_busy for r in rows)
        where = f"each on a paced device, on {cores} of which {busy:.0%} were busy"
        further = ""
        where += (
            f"; a decode step takes {step} ms, {sequence} ms per sequence in it and {prompt} "
            "ms per token of a prompt"
        )
    else:
        where = f"pinned to {cores}"
        further = (
            ", in which the engine's core has no time for coordinator, API server and reward "
            "workers"
        )
    lines = [
        f"vLLM engines and one trainer rank, {where}. Groups of {RESPONSES} responses of "
        f"{args.response} tokens on average, rollout.window=auto; medians of "
        f"{(args.iterations - WARMUP) // 2} synchronous and as many periodic iterations, "
        "alternating in one run. Ratios are over max(Tg, Tt), border left out; of synchronous "
        f"iterations, or with the Tt of the periodic ones (overlapped){further}.",
        "",
        "| row | groups | prompt | Tg s | Tt s | overlapped | border s | sync s | periodic s | "
        "periodic | over the overlapped | best window | optimum | speedup | bound | step ms + ms "
        "per sequence | model's error: median, worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        errors = [abs(error) for error in r.errors] or [math.nan]
        constant = f"{r.constant_s / r.longer_s:.2f} ({r.constant_window})" if r.constant_s else ""
        times = (r.generate_s, r.train_s, r.overlapped_train_s, r.border_s, r.sync_s, r.periodic_s)
        cells = [r.name, str(r.groups), str(r.prompt_tokens), *(f"{t:.2f}" for t in times)]
        cells += [
            f"{r.over_bound:.2f}",
            f"{r.over_overlapped_bound:.2f}",
            constant,
            f"{r.optimum_s / r.longer_s:.2f}",
            f"{r.sync_s / r.periodic_s:.2f}x",
        ]
        cells += [f"{(r.generate_s + r.train_s) / r.longer_s:.2f}x"]
        cells += [
            f"{r.step_ms:.1f} + {r.sequence_ms:.2f}",
            f"{statistics.median(errors):.1%}, {max(errors):.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if args.colocated:
        lines += [
            "",
            "placement.colocate: an engine and a replica on each device, all decoding, then all "
            "training, and with roles that follow the work; border included.",
            "",
            "| row | sync s | periodic s | turns s | roles s | turns / roles | periodic / roles |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for r in rows:
            turns_s = r.turns_s or math.nan
            roles_s = r.roles_s or math.nan
            cells = [r.name, *(f"{t:.2f}" for t in (r.sync_s, r.periodic_s, turns_s, roles_s))]
            lines.append(
                "| "
                f"{' | '.join([*cells, f'{turns_s / roles_s:.2f}', f'{r.periodic_s / roles_s:.2f}'])} "
                "|"
            )
    lines += [
        "",
        "Schedules of the last periodic iterations:",
        "",
        *(f"- {r.name}: {r.schedule}" for r in rows),
    ]
    return "\n".join(lines)


def render_shared(rows: list[SharedRow], args: argparse.Namespace) -> str:
    step, sequence, prompt = (f"{1000 * seconds:g}" for seconds in astuple(args.paced))
    splits = list(range(1, args.devices))
    where = "in virtual time"
    if not args.virtual:
        busy = max(row.cores_busy for row in rows)
        where = (
            f"on {len(os.sched_getaffinity(0))} cores ({processor()}), of which up to "
            f"{busy:.0%} were busy"
        )
    lines = [
        f"{args.devices} paced devices {where}; a decode step takes {step} ms, {sequence} ms per "
        f"sequence in it and {prompt} ms per token of a prompt of {PACED_PROMPT}; groups of "
        f"{RESPONSES} responses of {args.response} tokens on average, room for {args.max_num_seqs} "
        "sequences, all training as long as all decoding"
        f"{f', engines unsteady by {args.unsteady:.0%}' if args.unsteady else ''}; "
        f"schedule.order={args.order}; medians of {args.iterations - SHARED_WARMUP} iterations, "
        "border included.",
        "",
        "| row | R | turns s | "
        f"{' | '.join(f'{count} + {args.devices - count} s' for count in splits)} | roles s | "
        "turns / roles | best split / roles | roles / floor | roles / reach | changes | error of "
        "predictions: median, worst | error of the simulation: median, worst |",
        "|---|" + "---:|" * (10 + len(splits)),
    ]
    for row in rows:
        cells = [row.name, str(row.replica), f"{row.turns_s:.2f}"]
        cells += [f"{row.splits_s[count]:.2f}" if count in row.splits_s else "" for count in splits]
        ratios = (
            row.turns_s / row.roles_s,
            row.best_split_s / row.roles_s,
            row.roles_s / row.floor_s,
            row.roles_s / row.reach_s,
        )
        cells += [f"{row.roles_s:.2f}", *(f"{ratio:.2f}" for ratio in ratios), f"{row.changes:.1f}"]
        for errors in ([abs(error) for error in row.errors], row.simulation_errors):
            cells.append(f"{statistics.median(errors):.1%}, {max(errors):.1%}" if errors else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render_stale(rows: list[StaleRow], args: argparse.Namespace) -> str:
    lines = [
        f"One vLLM engine and one trainer rank, pinned to {len(os.sched_getaffinity(0))} cores "
        f"({processor()}); 16 groups of {RESPONSES} responses of {args.response} tokens. Tg, Tt: "
        "of synchronous iterations with the same window.",
        "",
        "| max_staleness | waves | Tg s | Tt s | border s | iteration s | over max(Tg, Tt), border "
        "left out | of the bound |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        times = (r.generate_s, r.train_s, r.border_s, r.iteration_s)
        cells = [str(r.staleness), str(r.waves), *(f"{t:.2f}" for t in times)]
        lines.append(
            f"| {' | '.join([*cells, f'{r.over_bound:.2f}', f'{1 / r.over_bound:.2f}'])} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
