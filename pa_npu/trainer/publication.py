"""Publication: a trainer rank's part in bringing versions to the engines; one policy per run.

    policy                         key                   what it does with version v
    BlockingTrainerPublication     publish.mode=blocking sends it at the border; engines hold it then
    DelayedTrainerPublication      publish.mode=delayed, sends it at the border; engines may swap to
                                   rolling               it later, and late engines get the version
                                                         before until then
    SkippingTrainerPublication     publish.divergence    leaves it out while the engines' policy is
                                                         near
    NoTrainerPublication           rollout.engines=0     announces it: there are no engines

A policy is called at these points of an iteration:

    publish         the policy is `version`, before anything is trained from it
    probed          engines have answered a probe of `version`
    before_step     the weights are about to change

Every method is called by all ranks in the same order. The coordinator's part is
pa_npu.coordinator.publication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)
from pa_npu.config.sections.operation import PublishConfig
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import DivergenceReport
from pa_npu.control.milestones import Milestones
from pa_npu.publish.messages import READY, PublishMembers, TrainersReady
from pa_npu.publish.publisher import Publisher, PublishStats
from pa_npu.publish.trainer_side import Published, TrainerPublish
from pa_npu.samples.microbatch import Microbatch
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner


class TrainerPublication(ABC):
    """The points at which a run's publication takes part in a rank's iteration."""

    @abstractmethod
    def publish(self, version: int) -> Published:
        """Brings `version` to the engines. Raises DeadlineExceeded if the coordinator is silent."""

    @abstractmethod
    def probed(self, version: int, probe: Sequence[Microbatch]) -> None:
        """Takes note of what engines sampled by `version` right after they had loaded it."""

    @abstractmethod
    def before_step(self) -> None:
        """Ends what the change of the weights would disturb."""


class NoTrainerPublication(TrainerPublication):
    """Announces every version in a run without engines, and sends nothing."""

    def __init__(self, *, learner: Learner, channel: StoreChannel) -> None:
        self._learner = learner
        self._channel = channel
        place = learner.backend.place
        self._rank = place.rank
        self._digest = learner.backend.digest if place.sends else no_digest

    def publish(self, version: int) -> Published:
        """Announces `version` and returns at once."""
        self._learner.skip_publish(version)
        if self._rank == 0:
            READY.put(self._channel, TrainersReady(version, publishes=False), version=version)
        return Published(None, 0.0, 0.0, policy=self._digest())

    def probed(self, version: int, probe: Sequence[Microbatch]) -> None:
        """Does nothing: nobody samples a probe."""

    def before_step(self) -> None:
        """Does nothing: nobody else uses the weights."""


class BlockingTrainerPublication(TrainerPublication):
    """Sends every version at its border, after which engines hold it."""

    def __init__(
        self,
        *,
        learner: Learner,
        publisher: Publisher | None,
        channel: StoreChannel,
        timeline: Timeline,
        timeout_s: float,
    ) -> None:
        """Makes the policy. publisher: sends this rank's weights, or gives them to the rank that
        does; None on ranks that take no part. timeout_s: of every wait for the coordinator.
        """
        self._learner = learner
        self._publisher = publisher
        place = learner.backend.place
        self._protocol = TrainerPublish(
            channel,
            self._send,
            learner.backend.digest if place.sends else no_digest,
            place.rank,
            place.stage if publisher is not None and publisher.is_leader else None,
            timeout_s,
            timeline,
            contents=None if publisher is None else publisher.contents,
        )

    def publish(self, version: int) -> Published:
        return self._protocol.publish(version)

    def probed(self, version: int, probe: Sequence[Microbatch]) -> None:
        """Does nothing: every version is published, whatever the probe says."""

    def before_step(self) -> None:
        """Does nothing: engines hold the version already."""

    def _send(self, version: int, members: PublishMembers) -> PublishStats | None:
        """Sends `version` to its members; see TrainerPublish."""
        self._learner.publish(version)
        return self._transfer(version, members)

    def _transfer(self, version: int, members: PublishMembers) -> PublishStats | None:
        if self._publisher is None:
            return None
        return self._publisher.publish(version, members)


class DelayedTrainerPublication(BlockingTrainerPublication):
    """Sends every version at its border; engines may receive it while they generate and swap later.

    The coordinator says in each attempt whether they do (PublishMembers.delayed).
    """

    # the version that engines have received and do not hold yet
    _swaps_to: int | None = None

    def publish(self, version: int) -> Published:
        published = super().publish(version)
        self._swaps_to = version if published.delayed else None
        return published

    def before_step(self) -> None:
        """Waits until engines have swapped, so that late ones get what the others have."""
        if self._swaps_to is not None:
            self._protocol.wait_swapped(self._swaps_to)
            self._learner.engines_swapped()
            self._swaps_to = None

    def _send(self, version: int, members: PublishMembers) -> PublishStats | None:
        if not members.delayed:
            return super()._send(version, members)
        self._learner.offer(version)
        return self._transfer(version, members)


class SkippingTrainerPublication(BlockingTrainerPublication):
    """Publishes a version only if the policy has moved on, or if it must be published."""

    def __init__(
        self,
        *,
        learner: Learner,
        publisher: Publisher | None,
        channel: StoreChannel,
        timeline: Timeline,
        timeout_s: float,
        choice: PublishedVersions,
    ) -> None:
        super().__init__(
            learner=learner,
            publisher=publisher,
            channel=channel,
            timeline=timeline,
            timeout_s=timeout_s,
        )
        self._choice = choice

    def publish(self, version: int) -> Published:
        decision = self._choice.decide(version)
        if decision.publish_skipped:
            self._learner.skip_publish(version)
            published = self._protocol.skip(version)
        else:
            published = super().publish(version)
        return replace(published, divergence=decision)

    def probed(self, version: int, probe: Sequence[Microbatch]) -> None:
        self._choice.published(version, probe)


class Probes(Protocol):
    """Compares log-probs of the policy with those that engines gave: a Learner."""

    def probe(self, microbatches: list[Microbatch]) -> DifferenceSums:
        """Returns the differences over all ranks. Collective."""


@dataclass(eq=False, repr=False, kw_only=True)
class PublishedVersions:
    """Chooses the versions that are published (publish.divergence): engines keep their version as
    long as it is near the trainers' policy.

        publish of version e ──> probe: responses that e sampled, and their log-probs
        border of version v  ──> KL(e || v) over the probe, by K3, under the weights that train now
                                 below `limit`: engines keep e, the trainers go on

    Always published are the first and the last version, a version that is evaluated or saved (so
    that a continued run does what an undisturbed one does), and one without which tokens would be
    older than schedule.max_staleness. A version by which nothing is generated anymore is never
    published. All ranks decide alike, from numbers that depend neither on time nor on which engines
    serve.

    The idea is that of adaptive actor policy synchronisation: ClusterEnv, arXiv 2507.10990.
    """

    probes: Probes
    limit: float
    freshness: Freshness
    milestones: Milestones
    _published: int | None = field(default=None, init=False)  # by this process
    _probe: Sequence[Microbatch] = field(default=(), init=False)

    def published(self, version: int, probe: Sequence[Microbatch]) -> None:
        """Takes note that engines hold `version` and have sampled `probe` by it."""
        self._published = version
        self._probe = probe

    def decide(self, version: int) -> DivergenceReport:
        """Decides whether to publish `version`, which the policy holds now. Collective."""
        kl = self.probes.probe(list(self._probe)).k3_mean if self._probe else None
        return DivergenceReport(kl, self._is_skipped(version, kl))

    def _is_skipped(self, version: int, kl: float | None) -> bool:
        if self._published is None or kl is None or version == self.milestones.last:
            return False
        if self.milestones.is_saved(version) or self.milestones.is_evaluated(version):
            return False
        if version + self.freshness.iterations_ahead >= self.milestones.last:
            return True  # nothing is left to generate
        return kl < self.limit and self.freshness.may_skip(version, self._published)


def make_publication(
    publish: PublishConfig,
    *,
    learner: Learner,
    publisher: Publisher | None,
    channel: StoreChannel,
    timeline: Timeline,
    timeout_s: float,
    freshness: Freshness,
    milestones: Milestones,
) -> BlockingTrainerPublication:
    """Makes the policy that the keys of a run with engines ask for; arguments as in the policies."""
    if publish.divergence is not None:
        choice = PublishedVersions(
            probes=learner, limit=publish.divergence, freshness=freshness, milestones=milestones
        )
        return SkippingTrainerPublication(
            learner=learner,
            publisher=publisher,
            channel=channel,
            timeline=timeline,
            timeout_s=timeout_s,
            choice=choice,
        )
    kind = BlockingTrainerPublication if publish.mode == "blocking" else DelayedTrainerPublication
    return kind(
        learner=learner,
        publisher=publisher,
        channel=channel,
        timeline=timeline,
        timeout_s=timeout_s,
    )


def no_digest() -> str:
    """Returns the digest of a rank whose weights another rank has too."""
    return ""
