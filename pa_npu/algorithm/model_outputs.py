"""The outputs of models for a microbatch's targets, with which weights, and the part that losses read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from pa_npu.algorithm.choices import Choices
from pa_npu.algorithm.loss_gradient import HeadGradient
from pa_npu.algorithm.policy_losses import TokenBatch


@dataclass(frozen=True)
class PolicyState:
    """The policy's weights of a version, after a number of updates of the iteration that trains it."""

    version: int
    updates: int = 0


@dataclass(frozen=True)
class FixedWeights:
    """The weights of an HF directory, which no run changes."""

    directory: str


Weights = PolicyState | FixedWeights


@dataclass(frozen=True)
class Logprobs:
    """[tokens] fp32, and the weights that they were computed with.

    weights: "engine" for what an engine reported, None where nobody has named them yet.
    choices: [tokens, k + 1], of a teacher's most likely tokens (choices.py); None where nobody
    wants them.
    """

    values: torch.Tensor
    weights: Weights | Literal["engine"] | None
    choices: torch.Tensor | None = None


@dataclass(frozen=True)
class Outputs:
    """Outputs of the models for a microbatch's N targets.

    Gradients flow through policy.values and policy.choices, and through `entropy` [N] where
    Objective.entropy_gradient asks for it.
    frozen: by name, TrainerModels.computed.
    head: watches the gradient behind policy.values; None where nobody does.
    """

    policy: Logprobs
    entropy: torch.Tensor
    frozen: dict[str, Logprobs]
    head: HeadGradient | None = None


@dataclass(frozen=True, eq=False)
class Targets:
    """The N targets of a microbatch, the trained tokens of its samples, with all that the objective
    reads of them.

    columns: [N, *shape] by name: "logprobs" (the engine's), "advantages", and every declared
    column; "component" where not all are 1, "weight" where not all are 1, and "written", whether
    the policy wrote the target, where it did not write all.
    ages: float32 [N], by how many versions the weights that sampled a target are behind those that
    the iteration trains.
    response_index: int64 [N], the sample's number in this microbatch, from 0.
    response_lengths: trained tokens of each sample, its response. versions: oldest and newest
    weight version of a target; empty where the policy wrote none of them.
    group_indices: dispatch indices of the groups that the samples come from, each once.
    sources: of each sample its group's dispatch index and its number in the group.
    num_computed_tokens: tokens of the microbatch that go through the model, padding left out.
    leading_lengths: tokens of each sample that the leading component trains; None where it trains
    all of them.
    repeats: in how many responses of its group here a target stands, at its place and behind the
    same token; the mean, at least 1.
    """

    columns: dict[str, torch.Tensor]
    ages: torch.Tensor
    response_index: torch.Tensor
    response_lengths: tuple[int, ...]
    iteration: int
    versions: tuple[int, ...]
    group_indices: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]
    num_computed_tokens: int
    repeats: float
    leading_lengths: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def leading(self) -> tuple[int, ...]:
        """Tokens of each sample that the leading component trains."""
        return self.response_lengths if self.leading_lengths is None else self.leading_lengths

    @property
    def engine_logprobs(self) -> torch.Tensor:
        return self.columns["logprobs"]

    @property
    def advantages(self) -> torch.Tensor:
        return self.columns["advantages"]


def token_batch(
    microbatch: Targets,
    outputs: Outputs,
    *,
    old_logprobs: torch.Tensor,
    weights: torch.Tensor,
    group_size: int,
    columns: Mapping[str, torch.Tensor] | None = None,
    choices: Choices | None = None,
) -> TokenBatch:
    """Joins a microbatch's targets and the models' outputs for them into what losses read.

    Args:
        old_logprobs: [N], of the policy that ratios are taken against, without gradient.
        weights: float32 [N].
        group_size: responses of a prompt.
        columns: those of the batch; None: the microbatch's.
        choices: a teacher's most likely tokens; None without a divergence.
    """
    reference = outputs.frozen.get("reference")
    return TokenBatch(
        logprobs=outputs.policy.values,
        entropy=outputs.entropy,
        old_logprobs=old_logprobs,
        reference_logprobs=None if reference is None else reference.values,
        engine_logprobs=microbatch.engine_logprobs,
        advantages=microbatch.advantages,
        weights=weights,
        response_index=microbatch.response_index,
        num_responses=len(microbatch.response_lengths),
        group_size=group_size,
        columns=microbatch.columns if columns is None else columns,
        choices=choices,
    )


def named_weights(weights: Weights | str | None) -> str:
    """Returns which weights these are, for error messages."""
    if isinstance(weights, FixedWeights):
        return f"the model of {weights.directory}"
    if isinstance(weights, PolicyState):
        return f"the policy of version {weights.version} after {weights.updates} updates"
    return "what the engines reported" if weights == "engine" else "weights that nobody has named"
