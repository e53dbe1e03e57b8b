"""The messages of coordinator and schedule controller to each other about an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pa_npu.config.schema import Config
from pa_npu.planning import amounts


@dataclass(frozen=True)
class Rules:
    """The choices that the configuration leaves, and the shape of the run. responses: per prompt; max_tokens: of a response."""

    window: Literal["auto"] | int
    dispatch: Literal["auto", "longest-first", "in-order"]
    responses: int
    max_num_seqs: int
    max_tokens: int
    replicas: int
    order: Literal["prompt", "completion"]
    updates: int

    @classmethod
    def of(cls, config: Config) -> Rules:
        rollout, schedule = config.rollout, config.schedule
        return cls(
            rollout.window,
            schedule.dispatch,
            rollout.responses_per_prompt,
            rollout.max_num_seqs,
            rollout.max_response_tokens,
            config.mesh.data,
            schedule.order,
            amounts.work(config).updates,
        )


@dataclass(frozen=True)
class GroupOutlook:
    """A prompt to come: its tokens, and the tokens expected of a group's longest response and of its mean one."""

    prompt_tokens: int
    longest: float
    mean: float


@dataclass(frozen=True)
class IterationOutlook:
    """groups by index; engines: names of those that serve; streams: trainers get groups as they complete.
    windows: of engines that have one of their own, in sequences; speeds: of engines that are
    expected to differ from an engine of 1 (rollout.engine_settings)."""

    groups: Sequence[GroupOutlook]
    engines: Sequence[str]
    streams: bool = True
    windows: Mapping[str, int] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IterationTimes:
    """The measured times of an iteration, in seconds.

    iteration_s: from the first dispatch until the next iteration's could come, evaluation left out. border_s: of it, from the
    trainers' being ready to publish to the end of the publish. train_s, step_s: means of the trainers' report; training without
    waiting for groups, and, of it, the optimizer's steps.
    """

    iteration_s: float
    border_s: float
    train_s: float
    step_s: float


@dataclass(frozen=True)
class Prediction:
    """schedule: the name of the one that was followed. predicted_s: what IterationTimes.iteration_s was thought to become; None
    where nothing was known yet. error: predicted_s over what was measured, less one. learned: numbers of the model as they are
    now, in seconds: decode_step_s and decode_sequence_s (a decode step with n sequences takes one and n times the other),
    prompt_token_s, means over engines; train_group_s of a group of expected lengths; empty where nothing was learned."""

    schedule: str
    predicted_s: float | None
    error: float | None
    learned: Mapping[str, float] = field(default_factory=dict)
