"""One tri-model pass against three separate passes over the same microbatches, on one rank of a world of any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.attention import PrefixLayout
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from tests.helpers.megatron import (
    PLATFORM,
    TriModel,
    build_stage,
    initialise_parallel,
    load_hf,
    shutdown_parallel,
)

Microbatch = tuple[torch.Tensor, PrefixLayout, torch.Tensor, torch.Tensor, torch.Tensor]
Logprobs = dict[int, torch.Tensor]  # by microbatch; empty on all stages but the last


@dataclass
class Pass:
    """Results of one pass on a rank: log-probs of each model on the last stage, and the policy's
    gradients.
    """

    logprobs: dict[str, Logprobs]
    gradients: list[torch.Tensor]


def compare_passes(
    config: Config,
    models: dict[str, Path],
    store: dist.Store,
    rank: int,
    world_size: int,
    batch: list[Microbatch],
) -> dict[str, float]:
    """Largest absolute differences over all ranks, and how far apart the models are, which must not
    be 0.

    models: HF directories of "policy", "old" and "reference". The loss is the clipped ratio to old
    plus k3 to the reference, whose log-probs the separate passes store beforehand.
    """
    place = initialise_parallel(config, PLATFORM, store, rank)
    mine = list(enumerate(batch))[place.replica :: place.mesh.data]
    together = run_pass(load(config, models, ("old", "reference")), mine, None)

    stored = {
        name: run_pass(
            load(config, {"policy": models[name]}, ()), mine, None, forward_only=True
        ).logprobs["policy"]
        for name in ("old", "reference")
    }
    separate = run_pass(load(config, models, ()), mine, stored)

    expected = {"policy": separate.logprobs["policy"], **stored}
    differences = [largest(together.logprobs[name], expected[name]) for name in expected]
    gradients = torch.stack(
        [
            (ours - theirs).abs().max()
            for ours, theirs in zip(together.gradients, separate.gradients, strict=True)
        ]
    ).max()
    sizes = torch.stack([gradient.abs().max() for gradient in separate.gradients]).max()
    apart = [largest(expected["policy"], expected[name]) for name in ("old", "reference")]
    values = torch.stack([*differences, gradients, sizes, *apart])
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    shutdown_parallel()
    names = (
        "policy",
        "old",
        "reference",
        "gradients",
        "largest gradient",
        "old apart",
        "reference apart",
    )
    return dict(zip(names, values.tolist(), strict=True))


def load(config: Config, models: dict[str, Path], frozen: tuple[str, ...]) -> TriModel:
    spec = ModelSpec.read(str(models["policy"]))
    stage = build_stage(spec, config, PLATFORM, frozen=frozen)
    for name, model in stage.gpts().items():
        load_hf(model, ModelSpec.read(str(models[name])))
    return stage


def run_pass(
    stage: TriModel,
    batch: list[tuple[int, Microbatch]],
    stored: dict[str, Logprobs] | None,
    *,
    forward_only: bool = False,
) -> Pass:
    """One pass of Megatron's schedule. stored: the frozen models' log-probs where the stage does
    not compute them.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from pa_npu.backends.megatron.stage import data_parallel

    ddp = data_parallel(stage, distributed_optimizer=False)
    ddp.zero_grad_buffer()
    logprobs: dict[str, Logprobs] = {name: {} for name in stage.gpts()}

    def forward_step(iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[[Any], Any]]:
        index, (tokens, layout, rows, targets, advantages) = next(iterator)

        def loss(output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            logprobs["policy"][index] = output.logprobs.detach()
            for name, values in output.frozen.items():
                logprobs[name][index] = values
            total = torch.zeros(())
            if not forward_only:
                others = (
                    output.frozen
                    if stored is None
                    else {name: stored[name][index] for name in stored}
                )
                total = clipped_and_kl(
                    output.logprobs, others["old"], others["reference"], advantages
                )
            return total, torch.tensor(targets.numel(), dtype=torch.int), {}

        return model(tokens, layout, rows, targets, 0.9, 4), loss

    with torch.set_grad_enabled(not forward_only):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batch),
            model=[ddp],
            num_microbatches=len(batch),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return Pass(logprobs, [parameter.main_grad.clone() for parameter in stage.policy.parameters()])


def clipped_and_kl(
    logprobs: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    ratio = (logprobs - old).exp()
    difference = reference - logprobs
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (0.1 * (difference.exp() - difference - 1) - surrogate).sum()


def largest(first: Logprobs, second: Logprobs) -> torch.Tensor:
    assert first.keys() == second.keys()
    if not first:
        return torch.zeros(())
    return torch.stack([(first[index] - second[index]).abs().max() for index in first]).max()
