"""TokenBatch: the response tokens of one microbatch as the losses see them, and sums over its responses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenBatch:
    """Every field is [tokens] fp32 unless stated; tokens are ordered by response."""

    logprobs: torch.Tensor  # of the policy, with gradient
    entropy: torch.Tensor  # of the policy's next-token distribution, in nats
    old_logprobs: torch.Tensor  # of the policy that the ratio is taken against, proximal or sampling, no gradient
    reference_logprobs: torch.Tensor | None  # of the reference, no gradient; None when kl_coef is 0
    engine_logprobs: torch.Tensor  # what the engine reported when it sampled the token
    advantages: torch.Tensor
    weights: torch.Tensor  # of aggregation.token_weights
    response_index: torch.Tensor  # int64, which response of the microbatch a token belongs to, from 0
    num_responses: int
    group_size: int  # responses of a prompt; they are consecutive, though a microbatch may hold a part of a group
    ages: torch.Tensor | None = (
        None  # by how many versions a token is older than what it trains; None with max_staleness=0
    )

    def response_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [responses]."""
        sums = torch.zeros(self.num_responses, dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.response_index, values)

    def response_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [responses]."""
        return self.response_sum(values) / self.response_sum(torch.ones_like(values))

    def per_token(self, response_values: torch.Tensor) -> torch.Tensor:
        """[responses] -> [tokens]."""
        return response_values.index_select(0, self.response_index)
