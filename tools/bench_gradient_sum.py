#!/usr/bin/env python
"""Measures what invariant I7 costs: the share of a trainer's iteration that goes into checking its gradient and its step.

    python tools/bench_gradient_sum.py [--backends megatron fsdp] [--ranks 2] [--prompt 64] [--response 64] [--responses 8]
                                       [--groups 8] [--pairs 9] [--dtype fp32] [--table]

A random Qwen2 (hidden 256, 4 layers) is trained by so many replicas, each of them a process of one
thread. All times are CPU times of the process: waiting for another rank, or for a core, is in none
of them. Three figures, of the slowest rank:

    inside    the time in the checks' own functions, as a share of the iteration; the median over the pairs
    least     the same of the shortest times of both over all pairs, which other work on the cores disturbs least
    paired    an iteration with the checks against one without them, which follows or precedes it, in turn; this has everything that
              the checks make others do, and the noise of two iterations; the median

On cores that other work uses too, caches are colder, and small calls suffer more from that than
large products. --table lists where the time goes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import multiprocessing

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu import platform as platforms
from pa_npu.algorithm.loss_gradient import GivenLoss, HeadGradient
from pa_npu.algorithm.objective import Objective
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer import learner as learner_module
from pa_npu.trainer.invariants import GradientSum
from pa_npu.trainer.learner import Learner
from pa_npu.trainer.loss_checks import LossGradient
from pa_npu.trainer.step_replay import StepReplay
from tools.bench_trainer import iteration, make_config, make_groups, make_random_model
from tools.hardware import processor

BACKENDS = ("megatron", "fsdp")


@dataclass(frozen=True)
class Cost:
    """See the module's docstring. seconds: of an iteration. by_function: seconds an iteration
    inside the checks.
    """

    inside: float
    least: float
    paired: float
    seconds: float
    by_function: dict[str, float]


class Checks:
    """The functions of the checks: times them, or leaves them out."""

    def __init__(self) -> None:
        self.are_on = True
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._depth = 0

    def within(self, owner: Any, *names: str, instead: Any = None) -> None:
        """instead: what the functions return while checks are off; a function of their arguments
        may say it.
        """
        for name in names:
            setattr(
                owner,
                name,
                self._timed(
                    getattr(owner, name), f"{owner.__name__.rpartition('.')[2]}.{name}", instead
                ),
            )

    def _timed(self, function: Callable[..., Any], label: str, instead: Any) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.are_on:
                return instead(*args, **kwargs) if callable(instead) else instead
            start = time.thread_time()
            self._depth = self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds[label] += time.thread_time() - start

        return timed


def watch(checks: Checks, backend: str) -> None:
    """Replaces the functions of the checks by timed ones."""
    nothing = torch.zeros(())
    checks.within(GradientSum, *(name for name in vars(GradientSum) if name.startswith("check_")))
    checks.within(StepReplay, "before")
    checks.within(StepReplay, "after", instead=_count_update)
    checks.within(learner_module, "check_copies")
    checks.within(LossGradient, "check")
    checks.within(HeadGradient, "_arrived", "offer")
    checks.within(GivenLoss, "_arrived")
    checks.within(Objective, "_check_reference", "_passed", "finish", "loss_advantages")
    checks.within(Objective, "_watch", instead=_watch_nothing)
    checks.within(Learner, "_check_reference", "_look_at_start")
    if backend == "megatron":
        from pa_npu.backends.megatron.backend import MegatronBackend
        from pa_npu.backends.megatron.optimizer import WatchedReduction

        checks.within(WatchedReduction, "_note_own", "_note_reduced", "pop_reduced")
        checks.within(MegatronBackend, "gradient_size", instead=nothing)
        checks.within(MegatronBackend, "stepped", "copied", instead=())
    else:
        from pa_npu.backends.fsdp import backend as fsdp
        from pa_npu.backends.fsdp.optimizer import CountedReduceScatter

        checks.within(CountedReduceScatter, "on_reduced", instead=_forget_input)
        checks.within(fsdp, "counted")
        checks.within(fsdp.FsdpBackend, "gradient_size", instead=nothing)
        checks.within(fsdp.FsdpBackend, "stepped", "copied", instead=())


def _watch_nothing(objective: Objective, *_: Any) -> None:
    return None


def _count_update(replay: StepReplay, *_: Any) -> None:
    replay._updates += 1


def _forget_input(reduction: Any, reduced: torch.Tensor) -> None:
    reduction._input = None


def train(
    rank: int,
    backend: str,
    model: str,
    config: Config,
    args: argparse.Namespace,
    port: int,
    results: Any,
) -> None:
    """One rank: puts its Cost into `results`."""
    torch.set_num_threads(1)
    platform = platforms.get("cpu")
    spec = ModelSpec.read(model)
    checks = Checks()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    module = backend_module(backend)
    if backend == "fsdp":  # it binds some of the functions when it is made
        watch(checks, backend)
    trainer = module.create(
        config, spec, platform, dist.PrefixStore(backend, store), rank, 0, Timeline(None, "")
    )
    if backend == "megatron":  # it imports megatron only then
        watch(checks, backend)
    learner = Learner(config, trainer, platform, Timeline(None, ""))
    groups = make_groups(args, spec.vocab_size)[rank :: args.ranks]
    inside = []
    differences = []
    seconds = []
    iteration(learner, groups, config, True)
    checks.seconds.clear()
    for pair in range(args.pairs):
        spent_s: dict[bool, float] = {}
        for are_on in (True, False) if pair % 2 else (False, True):
            checks.are_on = are_on
            if are_on:  # the iteration without checks has left nothing to go on from
                learner._replay._choose(trainer.stepped())
            before_s = sum(checks.seconds.values())
            start_s = time.process_time()
            iteration(learner, groups, config, True)
            spent_s[are_on] = time.process_time() - start_s
            if are_on:
                inside.append(sum(checks.seconds.values()) - before_s)
        differences.append(spent_s[True] / spent_s[False] - 1.0)
        seconds.append(spent_s[True])
    most_first = sorted(checks.seconds.items(), key=itemgetter(1), reverse=True)
    by_function = {name: value / args.pairs for name, value in most_first}
    shares = [part / whole for part, whole in zip(inside, seconds, strict=True)]
    results.put(
        Cost(
            inside=statistics.median(shares),
            least=min(inside) / min(seconds),
            paired=statistics.median(differences),
            seconds=statistics.median(seconds),
            by_function=by_function,
        )
    )
    trainer.close()


def measure(backend: str, model: str, args: argparse.Namespace) -> Cost:
    """Returns the cost on the rank where the share inside the checks is largest."""
    config = make_config(model, args)
    trainer = {**config.trainer.model_dump(), "backend": backend, "devices": args.ranks}
    sections = {"trainer": trainer, "model": {**config.model.model_dump(), "dtype": args.dtype}}
    config = Config.model_validate({**config.model_dump(), **sections})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(
        train, (backend, model, config, args, store.port, results), nprocs=args.ranks
    )
    costs: list[Cost] = [results.get() for _ in range(args.ranks)]
    return max(costs, key=attrgetter("inside"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("ranks", 2),
        ("prompt", 64),
        ("response", 64),
        ("responses", 8),
        ("groups", 8),
        ("pairs", 9),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", help="model directory; the random model if there is none")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args(arguments)
    print(
        f"{processor()}, {args.ranks} ranks, {args.dtype}; {args.groups} groups of "
        f"{args.responses} responses of up to {args.response} tokens"
    )
    print(
        "\n| backend | CPU time of an iteration | inside the checks | least | paired difference |"
    )
    print("|---|---:|---:|---:|---:|")
    tables = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make_random_model(Path(scratch) / "model")
        for backend in args.backends:
            cost = measure(backend, model, args)
            tables[backend] = cost.by_function
            print(
                f"| {backend} | {cost.seconds:.2f} s | {cost.inside:.2%} | {cost.least:.2%} | "
                f"{cost.paired:+.2%} |",
                flush=True,
            )
    for backend, table in tables.items() if args.table else ():
        print(f"\n| {backend} | ms an iteration |\n|---|---:|")
        for name, spent_s in table.items():
            print(f"| {name} | {1e3 * spent_s:.2f} |")


if __name__ == "__main__":
    main()
