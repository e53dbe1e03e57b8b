"""Whole runs on pairs of answers: no engine, a margin that rises on the trained pairs, and the same weights after a kill."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.launched import ENGINE_SERVERS, Launched, find, random_tiny
from tests.integration.test_supervised_run import TIMEOUT_S, arguments, ends, records, weights

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]


PAIRS = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """eight_pairs.jsonl has the pairs of an iteration, which every iteration trains."""
    directory = random_tiny(tmp_path_factory.mktemp("tiny"))
    rows = (directory / "pairs.jsonl").read_text().splitlines()[:PAIRS]
    assert all({"chosen", "rejected"} < json.loads(row).keys() for row in rows)
    (directory / "eight_pairs.jsonl").write_text("\n".join(rows) + "\n")
    return directory


def of_pairs(tiny: Path, run_dir: Path, backend: str, **others: object) -> list[str]:
    keys: dict[str, object] = {
        "data__train": tiny / "eight_pairs.jsonl",
        "data__test": tiny / "eight_pairs.jsonl",  # a random model says nothing of other pairs
        "algorithm__name": "dpo",
        "rollout__responses_per_prompt": 2,
        "schedule__prompts_per_iteration": PAIRS,
        "optimizer__learning_rate": 3e-4,
    }
    return arguments(tiny, run_dir, backend, **{**keys, **others})


@pytest.mark.nightly  # a run on rows that is killed: test_supervised_run.py
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_killed_run_on_pairs_ends_with_the_weights_of_one_that_was_not(
    backend: str, tiny: Path, tmp_path: Path
) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run = Launched(tmp_path, "run", *of_pairs(tiny, undisturbed, backend))
    try:
        seen = ends(run)
    finally:
        run.close()
    assert not [line for line in seen if any(name in line for name in ENGINE_SERVERS.values())]
    run = Launched(tmp_path, "run", *of_pairs(tiny, killed, backend))
    try:
        run.wait_for(lambda: len(records(killed)) >= 3, "three iterations", TIMEOUT_S)
        trainer = find(run, "trainer.main")
        assert trainer is not None
        os.kill(trainer, signal.SIGKILL)  # the run goes on by itself
        ends(run)
    finally:
        run.close()

    first, second = weights(undisturbed), weights(killed)
    assert not [name for name in first if not torch.equal(first[name], second[name])]
    done = records(undisturbed)
    for name in ("loss", "preference_margin", "preference_accuracy", "grad_norm"):
        assert [one[name] for one in done] == [one[name] for one in records(killed)], name
    assert done[0]["preference_margin"] == 0, "policy and reference begin equal"
    assert done[-1]["preference_margin"] > 0 and done[-1]["loss"] < done[0]["loss"]
    held_out = [one["sets"]["test"] for one in records(undisturbed, "evaluations.jsonl")]
    assert held_out[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    assert held_out[-1]["preference_margin"] > 0
    assert "perplexity" not in held_out[0]
