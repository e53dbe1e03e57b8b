"""A user's own loss, advantage or algorithm, called once on a small made-up batch before a run: what is wrong is one line.

python -m pa_npu.algorithm.trial      Config as JSON on stdin; see pa_npu.control.worker_process
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pa_npu.algorithm.advantages import group_advantages
from pa_npu.algorithm.algorithm import ScoredSamples
from pa_npu.algorithm.normaliser import Counts
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.config.user_code import describe, source_of
from pa_npu.control.worker_process import run_trial, serve
from pa_npu.errors import ConfigError

if TYPE_CHECKING:
    from pa_npu.algorithm.choices import Choices
    from pa_npu.algorithm.policy_losses import TokenBatch

TIME_LIMIT_S = 60.0  # importing torch and a user's modules on a busy machine
_LENGTHS = (3, 5, 2, 4)  # tokens of the made-up batch's responses, a group of four
_REWARDS = (1.0, 0.0, 0.0, 1.0)


def check_algorithm(config: Config) -> None:
    """Tries what is the user's own.

    Raises ConfigError in one line with file and line of the user's code.
    """
    keys = config.algorithm
    named = [
        f"algorithm.{key}: {name}"
        for key, name in (("loss", keys.loss), ("advantage", keys.advantage))
    ]
    if keys.is_users_own:
        named.append(f"algorithm.name: {keys.name}")
    users = [value for value in named if value.count(":") > 1]
    if not users:
        return
    problem = run_trial(
        "pa_npu.algorithm.trial",
        config.model_dump_json().encode(),
        TIME_LIMIT_S,
        " and ".join(users),
        f"not imported and called within {TIME_LIMIT_S:.0f} s; make it import and return faster",
    )
    if problem is not None:
        raise ConfigError(problem)


def _try(request: bytes) -> None:
    config = Config.model_validate_json(request)
    keys = config.algorithm
    if ":" in keys.advantage:
        group_advantages(np.array(_REWARDS, np.float32), keys.advantage)
    if ":" in keys.loss:
        try_loss(keys)
    if keys.is_users_own:
        try_class(config)


def try_loss(config: AlgorithmConfig) -> None:
    """Raises ConfigError where the loss fails, returns something else than PolicyTerms, or gives no
    usable gradient.
    """
    import torch

    from pa_npu.algorithm.policy_losses import PolicyTerms, find_policy_loss

    loss = find_policy_loss(config.loss)
    where = f"algorithm.loss: {config.loss} ({source_of(loss)})"
    batch = _made_up_batch(getattr(loss, "columns", ()))
    num_tokens = batch.logprobs.numel()
    try:
        terms = loss(batch, config)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(
            f"{where} failed on a made-up batch: {describe(error)}; correct the function"
        ) from None
    if not isinstance(terms, PolicyTerms):
        raise ConfigError(
            f"{where} returned a {type(terms).__name__}; return PolicyTerms(loss, clipped)"
        )
    for name in ("loss", "clipped"):
        value = getattr(terms, name)
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{where}: its {name} is a {type(value).__name__}; return a tensor of [tokens]"
            )
        if tuple(value.shape) != (num_tokens,):
            raise ConfigError(
                f"{where}: its {name} has the shape {list(value.shape)} for {num_tokens} tokens; "
                "return one value per token, neither summed nor averaged"
            )
    if not torch.isfinite(terms.loss).all():
        raise ConfigError(
            f"{where}: its loss is not finite on a made-up batch; correct the formula"
        )
    if not terms.loss.requires_grad:
        raise ConfigError(
            f"{where}: its loss has no gradient; compute it from batch.logprobs, not from a "
            "detached copy"
        )
    try:
        (gradient,) = torch.autograd.grad(terms.loss.sum(), batch.logprobs, allow_unused=True)
    except Exception as error:
        raise ConfigError(
            f"{where}: its gradient cannot be computed: {describe(error)}; correct the function"
        ) from None
    if gradient is None or not gradient.any():
        raise ConfigError(
            f"{where}: its gradient for batch.logprobs is zero; compute the loss from "
            "batch.logprobs"
        )
    if not torch.isfinite(gradient).all():
        raise ConfigError(
            f"{where}: its gradient is not finite on a made-up batch; correct the formula"
        )


def try_class(config: Config) -> None:
    """Raises ConfigError where the class of algorithm.name cannot be made, breaks a rule of its
    own, or gives no usable credit or loss."""
    import torch

    from pa_npu.algorithm.loss_gradient import on_host
    from pa_npu.algorithm.registry import build_algorithm
    from pa_npu.algorithm.rules import rules_of

    where = f"algorithm.name: {config.algorithm.name}"
    try:
        algorithm = build_algorithm(config)
        broken = next(rules_of(algorithm), None)
        group = _made_up_group(num_samples=2 if algorithm.row_is == "pair" else len(_LENGTHS))
        advantages = algorithm.credit(group)
        wrong_credit = algorithm.broken_credit(group, advantages)
        batch = _made_up_batch(algorithm.loss_columns)
        teachers = [model.name for model in algorithm.models if model.is_teacher]
        columns = {name: batch.engine_logprobs - 0.02 for name in teachers}
        for model in algorithm.models:
            if model.targets is not None:
                column, value = model.targets
                columns[column] = torch.full((len(batch.logprobs),), value, dtype=torch.uint8)
        batch = replace(batch, columns={**batch.columns, **columns})
        if (count := max((model.num_choices for model in algorithm.models), default=0)) > 0:
            batch = replace(batch, choices=_made_up_choices(len(batch.logprobs), count))
        if not any(model.name == "reference" for model in algorithm.models):
            batch = replace(batch, reference_logprobs=None)
        if config.schedule.max_staleness:
            batch = replace(batch, ages=torch.ones_like(batch.weights))
        sums = algorithm.loss_sums(batch)
        (gradient,) = torch.autograd.grad(sums.loss, batch.logprobs, allow_unused=True)
        expected = algorithm.expected_gradient(on_host(batch))
        counts = Counts(tokens=sum(_LENGTHS), responses=len(_LENGTHS), units=1.0)
        normaliser = algorithm.normaliser(counts)
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"{where} failed on a made-up batch: {describe(error)}; correct the class"
        ) from None
    if broken is not None:
        raise ConfigError(broken)
    shape, num_tokens = np.shape(advantages), len(group.tokens)
    if shape != (num_tokens,) or not np.isfinite(advantages).all():
        raise ConfigError(
            f"{where}: credit returned {shape} for {num_tokens} tokens; return a finite number for "
            "each"
        )
    if wrong_credit is not None:
        raise ConfigError(
            f"{where}: of what credit returned, broken_credit says that {wrong_credit}; correct "
            "one of them"
        )
    if set(sums.metrics) != set(algorithm.metric_names):
        raise ConfigError(
            f"{where}: loss_sums has the metrics {sorted(sums.metrics)}, metric_names are "
            f"{sorted(algorithm.metric_names)}; name the same ones"
        )
    if gradient is None or not gradient.any() or not torch.isfinite(gradient).all():
        raise ConfigError(
            f"{where}: the gradient of its loss is zero or not finite; compute it from "
            "batch.logprobs"
        )
    wrong = ~(np.abs(gradient.double().numpy() - expected.values) <= expected.limit)
    if (wrong & expected.is_sure).any():
        raise ConfigError(
            f"{where}: expected_gradient is not the gradient of loss_sums; correct one of them"
        )
    if not normaliser > 0:
        raise ConfigError(f"{where}: normaliser is {normaliser}; return a positive number")


def _made_up_choices(num_tokens: int, count: int) -> Choices:
    """Two distributions over `count` tokens and the rest, the same of every token."""
    import torch

    from pa_npu.algorithm.choices import Choices

    policy, teacher = (
        torch.linspace(0.0, slope, count + 1).log_softmax(-1).expand(num_tokens, -1).clone()
        for slope in (-1.0, -2.0)
    )
    return Choices(policy.requires_grad_(), teacher)


def _made_up_group(num_samples: int) -> ScoredSamples:
    lengths = np.array(_LENGTHS[:num_samples], np.int32) + 2  # a prompt of two tokens
    trained = np.ones(int(lengths.sum()), np.bool_)
    starts = np.cumsum(lengths) - lengths
    trained[starts] = trained[starts + 1] = False
    tokens = np.arange(len(trained), dtype=np.int32)
    rewards = np.array(_REWARDS[:num_samples], np.float32)
    return ScoredSamples(rewards, lengths, tokens, trained.astype(np.uint8))


def _made_up_batch(columns: Sequence[Any] = ()) -> TokenBatch:
    """Returns a TokenBatch of one group, on the policy that sampled for half of the tokens and near
    it for the others.

    columns: the declared ones that it has.
    """
    import torch

    # brings torch, which the launcher need not wait for
    from pa_npu.algorithm.policy_losses import TokenBatch

    index = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    num_tokens = len(index)
    logprobs = torch.linspace(-2.0, -0.1, num_tokens).requires_grad_()
    old = logprobs.detach() - 0.05 * (torch.arange(num_tokens) % 2)
    return TokenBatch(
        logprobs=logprobs,
        entropy=torch.full((num_tokens,), 1.0),
        old_logprobs=old,
        reference_logprobs=old - 0.01,
        engine_logprobs=old.clone(),
        advantages=torch.tensor(group_advantages(np.array(_REWARDS, np.float32), "group-std"))[
            index
        ],
        weights=torch.ones(num_tokens),
        response_index=index,
        num_responses=len(_LENGTHS),
        group_size=len(_LENGTHS),
        columns={
            column.name: torch.ones(num_tokens, *column.shape).to(getattr(torch, column.dtype))
            for column in columns
        },
    )


if __name__ == "__main__":
    serve(_try)
