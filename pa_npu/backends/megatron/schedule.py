"""One pass of a model over microbatches that arrive one by one: a plain loop, or Megatron's 1F1B over pipeline stages.

Both accumulate unnormalised gradients, let their reduction over replicas begin inside the last backward, and call the model
configuration's finalize_model_grads_func once, at the end. The plain loop ends when its microbatches do; 1F1B has to know their
number in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from pa_npu.backends.megatron.stage import ModelOutput
from pa_npu.samples.microbatch import Microbatch
from pa_npu.telemetry.timeline import Timeline, now

Forward = Callable[[Microbatch], Any]  # ModelOutput on the last stage, hidden states before it
Loss = Callable[[Microbatch, Any], torch.Tensor]  # of what the forward gives on the last stage


def run_sequential(
    model: Any,
    microbatches: Iterable[Microbatch],
    forward: Forward,
    loss: Loss,
    is_last: Callable[[], bool] | None,
) -> None:
    """Forward and backward of one microbatch after another, on a model without pipeline stages.

    is_last: whether the microbatch taken last is the last one, in whose backward gradients begin to be reduced; None: forward only.
    """
    if is_last is None:
        for microbatch in microbatches:
            loss(microbatch, forward(microbatch))
        return
    for microbatch in microbatches:
        with nullcontext() if is_last() else model.config.no_sync_func():
            loss(microbatch, forward(microbatch)).backward()
    model.config.finalize_model_grads_func([model])


def run_pipelined(
    model: Any,
    microbatches: Iterator[Microbatch],
    num_microbatches: int,
    forward: Forward,
    loss: Loss,
    *,
    forward_only: bool,
) -> None:
    """Megatron's schedule over the stages of a pipeline; every stage takes all microbatches."""

    def forward_step(iterator: Iterator[Microbatch], model: Any) -> tuple[Any, Callable[[Any], Any]]:
        microbatch = next(iterator)
        return forward(microbatch), partial(loss_step, microbatch)

    def loss_step(microbatch: Microbatch, output: ModelOutput) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        # three values mean: the first is a sum over as many tokens as the second says, leave it undivided
        return loss(microbatch, output), torch.tensor(microbatch.targets.numel(), dtype=torch.int), {}

    # lengths vary, so the schedule exchanges shapes (variable_seq_lengths) and its seq_length is unused
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=microbatches,
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def with_spans(microbatches: Iterable[Microbatch], timeline: Timeline) -> Generator[Microbatch, None, None]:
    """The same, with a timeline span for each: from the moment it is at hand until the next one is asked for."""
    for microbatch in microbatches:
        start_s = now()
        try:
            yield microbatch
        finally:
            groups = ", ".join(map(str, microbatch.group_indices))
            timeline.complete(f"group {groups}", start_s, now(), lane="microbatches")
