#!/usr/bin/env python
"""Time one iteration's forward, backward and step against plain HF transformers + torch AdamW, same model, same tokens.

One process, TP1. Rows alternate inside one invocation, so that noise hits all of them alike;
medians are printed:
  HF           transformers model on right-padded batches of a group's responses, torch.optim.AdamW, same loss
  separate     this trainer with attention.shared_prompt=false (each response with its own copy of the prompt)
  shared       this trainer with attention.shared_prompt=true
  fsdp separate, fsdp shared    the same with trainer.backend=fsdp
Before timing, loss and gradient norm of all rows are compared. Afterwards a profile names where the
time goes.

    python tools/bench_trainer.py [--model DIR | --family qwen3_moe] [--prompt 64] [--response 64] [--responses 8] [--groups 4]
                                  [--repetitions 7]

With --trees groups are sessions of agents, and the rows are this trainer's on their trees and on
every branch as a sequence of its own, for sessions that tried a turn again, asked sub-agents, or
compacted their context:

    python tools/bench_trainer.py --trees --prompt 512 --response 64 --responses 4 --groups 1

--prompt is then the system prompt of a group, --response a turn (half as much is shown before
each), --responses the sessions.

With --long, the steps over one group of long sequences that tools/bench_long.py describes:

    python tools/bench_trainer.py --long --prompt 4096 --response 2048 --responses 8 --repetitions 1 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.agents.tree import SessionTree, TurnNode
from pa_npu.backends.megatron.patches.table import prepare
from pa_npu.config.schema import Config
from pa_npu.engines.protocol import Generation
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.notice import Notice
from pa_npu.samples.replica_feed import Traffic
from tools.groups import group_of_responses, step_flops

PROFILE_GROUPS = {
    "linear layers": ("aten::mm", "aten::addmm", "aten::linear", "aten::bmm", "mkldnn"),
    "attention": ("attention", "SharedPrompt", "flash"),
    "optimizer": ("lerp", "addcdiv", "addcmul", "_fused_adam", "Optimizer", "sqrt", "_foreach"),
    "log-prob and softmax": ("softmax", "exp", "gather", "amax", "aten::max", "log"),
    "norm, rotary, activation": (
        "rsqrt",
        "silu",
        "mean",
        "pow",
        "aten::mul",
        "aten::add",
        "native_layer_norm",
        "rms_norm",
    ),
    "copies and layout": (
        "copy_",
        "cat",
        "index",
        "clone",
        "contiguous",
        "fill_",
        "zero_",
        "slice",
        "narrow",
    ),
}


class FixedMicrobatches:
    """A MicrobatchSource over microbatches that are all there."""

    waited_s = 0.0
    traffic = Traffic()
    by_rule: Sequence[Notice] = ()
    advantages: Mapping[int, Sequence[np.ndarray]] = MappingProxyType({})

    def __init__(self, microbatches: list[Microbatch]) -> None:
        self._left = microbatches[::-1]

    @property
    def is_last(self) -> bool:
        return not self._left

    def settle(self) -> int:
        raise AssertionError("without pipeline stages nobody needs to know in advance")

    def __iter__(self) -> FixedMicrobatches:
        return self

    def __next__(self) -> Microbatch:
        if not self._left:
            raise StopIteration
        return self._left.pop()


class TransformersTrainer:
    """Trains as a straightforward script does: padded batches, log_softmax, AdamW.

    Parameters, gradients and AdamW's moments are of config.model.dtype, and so is all arithmetic.
    """

    def __init__(self, config: Config) -> None:
        from transformers import AutoModelForCausalLM

        self.device = platforms.get(config.run.device).device(0)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.model.dtype]
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=dtype
        )
        self.model = model.to(self.device).train()
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=o.learning_rate,
            betas=o.betas,
            eps=o.epsilon,
            weight_decay=0.0,
        )

    def iteration(self, groups: list[Group]) -> tuple[float, float]:
        self.optimizer.zero_grad()
        num_tokens = sum(group.num_trained for group in groups)
        total = 0.0
        for group in groups:
            loss = self._group_loss(group) / num_tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total, float(norm)

    def _group_loss(self, group: Group) -> torch.Tensor:
        prompt = group.prompt_lengths()[0]
        lengths = group.trained_lengths
        longest = int(lengths.max())
        tokens = np.zeros((len(lengths), prompt + longest), np.int64)
        mask = np.zeros((len(lengths), prompt + longest), np.int64)
        sequences = group.sequences()
        for i, length in enumerate(lengths):
            tokens[i, : prompt + length] = sequences[i]
            mask[i, : prompt + length] = 1
        ids = torch.from_numpy(tokens).to(self.device)
        mask_t = torch.from_numpy(mask).to(self.device)
        # Without padding, attention takes its causal kernel, which is faster than one with a mask.
        padding = mask_t if int(mask.min()) == 0 else None
        logits = self.model(
            input_ids=ids, attention_mask=padding, use_cache=False, logits_to_keep=longest + 1
        ).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        advantages = torch.from_numpy(group.advantages[group.offsets()[1:] - 1])[:, None]
        advantages = advantages.to(self.device)
        losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
        return (losses * mask_t[:, prompt:]).sum()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="HF model directory; none writes a random model (hidden 256, 4 layers)"
    )
    parser.add_argument(
        "--family", choices=("qwen2", "qwen3_moe"), default="qwen2", help="of the random model"
    )
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument(
        "--response",
        type=int,
        default=64,
        help="longest response, see --lengths",
    )
    parser.add_argument(
        "--lengths",
        choices=("drawn", "equal"),
        help="of responses: drawn between half of --response and it, or equal to it, which is the "
        "default of --long",
    )
    parser.add_argument("--responses", type=int, default=8, help="responses per group")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trees", action="store_true", help="time trees of agents' sessions")
    parser.add_argument("--long", action="store_true", help="time one group of long sequences")
    parser.add_argument("--context", type=int, nargs="+", default=[1, 2], help="ranks of --long")
    parser.add_argument("--hidden", type=int, default=256, help="of the random model of --long")
    parser.add_argument("--layers", type=int, default=2, help="of the random model of --long")
    parser.add_argument("--recompute", default="none", help="trainer.recompute of --long")
    parser.add_argument("--rounds", type=int, default=1, help="of all rows of --long, in turn")
    args = parser.parse_args()
    args.lengths = args.lengths or ("equal" if args.long else "drawn")
    torch.set_num_threads(1)
    if args.long:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from tools.bench_long import compare_long, render_long

        measured = compare_long(args)
        print(json.dumps(measured) if args.json else render_long(measured))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make_random_model(Path(scratch) / "model", args.family)
        result = compare_trees(model, args) if args.trees else compare(model, args)
    if args.json:
        print(json.dumps(result))
    else:
        print(render_trees(result) if args.trees else render(result))
    return 0


def make_random_model(directory: Path, family: str = "qwen2") -> str:
    """Writes a random model. A mixture has 8 experts, and a token goes through two: the work of a
    dense layer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "head_dim": 32,
    }
    config = AutoConfig.for_model(
        family, vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True,
        **(experts if family == "qwen3_moe" else {}),
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return str(directory)


def compare(model: str, args: argparse.Namespace) -> dict[str, object]:
    spec = ModelSpec.read(model)
    groups = make_groups(args, spec.vocab_size)
    config = make_config(model, args)
    rows: dict[str, Callable[[], tuple[float, float]]] = {}
    hf = TransformersTrainer(config)
    rows["HF"] = lambda: hf.iteration(groups)
    for prefix, learner in (
        ("", make_learner(config, spec)),
        ("fsdp ", make_sharded(config, spec)),
    ):
        for name, shared in (("separate", False), ("shared", True)):
            rows[prefix + name] = partial(iteration, learner, groups, config, shared)

    first = {
        name: row() for name, row in rows.items()
    }  # also the warm-up; rows share the first weights only for HF and the two separate
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(args.repetitions):
        for name, row in rows.items():
            start = time.perf_counter()
            row()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "model": f"{spec.family}, hidden {spec.hidden_size}, {spec.num_layers} layers, "
        f"{spec.num_parameters / 1e6:.1f}M parameters",
        "tokens": {
            "separate": sum(len(g.tokens) for g in groups),
            "shared": sum(g.prompt_lengths()[0] + g.num_trained for g in groups),
        },
        "agreement": {name: first[name] for name in ("HF", "separate", "fsdp separate")},
        "seconds": medians,
        "spread": {name: (min(v), max(v)) for name, v in seconds.items()},
        "speedup": {name: medians["HF"] / value for name, value in medians.items()},
        "profile": {name: profile(row) for name, row in rows.items()},
    }


# Of a session's turns: the turn that each follows, None where it begins a branch behind the system
# prompt.
TREES: Mapping[str, Sequence[int | None]] = {
    "no branches": (None, 0, 1, 2),
    "last turn tried three times": (None, 0, 1, 1, 1),
    "last turn tried eight times": (None, 0, 1, *[1] * 7),
    "two sub-agents": (None, 0, 1, None, None),
    "context compacted": (None, 0, 1, 2, None, 4),
}


def compare_trees(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns rows by kind of tree. Seconds are of the processor, of one thread.

    The ideal is the ratio of floating-point operations of the two layouts.
    """
    spec = ModelSpec.read(model)
    config = make_config(model, args)
    # so that both have the same weights
    still = config.optimizer.model_copy(update={"learning_rate": 1e-12})
    config = config.model_copy(update={"optimizer": still})
    learner = make_learner(config, spec)
    flops = spec.definition.flops(spec)
    rows = {}
    for kind, parents in TREES.items():
        groups = [
            make_sessions(args, spec.vocab_size, parents, index) for index in range(args.groups)
        ]
        ways = {
            name: [
                m
                for group in groups
                for m in build_microbatches(group, group.num_samples, shared, 1)
            ]
            for name, shared in (("separate", False), ("trees", True))
        }
        work = {
            name: sum(step_flops(flops, m.whole_layout, len(m.targets)) for m in way)
            for name, way in ways.items()
        }
        first = {name: step(learner, way) for name, way in ways.items()}  # the warm-up, too
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.repetitions):
            for name, way in ways.items():
                start = time.process_time()
                step(learner, way)
                seconds[name].append(time.process_time() - start)
        rows[kind] = {
            "samples": sum(group.num_samples for group in groups),
            "tokens": {name: sum(m.num_computed_tokens for m in way) for name, way in ways.items()},
            "first": first,
            "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "ideal": work["separate"] / work["trees"],
        }
    return rows


def make_sessions(
    args: argparse.Namespace, vocab_size: int, parents: Sequence[int | None], index: int
) -> Group:
    """Returns a group of sessions whose trees have this form, put together as the gateway does."""
    rng = np.random.default_rng(index)

    def tokens(number: int) -> np.ndarray:
        return rng.integers(0, vocab_size, number).astype(np.int32)

    system = tokens(args.prompt)
    samples = []
    for session in range(args.responses):
        tree = SessionTree()
        nodes: list[TurnNode] = []
        for parent in parents:
            shown = tokens(max(1, args.response // 2))
            context = np.concatenate([system, shown]) if parent is None else shown
            written = Generation(
                tokens(args.response),
                np.full(args.response, -7.0, np.float32),
                "",
                "stop",
                version=0,
            )
            nodes.append(
                tree.add(tree.root if parent is None else nodes[parent], context, "", written, ())
            )
        samples += tree.samples("", ended=True, reward=0.0, session=session)
    advantages = rng.standard_normal(len(samples)).astype(np.float32)
    identity = {"run_seed": 0, "iteration": 0, "index": index, "prompt_id": index}
    return Group.from_samples(samples, np.zeros(len(samples), np.float32), advantages, **identity)


def render_trees(rows: Mapping[str, Any]) -> str:
    head = (
        "sessions",
        "samples",
        "tokens",
        "unique",
        "share",
        "separate s",
        "trees s",
        "speed-up",
        "ideal",
        "of it",
        "gradient norms",
    )
    lines = [head, ("---",) * len(head)]
    for kind, row in rows.items():
        tokens = row["tokens"]
        seconds = row["seconds"]
        first = row["first"]
        speed_up = seconds["separate"] / seconds["trees"]
        numbers = f"{row['samples']}", f"{tokens['separate']:,}", f"{tokens['trees']:,}"
        times = (
            f"{tokens['trees'] / tokens['separate']:.2f}",
            f"{seconds['separate']:.3f}",
            f"{seconds['trees']:.3f}",
        )
        speeds = f"{speed_up:.2f}", f"{row['ideal']:.2f}", f"{speed_up / row['ideal']:.2f}"
        apart = abs(first["trees"][1] / first["separate"][1] - 1)
        lines.append((kind, *numbers, *times, *speeds, f"{apart:.0e} apart"))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def make_config(model: str, args: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": model, "dtype": "fp32"},
            "data": {"train": "unused", "max_prompt_tokens": args.prompt},
            "rollout": {
                "responses_per_prompt": args.responses,
                "max_response_tokens": args.response,
            },
            "optimizer": {"learning_rate": 1e-5},
            "schedule": {"prompts_per_iteration": args.groups, "iterations": 1000},
        }
    )


def make_groups(
    args: argparse.Namespace, vocab_size: int, equal_lengths: bool = False
) -> list[Group]:
    """Returns args.groups groups of random tokens. equal_lengths: every response has args.response
    tokens; otherwise between half of them and all.
    """
    rng = np.random.default_rng(0)
    groups = []
    for index in range(args.groups):
        if equal_lengths:
            lengths = np.full(args.responses, args.response, np.int32)
        else:
            lengths = rng.integers(
                max(1, args.response // 2), args.response + 1, args.responses
            ).astype(np.int32)
        total = int(lengths.sum())
        groups.append(
            group_of_responses(
                iteration=0,
                version=0,
                index=index,
                prompt_id=index,
                prompt_tokens=rng.integers(0, vocab_size, args.prompt).astype(np.int32),
                response_tokens=rng.integers(0, vocab_size, total).astype(np.int32),
                response_lengths=lengths,
                logprobs=np.full(total, -7.0, np.float32),
                rewards=np.zeros(args.responses, np.float32),
                advantages=rng.standard_normal(args.responses).astype(np.float32),
                finished=np.ones(args.responses, np.uint8),
            )
        )
    return groups


def make_learner(config: Config, spec: ModelSpec):  # type: ignore[no-untyped-def]
    platform = platforms.get(config.run.device)
    prepare(platform.name)
    from pa_npu.backends.megatron.backend import MegatronBackend
    from pa_npu.backends.megatron.factory import load_stage
    from pa_npu.backends.megatron.parallel import initialise_parallel
    from pa_npu.telemetry.timeline import Timeline
    from pa_npu.trainer.learner import Learner

    initialise_parallel(config, platform, dist.HashStore(), 0)
    device = platform.device(0)
    timeline = Timeline(None, "")
    backend = MegatronBackend(
        load_stage(config, spec, platform), config, spec, platform, device, timeline
    )
    return Learner(config, backend, platform, timeline)


def make_sharded(config: Config, spec: ModelSpec):  # type: ignore[no-untyped-def]
    """In the process group that `make_learner` has joined."""
    from pa_npu.backends.registry import backend_module
    from pa_npu.telemetry.timeline import Timeline
    from pa_npu.trainer.learner import Learner

    trainer = config.trainer.model_copy(update={"backend": "fsdp"})
    config = config.model_copy(update={"trainer": trainer})
    platform = platforms.get(config.run.device)
    timeline = Timeline(None, "")
    backend = backend_module("fsdp").create(
        config, spec, platform, dist.HashStore(), 0, 0, timeline
    )
    return Learner(config, backend, platform, timeline)


def iteration(learner, groups: list[Group], config: Config, shared: bool) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    return step(
        learner,
        [
            m
            for g in groups
            for m in build_microbatches(g, config.rollout.responses_per_prompt, shared, 1)
        ],
    )


def step(learner, microbatches: list[Microbatch]) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Loss and gradient norm."""
    learner.accumulate(FixedMicrobatches(microbatches))
    report = learner.step().report
    return report.loss, report.grad_norm


def kind_of(operator: str) -> str:
    """Returns the kind of work of an operator as the profiler names it."""
    for kind, parts in PROFILE_GROUPS.items():
        if any(part in operator for part in parts):
            return kind
    return "other"


def profile(row: Callable[[], object]) -> dict[str, float]:
    """Share of self CPU time per kind of work, over one iteration."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU]) as recorded:
        row()
    shares: dict[str, float] = dict.fromkeys([*PROFILE_GROUPS, "other"], 0.0)
    for event in recorded.key_averages():
        shares[kind_of(event.key)] += event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: value / total for kind, value in shares.items()}


def render(result: dict) -> str:
    lines = [f"{result['model']}; one thread; tokens per iteration: {result['tokens']}"]
    agreement = result["agreement"]
    lines.append(
        "first iteration, (loss, gradient norm): "
        + ", ".join(f"{k} ({a:.7f}, {b:.7f})" for k, (a, b) in agreement.items())
    )
    lines.append(f"\n{'row':<14} {'median s':>9} {'min':>7} {'max':>7} {'speed against HF':>17}")
    for name, median in result["seconds"].items():
        low, high = result["spread"][name]
        lines.append(
            f"{name:<14} {median:>9.3f} {low:>7.3f} {high:>7.3f} {result['speedup'][name]:>16.2f}x"
        )
    lines.append(
        f"\n{'where the time goes':<28}" + "".join(f"{name:>15}" for name in result["profile"])
    )
    for kind in next(iter(result["profile"].values())):
        lines.append(
            f"{kind:<28}"
            + "".join(f"{shares[kind]:>15.1%}" for shares in result["profile"].values())
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
