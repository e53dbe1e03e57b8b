#!/usr/bin/env python
"""Measures what invariant I7 costs: the share of a trainer's iteration that goes into checking its gradient and its step.

    python tools/bench_gradient_sum.py [--ranks 2] [--prompt 64] [--response 64] [--responses 8] [--groups 8] [--repetitions 9]

A random Qwen2 (hidden 256, 4 layers) is trained in fp32 by so many replicas, each of them a process of one thread. Timed is the CPU
time of the checks themselves, and that of the whole process over forward, backward and step: waiting for the other rank, which
shares its cores with others, is in neither. Medians over the repetitions of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import multiprocessing

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu import platform as platforms
from pa_npu.algorithm.loss_gradient import HeadGradient
from pa_npu.algorithm.objective import Objective
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.invariants import GradientSum
from pa_npu.trainer.learner import Learner
from pa_npu.trainer.loss_checks import LossGradient
from pa_npu.trainer.step_replay import StepReplay
from tools.bench_trainer import iteration, make_config, make_groups, make_random_model
from tools.hardware import processor

BACKENDS = ("megatron", "fsdp")


class Spent:
    """Seconds of CPU time inside functions that were replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def within(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, self._depth = time.thread_time(), self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        return timed


def watch(spent: Spent, backend: str) -> None:
    """Before a backend is made, which binds some of these functions."""
    spent.within(GradientSum, *(name for name in vars(GradientSum) if name.startswith("check_")))
    spent.within(StepReplay, "before", "after")
    spent.within(LossGradient, "check")
    spent.within(HeadGradient, "_arrived")
    spent.within(Objective, "_watch", "_check_reference")
    spent.within(Learner, "_check_reference", "_look_at_start")
    if backend == "megatron":
        from pa_npu.backends.megatron.backend import MegatronBackend
        from pa_npu.backends.megatron.optimizer import WatchedReduction

        spent.within(WatchedReduction, "_note_own", "_note_reduced", "take")
        spent.within(MegatronBackend, "gradient_size", "stepped")
    else:
        from pa_npu.backends.fsdp import backend as fsdp
        from pa_npu.backends.fsdp.optimizer import CountedReduceScatter

        spent.within(CountedReduceScatter, "take_reduced")
        spent.within(fsdp, "counted")
        spent.within(fsdp.FsdpBackend, "gradient_size", "stepped")


def train(
    rank: int, backend: str, model: str, config: Config, args: argparse.Namespace, port: int, results: Any
) -> None:
    """One rank: puts (share, seconds) into `results`."""
    torch.set_num_threads(1)
    platform, spec, spent = platforms.get("cpu"), ModelSpec.read(model), Spent()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    module = backend_module(backend)
    trainer = module.create(config, spec, platform, dist.PrefixStore(backend, store), rank, 0, Timeline(None, ""))
    watch(spent, backend)
    learner = Learner(config, trainer, platform, Timeline(None, ""))
    groups = make_groups(args, spec.vocab_size)[rank :: args.ranks]
    found = []
    for _ in range(args.repetitions + 1):
        spent.seconds, start_s = 0.0, time.process_time()
        iteration(learner, groups, config, True)
        total_s = time.process_time() - start_s
        found.append((spent.seconds / total_s, total_s))
    results.put([statistics.median(values) for values in zip(*found[1:], strict=True)])
    trainer.close()


def measure(backend: str, model: str, args: argparse.Namespace) -> tuple[float, float]:
    """(share of an iteration, its CPU seconds) of the rank where the share is larger."""
    config = make_config(model, args)
    trainer = {**config.trainer.model_dump(), "backend": backend, "devices": args.ranks}
    config = Config.model_validate({**config.model_dump(), "trainer": trainer})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(train, (backend, model, config, args, store.port, results), nprocs=args.ranks)
    share, seconds = max(results.get() for _ in range(args.ranks))
    return share, seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("ranks", 2),
        ("prompt", 64),
        ("response", 64),
        ("responses", 8),
        ("groups", 8),
        ("repetitions", 9),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(arguments)
    print(
        f"{processor()}, {args.ranks} ranks; {args.groups} groups of {args.responses} responses of up to {args.response} tokens"
    )
    print("\n| backend | CPU time of an iteration | share of I7 |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        model = make_random_model(Path(scratch) / "model")
        for backend in BACKENDS:
            share, seconds = measure(backend, model, args)
            print(f"| {backend} | {seconds:.2f} s | {share:.2%} |", flush=True)


if __name__ == "__main__":
    main()
