#!/usr/bin/env python
"""Time one update of the supervised stage against TRL's SFTTrainer and plain transformers, same model, same rows.

One process, one thread. Programs alternate inside one invocation, so that noise hits all of them
alike; medians of processor seconds and of wall seconds are printed:
  transformers      transformers' model and loss on right-padded batches, torch.optim.AdamW
  TRL, TRL packed   SFTTrainer on the same batches; with packing=True (not measured where TRL is
                    not installed)
  apart, shared     this trainer, each row with its own copy of a beginning, or one for its group
  packed            with groups packed together up to --max-tokens
Rows have trained answers behind beginnings that are shared by --group of them, or by none. The
losses of the first updates must agree.

    python tools/bench_supervised.py [--model DIR] [--rows 32] [--group 8] [--beginning 96] [--answer 64]
                                     [--repetitions 5] [--max-tokens 1024] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.coordinator.row_groups import group_of
from pa_npu.data.row_sets import Row
from pa_npu.data.row_stream import groups_of_rows
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, filled, num_packed_tokens, pack
from tools.bench_trainer import make_learner, make_random_model, make_sharded, step

IGNORED = -100  # transformers' label of a token that is not trained
# So small that all programs keep the first weights: their losses can be compared at any time.
RATE = 1e-12


@dataclass
class Times:
    """Of the updates of one program. loss: of the first one."""

    processor_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    loss: float = 0.0

    def add(self, processor_s: float, wall_s: float) -> None:
        self.processor_s.append(processor_s)
        self.wall_s.append(wall_s)


def make_rows(args: argparse.Namespace, vocab_size: int, *, shared: bool) -> list[Row]:
    """Returns rows of a beginning and an answer, whose lengths are drawn between half of the key's
    and all of it; with `shared`, --group consecutive rows have one beginning.
    """
    rng = np.random.default_rng(3)
    rows = []
    beginning = np.zeros(0, np.int32)
    for number in range(args.rows):
        if not shared or number % args.group == 0:
            length = rng.integers(args.beginning // 2, args.beginning + 1)
            beginning = rng.integers(8, vocab_size, length).astype(np.int32)
        length = rng.integers(args.answer // 2, args.answer + 1)
        answer = rng.integers(8, vocab_size, length).astype(np.int32)
        tokens = np.concatenate([beginning, answer])
        weight = np.concatenate([np.zeros(len(beginning)), np.ones(len(answer))])
        rows.append(Row(number, tokens, weight.astype(np.float32), "", 0))
    return rows


class PlainTransformers:
    """Trains as a straightforward script does: padded batches, the model's own loss, AdamW."""

    def __init__(self, model: str, rows: Sequence[Row], batch: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.batches = [rows[start : start + batch] for start in range(0, len(rows), batch)]
        self.num_trained = sum(row.num_trained for row in rows)

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for rows in self.batches:
            longest = max(len(row.tokens) for row in rows)
            ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            labels = torch.full_like(ids, IGNORED)
            for number, row in enumerate(rows):
                length = len(row.tokens)
                ids[number, :length] = torch.from_numpy(row.tokens.astype(np.int64))
                mask[number, :length] = 1
                labels[number, :length] = torch.tensor(labels_of(row))
            loss = self.model(
                input_ids=ids,
                attention_mask=mask,
                labels=labels,
                num_items_in_batch=torch.tensor(self.num_trained),
            ).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


class TrlTrainer:
    """SFTTrainer, an update at a time. Its own callbacks time it: collating is left out."""

    def __init__(
        self, model: str, rows: Sequence[Row], args: argparse.Namespace, packed: bool
    ) -> None:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import SFTConfig, SFTTrainer

        from tools.make_tiny_model import make_tokenizer

        self.seconds = (0.0, 0.0)
        program = self

        class Timer(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.start = time.process_time(), time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                program.seconds = (
                    time.process_time() - self.start[0],
                    time.perf_counter() - self.start[1],
                )

        data = Dataset.from_list(
            [{"input_ids": row.tokens.tolist(), "labels": labels_of(row)} for row in rows]
        )
        batch = 1 if packed else args.group
        keys = {
            "output_dir": tempfile.mkdtemp(),
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": args.rows // batch,
            "max_steps": 1,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.95,
            "max_length": args.max_tokens,
            "packing": packed,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "model_init_kwargs": {"dtype": "float32"},
        }
        self.trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**keys),
            train_dataset=data,
            processing_class=make_tokenizer(),
            callbacks=[Timer()],
        )
        if packed:
            self.trainer.args.gradient_accumulation_steps = len(self.trainer.train_dataset)

    def __call__(self) -> float:
        return float(self.trainer.train().training_loss)


def labels_of(row: Row) -> list[int]:
    """Returns the row's tokens, IGNORED where one is not trained."""
    return np.where(row.weight != 0, row.tokens, IGNORED).tolist()


class ThisTrainer:
    """This trainer, with groups as a run makes them."""

    def __init__(self, learner: Any, groups: Sequence[Group], shared: bool, max_tokens: int | None):
        self.learner = learner
        self.groups = groups
        self.shared = shared
        self.max_tokens = max_tokens

    def __call__(self) -> float:
        return step(self.learner, self._microbatches())[0]

    def _microbatches(self) -> list[Microbatch]:
        # a group remembers its layout, which a run finds once
        groups = [group[0 : group.num_samples] for group in self.groups]
        sizes = [num_packed_tokens(group, self.shared) for group in groups]
        counts = filled(sizes, self.max_tokens, 1)
        bounds = np.cumsum([0, *counts]).tolist()
        return [pack(groups[start:end], self.shared, 1) for start, end in pairwise(bounds)]


def programs_of(
    args: argparse.Namespace, model: str, rows: Sequence[Row], learners: dict[str, Any]
) -> dict[str, Callable[[], float]]:
    """Returns all programs by name, each with its own copy of the model but ours, which share a
    learner.
    """
    programs: dict[str, Callable[[], float]] = {
        "transformers": PlainTransformers(model, rows, args.group)
    }
    if importlib.util.find_spec("trl") is not None:
        programs["TRL"] = TrlTrainer(model, rows, args, packed=False)
        programs["TRL packed"] = TrlTrainer(model, rows, args, packed=True)
    for backend, (config, learner) in learners.items():
        algorithm = build_algorithm(config)
        groups = [
            group_of(prompt, algorithm).group(1, 0, number, algorithm.credit)
            for number, prompt in enumerate(groups_of_rows(rows, args.group))
        ]
        make = partial(ThisTrainer, learner, groups)
        programs[f"{backend} apart"] = make(shared=False, max_tokens=None)
        programs[f"{backend} apart packed"] = make(shared=False, max_tokens=args.max_tokens)
        programs[f"{backend} shared"] = make(shared=True, max_tokens=None)
        programs[f"{backend} shared packed"] = make(shared=True, max_tokens=args.max_tokens)
    return programs


def timed(programs: dict[str, Callable[[], float]], repetitions: int) -> dict[str, Times]:
    """Returns every program's updates, in turn; the first one of each warms it up."""
    times = {name: Times() for name in programs}
    for name, program in programs.items():
        times[name].loss = program()
    losses = [measured.loss for measured in times.values()]
    if max(losses) - min(losses) > 1e-3:
        raise SystemExit(f"the programs do not train the same: their losses are {losses}")
    for _ in range(repetitions):
        for name, program in programs.items():
            start = time.process_time(), time.perf_counter()
            program()
            seconds = time.process_time() - start[0], time.perf_counter() - start[1]
            if isinstance(program, TrlTrainer):
                seconds = program.seconds
            times[name].add(*seconds)
    return times


def config_of(model: str, args: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": "fp32"},
            "data": {"train": "unused"},
            "algorithm": {"name": "sft"},
            "rollout": {"responses_per_prompt": args.group, "max_response_tokens": args.answer},
            "schedule": {"prompts_per_iteration": args.rows // args.group},
            "optimizer": {"learning_rate": RATE},
        }
    )


def render(result: dict[str, dict[str, Times]]) -> str:
    lines = []
    for kind, times in result.items():
        base = statistics.median(times["TRL" if "TRL" in times else "transformers"].processor_s)
        lines.append(f"{kind}: processor s, wall s, times as fast as the second row, first loss")
        for name, measured in times.items():
            processor_s = statistics.median(measured.processor_s)
            wall_s = statistics.median(measured.wall_s)
            lines.append(
                f"  {name:24} {processor_s:7.2f} {wall_s:7.2f} {base / processor_s:6.2f}"
                f"  {measured.loss:.5f}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="HF directory; none writes a random one (hidden 256)")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="rows with one beginning; of a batch")
    parser.add_argument("--beginning", type=int, default=96, help="longest, in tokens")
    parser.add_argument("--answer", type=int, default=64, help="longest, in tokens")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a packed microbatch")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make_random_model(Path(scratch) / "model")
        spec = ModelSpec.read(model)
        for kind, shared in (("shared beginnings", True), ("no shared beginnings", False)):
            config = config_of(model, args)
            rows = make_rows(args, spec.vocab_size, shared=shared)
            if not result:
                learners = {
                    "megatron": (config, make_learner(config, spec)),
                    "fsdp": (config, make_sharded(config, spec)),
                }
            result[kind] = timed(programs_of(args, model, rows, learners), args.repetitions)
    print(json.dumps(result, default=vars) if args.json else render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
