#!/usr/bin/env python
"""Measures what a run's chain costs: the share of an iteration's CPU time, on each backend.

    python tools/bench_chain.py [--ranks 2] [--prompt 64] [--response 64] [--responses 8] [--groups 8] [--repetitions 9]

A random Qwen2 (hidden 256, 4 layers) is trained in fp32 by so many replicas, each a process of one
thread. In every repetition an iteration is trained and then its line of the chain made: the digests of
its groups and the line, which a coordinator makes, and the digest of the weights with the sum over
ranks. The digest of weights is listed alone: the rank that publishes takes it anyway, for invariant I5,
and others take theirs while engines load. Generation, which a whole iteration has too, is not counted,
so that real shares are smaller. Medians over the repetitions, of the rank where they are larger.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import multiprocessing

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu import platform as platforms
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.group_digest import digest_group
from pa_npu.telemetry.chain import CHAIN, ChainWriter, group_fields
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.border import joint_digest
from pa_npu.trainer.learner import Learner
from tools.bench_trainer import iteration, make_config, make_groups, make_random_model
from tools.hardware import processor

BACKENDS = ("megatron", "fsdp")
DIGEST = "0" * 32
SOFTWARE = {"torch": torch.__version__, "backend": "a training backend 0.0.0", "engines": "an engine 0.0.0"}
ARRANGEMENT = {f"section.key_{number}": number for number in range(21)}


def write_line(chain: ChainWriter, number: int, groups: Sequence[Group], weights: str) -> None:
    """Does what a coordinator does for the chain in one iteration."""
    digests = [digest_group(group, {(0, place): None}) for place, group in enumerate(groups)]
    of_run = {"configuration": DIGEST, "arrangement": ARRANGEMENT, "software": SOFTWARE, "model": DIGEST}
    chain.write(
        {
            "iteration": number,
            **of_run,
            "data": DIGEST,
            **group_fields(digests),
            "gradient_norms": ((0.1 * number).hex(),),
            "weights_before": weights,
            "weights_after": weights,
            "record": DIGEST,
            "samples": DIGEST,
        }
    )


def train(
    rank: int, backend: str, model: str, config: Config, args: argparse.Namespace, port: int, results: Any
) -> None:
    """Trains on one rank; puts medians of (CPU seconds of an iteration, of the line, of the weights' digest, of the sum), and a
    line's bytes, into `results`."""
    torch.set_num_threads(1)
    platform, spec = platforms.get("cpu"), ModelSpec.read(model)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    module = backend_module(backend)
    trainer = module.create(config, spec, platform, dist.PrefixStore(backend, store), rank, 0, Timeline(None, ""))
    learner = Learner(config, trainer, platform, Timeline(None, ""))
    groups = make_groups(args, spec.vocab_size)
    spent: list[list[float]] = []
    with tempfile.TemporaryDirectory() as directory:
        with ChainWriter(directory, 0) as chain:
            for number in range(args.repetitions + 1):
                moments = [time.process_time()]
                iteration(learner, groups[rank :: args.ranks], config, True)
                moments.append(time.process_time())
                own = trainer.digest()
                moments.append(time.process_time())
                start = time.thread_time()
                weights = joint_digest(own, trainer.place, trainer.reductions, trainer.device)
                summed_s = time.thread_time() - start
                start = time.thread_time()
                write_line(chain, number, groups, weights)
                line_s = time.thread_time() - start
                spent.append([moments[1] - moments[0], line_s, moments[2] - moments[1], summed_s])
        size = (Path(directory) / CHAIN).stat().st_size / len(spent)
    results.put([*(statistics.median(values) for values in zip(*spent[1:], strict=True)), size])
    trainer.close()


def measure(backend: str, model: str, args: argparse.Namespace) -> list[float]:
    """The numbers of `train`, of the rank where the chain's share is largest."""
    config = make_config(model, args)
    trainer = {**config.trainer.model_dump(), "backend": backend, "devices": args.ranks}
    config = Config.model_validate({**config.model_dump(), "trainer": trainer})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(train, (backend, model, config, args, store.port, results), nprocs=args.ranks)
    measured: list[list[float]] = [results.get() for _ in range(args.ranks)]
    return max(measured, key=lambda numbers: (numbers[1] + numbers[3]) / numbers[0])


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
    print("\n| backend | CPU time of training an iteration | line and sum over ranks | weights' digest | a line |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        model = make_random_model(Path(scratch) / "model")
        for backend in BACKENDS:
            seconds, line_s, digest_s, sum_s, size = measure(backend, model, args)
            shares = (line_s + sum_s) / seconds, digest_s / seconds
            print(
                f"| {backend} | {seconds:.2f} s | {1e3 * (line_s + sum_s):.1f} ms, {shares[0]:.2%} | "
                f"{1e3 * digest_s:.1f} ms, {shares[1]:.2%} | {size / 1024:.1f} KiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
