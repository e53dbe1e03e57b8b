"""The subjects of the model of an iteration: its rules, engines, trainers and groups, and how it is expected to go and went."""

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
    """The choices that the configuration leaves, and the shape of the run. responses: per prompt;
    max_tokens: of a response.
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
            work(config).updates,
        )


@dataclass(frozen=True)
class Cluster:
    """Engines by name, and the trainers of one run.

    max_num_seqs: sequences that decode together on an engine; what it has beyond them waits in its
    own queue.
    order, updates, replicas: schedule.order, schedule.updates_per_iteration and data parallel size.
    step_s: of an optimizer step, at which replicas wait for each other. delivery_s: from a group's
    last response until trainers can take it (rewards, advantages, the way to the buffer).
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
    """A group of which everything is known.

    lengths: of its responses, in tokens. train_s: seconds that a replica takes for it.
    expected_tokens: what the coordinator believes it will put on its engine, prompts and responses.
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
    """A group that was generated: where, from when to when on one clock, from what and how long.
    delivered_s: how long until trainers could take it. trained: not replaced by another (dynamic
    sampling). moved: between engines, so that its seconds say nothing of one. computed: prompt and
    lengths as trainers have them, where that is not what was written (group_lengths)."""

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

    def work(self, cost: GroupCost) -> float:
        """Returns what training it costs, where a turn that branches of a session share is computed
        once.
        """
        return cost(*(self.computed or (self.prompt_tokens, self.lengths)))


def expected_lengths(longest: float, mean: float, responses: int) -> tuple[float, ...]:
    """Lengths of a group as they are expected: one response as long as its longest, the others
    alike.
    """
    if responses == 1:
        return (longest,)
    other = (responses * min(mean, longest) - longest) / (responses - 1)
    return (longest, *[min(longest, max(1.0, other))] * (responses - 1))


@dataclass(frozen=True)
class GroupOutlook:
    """A prompt to come: its tokens, and the tokens expected of a group's longest response and of
    its mean one.
    """

    prompt_tokens: int
    longest: float
    mean: float


@dataclass(frozen=True)
class IterationOutlook:
    """groups by index; engines: names of those that serve; streams: trainers get groups as they
    complete. windows: of engines that have one of their own, in sequences; speeds: of engines that
    are
    expected to differ from an engine of 1 (rollout.engine_settings)."""

    groups: Sequence[GroupOutlook]
    engines: Sequence[str]
    streams: bool = True
    windows: Mapping[str, int] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IterationTimes:
    """The measured times of an iteration, in seconds.

    iteration_s: from the first dispatch until the next iteration's could come, evaluation left out.
    border_s: of it, from the trainers' being ready to publish to the end of the publish. train_s,
    step_s: means of the trainers' report; training without waiting for groups, and, of it, the
    optimizer's steps.
    """

    iteration_s: float
    border_s: float
    train_s: float
    step_s: float


@dataclass(frozen=True)
class Prediction:
    """schedule: the name of the one that was followed. predicted_s: what IterationTimes.iteration_s
    was thought to become; None where nothing was known yet. error: predicted_s over what was
    measured, less one. learned: numbers of the model as they are now, in seconds: decode_step_s and
    decode_sequence_s (a decode step with n sequences takes one and n times the other),
    prompt_token_s, means over engines; train_group_s of a group of expected lengths; empty where
    nothing was learned."""

    schedule: str
    predicted_s: float | None
    error: float | None
    learned: Mapping[str, float] = field(default_factory=dict)
