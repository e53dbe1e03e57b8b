"""When gradients begin to be reduced: inside the last backward of an update, and never before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.megatron import PLATFORM  # noqa: F401 - prepares megatron

from pa_npu.backends.megatron.backend import run_sequential  # isort: skip


class Loss:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def backward(self) -> None:
        self._log.append("backward")


@pytest.mark.parametrize("count", [1, 3])
def test_only_the_last_backward_runs_outside_of_no_sync(count: int) -> None:
    log: list[str] = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        log.append("no_sync")
        yield
        log.append("sync")

    config = SimpleNamespace(
        no_sync_func=no_sync, finalize_model_grads_func=lambda models: log.append("finalise")
    )
    taken: list[int] = []
    arriving = (taken.append(number) or number for number in range(count))
    model: Any = SimpleNamespace(config=config)
    loss: Any = lambda *_: Loss(log)  # noqa: E731
    run_sequential(model, arriving, lambda _: None, loss, lambda: len(taken) == count)  # type: ignore[arg-type]
    assert log == ["no_sync", "backward", "sync"] * (count - 1) + ["backward", "finalise"]
