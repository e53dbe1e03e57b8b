"""Sums over an update's microbatches, reduced over the ranks that hold them into the numbers of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.algorithm.agreement_sums import (
    NUM_SUMS,
    DifferenceSums,
    added,
)
from pa_npu.algorithm.corrections import effective_sample_size

# A sum over a gradient takes one element in so many. A prime, so that they fall into all rows and
# columns: whole columns of the LM head's gradient add up to zero by themselves.
SAMPLED_EVERY = 61


@dataclass(frozen=True)
class Reductions:
    """Sums, or element-wise maxima, of a tensor over trainer ranks; the result is on all of them.
    Collective, in place.

    replica_group: the ranks that hold the same part of the model, one in each replica. stage_group:
    the pipeline stages of a replica. Both None where this rank is alone. gradient_group: ranks in
    which every reduction of gradients ends: with context parallelism the context groups of all
    replicas, with experts of a mixture the whole stage; None where these are the replicas.
    sharing_group: ranks that step the same weights, each a part of them or each all: those of
    replica_group and their context groups; None where these are the replicas.
    """

    replica_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    gradient_group: dist.ProcessGroup | None = None
    sharing_group: dist.ProcessGroup | None = None

    def replicas(self, values: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        return (
            values if self.replica_group is None else _reduce(values, largest, self.replica_group)
        )

    def gradients(self, values: torch.Tensor) -> torch.Tensor:
        return (
            self.replicas(values)
            if self.gradient_group is None
            else _reduce(values, False, self.gradient_group)
        )

    def sharing(self, values: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        if self.sharing_group is None:
            return self.replicas(values, largest=largest)
        return _reduce(values, largest, self.sharing_group)

    def stages(self, values: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        return values if self.stage_group is None else _reduce(values, largest, self.stage_group)

    def ranks(self, values: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        return _reduce(values, largest, None)


def _reduce(values: torch.Tensor, largest: bool, group: dist.ProcessGroup | None) -> torch.Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return values


@dataclass(frozen=True)
class ReducedGradient:
    """Sums that show that every replica's part is in the gradient, bucket by bucket, [buckets] each
    (invariant I7).

    sums, squares: of the elements, and of their squares, that this rank brings to a bucket,
    before any of it is reduced.
    reduced: its share of the sum of the elements afterwards; the shares of all make the whole. NaN
    where a bucket was not reduced. Elements may be a sample, the same on all replicas. In fp64, or
    in fp32 on a device that has none.
    """

    sums: torch.Tensor
    squares: torch.Tensor
    reduced: torch.Tensor


@dataclass
class Totals:
    """Counts of what the objective was given for one update, equal on all ranks of a replica.

    tokens_response: trained tokens, whatever their component; the leading ones and the responses
    that have any are what the normaliser counts, with those that are trained by rule, which are in
    no other count.
    """

    tokens_response: int = 0
    tokens_leading: int = 0
    responses_leading: int = 0
    tokens_computed: int = 0
    num_responses: int = 0
    num_microbatches: int = 0
    groups_by_rule: int = 0
    tokens_by_rule: int = 0
    responses_by_rule: int = 0

    def add_by_rule(self, leading_lengths: Sequence[int]) -> None:
        """Counts a group that is trained by rule: its gradient is 0, and it is not computed."""
        self.groups_by_rule += 1
        self.tokens_by_rule += sum(leading_lengths)
        self.responses_by_rule += sum(length > 0 for length in leading_lengths)

    def add(
        self, response_lengths: Sequence[int], leading_lengths: Sequence[int], tokens_computed: int
    ) -> None:
        """One microbatch. leading_lengths: tokens of each response that the leading component
        trains.
        """
        self.tokens_response += sum(response_lengths)
        self.tokens_leading += sum(leading_lengths)
        self.responses_leading += sum(length > 0 for length in leading_lengths)
        self.tokens_computed += tokens_computed
        self.num_responses += len(response_lengths)
        self.num_microbatches += 1


@dataclass(frozen=True)
class Statistics:
    """An update's MetricSums over all ranks. sums: by name. all, first: differences from the
    engines' log-probs (I5), of all microbatches and of every replica's first. age_max: by how many
    versions the oldest token is behind what it trains.
    factor_error: by how much a gradient that came to a loss was not 1. moved: whether any ratio was
    not 1.
    apart: whether the reference gave any log-prob that is not the policy's."""

    sums: dict[str, float]
    all: DifferenceSums
    first: DifferenceSums
    age_max: int
    factor_error: float
    moved: bool
    apart: bool

    def metrics(self, tokens: int, normaliser: float) -> dict[str, Any]:
        """Returns the fields of UpdateReport that say how the loss went. tokens: of the leading
        component, of all replicas, that were computed.
        """
        sums = self.sums

        def per_token(name: str) -> float | None:
            # no mean where nothing was computed
            return sums[name] / tokens if name in sums and tokens else None

        def per_pair(name: str) -> float | None:
            return sums[name] / max(1.0, sums["preference_pairs"]) if name in sums else None

        has_weights, has_pairs = "weight" in sums, "preference_pairs" in sums
        # rows of data have no policy that wrote them, with which the trained one is compared
        compares_policies = self.all.n > 0
        return {
            "loss": sums["loss"] / normaliser,
            "policy_loss": sums["policy_loss"] / normaliser,
            "demonstration_loss": sums["demonstration_loss"] / normaliser
            if "demonstration_loss" in sums
            else None,
            "observation_loss": sums["observation_loss"] / normaliser
            if "observation_loss" in sums
            else None,
            "kl": per_token("kl") or 0.0 if compares_policies else None,
            "teacher_kl": per_token("teacher_kl"),
            "teacher_divergence": per_token("teacher_divergence"),
            "entropy": per_token("entropy"),
            "clip_ratio": per_token("clipped"),
            "logprob_diff_mean": self.all.absolute_mean if compares_policies else None,
            "logprob_diff_max": self.all.largest if compares_policies else None,
            "logprob_k3": self.all.k3_mean if compares_policies else None,
            "importance_weight_mean": per_token("importance_weight"),
            "importance_truncated_ratio": per_token("importance_cut"),
            "effective_sample_size": effective_sample_size(
                sums["weight"], sums["weight_squared"], tokens
            )
            if has_weights and tokens
            else None,
            "age_mean": per_token("age"),
            "age_max": self.age_max if "age" in sums else None,
            "preference_pairs": round(sums["preference_pairs"]) if has_pairs else None,
            "preference_margin": per_pair("preference_margin"),
            "preference_accuracy": per_pair("preference_right"),
            "preference_chosen_reward": per_pair("preference_chosen"),
            "preference_rejected_reward": per_pair("preference_rejected"),
        }


@dataclass
class MetricSums:
    """Named sums, and differences from the engines' log-probs, that only the last pipeline stage
    computes. All on the device.

    all, first: of all microbatches and of the first that the policy wrote any of, as
    `difference_sums` gives them.
    """

    device: torch.device
    names: tuple[str, ...] = ()
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    all: torch.Tensor | None = None
    first: torch.Tensor | None = None
    age_max: torch.Tensor = field(init=False)
    factor_error: torch.Tensor = field(init=False)
    moved: torch.Tensor = field(init=False)
    apart: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.age_max = self.factor_error = self.moved = self.apart = torch.zeros(
            (), device=self.device
        )

    def add(
        self,
        metrics: dict[str, torch.Tensor],
        differences: torch.Tensor,
        age_max: torch.Tensor,
        *,
        is_written: bool = True,
    ) -> None:
        """One microbatch. is_written: whether the policy wrote any of its targets."""
        for name in self.names:
            value = metrics[name].float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        if self.first is None and is_written:
            self.first = differences
        self.all = differences if self.all is None else added(self.all, differences)
        self.age_max = torch.maximum(self.age_max, age_max)

    def total(self, name: str, reductions: Reductions) -> float:
        """One sum over all ranks (collective over replicas and stages), while others still
        accumulate.
        """
        value = self.sums.get(name, torch.zeros((), device=self.device)).clone()
        return float(reductions.stages(reductions.replicas(value)).item())

    def over_ranks(self, reductions: Reductions) -> Statistics:
        """Sums over replicas and overall maxima, known to every rank afterwards (collective over
        replicas and stages).
        """
        zero = torch.zeros((), device=self.device)
        none = torch.zeros(len(fields(DifferenceSums)), device=self.device)
        parts = [none if part is None else part for part in (self.all, self.first)]
        named = [self.sums.get(name, zero)[None] for name in self.names]
        vector = torch.cat([*named, *(part[:NUM_SUMS] for part in parts)])
        extremes = torch.stack([self.age_max, self.factor_error, self.moved, self.apart])
        largest = torch.cat([extremes, *(part[NUM_SUMS:] for part in parts)])
        # stages other than the last hold zeros, so the sum over the pipeline is a broadcast of the
        # last stage's values
        vector = reductions.stages(reductions.replicas(vector))
        largest = reductions.stages(reductions.replicas(largest, largest=True), largest=True)
        values, (oldest, factor_error, moved, apart, *maxima) = vector.tolist(), largest.tolist()
        sums, half = values[len(self.names) :], len(maxima) // 2
        every = DifferenceSums(*sums[:NUM_SUMS], *maxima[:half])
        first = DifferenceSums(*sums[NUM_SUMS:], *maxima[half:])
        by_name = dict(zip(self.names, values, strict=False))
        return Statistics(
            by_name, every, first, int(oldest), factor_error, bool(moved), bool(apart)
        )
