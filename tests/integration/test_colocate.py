"""A colocated run: engine and trainer on one core in turn, the same weights as synchronous on two, and one device counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.telemetry.metrics import read_records
from tests.helpers.launched import Launched, settings

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]


def test_it_trains_what_a_synchronous_run_trains_on_half_the_devices(tiny: Path, tmp_path: Path) -> None:
    weights = {}
    for colocate in (True, False):
        directory = tmp_path / f"colocate-{colocate}"
        keys = settings(
            tiny,
            directory,
            placement__colocate=str(colocate).lower(),
            schedule__stream="false",
            schedule__order="prompt",
        )
        run = Launched(tmp_path, "run", *keys)
        try:
            assert run.popen.wait(300) == 0, run.output
        finally:
            run.close()
        records = read_records(directory)
        for record in records:
            assert record["devices"] == (1 if colocate else 2)
            tokens = record["tokens_prompt"] + record["tokens_response"]
            assert record["tpspd"] == pytest.approx(tokens / record["iteration_s"] / record["devices"])
            assert record["periodic"] is False
            assert record["generate_s"] + record["train_s"] <= record["iteration_s"], "in turn"
            assert 0 < record["engine_idle"] < 1 and record["tail_waste"] >= 0
        weights[colocate] = load_file(directory / "hf" / "model.safetensors")
        placed = (directory / "logs" / "launcher.log").read_text()
        assert ("engine-0 on core 0, shared with trainers" in placed) is colocate, placed[:2000]
    assert all(torch.equal(weights[True][name], weights[False][name]) for name in weights[True])
