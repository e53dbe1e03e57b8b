#!/usr/bin/env python
"""Measures what a run's chain costs: the share of an iteration's CPU time.

    python tools/bench_chain.py --run configs/grpo_tiny.yaml [--iterations 12] [key=value ...]
    python tools/bench_chain.py [--ranks 2] [--prompt 64] [--response 64] [--responses 8] [--groups 8] [--repetitions 9]

With --run the configuration is run as it is, without evaluations. The CPU time of all its processes
is read at the end of each iteration, and divides the CPU time of making that iteration's line: the
digests of as many groups with responses of the same lengths, and the line, made in this process
with cold caches right after the line has appeared. The first iteration is left out.

Without it, a random Qwen2 (hidden 256, 4 layers) is trained in fp32 on each backend by so many
replicas, each a process of one thread. In every repetition an iteration is trained and then its
line of the chain made: the digests of its groups and the line, which a coordinator makes, and the
digest of the weights with the sum over ranks. The digest of weights is listed alone: the rank that
publishes takes it anyway, for invariant I5, and others take theirs while engines load. Generation
is not counted there, so that shares of whole iterations are smaller. Medians over the repetitions,
of the rank where they are larger.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pa_npu import platform as platforms
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.control.keeper import descendants
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.group_digest import digest_group
from pa_npu.telemetry.chain import CHAIN, ChainWriter, Responses, group_fields, read_chain
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.border import joint_digest
from pa_npu.trainer.learner import Learner
from tools.bench_trainer import iteration, make_config, make_groups, make_random_model
from tools.groups import group_of_responses
from tools.hardware import processor
from tools.processes import started

BACKENDS = ("megatron", "fsdp")
DIGEST = "0" * 32
SOFTWARE = {
    "torch": torch.__version__,
    "backend": "a training backend 0.0.0",
    "engines": "an engine 0.0.0",
}
ARRANGEMENT = {f"section.key_{number}": number for number in range(21)}


_PROMPT_TOKENS = 16  # which the quick start's questions have
_CACHE_BYTES = 64 << 20
_FIRST_S = 600.0
_ITERATION_S = 300.0
_LOOK_EVERY_S = 0.02


def write_line(chain: ChainWriter, number: int, groups: Sequence[Group], weights: str) -> None:
    """Does what a coordinator does for the chain in one iteration."""
    digests = [digest_group(group, {(0, place): None}) for place, group in enumerate(groups)]
    of_run = {
        "configuration": DIGEST,
        "arrangement": ARRANGEMENT,
        "software": SOFTWARE,
        "model": DIGEST,
    }
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
    rank: int,
    backend: str,
    model: str,
    config: Config,
    args: argparse.Namespace,
    port: int,
    results: Any,
) -> None:
    """Trains on one rank; puts medians of (CPU seconds of an iteration, of the line, of the
    weights' digest, of the sum), and a line's bytes, into `results`."""
    torch.set_num_threads(1)
    platform = platforms.get("cpu")
    spec = ModelSpec.read(model)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    module = backend_module(backend)
    trainer = module.create(
        config, spec, platform, dist.PrefixStore(backend, store), rank, 0, Timeline(None, "")
    )
    learner = Learner(config, trainer, platform, Timeline(None, ""))
    groups = make_groups(args, spec.vocab_size)
    spent: list[list[float]] = []
    with tempfile.TemporaryDirectory() as directory:
        with ChainWriter(directory, 0) as chain:
            for number in range(args.repetitions + 1):
                moments = [time.process_time()]
                iteration(learner, groups[rank :: args.ranks], config, True)
                moments.append(time.process_time())
                digest = trainer.digest()
                moments.append(time.process_time())
                start = time.thread_time()
                weights = joint_digest(digest, trainer.place, trainer.reductions, trainer.device)
                summed_s = time.thread_time() - start
                start = time.thread_time()
                write_line(chain, number, groups, weights)
                line_s = time.thread_time() - start
                spent.append([moments[1] - moments[0], line_s, moments[2] - moments[1], summed_s])
        size = (Path(directory) / CHAIN).stat().st_size / len(spent)
    results.put([*(statistics.median(values) for values in zip(*spent[1:], strict=True)), size])
    trainer.close()


def measure(backend: str, model: str, args: argparse.Namespace) -> list[float]:
    """Returns the numbers of `train`, of the rank where the chain's share is largest."""
    config = make_config(model, args)
    trainer = {**config.trainer.model_dump(), "backend": backend, "devices": args.ranks}
    config = Config.model_validate({**config.model_dump(), "trainer": trainer})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(
        train, (backend, model, config, args, store.port, results), nprocs=args.ranks
    )
    measured: list[list[float]] = [results.get() for _ in range(args.ranks)]
    return max(measured, key=lambda numbers: (numbers[1] + numbers[3]) / numbers[0])


@dataclass(frozen=True)
class IterationCost:
    """CPU seconds of an iteration, of all processes, and of making its line."""

    iteration_s: float
    line_s: float
    responses: int

    @property
    def share(self) -> float:
        return self.line_s / self.iteration_s


def measure_run(config: str, iterations: int, overrides: Sequence[str]) -> list[IterationCost]:
    """Returns the costs of each iteration but the first."""
    costs = []
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        settings = [
            f"run.dir={run_dir}",
            f"schedule.iterations={iterations}",
            "schedule.compare_iterations=0",
            "data.test=null",
            "telemetry.trackers=[]",
            *overrides,
        ]
        command = [sys.executable, "-m", "pa_npu.launcher", "run", "--config", config, *settings]
        log = Path(scratch) / "run.log"
        with started(command, log) as process, ChainWriter(Path(scratch), 0) as chain:
            before_s: float | None = None
            for number, responses in enumerate(_lines(process, run_dir, iterations, log)):
                spent_s = _cpu_seconds(process.pid)
                groups = groups_like(responses)
                line_s = _line_seconds(chain, number, groups)
                if before_s is not None:
                    costs.append(IterationCost(spent_s - before_s, line_s, responses.size))
                before_s = spent_s
    return costs


def _lines(process: Popen[bytes], run_dir: Path, iterations: int, log: Path) -> Iterator[Responses]:
    """Yields the responses of each line of the run's chain, as it appears.

    Ends the program if the run does not come so far.
    """
    for number in range(iterations):
        deadline = time.monotonic() + (_ITERATION_S if number else _FIRST_S)
        while (
            not (run_dir / CHAIN).is_file() or (run_dir / CHAIN).read_bytes().count(b"\n") <= number
        ):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"iteration {number} did not come; the end of the run's "
                    f"output:\n{log.read_text()[-2000:]}"
                )
            time.sleep(_LOOK_EVERY_S)
        link = next(link for link in read_chain(run_dir) if link.iteration == number)
        yield link.table()


def _cpu_seconds(root: int) -> float:
    """Of a process and all below it, that are alive."""
    ticks = 0
    for pid in (root, *descendants(root)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        ticks += int(fields[11]) + int(fields[12])  # user and system time
    return ticks / os.sysconf("SC_CLK_TCK")


def groups_like(responses: Responses) -> list[Group]:
    """Groups of as many responses with the same lengths, of random tokens."""
    rng = np.random.default_rng(0)
    ends = np.append(responses.starts[1:], responses.size)
    groups = []
    for place, (start, end) in enumerate(
        zip(responses.starts.tolist(), ends.tolist(), strict=True)
    ):
        lengths = responses.rows["length"][start:end].astype(np.int32)
        total = int(lengths.sum())
        groups.append(
            group_of_responses(
                iteration=0,
                version=0,
                index=place,
                prompt_id=place,
                prompt_tokens=rng.integers(0, 64, _PROMPT_TOKENS).astype(np.int32),
                response_tokens=rng.integers(0, 64, total).astype(np.int32),
                response_lengths=lengths,
                logprobs=rng.random(total).astype(np.float32),
                rewards=responses.rows["reward"][start:end].copy(),
                advantages=responses.rows["advantage"][start:end].copy(),
                finished=np.ones(end - start, np.uint8),
            )
        )
    return groups


def _line_seconds(chain: ChainWriter, number: int, groups: Sequence[Group]) -> float:
    np.ones(_CACHE_BYTES, np.uint8).sum()  # what the caches hold is not of these groups
    start = time.thread_time()
    write_line(chain, number, groups, DIGEST)
    return time.thread_time() - start


def report_run(config: str, costs: Sequence[IterationCost]) -> None:
    middle = {
        "an iteration": statistics.median(cost.iteration_s for cost in costs),
        "its line": statistics.median(cost.line_s for cost in costs),
    }
    shares = sorted(cost.share for cost in costs)
    print(
        f"{processor()}; {config}, {costs[0].responses} responses an iteration, medians of "
        f"{len(costs)} iterations\n"
    )
    print("| CPU time of an iteration, all processes | of its line | share | largest share |")
    print("|---:|---:|---:|---:|")
    print(
        f"| {middle['an iteration']:.2f} s | {1e3 * middle['its line']:.1f} ms | "
        f"{statistics.median(shares):.2%} | {shares[-1]:.2%} |"
    )


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
        ("repetitions", 9),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--run", metavar="CONFIG", help="run this configuration, and measure its iterations"
    )
    parser.add_argument("--iterations", type=int, default=12, help="of --run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further keys of --run")
    args = parser.parse_args(arguments)
    if args.run:
        report_run(args.run, measure_run(args.run, args.iterations, args.overrides))
        return
    print(
        f"{processor()}, {args.ranks} ranks; {args.groups} groups of {args.responses} responses of "
        f"up to {args.response} tokens"
    )
    print(
        "\n| backend | CPU time of training an iteration | line and sum over ranks | weights' "
        "digest | a line |"
    )
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        model = make_random_model(Path(scratch) / "model")
        for backend in BACKENDS:
            seconds, line_s, digest_s, sum_s, size = measure(backend, model, args)
            shares = (line_s + sum_s) / seconds, digest_s / seconds
            print(
                f"| {backend} | {seconds:.2f} s | {1e3 * (line_s + sum_s):.1f} ms, {shares[0]:.2%} "
                f"| {1e3 * digest_s:.1f} ms, {shares[1]:.2%} | {size / 1024:.1f} KiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
