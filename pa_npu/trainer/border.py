"""The iteration border as a trainer rank sees it: announce, publish, wait for the engines, check the probe.

Protocol with the coordinator, through the store (version v, keys under publish/v; n counts the attempts from 0):
  1. rank 0 puts the report of iteration v - 1 and `ready`; the coordinator checks that nothing is in flight;
  2. the coordinator puts `n/members`: the epoch of the groups, and how many engine workers are in them;
  3. engines receive while the stage leaders broadcast (backend.publish); a leader that loses one puts `n/broken`;
  4. the coordinator drops the engines' prefix caches, samples the probe, and puts `n/verdict`: done, or once more from 2 with the
     engines that are left;
  5. every rank compares the probe's log-probs with its own (invariant I5, agreement.py).
"""

from __future__ import annotations

import logging
import time
from itertools import count
from typing import Any

import numpy as np

from pa_npu.backends.protocol import Members, TrainBackend
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import BORDER, DATA_POSITION, REPORT, BorderReport, IterationReport, ProbeReport
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.transport import WeightSyncError
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.types import Group
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.agreement import Agreement

logger = logging.getLogger(__name__)


class Border:
    def __init__(
        self,
        config: Config,
        backend: TrainBackend,
        channel: StoreChannel,
        timeline: Timeline,
        rank: int,
        agreement: Agreement,
    ) -> None:
        self._config = config
        self._backend = backend
        self._channel = channel
        self._timeline = timeline
        self._rank = rank
        self._agreement = agreement

    def cross(self, version: int, report: IterationReport | None) -> ProbeReport:
        """Publish `version`, hand over the report of the iteration before, and compare the probe. Raises InvariantViolation."""
        if self._rank == 0:
            if report is not None:
                REPORT.put(self._channel, report, iteration=report.iteration)
            self._channel.put_json(f"publish/{version}/ready", {"version": version})
        start, publish_s = time.perf_counter(), 0.0
        for attempt in count():
            key = f"publish/{version}/{attempt}"
            members = Members(**self._wait(f"{key}/members", f"engines that can load weight version {version}"))
            with self._timeline.span("publish", version=version):
                publish_s += self._publish(version, members, f"{key}/broken")
            verdict = self._wait(f"{key}/verdict", f"the engines to load weight version {version}")
            if verdict["done"]:
                break
            logger.warning("weight version %d is published again: %s", version, verdict["reason"])
        if self._rank == 0:
            BORDER.put(self._channel, BorderReport(time.perf_counter() - start - publish_s), version=version)
        logger.info("published version %d in %.2f s", version, publish_s)
        if verdict.get("probe") is None:
            return ProbeReport()
        with self._timeline.span("probe", version=version):
            return self._check_probe(version, probe_microbatches(verdict["probe"], version, self._config))

    def _publish(self, version: int, members: Members, broken_key: str) -> float:
        """This rank's seconds of an attempt; that it failed on a leader is for the coordinator to judge."""
        start = time.perf_counter()
        try:
            self._backend.publish(version, members)
        except (WeightSyncError, DeadlineExceeded) as error:
            logger.warning("%s", error)
            self._channel.put_json(broken_key, str(error))
        return time.perf_counter() - start

    def _wait(self, key: str, what: str) -> dict[str, Any]:
        with self._timeline.span("wait for engines"):
            value: dict[str, Any] = self._channel.wait_json(key, self._config.border_timeout_s, what)
        return value

    def data_position(self, version: int) -> dict[str, Any]:
        """PromptStream.state() of the coordinator before iteration `version`: where a resumed run goes on."""
        return DATA_POSITION.wait(self._channel, self._config.trainer.wait_timeout_s, iteration=version).state

    def _check_probe(self, version: int, microbatches: list[Microbatch]) -> ProbeReport:
        result = self._backend.probe(microbatches)
        self._agreement.check_probe(version, result)
        return ProbeReport(result.difference_max, result.differences.absolute_mean)


def probe_microbatches(probe: dict[str, Any], version: int, config: Config) -> list[Microbatch]:
    """One microbatch with the probe's prompt and one response per engine, in the packing that training uses."""
    responses = probe["responses"]
    group = Group.of_responses(
        iteration=version,
        version=version,
        index=0,
        prompt_id=0,
        prompt_tokens=np.asarray(probe["prompt_tokens"], np.int32),
        response_tokens=np.concatenate([np.asarray(r["tokens"], np.int32) for r in responses]),
        response_lengths=np.asarray([len(r["tokens"]) for r in responses], np.int32),
        logprobs=np.concatenate([np.asarray(r["logprobs"], np.float32) for r in responses]),
        rewards=np.zeros(len(responses), np.float32),
        advantages=np.zeros(len(responses), np.float32),
        finished=np.zeros(len(responses), np.uint8),
    )
    return build_microbatches(group, len(responses), config.attention.shared_prompt, config.pad_multiple)
