"""A colocated run: engine and trainer on one core in turn, the same weights as synchronous on two, and one device counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.telemetry.records import read_records
from tests.helpers.launched import Launched, settings

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]


def run(tiny: Path, directory: Path, colocate: bool) -> Path:
    """Runs to the end; returns the run's directory."""
    keys = settings(
        tiny,
        directory / "run",
        placement__colocate=str(colocate).lower(),
        schedule__stream="false",
        schedule__order="prompt",
    )
    launched = Launched(directory, "run", *keys)
    try:
        assert launched.popen.wait(300) == 0, launched.output
    finally:
        launched.close()
    return directory / "run"


def check_records(directory: Path, colocate: bool) -> None:
    records = read_records(directory)
    assert len(records) == 2
    for record in records:
        assert record["devices"] == (1 if colocate else 2)
        tokens = record["tokens_prompt"] + record["tokens_response"]
        assert record["tpspd"] == pytest.approx(tokens / record["iteration_s"] / record["devices"])
        assert record["periodic"] is False
        assert record["generate_s"] + record["train_s"] <= record["iteration_s"], "in turn"
        assert 0 < record["engine_idle"] < 1 and record["tail_waste"] >= 0
    placed = (directory / "logs" / "launcher.log").read_text()
    assert ("engine-0 on core 0, shared with trainers" in placed) is colocate, placed[:2000]


@pytest.fixture(scope="module")
def colocated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny, tmp_path_factory.mktemp("colocated"), True)


# unit/test_colocate.py has the turns; runs of such devices: test_exact_schedules.py,
# test_recovery.py
@pytest.mark.nightly
def test_a_device_with_both_counts_once_and_they_work_in_turn(colocated: Path) -> None:
    check_records(colocated, True)


@pytest.mark.nightly  # test_exact_schedules.py compares a run with two such devices
def test_it_trains_what_a_synchronous_run_trains_on_half_the_devices(
    colocated: Path, tiny: Path, tmp_path: Path
) -> None:
    apart = run(tiny, tmp_path, False)
    check_records(apart, False)
    weights, others = (
        load_file(directory / "hf" / "model.safetensors") for directory in (colocated, apart)
    )
    assert all(torch.equal(weights[name], others[name]) for name in weights)
