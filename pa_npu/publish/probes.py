"""Probes of a publish: which responses show that the engines hold the weights that the trainers have (invariant I5).

A probe is a few responses that engines sample right after a publish, for the trainers to compare
log-probs with. In a strictly on-policy run the first groups of an iteration are the probe: they
ride with the iteration, and only the first and the last version are probed by requests of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.config.sections.operation import PublishConfig, ScheduleConfig
from pa_npu.config.sections.rollout import RolloutConfig

# With fewer a probe could show no more than another model altogether.
MIN_RESPONSES = 16


def decides_publishes(publish: PublishConfig) -> bool:
    """Returns whether the last probe decides which versions are published (publish.divergence)."""
    return publish.divergence is not None


@dataclass(frozen=True)
class ProbePlan:
    """The probes of a run.

    Args:
        num_tokens: of a response; 0 turns probes off.
        num_responses: responses of a probe, at least: one of each engine, and enough to judge and
            decide by, whatever engines there are.
        rides: whether an iteration's first groups are its probe: they are of the version just
            published, and so is what trains them. With router replay they are not, because wrong
            routers of an engine would choose the trainers' experts too.
    """

    num_tokens: int
    num_responses: int
    rides: bool

    @classmethod
    def from_sections(
        cls,
        *,
        publish: PublishConfig,
        rollout: RolloutConfig,
        schedule: ScheduleConfig,
        algorithm: AlgorithmConfig,
    ) -> ProbePlan:
        """Returns the probes that a run's keys ask for."""
        num_responses = MIN_RESPONSES
        if decides_publishes(publish):
            num_responses = rollout.responses_per_prompt
        is_on_policy = schedule.max_staleness == 0
        replays_routers = algorithm.router_replay != "none"
        return cls(
            num_tokens=publish.probe_tokens,
            num_responses=num_responses,
            rides=rollout.engines > 0
            and publish.probe_tokens > 0
            and is_on_policy
            and not replays_routers,
        )
