#!/usr/bin/env python
"""Load balance with heavy-tailed response lengths: dispatch in order against longest first, replicas by FLOPs against tokens.

The real producer, pool, estimates and assignment, between engines and trainers that only take time:

  virtual    engines and trainers in virtual time, where nothing else costs anything: the same
             numbers on every machine
  --real     stand-in engines (tools/stand_in.py) as processes, HTTP, wall time; trainers are timers

    python tools/bench_balance.py [--markdown FILE]          # about two minutes
    python tools/bench_balance.py --speeds 1,0.5             # one engine of each of these speeds; seconds
    python tools/bench_balance.py --real [--markdown FILE]

A decode step takes the same time whatever is in flight (engines below saturation, where decoding
waits for memory). A group holds one of the places for groups of its engine until its longest
response ends. Response lengths are lognormal, exp(0.6 a + 0.4 b) times the median, a of the prompt
and b of the response, cut at the limit. R replicas train their slots in turn, a group in proportion
to its FLOPs (7B shape). Every prompt comes once per epoch: nothing is known in the first one, one
group of each prompt in the second. The same prompts in the same order for every row. Columns, means
over iterations:

  generate   until the last response, over the bound: the larger of the sum of the groups' longest
             responses over all places, and the longest response of all
  iteration  until the last replica is done, over the larger of that bound and of Tt, training on
             equally loaded replicas
  tail       tail_waste of the records (pa_npu/coordinator/features.py)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import heapq
import os
import random
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.data.prompts import Prompt
from pa_npu.data.stream import PromptStream
from pa_npu.dispatch.assignment import Assignment, GroupWork
from pa_npu.engines.client import EngineClient
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, RolloutEngine, Sampling
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import IterationTimes, Rules
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.samples.group import Group
from pa_npu.samples.seeds import group_seed
from pa_npu.telemetry.timeline import Timeline

# a script sees its own directory only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.hardware import processor
from tools.stand_in import HeavyTail, Speed

ROOT = Path(__file__).resolve().parent.parent
RUN_SEED = 0
GROUP = 8
VOCABULARY = 1000
_COMMON = {
    "model_type": "qwen2",
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
_SIZES = {
    "1.5B": (28, 1536, 8960, 12, 151936),
    "7B": (28, 3584, 18944, 28, 152064),
}
SHAPES = {
    name: ModelSpec.parse(
        name,
        _COMMON
        | {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_attention_heads": heads,
            "vocab_size": vocabulary,
        },
    )
    for name, (layers, hidden, ffn, heads, vocabulary) in _SIZES.items()
}


@dataclass(frozen=True)
class Case:
    """train: Tt over the bound of generation. speed: the same per token, whatever is in flight.
    speeds: of each engine, where they are not all of this one; a decode step takes speed.step_s
    over it."""

    engines: int
    places: int  # groups in flight per engine
    groups: int
    replicas: int
    train: float
    speed: Speed
    lengths: HeavyTail
    max_tokens: int
    epochs: int
    iterations_per_epoch: int
    speeds: tuple[float, ...] = ()

    def step_s(self, engine: int) -> float:
        return self.speed.step_s / (self.speeds[engine] if self.speeds else 1.0)

    def group_lengths(self, prompt: Prompt, iteration: int, index: int) -> list[int]:
        seed = group_seed(RUN_SEED, iteration, index)
        return [self.lengths.length(prompt.tokens, seed + i, self.max_tokens) for i in range(GROUP)]

    def bound_s(self, lengths: Sequence[Sequence[int]]) -> float:
        """No generation of these groups is shorter, as long as a group keeps its place until its
        longest response ends.

        Engines of one speed: the larger of sum / places and the longest. Else, for every k, the k
        longest over the k fastest places (Horvath, Lam and Sethi 1977), and all over all.
        """
        longest = sorted((max(group) for group in lengths), reverse=True)
        rates = sorted(
            (1 / self.step_s(e) for e in range(self.engines) for _ in range(self.places)),
            reverse=True,
        )
        firsts = range(1, min(len(longest), len(rates)) + 1)
        return max(sum(longest) / sum(rates), *(sum(longest[:k]) / sum(rates[:k]) for k in firsts))


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration. bound: of generation; train: Tt of equally loaded replicas; end: of
    the last replica.
    """

    bound_s: float
    train_s: float
    generate_s: float
    end_s: float
    tail_waste: float
    imbalance: float


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: where nothing is left to do, its clock goes to the next
    timer.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds


class _Skipping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("virtual time: everything waits and no timer is set")
            self._loop.skip(timeout)
        return events


class Inline(Executor):
    """Runs at once, in the caller's thread."""

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args, **kwargs))
        return future


class VirtualEngine:
    """Decodes all its sequences at the same rate: a sequence ends when the tokens decoded since it
    came are its length.
    """

    def __init__(self, number: int, case: Case) -> None:
        self.name = f"engine {number}"
        self._case = case
        self._step_s = case.step_s(number)
        self._decoded = 0.0
        self._since_s = 0.0
        self._ends: list[tuple[float, int]] = []
        self._left: dict[int, tuple[int, asyncio.Event]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        lengths = [
            self._case.lengths.length(prompt_tokens, seed + i, sampling.max_tokens)
            for i in range(n)
        ]
        self._advance()
        number = len(self._left)
        done = asyncio.Event()
        self._left[number] = (n, done)
        for length in lengths:
            heapq.heappush(self._ends, (self._decoded + length, number))
        self._set_timer()
        await done.wait()
        return [
            Generation(
                np.full(length, (seed + number) % 2**31, np.int32),  # no two answers are alike
                np.full(length, -1.0, np.float32),
                "",
                "stop",
                version=0,
            )
            for number, length in enumerate(lengths)
        ]

    async def close(self) -> None:
        """Nothing to close."""

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._ends:
            self._decoded += (now_s - self._since_s) / self._step_s
        self._since_s = now_s

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ends:
            delay_s = max(0.0, self._ends[0][0] - self._decoded) * self._step_s
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_some)

    def _end_some(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._decoded + 1e-6:
            _, number = heapq.heappop(self._ends)
            left, done = self._left[number]
            self._left[number] = (left - 1, done)
            if left == 1:
                done.set()
        self._set_timer()


class Rewards:
    """Rewards that cost nothing."""

    async def score(self, group: RewardInput) -> RewardResult:
        total = np.arange(len(group.responses), dtype=np.float32) % 2
        return RewardResult(total, {"stub": total}, total > 0, ())


class Shelf:
    """The buffer: puts what is produced before the trainers of the iteration."""

    readers = 1
    trainers: Trainers

    def put(self, group: Group, replica: int, slot: int) -> None:
        self.trainers.put(group, replica, slot)


class Trainers:
    """Replicas that take their slots in turn."""

    def __init__(self, case: Case, work: GroupWork, second_per_work: float) -> None:
        self._case = case
        self._work = work
        self._second_per_work = second_per_work
        self._loop = asyncio.get_running_loop()
        slots = case.groups // case.replicas
        self._slots = [
            [self._loop.create_future() for _ in range(slots)] for _ in range(case.replicas)
        ]

    def put(self, group: Group, replica: int, slot: int) -> None:
        work = self._work(group.prompt_lengths()[0], group.trained_lengths.tolist())
        self._loop.call_soon_threadsafe(self._slots[replica][slot].set_result, work)

    async def train(self) -> float:
        """Returns the time at which the last replica is done."""
        await asyncio.gather(*map(self._replica, self._slots))
        return self._loop.time()

    async def _replica(self, slots: Sequence[asyncio.Future[float]]) -> None:
        done_s = 0.0
        for slot in slots:
            work = await slot
            done_s = max(done_s, self._loop.time()) + work * self._second_per_work
            await asyncio.sleep(max(0.0, done_s - self._loop.time()))


def prompts_of(count: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        Prompt(
            i,
            np.array([rng.randrange(3, VOCABULARY) for _ in range(rng.randint(64, 256))], np.int32),
            "0",
            "",
            {},
        )
        for i in range(count)
    ]


def configuration(case: Case, dispatch: str, stream: bool) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": RUN_SEED},
            "model": {"path": "none"},
            "data": {"train": "none"},
            "rollout": {
                "responses_per_prompt": GROUP,
                "max_response_tokens": case.max_tokens,
                "window": case.places * GROUP,
            },
            "trainer": {"devices": case.replicas},
            "schedule": {
                "skip_zero_advantage": False,  # whatever its rewards, a group has work
                "prompts_per_iteration": case.groups,
                "dispatch": dispatch,
                "stream": stream,
            },
            "telemetry": {"samples": 0},
        }
    )


async def run_iterations(
    case: Case,
    engines: Sequence[RolloutEngine],
    dispatch: str,
    stream: bool,
    seed: int,
    store_thread: Executor,
) -> list[Iteration]:
    """Returns all epochs, one iteration after another."""
    config = configuration(case, dispatch, stream)
    work = GroupWork(SHAPES["7B"], config)
    prompt_stream = PromptStream(prompts_of(case.groups * case.iterations_per_epoch, seed), seed)
    shelf: Any = Shelf()  # the put of a RolloutBuffer is all that is used
    loop = asyncio.get_running_loop()
    results = []
    async with EnginePool(engines) as pool:
        controller = ScheduleController(Rules.from_config(config), work)
        sampling = Sampling(case.max_tokens, 1.0)
        timeline = Timeline(None, "")
        environment = SingleTurn(EnvironmentContext(None, case.max_tokens))
        rewards: Any = Rewards()
        producer = producer_on_engines(
            config,
            pool,
            environment,
            rewards,
            shelf,
            controller,
            sampling,
            timeline,
            work,
            store_thread,
        )
        for iteration in range(case.epochs * case.iterations_per_epoch):
            prompts = prompt_stream.next_items(case.groups)
            lengths = [
                case.group_lengths(prompt, iteration, index) for index, prompt in enumerate(prompts)
            ]
            total = sum(
                work(len(p.tokens), group) for p, group in zip(prompts, lengths, strict=True)
            )
            bound_s = case.bound_s(lengths)
            train_s = case.train * bound_s
            shelf.trainers = Trainers(case, work, train_s * case.replicas / total)
            start_s = loop.time()
            training = asyncio.create_task(shelf.trainers.train())
            numbers = (await producer.produce(iteration, prompts)).numbers
            generate_s = loop.time() - start_s
            end_s = await training - start_s
            if generate_s < bound_s * 0.999:
                raise SystemExit(
                    f"iteration {iteration}: generated in {generate_s} s, below the bound of "
                    f"{bound_s} s"
                )
            times = IterationTimes(end_s, border_s=0.0, train_s=train_s, step_s=0.0)
            controller.end_iteration(times, iteration)
            results.append(
                Iteration(
                    bound_s,
                    train_s,
                    generate_s,
                    end_s,
                    numbers["tail_waste"],
                    numbers["replica_imbalance"],
                )
            )
    return results


def virtual(case: Case, dispatch: str, stream: bool, seed: int) -> list[Iteration]:
    loop = VirtualLoop()
    try:
        with mock.patch.object(time, "perf_counter", loop.time):  # the pool's clock
            engines: list[Any] = [VirtualEngine(number, case) for number in range(case.engines)]
            return loop.run_until_complete(
                run_iterations(case, engines, dispatch, stream, seed, Inline())
            )
    finally:
        loop.close()


STEP_S = 0.01
EPOCHS = 3
PER_EPOCH = 4
SEEDS = 3


def case_of(waves: int, train: float, speeds: tuple[float, ...] = ()) -> Case:
    groups = 64
    engines = len(speeds) or 4
    speed = Speed(step_s=STEP_S)
    lengths = HeavyTail(300)
    places = max(1, groups // (engines * waves))
    return Case(engines, places, groups, 4, train, speed, lengths, 4096, EPOCHS, PER_EPOCH, speeds)


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def generate_ratio(iterations: Iterable[Iteration]) -> float:
    return mean(i.generate_s / i.bound_s for i in iterations)


def iteration_ratio(iterations: Iterable[Iteration]) -> float:
    return mean(i.end_s / max(i.bound_s, i.train_s) for i in iterations)


def learning_table() -> list[str]:
    lines = [
        "| waves | dispatch | generate, epoch 1 | epoch 2 | epoch 3 | tail, epoch 3 |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for waves in (2, 4, 8, 16):
        for dispatch in ("in-order", "longest-first"):
            runs = [virtual(case_of(waves, 1.0), dispatch, True, seed) for seed in range(SEEDS)]
            epochs = [
                [i for run in runs for i in run[e * PER_EPOCH : (e + 1) * PER_EPOCH]]
                for e in range(EPOCHS)
            ]
            cells = [f"{generate_ratio(epoch):.3f}" for epoch in epochs]
            tail = f"{mean(i.tail_waste for i in epochs[-1]):.1%}"
            lines.append(f"| {waves} | {dispatch} | {' | '.join(cells)} | {tail} |")
    return lines


def iteration_table() -> list[str]:
    """Iterations after the first epoch."""
    lines = [
        "| waves | Tt / bound | sync: in-order | auto | periodic: in-order | longest-first | auto |"
    ]
    lines.append("|---:|---:|---:|---:|---:|---:|---:|")
    for waves in (4, 8, 16):
        for train in (0.5, 1.0, 1.5, 2.5):
            cells = [
                iteration_ratio(
                    i
                    for seed in range(SEEDS)
                    for i in virtual(case_of(waves, train), dispatch, stream, seed)[PER_EPOCH:]
                )
                for stream, dispatch in (
                    (False, "in-order"),
                    (False, "auto"),
                    (True, "in-order"),
                    (True, "longest-first"),
                    (True, "auto"),
                )
            ]
            lines.append(f"| {waves} | {train:g} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    return lines


def speeds_table(speeds: tuple[float, ...]) -> list[str]:
    """Generation over its bound with an engine of each speed.

    Tt is half of it, so that engines decide.
    """
    lines = [
        "| waves | dispatch | generate, epoch 1 | epoch 2 | epoch 3 |",
        "|---:|---|---:|---:|---:|",
    ]
    for waves in (2, 4, 8, 16):
        for dispatch in ("in-order", "longest-first", "auto"):
            case = case_of(waves, 0.5, speeds)
            runs = [virtual(case, dispatch, True, seed) for seed in range(SEEDS)]
            epochs = [
                [i for run in runs for i in run[e * PER_EPOCH : (e + 1) * PER_EPOCH]]
                for e in range(EPOCHS)
            ]
            lines.append(
                f"| {waves} | {dispatch} | "
                f"{' | '.join(f'{generate_ratio(epoch):.3f}' for epoch in epochs)} |"
            )
    return lines


def speeds_report(speeds: tuple[float, ...]) -> str:
    named = ", ".join(f"{speed:g}" for speed in speeds)
    head = (
        f"Engines of speed {named}, 64 groups of {GROUP}, median 300 tokens, limit 4,096; "
        f"{SEEDS} seeds, epochs of {PER_EPOCH}."
    )
    return "\n".join([head, "", *speeds_table(speeds)])


def replica_table() -> list[str]:
    """Iterations of 64 groups in the order in which they arrive, imbalance by FLOPs whatever the
    balance was by.
    """
    lines = [
        "| model | limit | replicas | least tokens so far | least FLOPs so far | tokens, in sight "
        "| FLOPs, in sight | known |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, limit in (("7B", 4096), ("7B", 16384), ("1.5B", 16384)):
        for replicas in (4, 8):
            case = dataclasses.replace(
                case_of(4, 1.0), replicas=replicas, max_tokens=limit, lengths=HeavyTail(limit / 12)
            )
            rows = [imbalances(case, SHAPES[name], seed) for seed in range(20)]
            cells = " | ".join(f"{mean(column):.1%}" for column in zip(*rows, strict=True))
            lines.append(f"| {name} | {limit:,} | {replicas} | {cells} |")
    return lines


def imbalances(case: Case, spec: ModelSpec, seed: int) -> tuple[float, ...]:
    """Returns the imbalances that are the columns of replica_table."""
    work = GroupWork(spec, configuration(case, "auto", True))
    prompts = prompts_of(case.groups, seed)
    lengths = [case.group_lengths(prompt, 0, index) for index, prompt in enumerate(prompts)]
    order = random.Random(seed).sample(range(case.groups), case.groups)
    flops = [work(len(prompts[index].tokens), lengths[index]) for index in order]
    tokens = [float(len(prompts[index].tokens) + sum(lengths[index])) for index in order]
    estimate = random.Random(seed).lognormvariate(0, 0.1)  # of the whole iteration, off by a tenth

    def imbalance(replicas: Sequence[int]) -> float:
        loads = [0.0] * case.replicas
        for cost, replica in zip(flops, replicas, strict=True):
            loads[replica] += cost
        return max(loads) / mean(loads) - 1

    def in_sight(costs: Sequence[float]) -> list[int]:
        assignment = Assignment(
            "completion",
            case.replicas,
            case.groups // case.replicas,
            expected_work=estimate * sum(costs),
        )
        return [assignment.assign(index, cost)[0] for index, cost in enumerate(costs)]

    together = Assignment("completion", case.replicas, case.groups // case.replicas)
    known = [replica for replica, _ in together.assign_all(range(case.groups), flops)]
    choices = (
        least(tokens, case.replicas),
        least(flops, case.replicas),
        in_sight(tokens),
        in_sight(flops),
        known,
    )
    return tuple(map(imbalance, choices))


def least(costs: Sequence[float], replicas: int) -> list[int]:
    """Returns the baseline: the replica with the least so far that is not full."""
    loads = [0.0] * replicas
    free = [len(costs) // replicas] * replicas
    chosen = []
    for cost in costs:
        replica = min((r for r in range(replicas) if free[r]), key=loads.__getitem__)
        loads[replica] += cost
        free[replica] -= 1
        chosen.append(replica)
    return chosen


def virtual_report() -> str:
    return "\n".join(
        [
            f"4 engines, 64 groups of {GROUP}, median 300 tokens, limit 4,096; {SEEDS} seeds, "
            f"epochs of {PER_EPOCH} iterations.",
            "",
            *learning_table(),
            "",
            "The same after the first epoch, 4 replicas; over max(bound, Tt), for sync too "
            f"({SEEDS} seeds):",
            "",
            *iteration_table(),
            "",
            "Replica imbalance by FLOPs, 64 groups that arrive in random order, median length a "
            "twelfth of the limit (20 seeds):",
            "",
            *replica_table(),
        ]
    )


REAL = Case(2, 4, 32, 2, 1.0, Speed(step_s=0.004, stride=4), HeavyTail(160), 2048, 3, 3)


@contextlib.contextmanager
def stand_ins(case: Case) -> Iterator[list[str]]:
    """URLs of stand-in engines, one process each."""
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(case.engines):
            command = [
                sys.executable,
                str(ROOT / "tools/stand_in.py"),
                "--step-s",
                str(case.speed.step_s),
            ]
            command += [
                "--stride",
                str(case.speed.stride),
                "--median-tokens",
                str(case.lengths.median_tokens),
            ]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
            )
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("a stand-in engine ended before it was ready")
            urls.append(line.split()[-1])
        yield urls


async def run_on_stand_ins(
    case: Case, engines: Sequence[RolloutEngine], dispatch: str, store_thread: Executor
) -> list[Iteration]:
    for engine in engines:
        await engine.load_weights(0, deadline_s=60.0)
    return await run_iterations(case, engines, dispatch, True, 0, store_thread)


def real_report() -> str:
    case = REAL
    lines = [
        f"{case.engines} stand-in engines as processes, {case.places} places each, {case.groups} "
        f"groups of {GROUP}, median {case.lengths.median_tokens:g} tokens, "
        f"{case.speed.step_s * 1000:g} ms per step, {case.replicas} replicas (timers), Tt = bound; "
        f"wall time; {processor()}, {os.cpu_count()} cores.",
        "",
        "| dispatch | epoch | bound s | generate s | generate | iteration s | iteration | tail | "
        "imbalance |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for dispatch in ("in-order", "longest-first"):
        with stand_ins(case) as urls, ThreadPoolExecutor(1) as store_thread:
            engines = [EngineClient(url, VOCABULARY) for url in urls]
            iterations = asyncio.run(run_on_stand_ins(case, engines, dispatch, store_thread))
        for epoch in range(case.epochs):
            part = iterations[
                epoch * case.iterations_per_epoch : (epoch + 1) * case.iterations_per_epoch
            ]
            lines.append(
                f"| {dispatch} | {epoch + 1} | {mean(i.bound_s for i in part):.2f} | "
                f"{mean(i.generate_s for i in part):.2f} | {generate_ratio(part):.3f} | "
                f"{mean(i.end_s for i in part):.2f} | {iteration_ratio(part):.3f} | "
                f"{mean(i.tail_waste for i in part):.1%} | {mean(i.imbalance for i in part):.1%} |"
            )
    return "\n".join(lines)


def speeds_of(text: str) -> tuple[float, ...]:
    """Raises ArgumentTypeError."""
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        speeds = ()
    if not speeds or not all(0.01 <= speed <= 100 for speed in speeds):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of speeds from 0.01 to 100, as 1,0.5"
        )
    return speeds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--real", action="store_true", help="stand-in engines and wall time instead of virtual time"
    )
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    parser.add_argument(
        "--speeds", type=speeds_of, help="engines of these speeds, as 1,0.5, in virtual time"
    )
    arguments = parser.parse_args()
    reports = {True: real_report, False: virtual_report}
    report = speeds_report(arguments.speeds) if arguments.speeds else reports[arguments.real]()
    print(report)
    if arguments.markdown:
        arguments.markdown.write_text(report + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
