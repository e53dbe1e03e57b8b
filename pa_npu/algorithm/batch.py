"""The trained tokens of a microbatch as the losses see them, their weights, and the iteration's normaliser (invariant I3).

The loss of an iteration is sum_t w_t l_t / N. The weights w depend on one response only and N is known when the iteration
ends, so the sum can be accumulated over any cut into microbatches and replicas and divided once, at the step.

| aggregation   | w_t            | N                        | source                          |
|---------------|----------------|--------------------------|---------------------------------|
| token-mean    | 1              | response tokens          | DAPO, arXiv 2503.14476, eq. 8   |
| sequence-mean | 1 / len(o_i)   | responses                | GRPO, arXiv 2402.03300, eq. 3   |
| sequence-sum  | 1              | responses                | RLOO, arXiv 2402.14740          |
| dr-grpo       | 1              | responses x max length   | Dr.GRPO, arXiv 2503.20783       |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"]


@dataclass(frozen=True)
class TokenBatch:
    """Every field is [tokens] fp32 unless stated; tokens are ordered by response."""

    logprobs: torch.Tensor  # of the policy, with gradient
    entropy: torch.Tensor  # of the policy's next-token distribution, in nats
    old_logprobs: torch.Tensor  # of the policy that the ratio is taken against, proximal or sampling, no gradient
    reference_logprobs: torch.Tensor | None  # of the reference, no gradient; None where there is none
    engine_logprobs: torch.Tensor  # what the engine reported when it sampled the token
    advantages: torch.Tensor
    weights: torch.Tensor  # of token_weights
    response_index: torch.Tensor  # int64, which response of the microbatch a token belongs to, from 0
    num_responses: int
    group_size: int  # responses of a prompt; they are consecutive, though a microbatch may hold a part of a group
    ages: torch.Tensor | None = (
        None  # by how many versions a token is older than what it trains; None with max_staleness=0
    )
    columns: Mapping[str, torch.Tensor] = field(
        default_factory=dict
    )  # declared columns by name, [tokens, *shape], their dtype

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


def token_weights(response_lengths: Sequence[int], aggregation: Aggregation, device: torch.device) -> torch.Tensor:
    """Weights [sum of response_lengths] fp32, in the order of the responses."""
    lengths = torch.tensor(response_lengths, dtype=torch.int64)
    if aggregation == "sequence-mean":
        return (1.0 / lengths.float()).repeat_interleave(lengths).to(device)
    return torch.ones(int(lengths.sum()), device=device)


def normaliser(aggregation: Aggregation, num_tokens: int, num_responses: int, max_response_tokens: int) -> float:
    """N of the table above, from the iteration's totals over all replicas."""
    if aggregation == "token-mean":
        return float(num_tokens)
    if aggregation in ("sequence-mean", "sequence-sum"):
        return float(num_responses)
    return float(num_responses * max_response_tokens)
