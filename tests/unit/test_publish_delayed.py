"""publish.mode=delayed: which versions it is for, what a second buffer holds, and the memory that it takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pa_npu.config.schema import Config
from pa_npu.planning.memory import engine_memory
from pa_npu.planning.shortages import shortages
from pa_npu.weight_transfer.second_buffer import SecondBuffer
from pa_npu.weight_transfer.transport import WeightSyncError
from tools.bench_publish import MODELS

GIB = 2**30


def config_of(**sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "schedule": {"max_staleness": 1},
        "publish": {"mode": "delayed"},
    }
    return Config.model_validate({**tree, **sections})


def test_the_first_and_the_last_version_are_published_at_the_border() -> None:
    config = config_of(schedule={"max_staleness": 1, "iterations": 4})
    assert [version for version in range(5) if config.delays(version)] == [1, 2, 3]
    assert not any(config_of(publish={}).delays(version) for version in range(5))
    assert config.keeps_published, "engines that come late get the version before the swap"


class Stage:
    """A receiver that hands out two tensors, views of one buffer, when it is let."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self._error = threading.Event(), error
        self.buffer = torch.arange(6.0)
        self.digests = ("digest",)

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.go.wait(10)
        yield "a", self.buffer[1:3]
        if self._error is not None:
            raise self._error
        yield "b", self.buffer[3:]


def test_a_version_is_here_when_all_of_it_is() -> None:
    second, stage = SecondBuffer(), Stage()
    with pytest.raises(WeightSyncError, match="never asked for"):
        second.received(3)
    second.begin(stage, 3)  # type: ignore[arg-type]
    assert second.received(3) is None
    for too_early in (lambda: second.take(3), lambda: second.begin(stage, 4)):  # type: ignore[arg-type]
        with pytest.raises(WeightSyncError, match="still being received"):
            too_early()
    stage.go.set()
    assert second.received(3, wait_s=10) == ("digest",)
    with pytest.raises(WeightSyncError, match="weight version 4 was never asked for"):
        second.take(4)
    weights, digests = second.take(3)
    stage.buffer.zero_()
    assert {name: tensor.tolist() for name, tensor in weights} == {"a": [1, 2], "b": [3, 4, 5]}, "memory of its own"
    assert digests == ("digest",)
    with pytest.raises(WeightSyncError, match="never asked for"):
        second.take(3)


def test_a_version_that_broke_off_is_never_taken() -> None:
    second, stage = SecondBuffer(), Stage(WeightSyncError("the leader is gone"))
    second.begin(stage, 3)  # type: ignore[arg-type]
    stage.go.set()
    with pytest.raises(WeightSyncError, match="the leader is gone"):
        second.received(3, wait_s=10)
    with pytest.raises(WeightSyncError, match="the leader is gone"):
        second.take(3)
    whole = Stage()
    whole.go.set()
    second.begin(whole, 3)  # type: ignore[arg-type]
    assert second.received(3, wait_s=10) == ("digest",), "the next attempt"


def test_the_second_buffer_is_in_the_plan_and_beside_the_engines_share() -> None:
    spec = MODELS["7b"]
    blocking, delayed = (
        dict(engine_memory(config, spec, 64 * GIB).parts) for config in (config_of(publish={}), config_of())
    )
    assert blocking["second buffer"] == 0 and delayed["second buffer"] == delayed["weights"] == blocking["weights"]
    assert dict(engine_memory(config_of(), spec, None).parts)["second buffer"] == delayed["weights"]

    def lines(fraction: float) -> list[str]:
        config = config_of(rollout={"memory_fraction": fraction})
        return [found.line() for found in shortages(config, spec, 64 * GIB, True) if "second buffer" in found.what]

    (line,) = lines(0.85)
    assert "set rollout.memory_fraction=0.77 (which leaves room for it)" in line and not lines(0.77)
