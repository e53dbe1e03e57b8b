"""The iteration border as a trainer rank sees it: publish (pa_npu.publish), compare the probe (I5), know the data's position."""

from __future__ import annotations

from typing import Any

import numpy as np

from pa_npu.backends.protocol import TrainBackend
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.errors import InvariantViolation
from pa_npu.publish.messages import Probe
from pa_npu.publish.trainer_side import TrainerPublish
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.types import Group
from pa_npu.telemetry.timeline import Timeline


class Border:
    def __init__(
        self, config: Config, backend: TrainBackend, channel: StoreChannel, timeline: Timeline, rank: int
    ) -> None:
        self._config = config
        self._backend = backend
        self._channel = channel
        self._timeline = timeline
        stage = backend.ranks.pipeline_rank if backend.ranks.is_stage_leader else None
        self._publish = TrainerPublish(channel, backend.publish, rank, stage, config.border_timeout_s, timeline)

    def cross(self, version: int, report: dict[str, float] | None) -> dict[str, float]:
        """Publish `version` and hand over the report of the iteration before; returns numbers for the next report."""
        published = self._publish.publish(version, report)
        numbers = {"border_wait_s": published.wait_s}
        if published.probe is None:
            return numbers
        with self._timeline.span("probe", version=version):
            return numbers | self._check_probe(version, probe_microbatches(published.probe, version, self._config))

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


def probe_microbatches(probe: Probe, version: int, config: Config) -> list[Microbatch]:
    """One microbatch with the probe's prompt and one response per engine, in the packing that training uses."""
    responses = probe.responses
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
