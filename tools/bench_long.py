#!/usr/bin/env python
"""Time steps over a group of long sequences: its prompt computed once or in each microbatch, and its rows on one rank or several.

    python tools/bench_trainer.py --long [--prompt 4096] [--response 2048] [--responses 8] [--context 1 2] [--rounds 3]

Rows are steps of one thread over one group, each response a microbatch of its own, and over the
group in one microbatch; then the group in one microbatch on the ranks of a context group, a process
each. Processor seconds are of the busiest rank: they leave out what other work on the machine takes,
and waiting for the other ranks; seconds by the clock have both in them. Speed is by processor
seconds. The ideal is the ratio of floating-point operations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, cut, pack
from pa_npu.samples.stems import Branch, Stem, with_stems
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner

ROOT = Path(__file__).resolve().parents[1]
ONCE = "all at once"
EACH = "prompt in each"
DEPTH_FIRST = "depth first"


def compare_long(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all rows, each in processes of its own, in turn in each of args.rounds."""
    cases = [(name, 1) for name in (ONCE, EACH, DEPTH_FIRST)]
    cases += [(ONCE, context) for context in args.context if context > 1]
    rounds: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make_model(Path(scratch) / "model", args)
        for number in range(args.rounds):
            for way, context in cases:
                store = str(Path(scratch) / f"store-{number}-{way}-{context}")
                case = {"model": model, "way": way, "context": context, "store": store}
                ranks = [_started(args, {**case, "rank": rank}) for rank in range(context)]
                results = [_result(process) for process in ranks]
                busiest = max(results, key=lambda result: result["seconds"])
                name = way if context == 1 else f"{way}, C = {context}"
                rounds.setdefault(name, []).append(busiest)
    return {
        "shape": f"a prompt of {args.prompt:,} with {args.responses} responses of "
        f"{args.response:,}; hidden {args.hidden}, {args.layers} layers, "
        f"recompute={args.recompute}; medians of {args.rounds} rounds",
        "rows": {name: _median_of(results) for name, results in rounds.items()},
    }


def _median_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what a row measured, with the medians of its times over rounds."""
    medians = {
        name: statistics.median(result[name] for result in results)
        for name in ("seconds", "wall_s")
    }
    return {**results[0], **medians}


def _started(args: argparse.Namespace, case: Mapping[str, Any]) -> subprocess.Popen[str]:
    settings = {**vars(args), **case}
    argv = [sys.executable, "-m", "tools.bench_long", json.dumps(settings)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a row ended with exit code {process.returncode}; its error is above")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def make_model(directory: Path, args: argparse.Namespace) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=1024, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(1, args.hidden // 128),
        max_position_embeddings=args.prompt + args.response, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return str(directory)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one rank's step, the median, and what is computed."""
    from tools.bench_trainer import FixedMicrobatches, make_groups

    torch.set_num_threads(1)
    config = make_config(args)
    spec = ModelSpec.read(args.model)
    platform = platforms.get("cpu")
    store = dist.HashStore() if args.context == 1 else dist.FileStore(args.store, args.context)
    backend = backend_module(config.trainer.backend).create(
        config, spec, platform, store, args.rank, 0, Timeline(None, "")
    )
    learner = Learner(config, backend, platform, Timeline(None, ""))
    args.groups = 1
    (group,) = make_groups(args, spec.vocab_size, equal_lengths=args.lengths == "equal")
    microbatches = ways(group)[args.way]
    lengths = group.trained_lengths.tolist()
    flops = spec.definition.flops(spec)
    work = flops.group(args.prompt, lengths, shared=args.way != EACH)
    seconds = []
    wall_s = []
    norms = []
    for _ in range(args.repetitions + 1):
        start = time.process_time()
        start_wall = time.perf_counter()
        source: Any = FixedMicrobatches(list(microbatches))
        learner.accumulate(source)
        report = learner.step().report
        seconds.append(time.process_time() - start)
        wall_s.append(time.perf_counter() - start_wall)
        norms.append(report.grad_norm)
    backend.close()
    return {
        "seconds": statistics.median(seconds[1:]),  # the first one warms up
        "wall_s": statistics.median(wall_s[1:]),
        "work": work,
        "tokens": sum(m.num_computed_tokens for m in microbatches if not m.is_stem),
        "grad_norm": norms[0],
    }


def ways(group: Group) -> dict[str, list[Microbatch]]:
    pieces = cut(group, 1)
    in_turn: list[Microbatch] = []
    for part in with_stems(pieces, group, 1, None):
        if isinstance(part, Stem):
            in_turn.append(part.packed())
        elif isinstance(part, Branch):
            in_turn.append(part.packed(1))
        else:
            raise SystemExit(f"--prompt: {part} is too short for a pass of its own; make it longer")
    return {
        ONCE: [pack([group], True, 1)],
        EACH: [pack([piece], True, 1) for piece in pieces],
        DEPTH_FIRST: in_turn,
    }


def make_config(args: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": args.model, "dtype": "fp32"},
            "data": {"train": "unused", "max_prompt_tokens": args.prompt},
            "rollout": {
                "responses_per_prompt": args.responses,
                "max_response_tokens": args.response,
            },
            "trainer": {
                "devices": args.context,
                "context_parallel": args.context,
                "recompute": args.recompute,
            },
            # so that every repetition has the same weights
            "optimizer": {"learning_rate": 1e-12},
            "schedule": {"prompts_per_iteration": 1, "iterations": 1000},
        }
    )


def render_long(result: Mapping[str, Any]) -> str:
    """Returns the rows as a table of Markdown."""
    rows = result["rows"]
    once = rows[ONCE]
    head = ("step", "tokens", "operations", "s", "processor s", "of all at once", "ideal", "of it")
    lines = [head, ("---", *["---:"] * 7)]
    for name, row in rows.items():
        context = int(name.rpartition("= ")[2]) if "C = " in name else 1
        speed = once["seconds"] / row["seconds"]
        ideal = context * once["work"] / row["work"]
        if abs(row["grad_norm"] / once["grad_norm"] - 1) > 1e-4:
            raise SystemExit(f"{name}: gradient norm {row['grad_norm']}, not {once['grad_norm']}")
        lines.append(
            (
                name,
                f"{row['tokens']:,}",
                f"{row['work'] / once['work']:.2f}",
                f"{row['wall_s']:.2f}",
                f"{row['seconds']:.2f}",
                f"{speed:.2f}x",
                f"{ideal:.2f}x",
                f"{speed / ideal:.2f}",
            )
        )
    gain = rows[EACH]["seconds"] / rows[DEPTH_FIRST]["seconds"]
    ideal = rows[EACH]["work"] / rows[DEPTH_FIRST]["work"]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"{result['shape']}\n\n{table}\n\nDepth first is {gain:.2f}x as fast as the prompt in each "
        f"microbatch, {gain / ideal:.2f} of the ideal {ideal:.2f}x."
    )


if __name__ == "__main__":
    print(json.dumps(measure(argparse.Namespace(**json.loads(sys.argv[1])))))
