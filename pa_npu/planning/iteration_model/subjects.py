"""The data of the iteration model: rules, engines, trainers, groups, and an iteration's times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pa_npu.config.schema import Config
from pa_npu.dispatch.assignment import GroupCost
from pa_npu.dispatch.schedule import EngineSpeed
from pa_npu.planning.amounts import work


@dataclass(frozen=True)
class Rules:
    """The choices that the configuration leaves open, and the shape of the run.

    responses: per prompt.
    max_tokens: the limit of a response.
    """

    window: Literal["auto"] | int
    dispatch: Literal["auto", "longest-first", "in-order"]
    responses: int
    max_num_seqs: int
    max_tokens: int
    replicas: int
    order: Literal["prompt", "completion"]
    updates: int

    @classmethod
    def from_config(cls, config: Config) -> Rules:
        rollout = config.rollout
        schedule = config.schedule
        return cls(
            window=rollout.window,
            dispatch=schedule.dispatch,
            responses=rollout.responses_per_prompt,
            max_num_seqs=rollout.max_num_seqs,
            max_tokens=rollout.max_response_tokens,
            replicas=config.mesh.data,
            order=schedule.order,
            updates=work(config).updates,
        )


@dataclass(frozen=True)
class VirtualCluster:
    """The speeds of the engines, by name, and of the trainers of one run.

    max_num_seqs: sequences that decode together on an engine; further ones wait in its queue.
    replicas, order, updates: data parallel size, schedule.order, schedule.updates_per_iteration.
    step_s: duration of an optimizer step, at which replicas wait for each other.
    delivery_s: from a group's last response until trainers can take it (rewards, advantages, the
        way to the buffer).
    """

    engines: Mapping[str, EngineSpeed]
    max_num_seqs: int
    replicas: int = 1
    order: Literal["prompt", "completion"] = "completion"
    updates: int = 1
    step_s: float = 0.0
    delivery_s: float = 0.0


@dataclass(frozen=True)
class VirtualGroup:
    """A group whose lengths are known, or assumed.

    lengths: tokens of each response.
    train_s: seconds that a replica takes for it.
    expected_tokens: prompts and responses that the coordinator expects to put on its engine.
    informative: whether it is trained; otherwise (dynamic sampling) another takes its place.
    """

    index: int
    prompt_tokens: int
    lengths: tuple[float, ...]
    train_s: float
    expected_tokens: float
    informative: bool = True

    @property
    def longest(self) -> float:
        return max(self.lengths)


@dataclass(frozen=True)
class GroupTiming:
    """The time and the engine of a group's generation, and its lengths.

    start_s, end_s: seconds on one clock.
    lengths: tokens of each response.
    delivered_s: seconds from its end until trainers could take it.
    trained: whether it was trained, not replaced by another (dynamic sampling).
    moved: whether it moved between engines, so that its seconds do not show the speed of one.
    computed: prompt and lengths as trainers compute them, where they differ from what was written
        (group_lengths).
    by_rule: whether its gradient is 0 by rule, so that trainers do not compute it.
    """

    index: int
    engine: str
    start_s: float
    end_s: float
    prompt_tokens: int
    lengths: tuple[int, ...]
    delivered_s: float = 0.0
    trained: bool = True
    moved: bool = False
    computed: tuple[int, tuple[int, ...]] | None = None
    by_rule: bool = False

    def work(self, cost: GroupCost) -> float:
        """Returns what training it costs: nothing by rule, and a turn that branches of a session
        share is computed once.
        """
        if self.by_rule:
            return 0.0
        return cost(*(self.computed or (self.prompt_tokens, self.lengths)))


def expected_lengths(longest: float, mean: float, responses: int) -> tuple[float, ...]:
    """Returns lengths of a group with this longest response and mean: all other responses alike."""
    if responses == 1:
        return (longest,)
    shorter = (responses * min(mean, longest) - longest) / (responses - 1)
    shorter = min(longest, max(1.0, shorter))
    return (longest, *[shorter] * (responses - 1))


@dataclass(frozen=True)
class GroupOutlook:
    """A prompt to come: its tokens, and the expected tokens of the longest and of the mean response."""

    prompt_tokens: int
    longest: float
    mean: float


@dataclass(frozen=True)
class IterationOutlook:
    """An iteration to come: its groups by index, and the names of the engines that serve.

    streams: whether trainers get groups as they complete.
    windows: sequences in flight, for the engines whose settings fix them (rollout.engine_settings).
    speeds: expected speeds, for the engines that are expected to differ from 1 (same key).
    """

    groups: Sequence[GroupOutlook]
    engines: Sequence[str]
    streams: bool = True
    windows: Mapping[str, int] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IterationTimes:
    """The measured times of an iteration, in seconds.

    iteration_s: from its first dispatch until the next iteration could dispatch, without evaluation.
    border_s: the part of it from the moment trainers are ready to publish to the end of the publish.
    train_s: mean over trainers of training, without waiting for groups.
    step_s: the part of it that the optimizer's steps take.
    """

    iteration_s: float
    border_s: float
    train_s: float
    step_s: float


@dataclass(frozen=True)
class Prediction:
    """A prediction of an iteration that has ended, and its error.

    schedule: name of the schedule that was followed.
    predicted_s: the predicted IterationTimes.iteration_s; None where nothing was known yet.
    error: predicted_s over the measured seconds, minus 1.
    learned: numbers of the model after the iteration, in seconds; empty where nothing was learned.
        decode_step_s and decode_sequence_s (a decode step with n sequences takes the first plus n
        times the second) and prompt_token_s are means over engines; train_group_s is what a group
        of expected lengths takes.
    """

    schedule: str
    predicted_s: float | None
    error: float | None
    learned: Mapping[str, float] = field(default_factory=dict)
