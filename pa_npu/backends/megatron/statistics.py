"""Sums over an update's microbatches, reduced over the ranks that hold them into the numbers of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pa_npu.algorithm.agreement import DifferenceSums, difference_sums
from pa_npu.algorithm.corrections import effective_sample_size
from pa_npu.backends.protocol import ProbeResult, TrainedResponse
from pa_npu.control.messages import UpdateReport
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.samples.group_source import Traffic
from pa_npu.samples.microbatch import Microbatch


@dataclass
class IterationTotals:
    """What one replica has consumed for one update; equal on all its ranks, because every stage reads every microbatch."""

    tokens_response: int = 0
    tokens_computed: int = 0
    num_responses: int = 0
    num_microbatches: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def add(self, microbatch: Microbatch) -> None:
        self.tokens_response += microbatch.num_response_tokens
        self.tokens_computed += microbatch.num_computed_tokens
        self.num_responses += microbatch.num_samples
        self.num_microbatches += 1

    def over_replicas(self, device: torch.device) -> IterationTotals:
        """The totals of all replicas (collective over the data-parallel group)."""
        own = [self.tokens_response, self.tokens_computed, self.num_responses, self.num_microbatches]
        values = torch.tensor([*own, *astuple(self.traffic)], dtype=torch.int64, device=device)
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
        response, computed, responses, microbatches, *traffic = (int(v) for v in values.tolist())
        return IterationTotals(response, computed, responses, microbatches, Traffic(*traffic))


def trained_responses(microbatch: Microbatch) -> list[TrainedResponse]:
    """What one pass over the microbatch trains."""
    return [
        TrainedResponse(group, number, tokens)
        for (group, number), tokens in zip(microbatch.sources, microbatch.response_lengths, strict=True)
    ]


# The fields of DifferenceSums but for the last, which is a maximum.
_SUMS = 9


@dataclass(frozen=True)
class Differences:
    """From the engines' log-probs, on the device. sums: [9], the fields of DifferenceSums that add up. largest: [2], of |trainer -
    engine|, and DifferenceSums.k_largest."""

    sums: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def of(cls, difference: torch.Tensor, response_index: torch.Tensor, num_responses: int) -> Differences:
        """difference: trainer - engine log-prob, [tokens] fp32. response_index: int64 [tokens]."""
        fields = difference_sums(difference, response_index, num_responses)
        return cls(fields[:_SUMS], torch.stack([difference.abs().max().float(), fields[_SUMS]]))

    @classmethod
    def zeros(cls, device: torch.device) -> Differences:
        return cls(torch.zeros(_SUMS, device=device), torch.zeros(2, device=device))

    def plus(self, other: Differences) -> Differences:
        return Differences(self.sums + other.sums, torch.maximum(self.largest, other.largest))

    @staticmethod
    def result(sums: Sequence[float], largest: Sequence[float]) -> ProbeResult:
        return ProbeResult(largest[0], DifferenceSums(*[*sums, largest[1]]))

    def read(self) -> ProbeResult:
        """Waits for the device."""
        return self.result(self.sums.tolist(), self.largest.tolist())


@dataclass(frozen=True)
class Statistics:
    """An update's MetricSums over all ranks. sums: by name. all, first: differences from the engines' log-probs (I5), of all
    microbatches and of every replica's first. age_max: by how many versions the oldest token is behind what it trains."""

    sums: dict[str, float]
    all: ProbeResult
    first: ProbeResult
    age_max: int


@dataclass
class MetricSums:
    """Named sums, and differences from the engines' log-probs, that only the last pipeline stage computes. All on the device."""

    names: tuple[str, ...]
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    all: Differences | None = None
    first: Differences | None = None

    age_max: torch.Tensor | None = None

    def add(self, metrics: dict[str, torch.Tensor], differences: Differences, age_max: torch.Tensor) -> None:
        """One microbatch."""
        for name in self.names:
            value = metrics[name].float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.first = self.first or differences
        self.all = differences if self.all is None else self.all.plus(differences)
        self.age_max = age_max if self.age_max is None else torch.maximum(self.age_max, age_max)

    def total(self, name: str, device: torch.device) -> float:
        """One sum over all ranks (collective over data and pipeline groups), while others still accumulate."""
        value = self.sums.get(name, torch.zeros((), device=device)).clone()
        for group in (parallel_state.get_data_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
            dist.all_reduce(value, group=group)
        return float(value.item())

    def over_ranks(self, device: torch.device) -> Statistics:
        """Sums over replicas and overall maxima, known to every rank afterwards (collective over data and pipeline groups)."""
        zero = torch.zeros((), device=device)
        parts = [part or Differences.zeros(device) for part in (self.all, self.first)]
        vector = torch.cat([torch.stack([self.sums.get(name, zero) for name in self.names]), *(p.sums for p in parts)])
        age_max = zero if self.age_max is None else self.age_max
        largest = torch.cat([*(part.largest for part in parts), age_max[None]])
        # stages other than the last hold zeros, so the sum over the pipeline is a broadcast of the last stage's values
        for group in (parallel_state.get_data_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
            dist.all_reduce(vector, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        values, (*maxima, oldest) = vector.tolist(), largest.tolist()
        named = dict(zip(self.names, values[: len(self.names)], strict=True))
        every, first = (
            Differences.result(values[start : start + _SUMS], maxima[2 * number : 2 * number + 2])
            for number, start in enumerate(range(len(self.names), len(values), _SUMS))
        )
        return Statistics(named, every, first, int(oldest))


@dataclass(frozen=True)
class StepNumbers:
    """What the step itself knows. Seconds and bytes are this rank's."""

    normaliser: float
    grad_norm: float
    learning_rate: float
    wait_s: float
    train_s: float
    step_s: float
    memory_peak: MemoryPeak


def update_report(
    statistics: Statistics, totals: IterationTotals, step: StepNumbers, device: torch.device
) -> UpdateReport:
    """The report, equal on all ranks. statistics, totals: over all ranks. Collective over the world, for seconds and bytes."""
    sums, tokens = statistics.sums, max(1, totals.tokens_response)
    wait_s, train_s, step_s = _mean_over_world([step.wait_s, step.train_s, step.step_s], device)
    peak = step.memory_peak
    host_bytes, device_bytes = _largest_of_world([peak.host_bytes, peak.device_bytes or 0], device)
    return UpdateReport(
        loss=sums["loss"] / step.normaliser,
        policy_loss=sums["policy_loss"] / step.normaliser,
        kl=sums.get("kl", 0.0) / tokens,
        entropy=sums["entropy"] / tokens,
        clip_ratio=sums["clipped"] / tokens,
        logprob_diff_mean=statistics.all.differences.absolute_mean,
        logprob_diff_max=statistics.all.difference_max,
        logprob_k3=statistics.all.differences.k3_mean,
        importance_weight_mean=_per_token(sums, "importance_weight", tokens),
        importance_truncated_ratio=_per_token(sums, "importance_cut", tokens),
        effective_sample_size=effective_sample_size(sums["weight"], sums["weight_squared"], tokens)
        if "weight" in sums
        else None,
        age_mean=_per_token(sums, "age", tokens),
        age_max=statistics.age_max if "age" in sums else None,
        grad_norm=step.grad_norm,
        learning_rate=step.learning_rate,
        preference_pairs=round(sums["preference_pairs"]) if "preference_pairs" in sums else None,
        preference_margin=_per_pair(sums, "preference_margin"),
        preference_accuracy=_per_pair(sums, "preference_right"),
        tokens_response=totals.tokens_response,
        tokens_computed=totals.tokens_computed,
        microbatches=totals.num_microbatches,
        rollout_reads=totals.traffic.reads,
        rollout_buffer_bytes=totals.traffic.buffer_bytes,
        rollout_head_bytes=totals.traffic.head_bytes,
        rollout_collective_bytes=totals.traffic.collective_bytes,
        memory_trainer_host_bytes=host_bytes,
        memory_trainer_device_bytes=None if peak.device_bytes is None else device_bytes,
        wait_s=wait_s,
        train_s=train_s,
        step_s=step_s,
    )


def _per_pair(sums: dict[str, float], name: str) -> float | None:
    return sums[name] / max(1.0, sums["preference_pairs"]) if name in sums else None


def _per_token(sums: dict[str, float], name: str, tokens: int) -> float | None:
    return sums[name] / tokens if name in sums else None


def _mean_over_world(values: list[float], device: torch.device) -> list[float]:
    vector = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(vector)
    means: list[float] = (vector / dist.get_world_size()).tolist()
    return means


def _largest_of_world(values: list[int], device: torch.device) -> list[int]:
    vector = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    largest: list[int] = vector.tolist()
    return largest
