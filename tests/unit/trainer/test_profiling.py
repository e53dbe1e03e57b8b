"""telemetry.profile_iterations: the loop leaves a trace of the chosen iterations on the chosen ranks, and of no other."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)
from pa_npu.algorithm.objective import TrainedResponse
from pa_npu.config.schema import Config
from pa_npu.control.messages import AgreementReport, CheckpointReport, IterationReport, ProbeReport
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Update
from tests.helpers.megatron import PLATFORM, model_config
from tests.helpers.models import make_model
from tests.helpers.reports import update_report

# these import megatron, which the helper above has prepared
from pa_npu.trainer import loop  # isort: skip
from pa_npu.trainer.loop import IterationChecks

from pa_npu.trainer.loop import profiled  # isort: skip


class OneLayerLearner:
    """A Learner whose training is one matrix product."""

    def accumulate(self, microbatches: Any, judge_first: Any) -> list[TrainedResponse]:
        torch.ones(4, 4) @ torch.ones(4, 4)
        return []

    def step(self) -> Update:
        return Update(update_report(), DifferenceSums(), True, DifferenceSums(), 1.0)

    backend = SimpleNamespace(export=lambda *_: None)


class QuietBorder:
    def cross(self, version: int, report: IterationReport | None, save: Any) -> ProbeReport:
        torch.ones(4).exp()  # the border is not part of the training
        return ProbeReport()

    def before_step(self) -> None: ...

    def data_position(self, version: int) -> int:
        return 0

    def ahead(self, version: int) -> list[Any]:
        return []


class NoCheckpoints:
    def __init__(self, *_: Any) -> None: ...

    def load(self) -> int:
        return 0

    def at_border(self, version: int) -> CheckpointReport:
        return CheckpointReport()

    def finish(self, version: int) -> None: ...


class NoChecks(IterationChecks):
    def __init__(self) -> None:
        self.agreement: Any = SimpleNamespace(
            measure=lambda *_: None, check_first=lambda *_: None, probes_ride=True
        )

    def __call__(self, *_: Any) -> AgreementReport:
        return AgreementReport()


class NoMicrobatches:
    by_rule, contents = (), {}  # type: ignore[var-annotated]

    def first(self, number: int, *, only_written: bool = False) -> list[Any]:
        return []

    def updates(self, number: int) -> list[Any]:
        return [self] * number

    def finish(self) -> None: ...


@pytest.fixture(autouse=True)
def no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Checkpointing", NoCheckpoints)


def run(tmp_path: Path, rank: int, **telemetry: Any) -> list[Path]:
    config = make_config(tmp_path, telemetry)
    parts: Any = (
        OneLayerLearner(),
        QuietBorder(),
        lambda iteration: NoMicrobatches(),
        Timeline(None, ""),
    )
    loop.train(
        config, *parts, profiler=partial(profiled, config, PLATFORM, rank), checks=NoChecks()
    )
    return sorted((tmp_path / "profile").glob("*"))


def make_config(tmp_path: Path, telemetry: dict[str, Any]) -> Config:
    return model_config(
        make_model(tmp_path / "model"),
        run={"dir": str(tmp_path)},
        schedule={"iterations": 3, "prompts_per_iteration": 2},
        trainer={"devices": 2},
        telemetry=telemetry,
    )


def test_chosen_iterations_of_a_rank_that_publishes_leave_a_trace_with_the_operators_of_the_training(
    tmp_path: Path,
) -> None:
    files = run(tmp_path, rank=0, profile_iterations=[0, 2])
    assert [file.name.split(".")[0] for file in files] == [
        "iteration_000000_rank0",
        "iteration_000002_rank0",
    ]
    for file in files:
        names = {
            event["name"]
            for event in json.loads(file.read_text())["traceEvents"]
            if "name" in event
        }
        assert "aten::mm" in names
        assert "aten::exp" not in names, "the border was recorded too"


def test_without_the_key_or_on_another_rank_nothing_is_recorded(tmp_path: Path) -> None:
    assert run(tmp_path, rank=0) == []
    assert run(tmp_path, rank=1, profile_iterations=[1]) == [], (
        "another replica of the stage does the same"
    )


def test_iterations_that_the_run_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"telemetry.profile_iterations: \[3\]: the run has 0 to 2"
    ):
        make_config(tmp_path, {"profile_iterations": [3]})
