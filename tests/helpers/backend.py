"""A Megatron rank in the test's own process, and microbatches for it without a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.replica_feed import Traffic
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner
from tests.helpers.megatron import PLATFORM, TriModel

# these import megatron, which the helper above has prepared
from pa_npu.backends.megatron.backend import MegatronBackend  # isort: skip
from pa_npu.backends.megatron.factory import load_stage  # isort: skip

NONE = Traffic()


class Source(Iterator[Microbatch]):
    """A MicrobatchSource of what is already there."""

    is_last = False  # of one replica nobody asks

    advantages: Mapping[int, Sequence[np.ndarray]] = {}
    by_rule = ()

    def __init__(
        self, microbatches: Iterable[Microbatch], waited_s: float = 0.0, each: Traffic = NONE
    ) -> None:
        """each: how every microbatch came."""
        self._microbatches = iter(microbatches)
        self.waited_s = waited_s
        self.traffic = Traffic()
        self._each = each

    def settle(self) -> int:
        raise AssertionError("without pipeline stages nobody needs to know in advance")

    def __next__(self) -> Microbatch:
        microbatch = next(self._microbatches)
        self.traffic = self.traffic.plus(self._each)
        return microbatch


def make_learner(config: Config) -> tuple[Learner, TriModel]:
    """With the weights of config.model.path, inside `single_process`."""
    spec = ModelSpec.read(config.model.path)
    stage = load_stage(config, spec, PLATFORM)
    return learner_of(stage, config, spec), stage


def learner_of(
    stage: TriModel, config: Config, spec: ModelSpec, platform: Platform = PLATFORM
) -> Learner:
    """A rank's, on this stage."""
    timeline = Timeline(None, "")
    backend = MegatronBackend(stage, config, spec, platform, platform.device(0), timeline)
    return Learner(config, backend, platform, timeline)
