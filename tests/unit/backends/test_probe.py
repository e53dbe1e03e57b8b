"""The border's probe on the backend: microbatches come from the host and are computed with on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from tests.helpers.megatron import PLATFORM  # noqa: F401 - prepares megatron
from tools.groups import group_of_responses

from pa_npu.backends.megatron.backend import MegatronBackend  # isort: skip


def probe_group() -> Group:
    return group_of_responses(
        iteration=1,
        version=1,
        index=0,
        prompt_id=0,
        prompt_tokens=np.arange(3, dtype=np.int32),
        response_tokens=np.arange(5, dtype=np.int32),
        response_lengths=np.asarray([2, 3], np.int32),
        logprobs=np.zeros(5, np.float32),
        rewards=np.zeros(2, np.float32),
        advantages=np.zeros(2, np.float32),
        finished=np.zeros(2, np.uint8),
    )


def test_what_the_probe_computes_with_is_on_the_device() -> None:
    taken: list[Microbatch] = []
    backend: Any = MegatronBackend.__new__(MegatronBackend)
    backend.device = torch.device("meta")
    backend._run = lambda microbatches, count, forward, loss: taken.extend(microbatches)
    microbatches = build_microbatches(probe_group(), 2, True, 1)
    backend.evaluate(microbatches, print)
    assert [one.tokens.device.type for one in microbatches] == ["cpu"], "they come from the host"
    (one,) = taken
    devices = {value.device.type for value in vars(one).values() if isinstance(value, torch.Tensor)}
    assert devices == {"meta"} and one.layout is microbatches[0].layout
