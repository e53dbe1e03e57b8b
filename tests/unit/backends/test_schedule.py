"""When gradients begin to be reduced: inside the last backward of an update, and never before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pa_npu.backends.in_step import Turn
from tests.helpers.megatron import PLATFORM  # noqa: F401 - prepares megatron

from pa_npu.backends.megatron.passes import run_sequential  # isort: skip


class Loss:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def backward(self) -> None:
        self._log.append("backward")


@pytest.mark.parametrize(
    "kinds", [["train"], ["train"] * 3, ["open", "open", "train", "train", "close", "close"]]
)
def test_only_the_last_backward_runs_outside_of_no_sync(kinds: Sequence[Any]) -> None:
    log: list[str] = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        log.append("no_sync")
        yield
        log.append("sync")

    config = SimpleNamespace(
        no_sync_func=no_sync, finalize_model_grads_func=lambda models: log.append("finalise")
    )
    microbatch: Any = None
    turns = [
        Turn(kind, microbatch, is_last=number == len(kinds) - 1)
        for number, kind in enumerate(kinds)
    ]
    model: Any = SimpleNamespace(config=config)
    loss: Any = lambda *_: Loss(log)  # noqa: E731
    run_sequential(model, turns, lambda _: None, loss, forward_only=False)
    expected = []
    for kind in kinds[:-1]:
        expected += ["no_sync", *([] if kind == "open" else ["backward"]), "sync"]
    assert log == [*expected, "backward", "finalise"]
