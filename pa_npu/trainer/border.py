"""The iteration border as a trainer rank sees it: announce, publish, wait for the engines, check the probe.

Protocol with the coordinator, through the store (version v, keys under publish/v):
  1. rank 0 puts `ready` with the report of iteration v - 1; the coordinator checks that nothing is in flight;
  2. engines receive while the stage leaders broadcast (backend.publish);
  3. the coordinator drops the engines' prefix caches, samples the probe, evaluates when due, and puts `done`;
  4. every rank compares the probe's log-probs with its own and stops beyond publish.probe_tolerance (invariant I5).
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from pa_npu.buffer.group import Group
from pa_npu.buffer.microbatch import Microbatch, build_microbatches
from pa_npu.buffer.store import StoreChannel
from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.protocol import TrainBackend

logger = logging.getLogger(__name__)


class Border:
    def __init__(
        self, config: Config, backend: TrainBackend, channel: StoreChannel, timeline: Timeline, rank: int
    ) -> None:
        self._config = config
        self._backend = backend
        self._channel = channel
        self._timeline = timeline
        self._rank = rank

    def cross(self, version: int, report: dict[str, float] | None) -> dict[str, float]:
        """Publish `version` and hand over the report of the iteration before; returns numbers for the next report."""
        if self._rank == 0:
            self._channel.put_json(f"publish/{version}/ready", {"version": version, "report": report})
        with self._timeline.span("publish", version=version):
            seconds = self._backend.publish(version)
        start = time.perf_counter()
        with self._timeline.span("wait for engines", version=version):
            done = self._channel.wait_json(
                f"publish/{version}/done",
                self._config.publish.timeout_s,
                f"the engines to load weight version {version}",
            )
        numbers = {"border_wait_s": time.perf_counter() - start}
        logger.info("published version %d in %.2f s", version, seconds)
        if done.get("probe") is None:
            return numbers
        with self._timeline.span("probe", version=version):
            return numbers | self._check_probe(version, probe_microbatches(done["probe"], version, self._config))

    def data_position(self, version: int) -> dict[str, Any]:
        """PromptStream.state() of the coordinator before iteration `version`: where a resumed run goes on."""
        return self._channel.wait_json(
            f"data/position/{version}",
            self._config.trainer.wait_timeout_s,
            f"the coordinator to say how many prompts were taken before iteration {version}",
        )

    def _check_probe(self, version: int, microbatches: list[Microbatch]) -> dict[str, float]:
        result = self._backend.probe(microbatches)
        tolerance = self._config.publish.probe_tolerance
        if not result.difference_max <= tolerance:
            raise InvariantViolation(
                f"I5: after publishing version {version} engine and trainer log-probs differ by {result.difference_max:.4g}, more "
                f"than publish.probe_tolerance = {tolerance}; the engines hold other weights than the trainers or compute "
                f"differently (check dtype and attention backend of both, then the weight map)"
            )
        return {"probe_diff_max": result.difference_max, "probe_diff_mean": result.difference_mean}


def probe_microbatches(probe: dict[str, Any], version: int, config: Config) -> list[Microbatch]:
    """One microbatch with the probe's prompt and one response per engine, in the packing that training uses."""
    responses = probe["responses"]
    group = Group(
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
