"""The normaliser: the one number that an iteration's sum of losses is divided by, and the weights that go with it.

The loss of an iteration is sum_t w_t l_t / N (invariant I3). The weights w depend on one sample
only, and N is known when the iteration ends. So the sum can be accumulated over any cut into
microbatches and replicas, and is divided once, at the step.

N counts the leading component alone:

| aggregation   | w_t            | N                        | source                          |
|---------------|----------------|--------------------------|---------------------------------|
| token-mean    | 1              | response tokens          | DAPO, arXiv 2503.14476, eq. 8   |
| sequence-mean | 1 / len(o_i)   | responses                | GRPO, arXiv 2402.03300, eq. 3   |
| sequence-sum  | 1              | responses                | RLOO, arXiv 2402.14740          |
| dr-grpo       | 1              | responses x max length   | Dr.GRPO, arXiv 2503.20783       |

A token of another component carries its weight, and its loss is divided by the same N. Systems that
divide each component by its own count have to know all counts before the first backward, or keep a
gradient for each component.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"]


@dataclass(frozen=True)
class Counts:
    """Counts of the leading component: its tokens, the samples that have any, and what the
    algorithm makes of these, such as pairs (Algorithm.counted_metric)."""

    tokens: int
    responses: int
    units: float = 0.0


def token_weights(
    response_lengths: Sequence[int], aggregation: Aggregation, device: torch.device
) -> torch.Tensor:
    """Returns w [sum of response_lengths] fp32, in the order of the responses."""
    import torch  # which the launcher need not wait for

    lengths = torch.tensor(response_lengths, dtype=torch.int64)
    if aggregation == "sequence-mean":
        return (1.0 / lengths.float()).repeat_interleave(lengths).to(device)
    return torch.ones(int(lengths.sum()), device=device)


def broken_normalisers(
    normalisers: Sequence[float], expected: float, dispatched: Counts, aggregation: Aggregation
) -> str | None:
    """Says, as a phrase, why the updates' normalisers do not add up to what was dispatched; None
    where they do.
    """
    if sum(normalisers) == expected:
        return None
    return (
        f"which should add up to {expected:g}: dispatched were {dispatched.responses} responses "
        f"with {dispatched.tokens} tokens, and algorithm.aggregation = {aggregation}"
    )


def normaliser(aggregation: Aggregation, counts: Counts, max_response_tokens: int) -> float:
    """Returns N of the table above.

    It is linear in the counts, so that a part of them has its part of N.
    """
    if aggregation == "token-mean":
        return float(counts.tokens)
    if aggregation in ("sequence-mean", "sequence-sum"):
        return float(counts.responses)
    return float(counts.responses * max_response_tokens)
