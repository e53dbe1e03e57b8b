"""The iteration border on a trainer rank: publish a version, save a checkpoint, compare a probe (I5).

    report of the last iteration ─> publish (publication.py) ─> checkpoint if due ─> probe if any

No engine waits for what comes after the publish: they generate already.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
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
from pa_npu.control.freshness import iterations_ahead
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
    IterationReport,
    ProbeReport,
)
from pa_npu.publish.messages import Probe
from pa_npu.publish.probes import ProbePlan
from pa_npu.samples.attachments import Attachment, Placeholders
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.rollout_buffer import RolloutBuffer, open_buffer
from pa_npu.samples.types import SampleBuilder
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.agreement import Agreement
from pa_npu.trainer.learner import Learner
from pa_npu.trainer.publication import TrainerPublication
from pa_npu.vision.images import PIXELS, from_png


class TrainerBorder:
    """Takes one rank from an iteration to the next."""

    def __init__(
        self,
        *,
        config: Config,
        learner: Learner,
        publication: TrainerPublication,
        channel: StoreChannel,
        timeline: Timeline,
        agreement: Agreement,
        probes: ProbePlan,
    ) -> None:
        self._config = config
        self._learner = learner
        self._publication = publication
        self._channel = channel
        self._timeline = timeline
        self._rank = learner.backend.place.rank
        self._agreement = agreement
        self._probes = probes
        self._buffer = open_buffer(config, channel)

    def cross(
        self, version: int, report: IterationReport | None, save: Callable[[int], CheckpointReport]
    ) -> ProbeReport:
        """Hands over the report of the last iteration, publishes `version`, saves it if that is
        due, and compares the probe.

        report: None before the first iteration. save: saves a version if that is due.

        Raises InvariantViolation.
        """
        if self._rank == 0 and report is not None:
            REPORT.put(self._channel, report, iteration=report.iteration)
        published = self._publication.publish(version)
        checkpoint = save(version) if report is not None else CheckpointReport()
        backend = self._learner.backend
        weights = joint_digest(published.policy, backend.place, backend.reductions, backend.device)
        if self._rank == 0:
            crossed = BorderReport(
                border_wait_s=published.wait_s,
                border_send_s=published.send_s,
                checkpoint=checkpoint,
                divergence=published.divergence,
                weights=weights,
            )
            BORDER.put(self._channel, crossed, version=version)
        if published.probe is None:
            return ProbeReport()
        with self._timeline.span("probe", version=version):
            return self._compare(version, published.probe)

    def _compare(self, version: int, probe: Probe) -> ProbeReport:
        """Compares the log-probs of the probe with the trainers'."""
        replica = self._learner.backend.place.replica
        microbatches = probe_microbatches(probe, version, self._config, replica)
        # engines beyond probes.num_responses come and go; what decides about publishes must not depend on them
        first = replace(probe, responses=probe.responses[: self._probes.num_responses])
        self._publication.probed(version, probe_microbatches(first, version, self._config, replica))
        differences = self._agreement.check_requests(version, microbatches)
        return ProbeReport(differences.largest, differences.absolute_mean)

    def before_step(self) -> None:
        """Waits for whatever still reads the weights that the step will change: engines that have
        not swapped yet (delayed publication), late deliveries.
        """
        self._publication.before_step()

    def ends(self, version: int) -> bool:
        """Returns whether the run ends with `version`, earlier than configured, because the
        launcher asks for it; the same on all ranks.

        Collective; call it when `version` is published. If groups are carried over the version, the
        run ends only once they can be saved.
        """
        asked = False
        if self._rank == 0:
            asked = EARLY_END.exists(self._channel)
            if asked and self._config.schedule.trained_groups is None:
                asked = CARRIED.exists(self._channel, version=version)
        answer = torch.tensor([int(asked)])
        dist.broadcast(answer, src=0)
        return bool(answer.item())

    def data_position(self, version: int) -> dict[str, Any]:
        """Returns the coordinator's TrainingStream.state() before iteration `version`: the place
        where a resumed run continues.
        """
        return DATA_POSITION.wait(
            self._channel, self._config.deadlines.wait_timeout_s, iteration=version
        ).state

    def ahead(self, version: int) -> list[AheadIteration]:
        """Returns the iterations that the coordinator has produced before `version` is published,
        for a checkpoint of it.
        """
        return rollouts_ahead(self._config, self._channel, self._buffer, version)


def joint_digest(
    own_digest: str, place: Place, reductions: Reductions, device: torch.device
) -> str:
    """Returns one digest of all ranks' weights, equal on all ranks. Collective.

    own_digest: this rank's, empty if another rank has the same weights.

    Each rank brings eight numbers of 32 bits that follow from its place and its digest. Their sums
    cannot overflow, and do not depend on the order in which they are added.
    """
    numbers = torch.zeros(8, dtype=torch.int64)
    if own_digest:
        where = f"{place.stage} {place.tensor} {place.replica} {own_digest}"
        if place.coordinate("context"):
            where = f"context {place.coordinate('context')} {where}"
        mixed = hashlib.blake2b(where.encode(), digest_size=32).digest()
        numbers = torch.from_numpy(np.frombuffer(mixed, "<u4").astype(np.int64))
    sums = reductions.ranks(numbers.to(device)).cpu().numpy().astype("<i8")
    return hashlib.blake2b(sums.tobytes(), digest_size=16).hexdigest()


def probe_microbatches(
    probe: Probe, version: int, config: Config, replica: int
) -> list[Microbatch]:
    """Returns a microbatch of the probe's prompt and the replica's share of its responses, in the
    packing that training uses.
    """
    responses = probe.responses[config.mesh.turns_of(replica, len(probe.responses))]
    samples = []
    images = []
    for image in probe.images:
        pixels = Attachment(PIXELS, from_png(base64.b64decode(image.png)))
        images.append(Placeholders(image.start, image.length, (pixels,)))
    prompt = np.asarray(probe.prompt_tokens, np.int32)
    for response in responses:
        sample = SampleBuilder(prompt, placeholders=images)
        sample.write(
            np.asarray(response.tokens, np.int32),
            np.asarray(response.logprobs, np.float32),
            version,
        )
        samples.append(sample.finish(False, ""))
    zeros = np.zeros(len(samples), np.float32)
    group = Group.from_samples(
        samples, zeros, zeros, run_seed=0, iteration=version, index=0, prompt_id=0
    )
    return build_microbatches(
        group, len(responses), config.attention.shared_prompt, config.trainer.pad_multiple
    )


def rollouts_ahead(
    config: Config, channel: StoreChannel, buffer: RolloutBuffer, version: int
) -> list[AheadIteration]:
    """Returns the iterations that were produced by versions before `version` and are trained from
    it on, for a checkpoint of `version`. One rank calls it, once for each version.

    With schedule.max_staleness = k these are iterations v to v + k - 1 at the border before
    iteration v, or fewer if producing runs fewer iterations ahead (freshness.iterations_ahead). All
    of them are complete by then, or will be before the next publish, which waits for them too. With
    schedule.tokens_per_update there are also groups that were carried to a later update: those that
    no update before this version has trained.

    Raises DeadlineExceeded.
    """
    limit_s = config.deadlines.wait_timeout_s
    produced_ahead = []
    ahead = iterations_ahead(config.schedule, config.publish)
    for iteration in range(version, min(version + ahead, config.schedule.iterations)):
        produced = PRODUCED_AHEAD.wait(channel, limit_s, iteration=iteration)
        data = DATA_POSITION.wait(channel, limit_s, iteration=iteration + 1).state
        numbers = range(len(DISPATCHED.wait(channel, limit_s, iteration=iteration).groups))
        groups = [buffer.read_bytes(iteration, *config.mesh.slot_of(number)) for number in numbers]
        produced_ahead.append(
            AheadIteration(iteration, produced.numbers, produced.samples, data, groups)
        )
    if config.schedule.trained_groups is None and version < config.schedule.iterations:
        carried = CARRIED.wait(channel, limit_s, version=version)
        written = buffer.written(version)
        groups = []
        for index in range(len(carried.groups)):
            groups.append(written.read_bytes(carried.iteration, 0, index))
            written.done(carried.iteration, 0, index)
        produced_ahead.append(
            AheadIteration(carried.iteration, {CARRIED_KEY: asdict(carried)}, [], {}, groups)
        )
    return produced_ahead
