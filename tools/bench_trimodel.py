#!/usr/bin/env python
"""Time and peak memory of one tri-model pass against three separate passes over the same microbatches, PP1 and PP2.

    python tools/bench_trimodel.py [--groups 6] [--repeats 5] [--json FILE] [--markdown FILE]

  one pass      policy (forward and backward), old policy and reference go through the pipeline
                together
  three passes  old policy, then reference, forward only, their log-probs stored; then the policy
                with GRPO's loss on these

Both passes use this package's stages, schedules and losses on random Qwen2 models, three different
ones. Before timing, the log-probs of all models and all of the policy's gradients are compared: the
largest difference is printed. Timed rows alternate in one set of processes; memory is measured in
processes of its own per row, as the rise of the resident set over what it is with all weights and
gradient buffers in place (VmHWM, reset through /proc/self/clear_refs), on the fullest rank.

Columns: median, least and most seconds; speed against three passes; messages that the stages send,
and their MiB; the share of the time a stage waits for the other one (sending and receiving
included); MiB above weights. "streamed s" is the same work on microbatches that arrive one by one,
evenly over as long as one pass takes (the least sample): seconds from the start to the end. Three
passes can start to train only when the last microbatch has been through the first two.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import numpy as np
import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.backends.megatron.patches.table import prepare
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from tools.groups import group_of_responses

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.hardware import processor

TIMEOUT_S = 170.0
MODELS = ("policy", "old", "reference")
VARIANTS = ("three passes", "one pass")
COLUMNS: tuple[str, ...] = (
    "stages",
    "row",
    "median s",
    "least",
    "most",
    "speed",
    "streamed s",
    "messages",
    "MiB sent",
    "waiting",
    "MiB above weights",
)

Logprobs = dict[str, dict[int, torch.Tensor]]  # by model and microbatch; filled on the last stage


@dataclass(frozen=True)
class Case:
    """One world of processes. variants: what it runs; repeats 0 measures memory instead of time."""

    models: dict[str, str]
    stages: int
    variants: tuple[str, ...]
    repeats: int
    groups: int
    prompt: int
    response: int
    responses: int
    port: int

    def config(self) -> Config:
        tree: dict[str, dict[str, object]] = {
            "run": {"device": "cpu"},
            "model": {"path": self.models["policy"], "dtype": "fp32"},
            "data": {"train": "unused", "max_prompt_tokens": self.prompt},
            "rollout": {
                "responses_per_prompt": self.responses,
                "max_response_tokens": self.response,
            },
            "algorithm": {"name": "grpo"},
            "trainer": {"devices": self.stages, "pipeline_parallel": self.stages},
            "schedule": {"prompts_per_iteration": self.groups},
        }
        return Config.model_validate(tree)


@dataclass(frozen=True)
class Row:
    stages: int
    name: str
    seconds: float
    min_s: float
    max_s: float
    streamed_s: float
    messages: int
    sent_bytes: int
    waiting: float
    memory_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=(1, 2), help="pipeline stages")
    parser.add_argument(
        "--hidden", type=int, default=256, help="hidden size of the models, which have 4 layers"
    )
    parser.add_argument("--groups", type=int, default=6, help="microbatches, each one group")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument(
        "--response", type=int, default=64, help="longest response; lengths are half of it to it"
    )
    parser.add_argument("--responses", type=int, default=8, help="responses per group")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed repetitions; medians are printed"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--markdown", type=Path, help="write hardware, differences and table to this file"
    )
    args = parser.parse_args(argv)

    rows: list[Row] = []
    differences: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        models = {
            name: make_model(Path(scratch) / name, args.hidden, seed)
            for seed, name in enumerate(MODELS)
        }
        for stages in args.stages:
            measured, differences[f"PP{stages}"] = compare(models, stages, args)
            rows += measured
    table = render(rows)
    settings = (
        f"{args.groups} microbatches of {args.responses} responses of {args.response // 2} to "
        f"{args.response} tokens, prompts of {args.prompt}; hidden {args.hidden}, 4 layers, fp32; "
        f"medians of {args.repeats}"
    )
    exact = ", ".join(f"{name}: {value}" for name, value in differences.items())
    lines = [
        hardware(),
        settings,
        f"largest difference of log-probs and gradients from separate passes: {exact}",
    ]
    print("\n".join([*lines, "", *table]))
    if args.json:
        result = {
            "rows": [asdict(row) for row in rows],
            "differences": differences,
            "hardware": hardware(),
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text("\n\n".join([*lines, "\n".join(table)]) + "\n", encoding="utf-8")
    return 0


def hardware() -> str:
    return (
        f"{processor()}, {os.cpu_count()} cores, one thread per rank, torch "
        f"{torch.__version__}, gloo"
    )


def make_model(directory: Path, hidden: int, seed: int) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).float().save_pretrained(directory)
    return str(directory)


def compare(
    models: dict[str, str], stages: int, args: argparse.Namespace
) -> tuple[list[Row], float]:
    """Returns the rows of one number of stages, and the largest difference between them."""

    def run(variants: tuple[str, ...], repeats: int) -> list[dict[str, Any]]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        sizes = (args.groups, args.prompt, args.response, args.responses)
        return run_world(Case(models, stages, variants, repeats, *sizes, store.port))

    timed = run(VARIANTS, args.repeats)
    rows = []
    for name in VARIANTS:
        memory = max(rank["memory"] for rank in run((name,), 0))
        # a pass ends when its last stage ends
        seconds = [
            max(times) for times in zip(*(rank["seconds"][name] for rank in timed), strict=True)
        ]
        streamed = [
            max(times) for times in zip(*(rank["streamed"][name] for rank in timed), strict=True)
        ]
        wait = sum(sum(rank["waited"][name]) for rank in timed) / stages / sum(seconds)
        sent = [rank["sent"][name] for rank in timed]
        rows.append(
            Row(
                stages, name, statistics.median(seconds), min(seconds), max(seconds), statistics.median(streamed),
                sum(count for count, _ in sent), sum(size for _, size in sent), wait, memory,
            )
        )  # fmt: skip
    return rows, max(rank["difference"] for rank in timed)


def run_world(case: Case) -> list[dict[str, Any]]:
    """Starts a fresh world of processes and returns each rank's measurements."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(case, rank, results), name=f"rank-{rank}")
        for rank in range(case.stages)
    ]
    for process in processes:
        process.start()
    measured: list[dict[str, Any]] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(measured) < len(processes):
            with contextlib.suppress(queue.Empty):
                measured.append(results.get(timeout=0.5))
            failed = [process.name for process in processes if process.exitcode]
            if failed or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{failed or 'no rank'} of PP{case.stages}: ended without a result or in "
                    f"{TIMEOUT_S} s"
                )
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    return measured


def rank_main(case: Case, rank: int, results: Any) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # a device is one core
    config = case.config()
    platform = platforms.get("cpu")
    prepare(platform.name)
    from pa_npu.backends.megatron.parallel import initialise_parallel, shutdown_parallel

    store = dist.TCPStore("127.0.0.1", case.port, is_master=False)
    initialise_parallel(config, platform, store, rank)
    microbatches = [
        m for g in make_groups(case) for m in build_microbatches(g, case.responses, True, 1)
    ]
    passes = {
        name: build_pass(name, case, config, platform, microbatches) for name in case.variants
    }
    link = LinkMeter()
    if case.repeats:
        results.put(time_passes(passes, len(microbatches), case.repeats, link))
    else:
        results.put({"memory": memory_rise(*passes.values())})
    shutdown_parallel()


def make_groups(case: Case) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = []
    for index in range(case.groups):
        lengths = rng.integers(
            max(1, case.response // 2), case.response + 1, case.responses
        ).astype(np.int32)
        total = int(lengths.sum())
        groups.append(
            group_of_responses(
                iteration=0,
                version=0,
                index=index,
                prompt_id=index,
                prompt_tokens=rng.integers(0, 1024, case.prompt).astype(np.int32),
                response_tokens=rng.integers(0, 1024, total).astype(np.int32),
                response_lengths=lengths,
                logprobs=np.full(total, -7.0, np.float32),
                rewards=np.zeros(case.responses, np.float32),
                advantages=rng.standard_normal(case.responses).astype(np.float32),
                finished=np.ones(case.responses, np.uint8),
            )
        )
    return groups


@dataclass(frozen=True)
class Pass:
    """run(interval_s) -> log-probs of all models; the policy's summed gradients are in
    `parameters`' main_grad afterwards.

    interval_s: seconds between the arrivals of microbatches, counted from the call; 0 means that
    all are there.
    """

    run: Callable[[float], Logprobs]
    zero: Callable[[], None]
    parameters: list[torch.nn.Parameter]


def build_pass(
    name: str, case: Case, config: Config, platform: Any, microbatches: list[Microbatch]
) -> Pass:
    from pa_npu.backends.in_step import Turn
    from pa_npu.backends.megatron.passes import run_pipelined, run_sequential
    from pa_npu.backends.megatron.stage import build_stage, data_parallel
    from pa_npu.backends.megatron.weights.hf_map import load_hf

    specs = {model: ModelSpec.read(path) for model, path in case.models.items()}
    algorithm = build_algorithm(config)

    def load(models: tuple[str, ...]) -> Any:
        """Returns a stage whose policy is the first of `models`, the others frozen beside it."""
        stage = build_stage(specs[models[0]], config, platform, frozen=models[1:])
        for model, gpt in zip(models, stage.gpts().values(), strict=True):
            load_hf(gpt, specs[model])
        return stage

    def one_pass(
        model: Any,
        names: tuple[str, ...],
        logprobs: Logprobs,
        arrivals: Arrivals,
        *,
        forward_only: bool,
    ) -> None:
        """Log-probs of `names` into `found`; with backward unless forward_only, against the frozen
        ones in `found`.
        """
        position = {id(microbatch): index for index, microbatch in enumerate(microbatches)}

        def forward(m: Microbatch) -> Any:
            return model(
                m.tokens[None], m.layout, m.rows, m.targets, 1.0, config.model.head_chunk_tokens
            )

        def loss(m: Microbatch, output: Any) -> torch.Tensor:
            index = position[id(m)]
            for name, values in zip(
                names, (output.logprobs.detach(), *output.frozen.values()), strict=True
            ):
                logprobs.setdefault(name, {})[index] = values
            if forward_only:
                return torch.zeros(())
            batch = TokenBatch(
                logprobs=output.logprobs,
                entropy=output.entropy,
                old_logprobs=logprobs["old"][index],
                reference_logprobs=logprobs["reference"][index],
                engine_logprobs=m.engine_logprobs,
                advantages=m.advantages,
                weights=algorithm.token_weights(m.response_lengths, torch.device("cpu")),
                response_index=m.response_index,
                num_responses=m.num_samples,
                group_size=case.responses,
            )
            return algorithm.loss_sums(batch).loss

        with torch.set_grad_enabled(not forward_only):
            if case.stages == 1:
                run_sequential(
                    model,
                    (Turn("train", microbatch) for microbatch in arrivals.wait(microbatches)),
                    forward,
                    loss,
                    forward_only=forward_only,
                )
            else:
                paced = arrivals.wait(microbatches)
                run_pipelined(
                    model, paced, len(microbatches), forward, loss, forward_only=forward_only
                )

    others = {} if name == "one pass" else {model: load((model,)) for model in MODELS[1:]}
    trained = MODELS if name == "one pass" else MODELS[:1]
    stage = load(trained)
    ddp = data_parallel(stage, distributed_optimizer=False)
    stage.config.no_sync_func = ddp.no_sync

    def run(interval_s: float) -> Logprobs:
        logprobs: Logprobs = {}
        arrivals = Arrivals(interval_s)
        for model, frozen in others.items():
            one_pass(frozen, (model,), logprobs, arrivals, forward_only=True)
        one_pass(ddp, trained, logprobs, arrivals, forward_only=False)
        return logprobs

    return Pass(run, ddp.zero_grad_buffer, list(stage.policy.parameters()))


class Arrivals:
    """When microbatches are at hand: number i at interval_s * (i + 1) after the start, for every
    pass over them.
    """

    def __init__(self, interval_s: float) -> None:
        self._start_s = time.perf_counter()
        self._interval_s = interval_s

    def wait(self, microbatches: list[Microbatch]) -> Iterator[Microbatch]:
        for index, microbatch in enumerate(microbatches):
            due_s = self._start_s + self._interval_s * (index + 1)
            time.sleep(max(0.0, due_s - time.perf_counter()))
            yield microbatch


class LinkMeter:
    """Messages that this rank sends to the other stages, their bytes, and the seconds it spends in
    sending and receiving.
    """

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import p2p_communication

        self.reset()
        start_all = dist.batch_isend_irecv
        communicate = p2p_communication._communicate

        def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
            sent = [
                operation.tensor.nbytes for operation in operations if operation.op is dist.isend
            ]
            self.messages += len(sent)
            self.bytes += sum(sent)
            return start_all(operations)

        def timed(**arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return communicate(**arguments)
            finally:
                self.seconds += time.perf_counter() - start

        # Megatron's schedule looks both up where they are defined, at each call
        dist.batch_isend_irecv = counted  # type: ignore[assignment]
        p2p_communication._communicate = timed

    def reset(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.seconds = 0.0


def time_passes(
    passes: dict[str, Pass], num_microbatches: int, repeats: int, link: LinkMeter
) -> dict[str, Any]:
    outcomes = {}
    for name, variant in passes.items():
        variant.zero()
        outcomes[name] = variant.run(0.0), gradients(variant)
    difference = largest_difference(*outcomes.values())
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    waited: dict[str, list[float]] = {name: [] for name in passes}
    streamed: dict[str, list[float]] = {name: [] for name in passes}
    sent = {}
    for _ in range(repeats):
        for name, variant in passes.items():
            variant.zero()
            link.reset()
            dist.barrier()
            start = time.perf_counter()
            variant.run(0.0)
            seconds[name].append(time.perf_counter() - start)
            waited[name].append(link.seconds)
            sent[name] = (link.messages, link.bytes)
    interval_s = torch.tensor(min(seconds["one pass"]) / num_microbatches)
    dist.all_reduce(interval_s, op=dist.ReduceOp.MAX)  # a pass ends when its last stage ends
    for _ in range(repeats):
        for name, variant in passes.items():
            variant.zero()
            dist.barrier()
            start = time.perf_counter()
            variant.run(float(interval_s))
            streamed[name].append(time.perf_counter() - start)
    return {
        "streamed": streamed,
        "seconds": seconds,
        "waited": waited,
        "sent": sent,
        "difference": difference,
    }


def gradients(variant: Pass) -> list[torch.Tensor]:
    """Copies of the sums in DDP's buffers."""
    return [parameter.main_grad.clone() for parameter in variant.parameters]  # type: ignore[attr-defined]


def largest_difference(
    first: tuple[Logprobs, list[torch.Tensor]], second: tuple[Logprobs, list[torch.Tensor]]
) -> float:
    """Over the log-probs of all models (on the last stage) and all gradients of this stage."""
    if first[0].keys() != second[0].keys():
        raise ValueError(
            f"the passes computed {sorted(first[0])} and {sorted(second[0])}; both must give all "
            "models"
        )
    pairs = [(values[i], second[0][name][i]) for name, values in first[0].items() for i in values]
    pairs += zip(first[1], second[1], strict=True)
    if not max(float(gradient.abs().max()) for gradient in first[1]):
        raise ValueError("all gradients are zero: the comparison would show nothing")
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def memory_rise(variant: Pass) -> int:
    """Returns the bytes that one pass adds to the resident set at its peak."""
    variant.zero()
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at what is resident
    variant.run(0.0)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def render(rows: list[Row]) -> list[str]:
    base = {row.stages: row.seconds for row in rows if row.name == VARIANTS[0]}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "--:|" * len(COLUMNS)]
    for row in rows:
        cells = [
            f"PP{row.stages}",
            row.name,
            f"{row.seconds:.2f}",
            f"{row.min_s:.2f}",
            f"{row.max_s:.2f}",
            f"{base[row.stages] / row.seconds:.2f}x",
            f"{row.streamed_s:.2f}",
            str(row.messages),
            f"{row.sent_bytes / 2**20:.1f}",
            f"{row.waiting:.0%}",
            f"{row.memory_bytes / 2**20:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
