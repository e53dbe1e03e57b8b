"""Megatron on a paced device.

PACED_TRAINER=token_s    trainer.backend=tools.paced.trainer:BACKEND
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from pa_npu.algorithm.objective import Objective
from pa_npu.algorithm.update_sums import ReducedGradient
from pa_npu.backends.megatron import factory
from pa_npu.backends.protocol import MicrobatchSource, TrainBackend
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.notice import Notice
from pa_npu.samples.replica_feed import Traffic
from tools.groups import separate
from tools.paced.device import Device

# A trainer that waited for longer had nothing to do.
_WAITED_S = 0.002


class PacedMicrobatches:
    """Microbatches each of which is followed by the next one no sooner than its tokens take at
    token_s.
    """

    def __init__(self, source: MicrobatchSource, token_s: float) -> None:
        self._source = source
        self._token_s = token_s
        self._device = Device()
        # of the microbatch handed out last, if there is one
        self._begin_s = 0.0
        self._seconds = 0.0

    @property
    def waited_s(self) -> float:
        return self._source.waited_s

    @property
    def is_last(self) -> bool:
        return self._source.is_last

    @property
    def advantages(self) -> Mapping[int, Sequence[np.ndarray]]:
        return self._source.advantages

    @property
    def traffic(self) -> Traffic:
        return self._source.traffic

    @property
    def by_rule(self) -> Sequence[Notice]:
        return self._source.by_rule

    def settle(self) -> int:
        return self._source.settle()

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        before = self._seconds > 0
        if before:
            self._device.ends(self._begin_s, self._seconds)
        waited_s = self._source.waited_s
        microbatch = next(self._source)
        self._begin_s = self._device.begins(before and self._source.waited_s - waited_s < _WAITED_S)
        self._seconds = self._token_s * separate(microbatch.whole_layout).total
        return microbatch


class PacedBackend:
    """A backend whose `accumulate` takes as long as asked; all else is the backend's."""

    def __init__(self, backend: TrainBackend) -> None:
        self._backend = backend
        self._token_s = float(os.environ["PACED_TRAINER"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def accumulate(
        self, microbatches: MicrobatchSource, objective: Objective
    ) -> ReducedGradient | None:
        return self._backend.accumulate(PacedMicrobatches(microbatches, self._token_s), objective)


BACKEND = SimpleNamespace(
    changes=factory.changes,
    fit=factory.fit,
    create=lambda *args, **kwargs: PacedBackend(factory.create(*args, **kwargs)),
    export_checkpoint=factory.export_checkpoint,
)
