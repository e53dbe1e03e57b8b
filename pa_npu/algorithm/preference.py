"""Online DPO: a preference between the best and the worst response of each group, under the policy and the reference."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from pa_npu.algorithm.batch import TokenBatch
from pa_npu.config.sections import AlgorithmConfig

PREFERENCE_METRICS = ("preference_pairs", "preference_margin", "preference_right")
"""Sums over pairs: 1, the margin, and whether it is positive."""


def preference_loss(batch: TokenBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-log sigmoid(m) of each group's pair, spread evenly over the tokens of its two responses, [tokens]; and PREFERENCE_METRICS.

        m = beta (h(best) - h(worst)),   h(o) = log pi(o) - log pi_reference(o), sums over the response

    Best and worst by advantage, which orders responses as their reward does; of equal ones the first. Where all are equal there is
    no preference: the group's tokens have the loss 0, and it is no pair, of which the update's loss is the mean.

    DPO: Rafailov et al., arXiv 2305.18290, eq. 7; best and worst of K online samples, trained asynchronously: arXiv 2410.18252.
    """
    size = batch.group_size
    if batch.reference_logprobs is None or batch.num_responses % size:
        raise ValueError(
            f"a preference needs reference log-probs and whole groups of {size}, not {batch.num_responses} responses"
        )
    lengths = batch.response_sum(torch.ones_like(batch.logprobs))
    first_tokens = (lengths.cumsum(0) - lengths).round().long()
    scores = batch.advantages.index_select(0, first_tokens).view(-1, size)
    # argmax promises no order among equal values
    earlier = torch.arange(size, 0, -1, device=scores.device)
    highest, lowest = scores.max(dim=1, keepdim=True).values, scores.min(dim=1, keepdim=True).values
    best, worst = (((scores == value) * earlier).argmax(dim=1, keepdim=True) for value in (highest, lowest))
    is_pair = (highest > lowest).squeeze(1).to(batch.logprobs.dtype)

    gained = batch.response_sum(batch.logprobs - batch.reference_logprobs).view(-1, size)
    margin = config.kl_coef * (gained.gather(1, best) - gained.gather(1, worst)).squeeze(1)
    loss = -logsigmoid(margin) * is_pair
    chosen = torch.zeros_like(scores, dtype=lengths.dtype).scatter(1, best, 1.0).scatter(1, worst, 1.0)
    num_tokens = (chosen * lengths.view(-1, size)).sum(dim=1)
    token_loss = batch.per_token(((loss / num_tokens)[:, None] * chosen).flatten())
    margin = margin.detach()
    sums = (is_pair.sum(), (margin * is_pair).sum(), ((margin > 0) * is_pair).sum())
    return token_loss, dict(zip(PREFERENCE_METRICS, sums, strict=True))
