"""Token weights and the iteration's normaliser: how token losses become one number (invariant I3).

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

from collections.abc import Sequence
from typing import Literal

import torch

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"]


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
