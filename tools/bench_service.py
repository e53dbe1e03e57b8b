#!/usr/bin/env python
"""Time a GRPO-shaped call of the training service with shared prefixes against the same datums packed separately.

Both go through the service's slots and the fsdp backend in one process, in turn; medians are
printed, and the ideal: the ratio of the FLOPs that each computes (linear layers and the LM head by
rows, attention by pairs), as if both ran at one speed.

    python tools/bench_service.py [--prompt 512] [--response 64] [--responses 8] [--groups 2]
                                  [--hidden 512] [--layers 4] [--vocab 1024] [--repetitions 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from pa_npu import platform as platforms
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.service.datums import microbatches
from pa_npu.service.losses import LOSSES
from pa_npu.service.slots import Slots
from pa_npu.service.wire import Datum, ForwardBackward
from pa_npu.telemetry.timeline import Timeline


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in (
        ("prompt", 512),
        ("response", 64),
        ("responses", 8),
        ("groups", 2),
        ("hidden", 512),
        ("layers", 4),
        ("vocab", 1024),
        ("repetitions", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(options, Path(folder))
        slots = {}
        for is_shared in (True, False):
            slots[is_shared] = make_slots(model, folder, is_shared)
            slots[is_shared].create("m", 1)
        call = grpo_call(options)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        losses = {}
        for repetition in range(options.repetitions + 1):
            for is_shared, own in slots.items():
                begun_s = time.perf_counter()
                losses[is_shared] = own.forward_backward("m", call).loss
                if repetition:  # the first one warms up
                    seconds[is_shared].append(time.perf_counter() - begun_s)
        assert abs(losses[True] - losses[False]) < 1e-3 * max(1.0, abs(losses[True])), losses
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        gain = medians[False] / medians[True]
        ideal = flops(options, call, False) / flops(options, call, True)
        print(
            f"({options.prompt}, {options.response}, {options.responses}) x {options.groups}: "
            f"separate {medians[False]:.3f} s, shared {medians[True]:.3f} s: {gain:.2f}x, "
            f"ideal {ideal:.2f}x, share of the ideal {gain / ideal:.2f}"
        )
    return 0


def make_model(options: argparse.Namespace, folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=options.vocab,
        max_position_embeddings=options.prompt + options.response,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


def make_slots(model: Path, folder: str, is_shared: bool) -> Slots:
    config = Config.model_validate(
        {
            "run": {"device": "cpu", "dir": folder},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": "unread"},
            "trainer": {"backend": "fsdp"},
            "lora": {"rank": 8},
            "attention": {"shared_prompt": is_shared},
        }
    )
    spec = ModelSpec.from_config(config)
    backend: Any = backend_module("fsdp").create(
        config, spec, platforms.get("cpu"), dist.HashStore(), 0, 0, Timeline(None, "")
    )
    return Slots(config, backend, "base")


def grpo_call(options: argparse.Namespace) -> ForwardBackward:
    random = np.random.default_rng(0)
    data = []
    for _ in range(options.groups):
        prompt = random.integers(0, options.vocab, options.prompt)
        for _ in range(options.responses):
            response = random.integers(0, options.vocab, options.response)
            tokens = np.concatenate([prompt, response]).astype(np.int32)
            length = len(tokens) - 1
            advantages = np.zeros(length, np.float32)
            advantages[options.prompt - 1 :] = random.normal()
            inputs = {
                "target_tokens": tokens[1:].astype(np.int64),
                "logprobs": np.full(length, -np.log(options.vocab), np.float32),
                "advantages": advantages,
            }
            data.append(Datum(tokens[:-1], inputs))
    return ForwardBackward("m", 1, "importance_sampling", data)


def flops(options: argparse.Namespace, call: ForwardBackward, is_shared: bool) -> float:
    """Returns the multiplications of a forward pass over the call's microbatches."""
    hidden = options.hidden
    linear = options.layers * (hidden * hidden * (2 + 2 / 4) + 3 * hidden * 3 * hidden)
    total = 0.0
    for part in microbatches(call.data, LOSSES[call.loss], max_tokens=2**14, shared=is_shared):
        layout = part.whole_layout
        pairs = 0.0
        for segment, length in enumerate(layout.lengths):
            before = len(layout.path_rows(segment)) - length
            pairs += length * before + length * length / 2
        total += part.num_computed_tokens * linear
        total += len(part.targets) * hidden * options.vocab
        total += 2 * options.layers * hidden * pairs
    return total


if __name__ == "__main__":
    sys.exit(main())
