#!/usr/bin/env python
"""Times a trainer's step on a device in bf16 beside transformers: tokens/s, share of the peak, and where the time goes.

    python tools/bench_device.py --device cuda [--shape 1.5b] [--prompt 512] [--response 448] [--responses 8]
                                 [--repetitions 5] [--markdown FILE]

A step is forward, backward and optimizer step over one group, by default 4,096 packed tokens. Rows:

    transformers       a model of transformers in bf16, causal flash attention, a group's responses as a
                       batch without padding, AdamW with moments in bf16
    separate, shared   trainer.backend=megatron, each response with its own copy of the prompt, or one for all
    fsdp separate, fsdp shared    the same with trainer.backend=fsdp

Weights are random. Ours keep fp32 main weights and moments, which transformers' row does not, so
that its optimizer step is lighter. Each row has a process of its own, so that it has the device's
memory alone.

The share of the peak is that of the maker's figure for dense bf16 where the device is a known one,
and of what a large matrix product reaches, for the operations of the tokens that the row computes
(FlopsModel: forward and backward of matrix products and attention). On cpu it shows that the tool
works, with --shape tiny.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import bench_trainer  # noqa: I001  (before torch: it sets what Megatron reads)

import numpy as np
import torch

from pa_npu import platform as platforms
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from tools.groups import group_of_responses, step_flops
from tools.hardware import processor

ROWS = ("transformers", "separate", "shared", "fsdp separate", "fsdp shared")
BASELINE = ROWS[0]
# Sizes of Qwen2.5-1.5B's config.json, and of a model that a core trains in a second.
SHAPES: Mapping[str, Mapping[str, int]] = {
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
# The makers' peaks for dense bf16, by a part of the device's name: data sheets of A100 80GB SXM,
# H100 SXM and H200 SXM, and of Atlas 800T A2.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "910B": 313e12}
WARMUP = 2
ROW_TIMEOUT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "npu", "cpu"))
    parser.add_argument("--shape", default="1.5b", choices=SHAPES)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=448, help="length of each response")
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--markdown", type=Path, help="writes the tables to this file too")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # of a row's process
    args = parser.parse_args()
    if args.model:
        print(json.dumps(measure(args)))
        return 0
    names = args.rows.split(",")
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"--rows: {unknown[0]!r} is none of {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory() as scratch:
        args.model = write_model(Path(scratch) / "model", args)
        rows = {name: in_a_process(name, args) for name in names}
    text = render(rows, args)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n")
    return 0 if all("problem" not in row for row in rows.values()) else 1


def write_model(directory: Path, args: argparse.Namespace) -> str:
    """Writes a random model of --shape in bf16, made on the device, which is quicker."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", max_position_embeddings=32768, tie_word_embeddings=True, **SHAPES[args.shape]
    )
    with platforms.get(args.device).device(0):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return str(directory)


def in_a_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what a process of its own measures of a row, or its problem."""
    command = [sys.executable, __file__, "--device", args.device, "--shape", args.shape]
    command += ["--prompt", str(args.prompt), "--response", str(args.response)]
    command += ["--responses", str(args.responses), "--repetitions", str(args.repetitions)]
    command += ["--rows", name, "--model", args.model]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=ROW_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"problem": f"not ended after {ROW_TIMEOUT_S:.0f} s"}
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        return {"problem": lines[-1] if lines else f"exit code {ended.returncode}"}
    row: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return row


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns a row: seconds of each step, what it computes, and where its time goes."""
    if args.device == "cpu":
        torch.set_num_threads(1)
    platform = platforms.get(args.device)
    platform.set_device(0)
    config = make_config(args)
    spec = ModelSpec.read(args.model)
    group = make_group(args, spec.vocab_size)
    name = args.rows
    shared = name.endswith("shared")
    microbatches = build_microbatches(group, group.num_samples, shared, 1)
    step: Callable[[], tuple[float, float]]
    if name == BASELINE:
        step = partial(bench_trainer.TransformersTrainer(config).iteration, [group])
    else:
        make = bench_trainer.make_sharded if name.startswith("fsdp") else bench_trainer.make_learner
        step = partial(bench_trainer.step, make(config, spec), microbatches)
    first = step()
    for _ in range(WARMUP - 1):
        step()
    seconds = []
    for _ in range(args.repetitions):
        platform.synchronize()
        start = time.perf_counter()
        step()
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    layouts = [microbatch.whole_layout for microbatch in microbatches]
    flops = spec.definition.flops(spec)
    predictions = [len(microbatch.targets) for microbatch in microbatches]
    work = sum(
        step_flops(flops, layout, number)
        for layout, number in zip(layouts, predictions, strict=True)
    )
    return {
        "first": first,
        "seconds": seconds,
        "tokens": sum(layout.total - layout.padding for layout in layouts),
        "trained": sum(predictions),
        "flops": work,
        "matmul": matmul_rate(platform),
        "device": device_name(args.device),
        "profile": profile(step, platform, statistics.median(seconds)),
    }


def make_config(args: argparse.Namespace) -> Config:
    """A run of one group an iteration in bf16, nothing recomputed."""
    return Config.model_validate(
        {
            "run": {"device": args.device},
            "model": {"path": args.model, "dtype": "bf16"},
            "data": {"train": "unused", "max_prompt_tokens": args.prompt},
            "rollout": {
                "responses_per_prompt": args.responses,
                "max_response_tokens": args.response,
            },
            "optimizer": {"learning_rate": 1e-6},
            "schedule": {"prompts_per_iteration": 1, "iterations": 1000},
        }
    )


def make_group(args: argparse.Namespace, vocab_size: int) -> Group:
    """One prompt with responses of equal lengths, so that transformers' batch needs no padding."""
    rng = np.random.default_rng(0)
    total = args.response * args.responses
    return group_of_responses(
        iteration=0,
        version=0,
        index=0,
        prompt_id=0,
        prompt_tokens=rng.integers(0, vocab_size, args.prompt).astype(np.int32),
        response_tokens=rng.integers(0, vocab_size, total).astype(np.int32),
        response_lengths=np.full(args.responses, args.response, np.int32),
        logprobs=np.full(total, -np.log(vocab_size), np.float32),
        rewards=np.zeros(args.responses, np.float32),
        advantages=rng.standard_normal(args.responses).astype(np.float32),
        finished=np.ones(args.responses, np.uint8),
    )


def matmul_rate(platform: Platform, repetitions: int = 10) -> float:
    """Operations per second of a large product of bf16 matrices of random numbers."""
    size = 512 if platform.name == "cpu" else 8192
    device = platform.device(0)
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        left @ right
    platform.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        left @ right
    platform.synchronize()
    return 2.0 * size**3 * repetitions / (time.perf_counter() - start)


def device_name(device: str) -> str:
    if device == "cpu":
        return f"a core of {processor()}"
    name: str = getattr(torch, device).get_device_name(0)
    return name


def profile(step: Callable[[], object], platform: Platform, step_s: float) -> dict[str, float]:
    """Shares of an unprofiled step's time: of the device by kind of work, and the rest, in which
    the device waits for the host to launch something. Of the host's time on cpu.
    """
    profiler = platform.profiler()
    recordable = profiler.ProfilerActivity
    on_host = platform.name == "cpu"
    kinds = dict.fromkeys(("CPU", platform.name.upper()))
    with profiler.profile(activities=[getattr(recordable, kind) for kind in kinds]) as recorded:
        step()
        platform.synchronize()
    seconds = dict.fromkeys([*bench_trainer.PROFILE_GROUPS, "other"], 0.0)
    for event in recorded.key_averages():
        # A device's time is that of the operators that launched its kernels; kernels are listed
        # by themselves too.
        if str(event.device_type).rpartition(".")[2] != "CPU":
            continue
        seconds[bench_trainer.kind_of(event.key)] += (
            event.self_cpu_time_total if on_host else event.self_device_time_total
        ) / 1e6
    if on_host:
        step_s = sum(seconds.values())
    shares = {kind: spent / step_s for kind, spent in seconds.items()}
    return shares | {"the device waits": max(0.0, 1.0 - sum(shares.values()))}


def render(rows: Mapping[str, Mapping[str, Any]], args: argparse.Namespace) -> str:
    """Returns the tables as Markdown."""
    measured = {name: row for name, row in rows.items() if "problem" not in row}
    lines = [f"| {name}: {row['problem']} |" for name, row in rows.items() if "problem" in row]
    if not measured:
        return "\n".join(lines)
    any_row = next(iter(measured.values()))
    device = any_row["device"]
    peak = next((flops for part, flops in PEAKS.items() if part in device), None)
    matmul = statistics.median(row["matmul"] for row in measured.values())
    named = "" if peak is None else f", the maker's peak {peak / 1e12:.0f} Tflop/s"
    lines += [
        f"{device}, torch {torch.__version__}{named}; a product of large bf16 matrices: "
        f"{matmul / 1e12:.3g} Tflop/s. Shape {args.shape}, bf16, a prompt of {args.prompt} with "
        f"{args.responses} responses of {args.response}; medians of {args.repetitions} steps.",
        "",
        "| row | tokens computed | s | least, largest | computed tokens/s | trained tokens/s "
        "| of the peak | of a matrix product | speed |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    baseline = measured.get(BASELINE)
    for name, row in measured.items():
        s = statistics.median(row["seconds"])
        of_peak = "" if peak is None else f"{row['flops'] / s / peak:.2f}"
        speed = "" if baseline is None else f"{statistics.median(baseline['seconds']) / s:.2f}x"
        lines.append(
            f"| {name} | {row['tokens']:,} | {s:.4f} | {min(row['seconds']):.4f}, "
            f"{max(row['seconds']):.4f} | {row['tokens'] / s:,.0f} | {row['trained'] / s:,.0f} | "
            f"{of_peak} | {row['flops'] / s / matmul:.2f} | {speed} |"
        )
    lines += [
        "",
        "First step, (loss, gradient norm): "
        + ", ".join(
            f"{name} ({row['first'][0]:.5f}, {row['first'][1]:.4f})"
            for name, row in measured.items()
        ),
        "",
        "| share of a step | " + " | ".join(measured) + " |",
        "|---|" + "--:|" * len(measured),
    ]
    for kind in any_row["profile"]:
        shares = " | ".join(f"{row['profile'][kind]:.1%}" for row in measured.values())
        lines.append(f"| {kind} | {shares} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
