"""The recipe of prompts of 8,000 tokens, by real vLLM: two ranks that share every sequence learn as one rank does.

Nightly: the model is made and taught in minutes, and each run takes some more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.helpers.launched import ROOT, Launched

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(5400)]

LIMIT_S = 2400.0
SCRIPT = ROOT / "launch" / "run_grpo_tiny_8k.sh"
RECIPE: dict[str, object] = {"data.test": "null", "telemetry.trackers": "[]"}
ONE_RANK: dict[str, object] = {"trainer.devices": 1, "trainer.context_parallel": 1}


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the questions of the recipe, made with the options of its script."""
    directory = tmp_path_factory.mktemp("long_prompts") / "made"
    text = SCRIPT.read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("make_tiny ")]
    options = line.partition("--")[2].split()
    argv = [sys.executable, "tools/make_tiny_model.py", "--out", str(directory)]
    argv += [f"--{options[0]}", *options[1:]]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=LIMIT_S)
    return directory


def records_of(long_prompts: Path, directory: Path, keys: dict[str, object]) -> list[Any]:
    directory.mkdir()
    chosen: dict[str, object] = {
        **RECIPE,
        "run.dir": directory / "run",
        "model.path": long_prompts / "model",
        "data.train": long_prompts / "train.jsonl",
        **keys,
    }
    arguments = [f"{key}={value}" for key, value in chosen.items()]
    run = Launched(directory, "run", "--config", "configs/grpo_tiny_8k.yaml", *arguments)
    try:
        assert run.popen.wait(LIMIT_S) == 0, run.output[-3000:]
    finally:
        run.close()
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_two_ranks_of_a_context_group_learn_behind_long_prompts_as_one_rank_does(
    long_prompts: Path, tmp_path: Path
) -> None:
    """The first iteration has the same responses in both, which later ones need not have."""
    one = records_of(long_prompts, tmp_path / "one", ONE_RANK)
    two = records_of(long_prompts, tmp_path / "two", {})
    for key in ("reward_mean", "tokens_prompt", "tokens_response"):
        assert two[0][key] == one[0][key], key
    for key in ("loss", "grad_norm"):
        assert two[0][key] == pytest.approx(one[0][key], rel=1e-4, abs=1e-7), key
    assert one[0]["tokens_prompt"] > 8000 * 8 * 8, "the prompts are long"
    for name, records in {"one rank": one, "two ranks": two}.items():
        rewards = [record["reward_mean"] for record in records]
        assert len(rewards) == 10
        assert fmean(rewards[2:]) > fmean(rewards[:2]) + 0.1, f"{name} does not learn: {rewards}"
        assert all(record["logprob_diff_max"] < 1e-3 for record in records), name
