"""One pass over microbatches that arrive one by one: by a plain loop, or by Megatron's 1F1B over pipeline stages.

Both accumulate unnormalised gradients, let their reduction over replicas begin inside the last
backward, and call the model configuration's finalize_model_grads_func once, at the end. The loop
ends when its turns do; 1F1B has to know the number of microbatches in advance.

A group whose pieces do not fit together takes turns depth first: the microbatch of its shared
prompt is opened, its pieces run with gradients for the prompt's keys and values, and the prompt's
own backward closes it (pa_npu/backends/in_step.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from pa_npu.backends.in_step import Turn
from pa_npu.backends.megatron.stage import ModelOutput
from pa_npu.samples.microbatch import Microbatch
from pa_npu.telemetry.timeline import Timeline, now

Forward = Callable[[Microbatch], Any]  # ModelOutput on the last stage, hidden states before it
Loss = Callable[[Microbatch, Any], torch.Tensor]  # of what the forward gives on the last stage


def run_sequential(
    model: Any, turns: Iterable[Turn], forward: Forward, loss: Loss, *, forward_only: bool
) -> None:
    """One turn after another on a model without pipeline stages. Gradients begin to be reduced in
    the backward of the last one.
    """
    if forward_only:
        for turn in turns:
            if turn.kind != "close":
                loss(turn.microbatch, forward(turn.microbatch))
        return
    opened: list[torch.Tensor] = []
    for turn in turns:
        with nullcontext() if turn.is_last else model.config.no_sync_func():
            if turn.kind == "close":
                opened.pop().backward()
                continue
            result = loss(turn.microbatch, forward(turn.microbatch))
            if turn.kind == "open":
                opened.append(result)
            else:
                result.backward()
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

    def forward_step(
        iterator: Iterator[Microbatch], model: Any
    ) -> tuple[Any, Callable[[Any], Any]]:
        microbatch = next(iterator)
        return forward(microbatch), partial(loss_step, microbatch)

    def loss_step(
        microbatch: Microbatch, output: ModelOutput
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        # three values mean: the first is a sum over as many tokens as the second says, leave it
        # undivided
        return (
            loss(microbatch, output),
            torch.tensor(microbatch.targets.numel(), dtype=torch.int),
            {},
        )

    # lengths vary, so the schedule exchanges shapes (variable_seq_lengths) and its seq_length is
    # unused
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=microbatches,
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def with_spans(turns: Iterable[Turn], timeline: Timeline) -> Generator[Turn, None, None]:
    """Yields the same turns, with a timeline span for each: from the moment it is at hand until the
    next one is asked for.
    """
    for turn in turns:
        start_s = now()
        try:
            yield turn
        finally:
            timeline.complete(turn.label, start_s, now(), lane="microbatches", turn=turn.kind)
