"""Several turns with a tool, end to end: periodic equals synchronous bit for bit, also where the engine is killed among turns."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launched import ENGINE_SERVERS, Launched, find, settings
from tools import make_tiny_model

# it trains a model for half a minute; in CI sessions of several samples are compared
# (test_exact_schedules.py)
pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(900)]

TIMEOUT_S = 300.0
ITERATIONS = 2


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that asks the calculator in half of its answers, not always properly."""
    directory = tmp_path_factory.mktemp("asking")
    arguments = [
        "--out",
        str(directory),
        "--task",
        "calculator",
        "--steps",
        "125",
        "--call-rate",
        "0.5",
    ]
    assert (
        make_tiny_model.main([*arguments, "--train-questions", "64", "--test-questions", "8"]) == 0
    )
    return directory


def launch(asking: Path, directory: Path, **others: object) -> Launched:
    arguments = settings(
        asking,
        directory / "run",
        environment__name="tools",
        environment__max_turns=3,
        rollout__responses_per_prompt=4,
        rollout__max_response_tokens=40,
        schedule__iterations=ITERATIONS,
        schedule__order="prompt",
        **others,
    )
    return Launched(directory, "run", *arguments)


def outcome(run: Launched, directory: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Final weights and samples."""
    try:
        assert run.popen.wait(TIMEOUT_S) == 0, run.output
    finally:
        run.close()
    samples = [
        json.loads(line) for line in (directory / "run" / "samples.jsonl").read_text().splitlines()
    ]
    return load_file(directory / "run" / "hf" / "model.safetensors"), samples


def test_periodic_with_a_killed_engine_equals_synchronous_with_several_turns(
    asking: Path, tmp_path: Path
) -> None:
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    quiet.mkdir()
    disturbed.mkdir()
    wanted, samples = outcome(launch(asking, quiet, schedule__stream=False), quiet)

    run = launch(asking, disturbed, schedule__stream=True)
    log = disturbed / "run" / "logs" / "coordinator.log"
    run.wait_for(
        lambda: log.is_file() and "weight version 1 on 1 engine " in log.read_text(),
        "iteration 1",
        TIMEOUT_S,
    )
    engine = find(run, ENGINE_SERVERS["transformers"])
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    weights, again = outcome(run, disturbed)

    assert "; started again (1 of run.restarts" in run.output, run.output
    texts = [response["text"] for sample in samples for response in sample["responses"]]
    assert any("<<" in text and ">>=" in text for text in texts), (
        "nobody asked the calculator: nothing was tested"
    )
    assert [s["responses"] for s in again] == [s["responses"] for s in samples]
    assert weights.keys() == wanted.keys()
    changed = [name for name in wanted if not torch.equal(weights[name], wanted[name])]
    assert not changed, f"tensors that differ: {changed}"
