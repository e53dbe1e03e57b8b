"""The losses by name: the formulas that tinker's documentation gives, as undivided sums over tokens.

    cross_entropy        -w log p
    importance_sampling  -r A                              r = p / q, q what sampled the token
    ppo                  -min(r A, clip(r, low, high) A)
    cispo                -sg(clip(r, low, high)) A log p   sg: no gradient flows
    gspo                 ppo's, with r = sg(s) p / sg(p), where log s is the mean of log(p / q) over
                         the datum's masked tokens
    dro                  -(A log p - beta / 2 (log p - log q)^2)

Source: https://tinker-docs.thinkingmachines.ai/tinker/losses and the pages below it. Parameters that
these give no default for have none here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from pa_npu.algorithm.algorithm import Algorithm, Component, ScoredSamples, TokenValues
from pa_npu.algorithm.loss_sums import LossSums
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.config.schema import Config
from pa_npu.service.wire import Refused

MASK = "sequence_ratio_mask"
# Columns of a call's microbatch: of every target of its datums, where its log-prob is among those
# that were computed, which datum it is of, and the arrays that its loss reads, by their names.
PLACE, OWNER, OF_CALL = "place", "owner", "call."
_SAMPLED = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": None, "clip_high_threshold": None}


@dataclass(frozen=True)
class Loss:
    """A loss that clients may name.

    reads: arrays of a datum beside target_tokens. parameters: with their defaults; None: none.
    optional: those of `reads` that may be missing, and then are 1.
    """

    name: str
    tokens: Callable[[TokenBatch, Mapping[str, float]], torch.Tensor]
    reads: tuple[str, ...]
    parameters: Mapping[str, float | None]
    optional: tuple[str, ...] = ()


def _cross_entropy(batch: TokenBatch, values: Mapping[str, float]) -> torch.Tensor:
    return -batch.logprobs


def _importance_sampling(batch: TokenBatch, values: Mapping[str, float]) -> torch.Tensor:
    return -_ratio(batch) * batch.advantages


def _ppo(batch: TokenBatch, values: Mapping[str, float]) -> torch.Tensor:
    return _clipped(_ratio(batch), batch.advantages, values)


def _cispo(batch: TokenBatch, values: Mapping[str, float]) -> torch.Tensor:
    weight = _clip(_ratio(batch), values).detach()
    return -weight * batch.advantages * batch.logprobs


def _gspo(batch: TokenBatch, values: Mapping[str, float]) -> torch.Tensor:
    mask = (batch.columns[MASK] != 0).to(batch.logprobs.dtype)
    frozen = batch.logprobs.detach()
    total = batch.response_sum((frozen - batch.engine_logprobs) * mask)
    mean = total / batch.response_sum(mask)
    ratio = (batch.per_token(mean) + batch.logprobs - frozen).exp()
    return _clipped(ratio, batch.advantages, values)


def _dro(batch: TokenBatch, values: Mapping[str, float]) -> torch.Tensor:
    penalty = (batch.logprobs - batch.engine_logprobs).square()
    return -(batch.logprobs * batch.advantages - 0.5 * values["beta"] * penalty)


def _ratio(batch: TokenBatch) -> torch.Tensor:
    return (batch.logprobs - batch.engine_logprobs).exp()


def _clip(ratio: torch.Tensor, values: Mapping[str, float]) -> torch.Tensor:
    return ratio.clamp(values["clip_low_threshold"], values["clip_high_threshold"])


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, values: Mapping[str, float]
) -> torch.Tensor:
    return -torch.minimum(ratio * advantages, _clip(ratio, values) * advantages)


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, ("weights",), {}, optional=("weights",)),
        Loss("importance_sampling", _importance_sampling, _SAMPLED, {}),
        Loss("ppo", _ppo, _SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        Loss("cispo", _cispo, _SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        Loss("gspo", _gspo, (*_SAMPLED, MASK), _CLIP),
        Loss("dro", _dro, _SAMPLED, {"beta": None}),
    )
}


def loss_named(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """Returns the loss and all its parameters. Raises Refused, which names what is wrong."""
    loss = LOSSES.get(name)
    if loss is None:
        raise Refused(
            f"loss_fn: {name[:60]!r} is no loss of this server, which has {', '.join(LOSSES)}"
        )
    for key, value in config.items():
        if key not in loss.parameters:
            known = ", ".join(loss.parameters) or "none"
            raise Refused(f"loss_fn_config: {name} has no {key[:60]!r}; it has {known}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise Refused(f"loss_fn_config: {key} must be a finite number, not {value!r:.60}")
    values = {}
    for key, default in loss.parameters.items():
        given = config.get(key, default)
        if given is None:
            raise Refused(f"loss_fn_config: {name} needs {key}, which has no default")
        values[key] = float(given)
    if values.get("clip_low_threshold", 0) > values.get("clip_high_threshold", 0):
        raise Refused("loss_fn_config: clip_low_threshold must not be above clip_high_threshold")
    return loss, values


def _of_all_targets(batch: TokenBatch) -> TokenBatch:
    """Returns the batch of every target of a call's datums, in the place of those that were scored."""
    columns = batch.columns
    owners = columns[OWNER]
    logprobs = batch.logprobs.index_select(0, columns[PLACE])
    nothing = torch.zeros_like(logprobs.detach())
    ones = torch.ones_like(nothing)
    return replace(
        batch,
        logprobs=logprobs,
        engine_logprobs=columns.get(f"{OF_CALL}logprobs", nothing),
        advantages=columns.get(f"{OF_CALL}advantages", nothing),
        weights=columns.get(f"{OF_CALL}weights", ones),
        response_index=owners,
        columns={MASK: columns.get(f"{OF_CALL}{MASK}", ones)},
    )


_TRAINED = Component(1, "trained", "those of the datums", needs_provenance=False)


class ServedLoss(Algorithm):
    """A named loss as the algorithm of one call: the objective's sum is the documented one, with the
    datum's weights and nothing else.
    """

    components = (_TRAINED,)

    def __init__(self, config: Config, loss: Loss, values: Mapping[str, float]) -> None:
        super().__init__(config)
        self.loss = loss
        self.values = values

    @property
    def ratio(self) -> Literal["proximal", "sampling"]:
        # the log-probs that clients sampled with are in the datum, and the loss reads them itself
        return "proximal"

    @property
    def reads_old_logprobs(self) -> bool:
        return False

    @property
    def credit_key(self) -> str:
        return f"loss_fn = {self.loss.name}, to which clients give advantages"

    def credit(self, group: ScoredSamples) -> TokenValues:
        return np.zeros(len(group.tokens), np.float32)

    def token_weights(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        return torch.ones(sum(lengths), device=device)

    def loss_sums(self, batch: TokenBatch) -> LossSums:
        batch = _of_all_targets(batch)
        total = (self.loss.tokens(batch, self.values) * batch.weights).sum()
        return LossSums(total, {"loss": total.detach(), "policy_loss": total.detach()})

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("loss", "policy_loss")
