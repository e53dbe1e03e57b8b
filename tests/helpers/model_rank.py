"""One rank of a small world that runs iterations on fixed microbatches under several parallel layouts, one after another.

    python -m tests.helpers.model_rank JOB.json      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

JOB.json: {"model": directory, "reference": directory, "layouts": {name: {section: {key: value}}}, "out": file}; rank 0 writes
{name: result} to "out". `run_layout` runs one layout in the calling process. With "passes": {name: sections} and "old":
directory, tri-model and separate passes are compared under these layouts too (helpers/passes.py).
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.attention import PrefixLayout
from pa_npu.backends.logprob import MostLikely, score_rows
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from tests.helpers.megatron import (
    PLATFORM,
    build_stage,
    initialise_parallel,
    load_hf,
    model_config,
    shutdown_parallel,
)
from tests.helpers.passes import compare_passes
from tests.helpers.preloaded import start_rank

STACKS_AFTER_S = 90  # a rank that hangs writes its stacks to its log before `launch` gives up
GROUPS = ((4, (3, 5)), (7, (6, 2)), (3, (1, 9)), (5, (4, 4)))


def microbatches(
    shared_prompt: bool = True,
) -> list[tuple[torch.Tensor, PrefixLayout, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, layout, rows, targets, weights) of each group; ragged, padded to a multiple of 2."""
    generator = torch.Generator().manual_seed(11)
    result = []
    for prompt, responses in GROUPS:
        layout = PrefixLayout.from_groups([(prompt, list(responses))]).pad(2)
        tokens = torch.randint(0, 128, (1, layout.total), generator=generator)
        last = prompt + sum(responses)
        weights = torch.randn(last - prompt, generator=generator)
        if not shared_prompt:
            result.append((*_separate(tokens, prompt, responses), weights))
            continue
        result.append(
            (tokens, layout, layout.predictor_rows()[prompt:last], tokens[0, prompt:last], weights)
        )
    return result


def sequences(tokens: torch.Tensor, prompt: int, responses: tuple[int, ...]) -> list[torch.Tensor]:
    """Take apart a group packed with its prompt once: the prompt with each response, [tokens]."""
    parts = tokens[0, prompt : prompt + sum(responses)].split(responses)
    return [torch.cat([tokens[0, :prompt], part]) for part in parts]


def _separate(tokens: torch.Tensor, prompt: int, responses: tuple[int, ...]) -> tuple[Any, ...]:
    """(tokens, layout, rows, targets) with the prompt in each sequence."""
    parts = sequences(tokens, prompt, responses)
    layout = PrefixLayout.from_sequences([len(part) for part in parts])
    starts = [sum(len(part) for part in parts[:number]) for number in range(len(parts))]
    rows = torch.cat(
        [
            torch.arange(s + prompt - 1, s + len(part) - 1)
            for s, part in zip(starts, parts, strict=True)
        ]
    )
    packed = torch.nn.functional.pad(torch.cat(parts), (0, layout.pad(2).padding))[None]
    return packed, layout.pad(2), rows, packed[0, rows + 1]


def run_layout(
    config: Config,
    reference: Path,
    store: dist.Store,
    rank: int,
    world_size: int,
    gradients: Path | None = None,
) -> dict[str, Any]:
    """Two updates; per update the loss and the gradient norm, and the reference's log-probs summed
    per microbatch.

    gradients: the directory for the first update's, without a sharded optimizer.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from pa_npu.backends.megatron.stage import data_parallel

    place = initialise_parallel(config, PLATFORM, store, rank)
    spec = ModelSpec.read(config.model.path)
    stage = build_stage(spec, config, PLATFORM, frozen=("reference",))
    load_hf(stage.policy, spec)
    load_hf(stage.frozen["reference"], ModelSpec.read(str(reference)))
    distributed = config.trainer.distributed_optimizer
    ddp = data_parallel(stage, distributed_optimizer=distributed)
    narrow = config.model.dtype == "bf16"
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3,
            min_lr=1e-3,
            weight_decay=0.0,
            clip_grad=1.0,
            adam_eps=1e-6,
            bf16=narrow,
            params_dtype=stage.config.params_dtype,
            use_distributed_optimizer=distributed,
        ),
        [ddp],
    )
    losses: list[torch.Tensor] = []
    references: dict[int, float] = {}

    def forward_step(iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
        index, (tokens, layout, rows, targets, weights) = next(iterator)

        def loss(output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            log_ratio = output.frozen["reference"] - output.logprobs
            kl = log_ratio.exp() - log_ratio - 1
            total = (0.1 * kl - output.logprobs * weights - 0.01 * output.entropy).sum()
            losses.append(total.detach())
            references[index] = output.frozen["reference"].sum().item()
            return total, torch.tensor(targets.numel(), dtype=torch.int), {}

        return model(tokens, layout, rows, targets, 0.9, 4, entropy_grad=True), loss

    result: dict[str, Any] = {"loss": [], "grad_norm": []}
    mine = list(enumerate(microbatches(config.attention.shared_prompt)))[
        place.replica :: place.mesh.data
    ]
    if gradients is not None and not distributed:
        export_gradients(ddp, stage, spec, place, mine, gradients)
    for _ in range(2):
        losses.clear()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(mine),
            model=[ddp],
            num_microbatches=len(mine),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        # every tensor rank of the last stage has the loss: count it once
        here = place.is_last_stage and place.is_tensor_leader
        total = torch.stack(losses).sum() if here else torch.zeros(())
        dist.all_reduce(total)
        result["loss"].append(total.item())
        result["grad_norm"].append(float(grad_norm))
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, references)
    result["reference"] = [
        next(part[str(i)] for part in map(stringify, gathered) if str(i) in part)
        for i in range(len(GROUPS))
    ]
    result["ranks"] = gather(
        {
            "rank": place.rank,
            "tensor": place.tensor,
            "replica": place.replica,
            "stage": place.stage,
        },
        world_size,
    )
    shutdown_parallel()
    return result


def export_gradients(
    ddp: Any, stage: Any, spec: ModelSpec, place: Any, microbatches: list[Any], directory: Path
) -> None:
    """Write the gradient of `policy_loss` as an HF directory of the model's names: the weights' own
    way, on other numbers.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from pa_npu.backends.megatron import parallel
    from pa_npu.backends.megatron.weights.buckets import export_hf

    def forward_step(iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
        _, (tokens, layout, rows, targets, weights) = next(iterator)

        def loss(output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            return (
                policy_loss(output.logprobs, weights),
                torch.tensor(targets.numel(), dtype=torch.int),
                {},
            )

        return model(tokens, layout, rows, targets, 0.9, 4), loss

    ddp.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=[ddp],
        num_microbatches=len(microbatches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    kept = [(parameter, parameter.detach().clone()) for parameter in stage.policy.parameters()]
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.copy_(parameter.main_grad)
        export_hf(stage.policy, spec, directory, place, parallel.shard_group())
        for parameter, weights in kept:
            parameter.copy_(weights)


def policy_loss(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return -(logprobs * weights).sum()


def stringify(part: dict[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in part.items()}


def gather(value: Any, world_size: int) -> list[Any]:
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value)
    return gathered


def vocab_parallel_error(store: dist.Store, rank: int, world_size: int) -> dict[str, float]:
    """Largest differences from the full softmax, fp64; with 49 tokens the last rank has padding."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    errors = _vocab_parallel_errors(rank, world_size)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    # the graph, which holds the group, is gone by now: torch 2.7 can deadlock when a group outlives
    # its destruction
    dist.destroy_process_group()
    return dict(
        zip(
            (
                "logprob",
                "entropy",
                "hidden_grad",
                "weight_grad",
                "choices",
                "choice_logprob",
                "choice_hidden_grad",
                "choice_weight_grad",
            ),
            errors.tolist(),
            strict=True,
        )
    )


def _vocab_parallel_errors(rank: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    vocab, num_rows, local_rows = 49, 11, -(-49 // world_size)
    hidden = torch.randn(num_rows, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    full = torch.randn(world_size * local_rows, 16, generator=generator, dtype=torch.float64)
    weight = full[rank * local_rows : (rank + 1) * local_rows].clone().requires_grad_()
    targets = torch.randint(0, vocab, (num_rows,), generator=generator)
    down, down_entropy = torch.randn(2, num_rows, generator=generator, dtype=torch.float64)
    logprobs, entropy, *_ = score_rows(
        hidden,
        weight,
        targets,
        vocab_size=vocab,
        temperature=0.7,
        chunk=4,
        group=dist.group.WORLD,
        entropy_grad=True,
    )
    (logprobs * down + entropy * down_entropy).sum().backward()

    whole_hidden = hidden.detach().clone().requires_grad_()
    full.requires_grad_()
    log_softmax = (whole_hidden @ full[:vocab].t() / 0.7).log_softmax(-1)
    expected = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    expected_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (expected * down + expected_entropy * down_entropy).sum().backward()
    mine = full.grad[rank * local_rows : (rank + 1) * local_rows]
    return torch.stack(
        [
            (logprobs - expected).abs().max(),
            (entropy - expected_entropy).abs().max(),
            (hidden.grad - whole_hidden.grad).abs().max(),
            (weight.grad - mine).abs().max(),
            *_choice_errors(rank, hidden.detach(), full.detach(), local_rows),
        ]
    ).detach()


def _choice_errors(
    rank: int, hidden: torch.Tensor, full: torch.Tensor, local_rows: int
) -> list[torch.Tensor]:
    """Of the most likely tokens, and of another model's log-probs of them; more than a rank has."""
    vocab, count = 49, 30
    own = slice(rank * local_rows, (rank + 1) * local_rows)
    settings: dict[str, Any] = {"vocab_size": vocab, "chunk": 4, "group": dist.group.WORLD}
    targets = torch.zeros(len(hidden), dtype=torch.int64)
    teacher = score_rows(
        hidden, full[own], targets, most_likely=MostLikely(count, below=vocab - 2), **settings
    )
    chosen = (hidden @ full[:vocab].t()).log_softmax(-1)[:, : vocab - 2].topk(count)[1]

    states = (hidden * 0.5).requires_grad_()
    weight = full[own].clone().requires_grad_()
    policy = score_rows(states, weight, targets, choices=chosen, **settings)
    assert teacher.choices is not None and policy.choice_logprobs is not None
    generator = torch.Generator().manual_seed(2)
    down = torch.randn(len(hidden), count + 1, generator=generator, dtype=torch.float64)
    (policy.choice_logprobs * down).sum().backward()

    whole, whole_states = full.clone().requires_grad_(), (hidden * 0.5).requires_grad_()
    log_softmax = (whole_states @ whole[:vocab].t()).log_softmax(-1)
    rest = log_softmax.scatter(-1, chosen, float("-inf")).logsumexp(-1, keepdim=True)
    expected = torch.cat([log_softmax.gather(-1, chosen), rest], dim=-1)
    (expected * down).sum().backward()
    return [
        (teacher.choices - chosen).abs().max().double(),
        (policy.choice_logprobs - expected).abs().max(),
        (states.grad - whole_states.grad).abs().max(),
        (weight.grad - whole.grad[own]).abs().max(),
    ]


def launch(
    job: dict[str, Any], world_size: int, directory: Path, timeout_s: float = 120
) -> dict[str, Any]:
    """Run the job on `world_size` processes and return what rank 0 wrote.

    AssertionError with the logs on failure.
    """
    job_file, out = directory / "job.json", directory / "out.json"
    job_file.write_text(json.dumps({**job, "out": str(out)}))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "WORLD_SIZE": str(world_size),
    }
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    logs = [directory / f"rank{rank}.log" for rank in range(world_size)]
    processes = [
        start_rank("tests.helpers.model_rank", str(job_file), {**base, "RANK": str(rank)}, log)
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            break  # one failed: the others would wait for it
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    tails = "\n".join(
        f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs)
    )
    assert codes == [0] * world_size, f"exit codes {codes}\n{tails}"
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(STACKS_AFTER_S)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    results: dict[str, Any] = {}
    if "layouts" in job:
        results["vocab_parallel"] = vocab_parallel_error(
            dist.PrefixStore("vocab", store), rank, world_size
        )
    for name, sections in job.get("layouts", {}).items():
        config = model_config(Path(job["model"]), **sections)
        gradients = Path(job["gradients"]) / name if "gradients" in job else None
        prefixed = dist.PrefixStore(name, store)
        results[name] = run_layout(
            config, Path(job["reference"]), prefixed, rank, world_size, gradients
        )
    models = {
        name: Path(job[key])
        for name, key in (("policy", "model"), ("old", "old"), ("reference", "reference"))
        if key in job
    }
    for name, sections in job.get("passes", {}).items():
        config = model_config(Path(job["model"]), **sections)
        passes = dist.PrefixStore(f"passes {name}", store)
        results[name] = compare_passes(config, models, passes, rank, world_size, microbatches())
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
