#!/usr/bin/env python
"""Compare the estimate of a trainer's memory (pa_npu.planning.memory) with what the allocator measures over two iterations.

One process, TP1, random Qwen2, by Megatron, by FSDP2 and by FSDP2 with adapters. Every case runs in
a process of its own, with its allocations recorded by torch's profiler: the peak of forward and
backward, with the optimizer's state in place. Megatron's reduction of gradients afterwards is left
out: gloo copies the whole gradient buffer there, which NCCL and HCCL do not.

    python tools/bench_memory.py [--hidden 512] [--layers 8] [--prompt 256] [--response 256] [--chunk 1024]
    python tools/bench_memory.py --long [--tokens 4096 16384 65536] [--context 1 2 4]

--long measures one microbatch of many tokens, a prompt and responses of its length, on 1, 2 and
4 ranks that share it (trainer.context_parallel): the fullest rank's peak. The ranks pass keys and
values point to point, because gloo's own collectives copy them, which NCCL's and HCCL's do not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.attention import context as context_attention
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import work
from pa_npu.planning.memory import gathered_keys_bytes, trainer_memory
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from tools.groups import group_of_responses

# Backend, dtype, recomputation, KL term, rank of adapters.
CASES = (
    ("megatron", "fp32", "none", 0.0, 0),
    ("megatron", "fp32", "full", 0.0, 0),
    ("megatron", "bf16", "none", 0.0, 0),
    ("megatron", "bf16", "selective", 0.0, 0),
    ("megatron", "bf16", "full", 0.0, 0),
    ("megatron", "bf16", "full", 0.1, 0),
    ("fsdp", "fp32", "none", 0.0, 0),
    ("fsdp", "fp32", "full", 0.0, 0),
    ("fsdp", "bf16", "none", 0.0, 0),
    ("fsdp", "bf16", "full", 0.0, 0),
    ("fsdp", "bf16", "full", 0.1, 0),
    ("fsdp", "bf16", "full", 0.1, 8),
)
# Backend and recomputation of --long, in fp32.
LONG_CASES = (("megatron", "none"), ("megatron", "full"))
LONG_RESPONSES = 15
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument(
        "--responses", type=int, help=f"default: 8, or {LONG_RESPONSES} with --long"
    )
    parser.add_argument("--chunk", type=int, default=1024, help="model.head_chunk_tokens")
    parser.add_argument(
        "--cases", type=int, default=len(CASES), help="only the first n cases of each backend"
    )
    parser.add_argument("--backends", default="megatron,fsdp")
    parser.add_argument("--long", action="store_true", help="context parallelism")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--context", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", action="store_true", help="one object per case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.long:
        arguments.hidden = min(arguments.hidden, 128)
        arguments.layers = min(arguments.layers, 4)
    if arguments.responses is None:
        arguments.responses = LONG_RESPONSES if arguments.long else 8
    if arguments.case and arguments.long:
        print(json.dumps(measure_long(json.loads(arguments.case), arguments)))
        return 0
    if arguments.case:
        print(json.dumps(measure(make_config(json.loads(arguments.case), arguments), arguments)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch), arguments)
        if arguments.long:
            print_long(model, Path(scratch), arguments)
            return 0
        chosen = [
            case
            for backend in arguments.backends.split(",")
            for case in [case for case in CASES if case[0] == backend][: arguments.cases]
        ]
        rows = [run_case([model, *case]) for case in chosen]
    print("\n".join(json.dumps(row) for row in rows) if arguments.json else render(rows))
    return 0


def run_case(case: list[object]) -> dict[str, object]:
    return _result(_started(case))


def _started(case: list[object]) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tools.bench_memory", *sys.argv[1:], "--case", json.dumps(case)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


def _result(process: subprocess.Popen[str]) -> dict[str, object]:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a case ended with exit code {process.returncode}; its error is above")
    result: dict[str, object] = json.loads(output.splitlines()[-1])
    return result


def print_long(model: str, scratch: Path, arguments: argparse.Namespace) -> None:
    """Prints each case as it is measured, on the ranks of a context group, one process each; of
    their peaks the largest.
    """
    if not arguments.json:
        print(LONG_HEAD, flush=True)
    alone: dict[tuple[int, str], dict[str, object]] = {}
    for number, (tokens, (backend, recompute), context) in enumerate(
        itertools.product(arguments.tokens, LONG_CASES, arguments.context)
    ):
        case = [model, backend, recompute, tokens, context, str(scratch / f"store{number}")]
        processes = [_started([*case, rank]) for rank in range(context)]
        ranks = [_result(process) for process in processes]
        row = max(ranks, key=lambda row: _mib(row, "peak"))
        if context == 1:
            alone[tokens, recompute] = row
        line = long_line(row, alone.get((tokens, recompute)))
        print(json.dumps(row) if arguments.json else line, flush=True)


def measure_long(case: list[Any], arguments: argparse.Namespace) -> dict[str, object]:
    model, backend, recompute, tokens, context, store, rank = case
    length = tokens // (1 + arguments.responses)
    arguments.prompt = arguments.response = length
    config = make_config([model, backend, "fp32", recompute, 0.0, 0], arguments)
    trainer = config.trainer.model_copy(update={"devices": context, "context_parallel": context})
    schedule = config.schedule.model_copy(update={"prompts_per_iteration": 1})
    config = config.model_copy(update={"trainer": trainer, "schedule": schedule})
    ranks = dist.HashStore() if context == 1 else dist.FileStore(store, context)
    context_attention._all_gather = gathered_without_copies
    context_attention._reduce_scatter = scattered_without_copies
    return {
        **measure(config, arguments, ranks, rank),
        "gathered_keys": gathered_keys_bytes(config, ModelSpec.read(model), work(config)),
        "tokens": tokens,
        "context": context,
        "recompute": recompute,
    }


class _OnTheWire:
    """Messages to and from the other ranks of a group."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    def wait(self) -> None:
        for message in self._messages:
            message.wait()
        self._messages.clear()


def gathered_without_copies(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> _OnTheWire:
    """Gathers `own` of all ranks into `whole`, as all_gather_into_tensor does."""
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    parts = whole.view(size, *own.shape)
    parts[rank] = own
    messages = []
    for peer in range(size):
        if peer != rank:
            messages.append(dist.isend(own, group=group, group_dst=peer))
            messages.append(dist.irecv(parts[peer], group=group, group_src=peer))
    return _OnTheWire(messages)


def scattered_without_copies(
    own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> _OnTheWire:
    """Sums every rank's part of `whole` into its `own`, as reduce_scatter_tensor does."""
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    parts = whole.view(size, *own.shape)
    own.copy_(parts[rank])
    received = torch.empty_like(own)
    for distance in range(1, size):
        to = (rank + distance) % size
        sent = dist.isend(parts[to], group=group, group_dst=to)
        arrived = dist.irecv(received, group=group, group_src=(rank - distance) % size)
        _OnTheWire([sent, arrived]).wait()
        own += received
    return _OnTheWire([])


def make_model(directory: Path, arguments: argparse.Namespace) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # a long microbatch has keys and values of two heads, which are gathered one by one
    head_dim = 32 if arguments.long else 64
    config = Qwen2Config(
        vocab_size=arguments.vocab, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.hidden // head_dim,
        num_key_value_heads=arguments.hidden // head_dim // 2, max_position_embeddings=8192,
        tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


def make_config(case: list[Any], arguments: argparse.Namespace) -> Config:
    """case: the model's directory and one of CASES."""
    model, backend, dtype, recompute, kl_coef, rank = case
    return Config.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": model, "dtype": dtype, "head_chunk_tokens": arguments.chunk},
            "data": {"train": "unused", "max_prompt_tokens": arguments.prompt},
            "rollout": {
                "responses_per_prompt": arguments.responses,
                "max_response_tokens": arguments.response,
            },
            "trainer": {"backend": backend, "recompute": recompute},
            "lora": {"rank": rank},
            "algorithm": {"kl_coef": kl_coef},
            "schedule": {"prompts_per_iteration": 2},
        }
    )


def measure(
    config: Config,
    arguments: argparse.Namespace,
    store: dist.Store | None = None,
    rank: int = 0,
) -> dict[str, object]:
    """Returns bytes of the second iteration's forward and backward: `state`, the least that is
    allocated, and `peak`.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    from pa_npu import platform as platforms
    from pa_npu.backends.registry import backend_module
    from pa_npu.telemetry.timeline import Timeline
    from pa_npu.trainer.learner import Learner

    sys.path.insert(0, str(Path(__file__).parent))
    from bench_trainer import FixedMicrobatches, make_groups

    torch.set_num_threads(1)
    spec = ModelSpec.read(config.model.path)
    platform = platforms.get("cpu")
    timeline = Timeline(None, "")
    groups = [
        at_full_length(g, arguments, spec.vocab_size)
        for g in make_groups(settings(arguments), spec.vocab_size)
    ]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        module = backend_module(config.trainer.backend)
        store = store or dist.HashStore()
        backend = module.create(config, spec, platform, store, rank, 0, timeline)
        learner = Learner(config, backend, platform, timeline)
        group = None
        if config.trainer.backend == "megatron":
            from megatron.core import parallel_state

            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            stage = cast(Any, backend)._stage
            reduce_gradients = stage.config.finalize_model_grads_func

            def reduce_marked(*args: Any, **kwargs: Any) -> None:
                with record_function("reduce gradients"):
                    reduce_gradients(*args, **kwargs)

            stage.config.finalize_model_grads_func = reduce_marked
        for iteration in range(2):
            trained = groups[: config.schedule.prompts_per_iteration]
            # of a long microbatch the first iteration has one response, which makes the
            # optimizer's state as well
            if arguments.long and iteration == 0:
                trained = [trained[0][:1]]
            microbatches = [
                m for g in trained for m in build_microbatches(g, arguments.responses, True, 1)
            ]
            with record_function(f"iteration-{iteration}"):
                learner.accumulate(FixedMicrobatches(microbatches))
            learner.step()
            # gloo's threads hold the buffers of their last collective until their next one
            for _ in range(64):
                dist.all_reduce(torch.zeros(1), group=group)
    events = recorded.profiler.kineto_results.events()
    (span,) = [e for e in events if e.name() == "iteration-1"]
    start = span.start_ns()
    # FSDP reduces each layer's gradients inside its backward
    reduces = [e.start_ns() for e in events if e.name() == "reduce gradients"]
    end = max(reduces, default=start + span.duration_ns())
    live = 0
    during = []
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        if start <= event.start_ns() <= end:
            during.append(live)
    state = min(during)
    peak = max(during)
    memory = trainer_memory(config, spec)
    publish = dict(memory.parts)["publish buckets"]  # no engine is attached here
    return {
        "case": f"{config.trainer.backend} {config.model.dtype}, "
        f"recompute={config.trainer.recompute}"
        + (", reference" if config.algorithm.kl_coef else "")
        + (f", LoRA {config.lora.rank}" if config.has_adapters else ""),
        "parameters": spec.num_parameters,
        "tokens": microbatches[0].tokens.numel(),
        "state": state,
        "state_estimated": memory.state,
        "peak": peak,
        "peak_estimated": memory.total - publish,
    }


def settings(arguments: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(
        prompt=arguments.prompt,
        response=arguments.response,
        responses=arguments.responses,
        groups=2,
    )


def at_full_length(group: Group, arguments: argparse.Namespace, vocab_size: int) -> Group:
    """Returns the group with responses of the longest length, as the estimate assumes."""
    total = arguments.responses * arguments.response
    return group_of_responses(
        iteration=group.iteration,
        version=group.version_range[0],
        index=group.index,
        prompt_id=group.prompt_id,
        prompt_tokens=group.tokens[: group.prompt_lengths()[0]],
        response_tokens=np.random.default_rng(1).integers(0, vocab_size, total).astype(np.int32),
        response_lengths=np.full(arguments.responses, arguments.response, np.int32),
        logprobs=np.full(total, -7.0, np.float32),
        rewards=group.rewards,
        advantages=group.advantages[group.offsets()[1:] - 1],
        finished=group.finished,
    )


LONG_HEAD = (
    "MiB; 'microbatch' is the peak beyond weights, gradients and optimizer, 'keys' what the estimate "
    "counts\nfor keys and values of the whole sequence, while one layer's are gathered\n\n"
    f"{'tokens':>7} {'recompute':<10}{'C':>3}{'peak':>10}{'estimate':>10}{'ratio':>7}"
    f"{'microbatch':>12}{'x C, of C=1':>13}{'keys':>8}"
)


def long_line(row: dict[str, object], alone: dict[str, object] | None) -> str:
    """Returns a row's line. alone: the row of one rank; None where it was not measured."""
    beyond = _mib(row, "peak") - _mib(row, "state")
    context = int(str(row["context"]))
    share = ""
    if alone is not None:
        of_one = _mib(alone, "peak") - _mib(alone, "state")
        share = f"{beyond * context / of_one:.2f}"
    ratio = _mib(row, "peak_estimated") / _mib(row, "peak")
    return (
        f"{row['tokens']!s:>7} {row['recompute']!s:<10}{context:>3}{_mib(row, 'peak'):>10.1f}"
        f"{_mib(row, 'peak_estimated'):>10.1f}{ratio:>7.2f}{beyond:>12.1f}{share:>13}"
        f"{_mib(row, 'gathered_keys'):>8.1f}"
    )


def _mib(row: dict[str, object], key: str) -> float:
    return float(str(row[key])) / MIB


def render(rows: list[dict[str, object]]) -> str:
    lines = [
        f"{float(str(rows[0]['parameters'])) / 1e6:.1f} M parameters, microbatches of "
        f"{rows[0]['tokens']} tokens; MiB"
    ]
    lines.append(
        f"\n{'case':<46}{'state':>9}{'estimate':>10}{'peak':>9}{'estimate':>10}{'ratio':>7}{'beyond state: ratio':>21}"
    )
    for row in rows:
        state, guess, peak, total = (
            float(str(row[k])) / MIB for k in ("state", "state_estimated", "peak", "peak_estimated")
        )
        beyond = (total - guess) / (peak - state)
        lines.append(
            f"{row['case']!s:<46}{state:>9.1f}{guess:>10.1f}{peak:>9.1f}{total:>10.1f}{total / peak:>7.2f}{beyond:>21.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
