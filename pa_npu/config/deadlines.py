"""Deadlines: how long the processes of a run wait for each other, each after what it stands behind.

a request < a group, with its rewards < what trainers wait for < a collective < the device's own limit
"""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.config.sections.inputs import RunConfig
from pa_npu.config.sections.learning import TrainerConfig
from pa_npu.config.sections.operation import PublishConfig, ScheduleConfig
from pa_npu.config.sections.reward import (
    COMPARED_CPU_S,
    JUDGE_ATTEMPTS,
    LONGEST_JUDGE_PAUSE_S,
    MAX_COMPARISONS,
    MOST_TESTS,
    RESPONSE_CPU_S,
    STARVED_FACTOR,
    RewardConfig,
)
from pa_npu.config.sections.rollout import (
    SLOWEST_TOKEN_S,
    AgentConfig,
    EnvironmentConfig,
    RolloutConfig,
)

WAIT_TIMEOUT_S = 1800.0
TURN_TIMEOUT_S = 10.0
SESSION_TIMEOUT_S = 600.0
# How much later a backend's own timeout comes than the wait that it stands behind.
COLLECTIVE_MARGIN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """The deadlines that follow from these sections, in seconds."""

    run: RunConfig
    rollout: RolloutConfig
    environment: EnvironmentConfig
    agent: AgentConfig
    reward: RewardConfig
    trainer: TrainerConfig
    schedule: ScheduleConfig
    publish: PublishConfig
    has_scored_teachers: bool = False

    @property
    def request_limit_s(self) -> float:
        """The longest that a request is waited for on an engine that works."""
        return self.rollout.request_timeout_s + SLOWEST_TOKEN_S * self.rollout.max_response_tokens

    @property
    def reward_limit_s(self) -> float:
        """The longest that the rewards of a group may take, from when no earlier group is waited
        for.

        Functions that compute are called one after another: a user's ends at STARVED_FACTOR times
        its time, and `math` and `format` have processor time for each response. Judge and programs
        wait beside them. Of requests that take t each, c at once, each response needs up to k one
        after another. A turn is free after t at most, so a group that has no more than c of them at
        once takes 2 k t, and one that has more also what it needs of all turns (Graham 1966, list
        scheduling).
        """
        reward, responses = self.reward, self.rollout.responses_per_prompt
        names = [function.name for function in reward.functions]
        computing_s = 0.0
        for name in names:
            if ":" in name:
                computing_s += STARVED_FACTOR * reward.timeout_s
            elif name == "math":
                computing_s += responses * (RESPONSE_CPU_S + MAX_COMPARISONS * COMPARED_CPU_S)
            elif name == "format":
                computing_s += responses * RESPONSE_CPU_S
        limits = [computing_s]
        if "judge" in names:
            pauses_s = LONGEST_JUDGE_PAUSE_S * (JUDGE_ATTEMPTS - 1)
            rounds = _rounds(responses, reward.judge.concurrency)
            limits.append(JUDGE_ATTEMPTS * reward.judge.timeout_s * rounds + pauses_s)
        if "code" in names:
            limits.append(MOST_TESTS * reward.code.timeout_s * _rounds(responses, reward.programs))
        return max(limits)

    @property
    def score_limit_s(self) -> float:
        """The longest that a teacher's engines score a group, beside its rewards: one that is lost
        has been replaced.
        """
        if not self.has_scored_teachers:
            return 0.0
        return self.rollout.request_timeout_s + self.run.startup_timeout_s

    @property
    def group_limit_s(self) -> float:
        """The longest that a group is written: its request, or the sessions of its agents."""
        if not self.environment.has_gateway:
            return self.request_limit_s
        return self.environment_timeout_s * _rounds(
            self.rollout.responses_per_prompt, self.agent.concurrent
        )

    @property
    def environment_timeout_s(self) -> float:
        """environment.timeout_s, resolved: of a turn's own work, or of an agent's session."""
        usual = SESSION_TIMEOUT_S if self.environment.has_gateway else TURN_TIMEOUT_S
        return usual if self.environment.timeout_s is None else self.environment.timeout_s

    @property
    def wait_timeout_s(self) -> float:
        """trainer.wait_timeout_s, resolved."""
        timeout_s = self.trainer.wait_timeout_s
        return (
            max(WAIT_TIMEOUT_S, self.group_limit_s + max(self.reward_limit_s, self.score_limit_s))
            if timeout_s is None
            else timeout_s
        )

    @property
    def engine_wait_s(self) -> float:
        """Deadline of the wait for room on an engine: what is in flight ends by then, and what died
        has been replaced.
        """
        return self.group_limit_s + self.run.startup_timeout_s + self.publish.timeout_s

    @property
    def border_timeout_s(self) -> float:
        """Deadline of an iteration border: a publish that fails, an engine that starts, and a
        publish that succeeds.

        With max_staleness trainers may come to it before the iteration that is produced meanwhile
        is complete.
        """
        produce_s = self.wait_timeout_s if self.schedule.max_staleness else 0.0
        return produce_s + self.run.startup_timeout_s + 2 * self.publish.timeout_s

    @property
    def collective_timeout_s(self) -> float:
        """Deadline of a trainer's collective: later than our own waits, so that the first error
        names what was awaited.

        A stage that waits for rollouts makes its neighbours wait in a collective, and a leader that
        publishes its TP peers.
        """
        return self.wait_timeout_s + COLLECTIVE_MARGIN_S

    @property
    def longest_collective_s(self) -> float:
        """Returns the seconds that any collective may take before a device ends it by itself. They
        are equal on engines and trainers, which share groups.
        """
        return max(self.collective_timeout_s, self.publish.timeout_s + COLLECTIVE_MARGIN_S)


def _rounds(requests: int, at_once: int) -> int:
    """Returns the most that a group waits for, in times of one request: as reward_limit_s says."""
    return 2 + (-(-requests // at_once) if requests > at_once else 0)
