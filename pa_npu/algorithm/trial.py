"""A user's own loss and advantage, called once on a small made-up batch before a run: what is wrong is one line.

python -m pa_npu.algorithm.trial      AlgorithmConfig as JSON on stdin; see pa_npu.control.worker_process
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pa_npu.algorithm.advantages import group_advantages
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.config.user_code import describe, source_of
from pa_npu.control.worker_process import ask, serve
from pa_npu.errors import ConfigError

if TYPE_CHECKING:
    from pa_npu.algorithm.policy_losses import TokenBatch

TIME_LIMIT_S = 60.0  # importing torch and a user's modules on a busy machine
_LENGTHS = (3, 5, 2, 4)  # tokens of the made-up batch's responses, a group of four
_REWARDS = (1.0, 0.0, 0.0, 1.0)


def check_algorithm(config: AlgorithmConfig) -> None:
    """Tries what is the user's own. Raises ConfigError in one line with file and line of the user's code."""
    own = [f"algorithm.{key}: {name}" for key, name in (("loss", config.loss), ("advantage", config.advantage))]
    own = [what for what in own if what.count(":") > 1]
    if not own:
        return
    problem = ask(
        "pa_npu.algorithm.trial",
        config.model_dump_json().encode(),
        TIME_LIMIT_S,
        " and ".join(own),
        f"not imported and called within {TIME_LIMIT_S:.0f} s; make it import and return faster",
    )
    if problem is not None:
        raise ConfigError(problem)


def _try(request: bytes) -> None:
    config = AlgorithmConfig.model_validate_json(request)
    if ":" in config.advantage:
        group_advantages(np.array(_REWARDS, np.float32), config.advantage)
    if ":" in config.loss:
        try_loss(config)


def try_loss(config: AlgorithmConfig) -> None:
    """Raises ConfigError where the loss fails, returns something else than PolicyTerms, or gives no usable gradient."""
    import torch

    from pa_npu.algorithm.policy_losses import PolicyTerms, find_policy_loss

    loss = find_policy_loss(config.loss)
    where = f"algorithm.loss: {config.loss} ({source_of(loss)})"
    batch = _made_up_batch()
    num_tokens = batch.logprobs.numel()
    columns = {
        one.name: torch.ones(num_tokens, *one.shape).to(getattr(torch, one.dtype))
        for one in getattr(loss, "columns", ())
    }
    batch = replace(batch, columns=columns)
    try:
        terms = loss(batch, config)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"{where} failed on a made-up batch: {describe(error)}; correct the function") from None
    if not isinstance(terms, PolicyTerms):
        raise ConfigError(f"{where} returned a {type(terms).__name__}; return PolicyTerms(loss, clipped)")
    for name in ("loss", "clipped"):
        value = getattr(terms, name)
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{where}: its {name} is a {type(value).__name__}; return a tensor of [tokens]")
        if tuple(value.shape) != (num_tokens,):
            raise ConfigError(
                f"{where}: its {name} has the shape {list(value.shape)} for {num_tokens} tokens; return one value per token, "
                f"neither summed nor averaged"
            )
    if not torch.isfinite(terms.loss).all():
        raise ConfigError(f"{where}: its loss is not finite on a made-up batch; correct the formula")
    if not terms.loss.requires_grad:
        raise ConfigError(
            f"{where}: its loss has no gradient; compute it from batch.logprobs, not from a detached copy"
        )
    try:
        (gradient,) = torch.autograd.grad(terms.loss.sum(), batch.logprobs, allow_unused=True)
    except Exception as error:
        raise ConfigError(
            f"{where}: its gradient cannot be computed: {describe(error)}; correct the function"
        ) from None
    if gradient is None or not gradient.any():
        raise ConfigError(f"{where}: its gradient for batch.logprobs is zero; compute the loss from batch.logprobs")
    if not torch.isfinite(gradient).all():
        raise ConfigError(f"{where}: its gradient is not finite on a made-up batch; correct the formula")


def _made_up_batch() -> TokenBatch:
    """A TokenBatch of one group, on the policy that sampled for half of the tokens and near it for the others."""
    import torch

    from pa_npu.algorithm.policy_losses import TokenBatch  # brings torch, which the launcher need not wait for

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
        advantages=torch.tensor(group_advantages(np.array(_REWARDS, np.float32), "group-std"))[index],
        weights=torch.ones(num_tokens),
        response_index=index,
        num_responses=len(_LENGTHS),
        group_size=len(_LENGTHS),
    )


if __name__ == "__main__":
    serve(_try)
