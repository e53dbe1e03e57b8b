"""The iteration border as a trainer rank sees it: publish (pa_npu.publish), save what is due, compare a probe (I5).

    report of the iteration before ─> publish: engines hold the version ─> checkpoint ─> probe, where one came with it

With publish.divergence a version may be left out (pa_npu.trainer.publish_when): then engines go on with theirs. What comes
after the publish no engine waits for: they generate already.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pa_npu.algorithm.update_sums import ProbeResult
from pa_npu.checkpoints.ahead import AheadIteration
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import (
    BORDER,
    DATA_POSITION,
    REPORT,
    RUN_END,
    BorderReport,
    CheckpointReport,
    IterationReport,
    ProbeReport,
)
from pa_npu.publish.messages import Probe
from pa_npu.publish.trainer_side import TrainerPublish
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.open_buffer import open_buffer
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.agreement import Agreement
from pa_npu.trainer.ahead import RolloutsAhead
from pa_npu.trainer.learner import Learner
from pa_npu.trainer.publish_when import PublishWhen


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
        self._ahead = RolloutsAhead(config, channel, open_buffer(config, channel))
        self._when = PublishWhen(config, learner)
        self._swaps_to: int | None = None  # the version that engines have received and do not hold yet
        self._publish = TrainerPublish(
            channel, learner.publish, learner.backend.digest, rank, stage, config.border_timeout_s, timeline
        )

    def cross(
        self, version: int, report: IterationReport | None, save: Callable[[int], CheckpointReport]
    ) -> ProbeReport:
        """Hand over the report of the iteration before, publish `version`, save it where that is due, compare the probe.

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
        if self._rank == 0:
            crossed = BorderReport(published.wait_s, published.send_s, checkpoint, decided)
            BORDER.put(self._channel, crossed, version=version)
        if published.probe is None:
            return ProbeReport()
        with self._timeline.span("probe", version=version):
            replica = self._learner.backend.place.replica
            microbatches = probe_microbatches(published.probe, version, self._config, replica)
            # engines beyond these come and go; what decides about publishes must not depend on them
            first = replace(published.probe, responses=published.probe.responses[: self._config.probe_responses])
            self._when.published(version, probe_microbatches(first, version, self._config, replica))
            return probe_report(self._agreement.check_requests(version, microbatches))

    def ends_run(self, version: int) -> tuple[bool, float]:
        """Whether `version` is the run's last, and how long the coordinator had to be waited for, in seconds: an evaluation may say
        so before schedule.iterations."""
        if not self._config.may_end_at(version):
            return version == self._config.schedule.iterations, 0.0
        start_s = time.perf_counter()
        # a border of training too: an engine that comes late to the evaluation gets its weights meanwhile
        with self._timeline.span("wait for evaluation", version=version):
            end = RUN_END.wait(self._channel, self._config.wait_timeout_s, version=version)
        return end.why is not None, time.perf_counter() - start_s

    def before_step(self) -> None:
        """The weights are about to change: engines that swap later have swapped by then, so that late ones get what they have."""
        if self._swaps_to is not None:
            self._publish.wait_swapped(self._swaps_to)
            self._learner.engines_swapped()
            self._swaps_to = None

    def data_position(self, version: int) -> dict[str, Any]:
        """TrainingStream.state() of the coordinator before iteration `version`: where a resumed run goes on."""
        return DATA_POSITION.wait(self._channel, self._config.wait_timeout_s, iteration=version).state

    def ahead(self, version: int) -> list[AheadIteration]:
        """Returns the iterations that the coordinator has produced before `version` is published, for a checkpoint of it."""
        return self._ahead(version)


def probe_report(result: ProbeResult) -> ProbeReport:
    """result: over all ranks."""
    return ProbeReport(result.difference_max, result.differences.absolute_mean)


def probe_microbatches(probe: Probe, version: int, config: Config, replica: int) -> list[Microbatch]:
    """One microbatch with the probe's prompt and the replica's share of its responses, in the packing that training uses."""
    responses = probe.responses[config.mesh.turns_of(replica, len(probe.responses))]
    group = Group.of_responses(
        iteration=version,
        version=version,
        index=0,
        prompt_id=0,
        prompt_tokens=np.asarray(probe.prompt_tokens, np.int32),
        response_tokens=np.concatenate([np.asarray(r.tokens, np.int32) for r in responses]),
        response_lengths=np.asarray([len(r.tokens) for r in responses], np.int32),
        logprobs=np.concatenate([np.asarray(r.logprobs, np.float32) for r in responses]),
        rewards=np.zeros(len(responses), np.float32),
        advantages=np.zeros(len(responses), np.float32),
        finished=np.zeros(len(responses), np.uint8),
    )
    return build_microbatches(group, len(responses), config.attention.shared_prompt, config.pad_multiple)
