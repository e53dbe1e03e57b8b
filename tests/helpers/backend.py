"""A Megatron backend in the test's own process, and microbatches for it without a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group_source import Traffic
from pa_npu.samples.microbatch import Microbatch
from pa_npu.telemetry.timeline import Timeline
from tests.helpers.megatron import PLATFORM, TriModel

# these import megatron, which the helper above has prepared
from pa_npu.backends.megatron.backend import MegatronBackend  # isort: skip
from pa_npu.backends.megatron.factory import load_stage  # isort: skip

NONE = Traffic()


class Source(Iterator[Microbatch]):
    """A MicrobatchSource of what is already there."""

    is_last = False  # of one replica nobody asks

    def __init__(self, microbatches: Iterable[Microbatch], waited_s: float = 0.0, each: Traffic = NONE) -> None:
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


def make_backend(config: Config) -> tuple[MegatronBackend, TriModel]:
    """With the weights of config.model.path, inside `single_process`."""
    spec = ModelSpec.read(config.model.path)
    stage = load_stage(config, spec, PLATFORM)
    return MegatronBackend(stage, config, spec, PLATFORM, torch.device("cpu"), Timeline(None, "")), stage
