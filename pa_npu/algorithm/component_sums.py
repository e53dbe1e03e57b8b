"""The loss of all components together: each over its own tokens, all divided by the leading one's normaliser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from pa_npu.algorithm.algorithm import Algorithm, Component
from pa_npu.algorithm.loss_gradient import ExpectedGradient
from pa_npu.algorithm.loss_sums import LossSums
from pa_npu.algorithm.policy_losses import TokenBatch

# As a share of the largest gradient of a token: fp32 against fp64.
_ROUNDING = 1e-4


def all_sums(algorithm: Algorithm, batch: TokenBatch) -> LossSums:
    """Returns the sum over a microbatch's tokens of all components, undivided, and the metrics of
    `all_metric_names`.
    """
    component = batch.columns.get("component")
    if component is None:
        sums = algorithm.loss_sums(batch)
        if len(algorithm.components) == 1:
            return sums
        zero = torch.zeros_like(sums.loss.detach())
        return LossSums(
            sums.loss, sums.metrics | dict.fromkeys(_component_metrics(algorithm), zero)
        )
    sums = algorithm.loss_sums(batch.select(component == 1))
    loss, metrics = sums.loss, dict(sums.metrics)
    for part in algorithm.components[1:]:
        part_loss = _part_sum(algorithm, part, batch.select(component == part.number))
        loss = loss + part_loss
        metrics[_loss_name(part)] = part_loss.detach()
    return LossSums(loss, metrics | {"loss": loss.detach()})


def all_metric_names(algorithm: Algorithm) -> tuple[str, ...]:
    """Returns the leading component's metrics, and the sum of each other one."""
    return (*algorithm.metric_names, *_component_metrics(algorithm))


def all_gradients(algorithm: Algorithm, batch: TokenBatch) -> ExpectedGradient:
    """Returns the gradient of `all_sums` at the log-probs by a second calculation, on the host
    (I7).
    """
    component = batch.columns.get("component")
    if component is None:
        return algorithm.expected_gradient(batch)
    num_tokens = len(batch.logprobs)
    values, limit, is_sure = (
        np.zeros(num_tokens),
        np.zeros(num_tokens),
        np.ones(num_tokens, np.bool_),
    )
    for part in algorithm.components:
        rows = component == part.number
        if not rows.any():
            continue
        selected = batch.select(rows)
        if part.number == 1:
            expected = algorithm.expected_gradient(selected)
        else:
            expected = gradient_by_autograd(partial(_part_sum, algorithm, part), selected)
        values[rows.numpy()] = expected.values
        limit[rows.numpy()] = expected.limit
        is_sure[rows.numpy()] = expected.is_sure
    return ExpectedGradient(values, limit, is_sure)


def gradient_by_autograd(
    loss: Callable[[TokenBatch], torch.Tensor], batch: TokenBatch
) -> ExpectedGradient:
    """Returns the gradient of `loss` at the batch's log-probs, in fp64 on the host."""
    wide = batch.wide()
    logprobs = wide.logprobs.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = loss(replace(wide, logprobs=logprobs))
    (gradient,) = torch.autograd.grad(value, logprobs, allow_unused=True)
    values = np.zeros(len(logprobs)) if gradient is None else gradient.numpy()
    limit = _ROUNDING * np.abs(values).max(initial=0.0) + 1e-12
    return ExpectedGradient(values, np.full(len(values), limit), np.ones(len(values), np.bool_))


def _part_sum(algorithm: Algorithm, part: Component, batch: TokenBatch) -> torch.Tensor:
    if not len(batch.logprobs):
        return batch.logprobs.sum()  # nothing, with a gradient of nothing
    return (algorithm.loss_of(part, batch) * batch.weights).sum()


def _component_metrics(algorithm: Algorithm) -> list[str]:
    return [_loss_name(part) for part in algorithm.components[1:]]


def _loss_name(part: Component) -> str:
    return f"{part.name}_loss"
