"""The subjects of the model of an iteration: engines, trainers, and groups with given lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineSpeed:
    """A decode step with n sequences takes step_s + sequence_s * n seconds; a group's prompt once prompt_token_s per token.

    Nothing decodes while a prompt is computed. The prompt is computed once for all responses of its group (prefix sharing).
    """

    step_s: float
    sequence_s: float
    prompt_token_s: float = 0.0

    def scaled(self, factor: float) -> EngineSpeed:
        return EngineSpeed(factor * self.step_s, factor * self.sequence_s, factor * self.prompt_token_s)


@dataclass(frozen=True)
class Cluster:
    """Engines by name, and the trainers of one run.

    max_num_seqs: sequences that decode together on an engine; what it has beyond them waits in its own queue.
    order, updates, replicas: schedule.order, schedule.updates_per_iteration and data parallel size.
    step_s: of an optimizer step, at which replicas wait for each other. delivery_s: from a group's last response until trainers
    can take it (rewards, advantages, the way to the buffer).
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

    lengths: of its responses, in tokens. train_s: seconds that a replica takes for it. expected_tokens: what the coordinator
    believes it will put on its engine, prompts and responses. informative: whether it is trained; otherwise (dynamic sampling)
    another takes its place.
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
    """A group that was generated: where, from when to when on one clock, from what and how long. delivered_s: how long until
    trainers could take it. trained: not replaced by another (dynamic sampling). moved: between engines, so that its seconds say
    nothing of one. computed: prompt and lengths as trainers have them, where that is not what was written (group_lengths)."""

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

    def work(self, cost: Callable[[int, Sequence[int]], float]) -> float:
        """Returns what training it costs, where a turn that branches of a session share is computed once."""
        return cost(*(self.computed or (self.prompt_tokens, self.lengths)))


def expected_lengths(longest: float, mean: float, responses: int) -> tuple[float, ...]:
    """Lengths of a group as they are expected: one response as long as its longest, the others alike."""
    if responses == 1:
        return (longest,)
    other = (responses * min(mean, longest) - longest) / (responses - 1)
    return (longest, *[min(longest, max(1.0, other))] * (responses - 1))
