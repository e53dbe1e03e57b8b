"""The iteration border as a trainer rank sees it: publish (pa_npu.publish), save what is due, compare a probe (I5).

    report of the iteration before ─> publish: engines hold the version ─> checkpoint ─> probe, where one came with it

With publish.divergence a version may be left out (PublishWhen): then engines go on with theirs.
What comes after the publish no engine waits for: they generate already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.algorithm.update_sums import Reductions
from pa_npu.checkpoints.ahead import AheadIteration
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import (
    BORDER,
    CARRIED,
    CARRIED_KEY,
    DATA_POSITION,
    DISPATCHED,
    EARLY_END,
    PRODUCED_AHEAD,
    REPORT,
    BorderReport,
    CheckpointReport,
    DivergenceReport,
    IterationReport,
    ProbeReport,
)
from pa_npu.publish.messages import Probe
from pa_npu.publish.trainer_side import TrainerPublish
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.rollout_buffer import RolloutBuffer, open_buffer
from pa_npu.samples.types import SampleBuilder
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.agreement import Agreement
from pa_npu.trainer.learner import Learner


class Border:
    def __init__(
        self,
        config: Config,
        learner: Learner,
        channel: StoreChannel,
        timeline: Timeline,
        rank: int,
        agreement: Agreement,
    ) -> None:
        self._config = config
        self._learner = learner
        self._channel = channel
        self._timeline = timeline
        self._rank = rank
        self._agreement = agreement
        place = learner.backend.place
        stage = place.stage if place.publishes else None
        self._buffer = open_buffer(config, channel)
        self._when = PublishWhen(config, learner)
        # the version that engines have received and do not hold yet
        self._swaps_to: int | None = None
        # replicas that take no part in a publish hold copies of the first one's weights
        publisher = learner.publisher
        self._publish = TrainerPublish(
            channel,
            learner.publish,
            no_digest if publisher is None else learner.backend.digest,
            rank,
            stage,
            config.border_timeout_s,
            timeline,
            contents=None if publisher is None else publisher.contents,
        )

    def cross(
        self, version: int, report: IterationReport | None, save: Callable[[int], CheckpointReport]
    ) -> ProbeReport:
        """Hand over the report of the iteration before, publish `version`, save it where that is
        due, compare the probe.

        Raises InvariantViolation.
        """
        if self._rank == 0 and report is not None:
            REPORT.put(self._channel, report, iteration=report.iteration)
        decided = self._when.decide(version)
        if decided.publish_skipped:
            self._learner.skip_publish(version)
            published = self._publish.skip(version)
        else:
            published = self._publish.publish(version)
        self._swaps_to = version if published.delayed else None
        checkpoint = save(version) if report is not None else CheckpointReport()
        backend = self._learner.backend
        weights = joint_digest(published.policy, backend.place, backend.reductions, backend.device)
        if self._rank == 0:
            crossed = BorderReport(published.wait_s, published.send_s, checkpoint, decided, weights)
            BORDER.put(self._channel, crossed, version=version)
        if published.probe is None:
            return ProbeReport()
        with self._timeline.span("probe", version=version):
            replica = self._learner.backend.place.replica
            microbatches = probe_microbatches(published.probe, version, self._config, replica)
            # engines beyond these come and go; what decides about publishes must not depend on them
            first = replace(
                published.probe, responses=published.probe.responses[: self._config.probe_responses]
            )
            self._when.published(version, probe_microbatches(first, version, self._config, replica))
            found = self._agreement.check_requests(version, microbatches)
            return ProbeReport(found.largest, found.absolute_mean)

    def ends(self, version: int) -> bool:
        """Whether the run ends with `version`, earlier than configured, because the launcher asks
        for it; the same on all ranks.

        Collective; call it when `version` is published. Groups that are carried over the version
        must be there for a checkpoint.
        """
        asked = False
        if self._rank == 0:
            asked = EARLY_END.exists(self._channel)
            if asked and self._config.trained_groups is None:
                asked = CARRIED.exists(self._channel, version=version)
        answer = torch.tensor([int(asked)])
        dist.broadcast(answer, src=0)
        return bool(answer.item())

    def before_step(self) -> None:
        """The weights are about to change: engines that swap later have swapped by then, so that
        late ones get what they have.
        """
        if self._swaps_to is not None:
            self._publish.wait_swapped(self._swaps_to)
            self._learner.engines_swapped()
            self._swaps_to = None

    def data_position(self, version: int) -> dict[str, Any]:
        """TrainingStream.state() of the coordinator before iteration `version`: where a resumed run
        goes on.
        """
        return DATA_POSITION.wait(
            self._channel, self._config.wait_timeout_s, iteration=version
        ).state

    def ahead(self, version: int) -> list[AheadIteration]:
        """Returns the iterations that the coordinator has produced before `version` is published,
        for a checkpoint of it.
        """
        return rollouts_ahead(self._config, self._channel, self._buffer, version)


def no_digest() -> str:
    """The digest of a rank whose weights another rank has too."""
    return ""


def joint_digest(own: str, place: Place, reductions: Reductions, device: torch.device) -> str:
    """Returns one digest of all ranks' weights, equal on all of them. own: this rank's, or empty.
    Collective.

    Each rank brings eight numbers of 32 bits that follow from its place and its digest. Their sums
    cannot overflow, and do not depend on the order in which they are added.
    """
    numbers = torch.zeros(8, dtype=torch.int64)
    if own:
        where = f"{place.stage} {place.tensor} {place.replica} {own}"
        mixed = hashlib.blake2b(where.encode(), digest_size=32).digest()
        numbers = torch.from_numpy(np.frombuffer(mixed, "<u4").astype(np.int64))
    sums = reductions.ranks(numbers.to(device)).cpu().numpy().astype("<i8")
    return hashlib.blake2b(sums.tobytes(), digest_size=16).hexdigest()


def probe_microbatches(
    probe: Probe, version: int, config: Config, replica: int
) -> list[Microbatch]:
    """One microbatch with the probe's prompt and the replica's share of its responses, in the
    packing that training uses.
    """
    responses = probe.responses[config.mesh.turns_of(replica, len(probe.responses))]
    samples = []
    for response in responses:
        sample = SampleBuilder(np.asarray(probe.prompt_tokens, np.int32))
        sample.write(
            np.asarray(response.tokens, np.int32),
            np.asarray(response.logprobs, np.float32),
            version,
        )
        samples.append(sample.finish(False, ""))
    none = np.zeros(len(samples), np.float32)
    group = Group.of_samples(
        samples, none, none, run_seed=0, iteration=version, index=0, prompt_id=0
    )
    return build_microbatches(
        group, len(responses), config.attention.shared_prompt, config.pad_multiple
    )


class PublishWhen:
    """Whether a version is published at all (publish.divergence): engines keep theirs while it is
    near the trainers' policy.

        publish of version e ──> probe: responses that e sampled, and their log-probs
        border of version v  ──> KL(e || v) over the probe, by K3, under the weights that train now
                                 below publish.divergence: engines keep e, the trainers go on

    Published in any case: the first and the last version, one that is evaluated or saved (so that a
    run that continues from it does what the one that was not interrupted does), and one without
    which tokens would be older than schedule.max_staleness. Not published in any other case: one by
    which nothing is generated any more. All ranks decide alike, and from numbers that do not depend
    on time or on which engines serve.

    The idea is that of adaptive actor policy synchronisation: ClusterEnv, arXiv 2507.10990.
    Every public method is called by all ranks in the same order; `decide` is collective.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        self._config = config
        self._learner = learner
        self._freshness = Freshness.from_config(config)
        self._published: int | None = None  # by this process
        self._probe: Sequence[Microbatch] = ()

    def published(self, version: int, probe: Sequence[Microbatch]) -> None:
        """Engines hold `version`, and have sampled `probe` by it."""
        self._published, self._probe = version, probe

    def decide(self, version: int) -> DivergenceReport:
        """Decides whether to publish `version`, which the policy holds now.

        An empty report if every version is published.
        """
        if self._config.publish.divergence is None:
            return DivergenceReport()
        kl = self._learner.probe(list(self._probe)).k3_mean if self._probe else None
        return DivergenceReport(kl, self._skips(version, kl))

    def _skips(self, version: int, kl: float | None) -> bool:
        config, last = self._config, self._config.schedule.iterations
        if (
            self._published is None
            or kl is None
            or version == last
            or config.saves(version)
            or config.evaluates(version)
        ):
            return False
        if version + self._freshness.iterations_ahead >= last:
            return True  # nothing is left to generate
        near = kl < (config.publish.divergence or 0.0)
        return near and self._freshness.may_skip(version, self._published)


def rollouts_ahead(
    config: Config, channel: StoreChannel, buffer: RolloutBuffer, version: int
) -> list[AheadIteration]:
    """Iterations that are produced by versions before `version` and trained from it on, for a
    checkpoint of it.

    One rank asks, once for each version. With schedule.max_staleness = k these are iterations v to
    v + k - 1 at the border before iteration v, or fewer where producing runs fewer iterations ahead
    (Config.iterations_ahead): all of them are complete by then, or will be before the next publish,
    which waits for them too. With schedule.tokens_per_update there are also groups that were
    carried to a later update: those that no update before this version has trained, and no
    iteration that is produced by then. Raises DeadlineExceeded.
    """
    limit_s, found = config.wait_timeout_s, []
    for iteration in range(
        version, min(version + config.iterations_ahead, config.schedule.iterations)
    ):
        produced = PRODUCED_AHEAD.wait(channel, limit_s, iteration=iteration)
        data = DATA_POSITION.wait(channel, limit_s, iteration=iteration + 1).state
        numbers = range(len(DISPATCHED.wait(channel, limit_s, iteration=iteration).groups))
        groups = [buffer.read_bytes(iteration, *config.mesh.slot_of(number)) for number in numbers]
        found.append(AheadIteration(iteration, produced.numbers, produced.samples, data, groups))
    if config.trained_groups is None and version < config.schedule.iterations:
        carried = CARRIED.wait(channel, limit_s, version=version)
        written, groups = buffer.written(version), []
        for index in range(len(carried.groups)):
            groups.append(written.read_bytes(carried.iteration, 0, index))
            written.done(carried.iteration, 0, index)
        found.append(
            AheadIteration(carried.iteration, {CARRIED_KEY: asdict(carried)}, [], {}, groups)
        )
    return found
