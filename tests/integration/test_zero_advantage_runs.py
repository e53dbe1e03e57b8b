"""schedule.skip_zero_advantage in whole runs: with the rule and without, weights are the same to the bit, whatever the schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.viewer.run import RunDirectory
from tests.helpers.engine_process import KEY
from tests.helpers.launched import ROOT, Launched, settings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

TIMEOUT_S = 400.0
ITERATIONS = 3


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    directory: Path
    weights: dict[str, torch.Tensor]
    records: list[dict[str, Any]]
    output: str


@pytest.fixture
def run(
    tiny: Path, shared_engine: Callable[[Path], str], tmp_path: Path
) -> Iterator[Callable[..., Ended]]:
    """Runs with the rule or without, and some keys of their own."""
    launched: list[Launched] = []

    def start(
        skips: bool | None, *, name: str = "", kill_after: int | None = None, **others: object
    ) -> Ended:
        names = {True: "by_rule", False: "computed", None: "default"}
        directory = tmp_path / (name or names[skips])
        directory.mkdir(exist_ok=True)
        chosen: dict[str, object] = {
            "rollout.attach": shared_engine(tiny / "model"),
            "schedule.iterations": ITERATIONS,
            "schedule.prompts_per_iteration": 8,
            "schedule.order": "prompt",
            "rollout.responses_per_prompt": 4,
            "rollout.max_response_tokens": 16,
            "reward.functions": '[{name: format, pattern: "[0-4]"}]',
            "trainer.devices": 2,
            "optimizer.learning_rate": "1e-3",
            "optimizer.weight_decay": "0.1",
            "telemetry.trackers": "[tensorboard]",
            "telemetry.samples": "all",
            "checkpoint.every": 1,
        }
        chosen["schedule.skip_zero_advantage"] = "null" if skips is None else str(skips).lower()
        merged = {name: value for name, value in (chosen | others).items() if value is not None}
        arguments = settings(tiny, directory / "run", **merged)
        launched.append(Launched(directory, "run", *arguments, variables=KEY))
        if kill_after is not None:
            kill_at(launched[-1], directory / "run", kill_after)
        launched[-1].popen.wait(TIMEOUT_S)
        if kill_after is not None:
            return Ended(directory / "run", {}, [], launched[-1].output)
        assert launched[-1].popen.returncode == 0, launched[-1].output
        weights: dict[str, torch.Tensor] = {}
        for file in sorted((directory / "run" / "hf").glob("*.safetensors")):
            weights |= load_file(file)
        lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
        return Ended(
            directory=directory / "run",
            weights=weights,
            records=[json.loads(line) for line in lines],
            output=launched[-1].output,
        )

    yield start
    for item in launched:
        item.close()


def kill_at(launched: Launched, directory: Path, iterations: int) -> None:
    """Kills the launcher, and so all that it started, once so many iterations are recorded."""

    def reached() -> bool:
        file = directory / "metrics.jsonl"
        return file.is_file() and len(file.read_text().splitlines()) >= iterations

    launched.wait_for(reached, f"{iterations} iterations are recorded", TIMEOUT_S)
    launched.close()


COLOCATED: dict[str, object] = {
    "rollout.engines": 2,
    "placement.colocate": "true",
    "rollout.attach": None,
}
SYNC: dict[str, object] = {"schedule.stream": "false"}
FSDP: dict[str, object] = {"trainer.backend": "fsdp"}
ADAPTERS = FSDP | {"lora.rank": 4, "checkpoint.export_hf": "merged"}
BEHIND = {"schedule.max_staleness": 1, "algorithm.importance_sampling": "token"}
MODES: dict[str, dict[str, object]] = {
    "synchronous": SYNC,
    "periodic": {},
    "turns": COLOCATED | SYNC,
    "roles": COLOCATED,
    "one version behind": BEHIND,
    "periodic, sharded": FSDP,
    "synchronous, sharded": FSDP | SYNC,
    "roles, sharded": COLOCATED | FSDP,
    "one version behind, sharded": BEHIND | FSDP,
    "periodic, adapters": ADAPTERS,
    "turns, adapters": COLOCATED | ADAPTERS | SYNC,
    "pipeline": {"trainer.pipeline_parallel": 2},
    "parts of groups": {"microbatch.responses": 2},
    "two updates": {"schedule.updates_per_iteration": 2},
}
REPLAYED = ("periodic", "one version behind")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of pa-npu on runs that have ended."""
    return subprocess.run(
        [sys.executable, "-m", "pa_npu.launcher", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **KEY},
    )


@pytest.mark.nightly  # in CI, backends alone: test_zero_advantage.py
@pytest.mark.parametrize("mode", MODES)
def test_a_run_by_the_rule_ends_with_the_weights_of_one_that_computes_all_groups(
    mode: str, run: Callable[..., Ended]
) -> None:
    computed = run(False, **MODES[mode])
    by_rule = run(True, **MODES[mode])
    assert by_rule.weights.keys() == computed.weights.keys()
    assert by_rule.weights
    different = [
        name
        for name, weight in computed.weights.items()
        if not torch.equal(weight, by_rule.weights[name])
    ]
    assert different == []
    skipped = [record.get("groups_skipped", 0) for record in by_rule.records]
    assert sum(skipped) > 0, "no group had equal rewards: the test shows nothing"
    assert sum(skipped) < 8 * ITERATIONS, "all groups had equal rewards: nothing was trained"
    for ours, theirs in zip(by_rule.records, computed.records, strict=True):
        assert ours["grad_norm"] == theirs["grad_norm"]
        assert ours["reward_mean"] == theirs["reward_mean"]
        assert ours["eval_accuracy"] == theirs["eval_accuracy"]
        assert "groups_skipped" not in theirs
        if ours.get("groups_skipped"):
            assert ours["tokens_computed"] < theirs["tokens_computed"]
    compared = command("diff", str(computed.directory), str(by_rule.directory))
    assert compared.returncode == 0, compared.stdout + compared.stderr
    print(mode, skipped, compared.stdout)
    if mode in REPLAYED:
        replayed = command("verify", str(by_rule.directory), "--replay", "1:3")
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        print(replayed.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_run_that_is_killed_with_notices_ahead_ends_with_the_same_weights(
    backend: str, run: Callable[..., Ended]
) -> None:
    """With max_staleness=1 a checkpoint keeps the groups that were produced ahead of it."""
    chosen = BEHIND | {"trainer.backend": backend, "schedule.iterations": 6}
    whole = run(True, name="whole", **chosen)
    killed = run(True, name="killed", kill_after=2, **chosen)
    kept = [file.read_bytes() for file in killed.directory.rglob("*") if file.is_file()]
    assert any(b"PAGN" in data for data in kept), "no notice was in flight: nothing is shown"
    resumed = run(True, name="killed", **chosen, **{"checkpoint.resume": "auto"})
    assert resumed.weights.keys() == whole.weights.keys()
    different = [
        name
        for name, weight in whole.weights.items()
        if not torch.equal(weight, resumed.weights[name])
    ]
    assert different == []
    skipped = [[record.get("groups_skipped") for record in one.records] for one in (whole, resumed)]
    assert skipped[0] == skipped[1]


@pytest.mark.nightly
def test_a_run_in_which_no_group_has_a_gradient_ends_and_says_so(run: Callable[..., Ended]) -> None:
    """By default; its records miss what nothing was computed for, and whoever reads them lives."""
    equal = {"reward.functions": '[{name: format, pattern: "(?s).*"}]'}
    ended = run(None, **equal)
    assert [record["groups_skipped"] for record in ended.records] == [8] * ITERATIONS
    assert [record["tokens_computed"] for record in ended.records] == [0] * ITERATIONS
    assert [record["grad_norm"] for record in ended.records] == [0.0] * ITERATIONS
    assert ended.output.count("the step is that of a gradient of 0") == ITERATIONS
    for arguments in (("verify",), ("diff", str(ended.directory))):
        result = command(*arguments, str(ended.directory))
        assert result.returncode == 0, result.stdout + result.stderr
    view = RunDirectory(ended.directory)
    assert len(view.records()) == ITERATIONS
    assert view.overview()["name"] == view.name
    assert view.samples(0)["groups"], "groups without trainers' log-probs are shown"
