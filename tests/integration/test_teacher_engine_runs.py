"""Whole runs with a teacher on an engine: neither the schedule nor the teacher's death changes a bit of what is learnt."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launched import Launched, find, random_tiny, settings

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
]

ITERATIONS, TIMEOUT_S = 3, 500.0
FORWARD = {"algorithm__distill_divergence": "forward", "algorithm__distill_top_k": 5}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("--seed", "5", "--family", "llama", "--layers", "1", "--hidden", "64")
    return random_tiny(tmp_path_factory.mktemp("teacher"), *options) / "model"


def arguments(tiny: Path, model: Path, run_dir: Path, **others: object) -> list[str]:
    """Keys of a run with one teacher on an engine. model: the teacher's."""
    keys: dict[str, object] = {
        "data__test": "null",
        "algorithm__name": "distill",
        "teacher": f"{{large: {{model: {model}, engines: 1}}}}",
        "trainer__backend": "fsdp",
        "rollout__temperature": 0.8,
        "rollout__max_response_tokens": 16,
        "schedule__iterations": ITERATIONS,
        "schedule__order": "prompt",
        "optimizer__learning_rate": "1e-3",
        "telemetry__trackers": "[]",
    }
    return settings(tiny, run_dir, **(keys | others))


def records(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    (file,) = (run_dir / "hf").glob("*.safetensors")
    return load_file(file)


def run_to_the_end(directory: Path, *arguments: str, kill: str | None = None) -> str:
    """Returns what the run printed. kill: part of the command line of a process that is killed once
    an iteration is done.
    """
    run = Launched(directory, "run", *arguments)
    run_dir = Path(arguments[0].partition("=")[2])
    try:
        if kill is not None:
            run.wait_for(lambda: len(records(run_dir)) >= 1, "an iteration", TIMEOUT_S)
            victim = find(run, kill)
            assert victim is not None, run.family()
            os.kill(victim, signal.SIGKILL)
        run.wait_for(lambda: "Total time" in run.output, "the run's end", TIMEOUT_S)
        assert run.popen.wait(60) == 0, run.output
        return run.output
    finally:
        run.close()


def different(first: Path, second: Path) -> list[str]:
    one, another = weights(first), weights(second)
    assert one.keys() == another.keys()
    return [name for name in one if not torch.equal(one[name], another[name])]


def test_a_periodic_run_whose_teacher_dies_ends_with_the_synchronous_runs_weights(
    tiny: Path, teacher: Path, tmp_path: Path
) -> None:
    synchronous, killed = tmp_path / "synchronous", tmp_path / "killed"
    more = {"schedule__stream": "false"}
    run_to_the_end(tmp_path, *arguments(tiny, teacher, synchronous, **more))
    output = run_to_the_end(tmp_path, *arguments(tiny, teacher, killed), kill=f"--model {teacher}")
    assert "teacher-0: killed by SIGKILL; started again" in output
    assert not different(synchronous, killed)
    first = records(killed)[0]
    assert first["teacher_kl"] > 0.01 and first["grad_norm"] > 0
    kept = json.loads((killed / "teachers.json").read_text())
    assert list(kept) == ["teacher.large"]


@pytest.mark.nightly  # above, such a run is killed too
def test_a_periodic_run_ends_with_the_synchronous_runs_weights(
    tiny: Path, teacher: Path, tmp_path: Path
) -> None:
    periodic, synchronous = tmp_path / "periodic", tmp_path / "synchronous"
    run_to_the_end(tmp_path, *arguments(tiny, teacher, periodic))
    more = {"schedule__stream": "false"}
    run_to_the_end(tmp_path, *arguments(tiny, teacher, synchronous, **more))
    assert not different(periodic, synchronous)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("loss", ["sampled", "forward"])
def test_a_teacher_in_the_trainers_pass_teaches_the_same_in_every_schedule(
    loss: str, backend: str, tiny: Path, teacher: Path, tmp_path: Path
) -> None:
    periodic, synchronous = tmp_path / "periodic", tmp_path / "synchronous"
    keys = {"teacher": f"{{large: {{model: {teacher}}}}}", "trainer__backend": backend}
    if loss == "forward":
        keys |= {name: str(value) for name, value in FORWARD.items()}
    run_to_the_end(tmp_path, *arguments(tiny, teacher, periodic, **keys))
    keys |= {"schedule__stream": "false"}
    run_to_the_end(tmp_path, *arguments(tiny, teacher, synchronous, **keys))
    assert not different(periodic, synchronous)
    learnt = [record["grad_norm"] for record in records(periodic)]
    assert len(learnt) == ITERATIONS and min(learnt) > 0


@pytest.mark.nightly
def test_teachers_of_every_place_teach_one_student(
    tiny: Path, teacher: Path, tmp_path: Path
) -> None:
    """One that trainers hold, one on an engine, one on a server, and the policy with a hint, by a
    column of the row; the coordinator's and a trainer's death change nothing.
    """
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
    names = ("held", "engine", "server", "hinted")
    data = tmp_path / "rows.jsonl"
    with data.open("w") as file:
        for number, row in enumerate(rows):
            file.write(json.dumps({**row, "teacher": names[number % 4], "hint": "It is 7"}) + "\n")
    served = Launched(
        tmp_path,
        "engines",
        *settings(tiny, tmp_path / "served", model__path=teacher, rollout__max_response_tokens=32),
    )
    try:
        served.wait_for(lambda: "ready" in served.output, "the server", TIMEOUT_S)
        key = next(tmp_path.glob("served-engines/api_key")).read_text().strip()
        url = served.output.partition("rollout.attach=[")[2].partition("]")[0]
        os.environ["TEACHER_API_KEY"] = key
        teachers = (
            f"{{held: {{model: {teacher}}}, engine: {{model: {teacher}, engines: 1}}, "
            f"server: {{url: {url}}}, hinted: {{hint_column: hint}}}}"
        )
        keys = {
            "data__train": data,
            "data__teacher_column": "teacher",
            "teacher": teachers,
            "schedule__prompts_per_iteration": 8,
            "checkpoint__every": 1,
            **FORWARD,
        }
        whole, trainer, coordinator = (tmp_path / n for n in ("whole", "trainer", "coordinator"))
        run_to_the_end(tmp_path, *arguments(tiny, teacher, whole, **keys))
        for run_dir in (trainer, coordinator):
            overrides = arguments(tiny, teacher, run_dir, **keys)
            run_to_the_end(tmp_path, *overrides, kill=f"{run_dir.name}.main")
            assert not different(whole, run_dir)
    finally:
        os.environ.pop("TEACHER_API_KEY", None)
        served.close()
    assert all(record["teacher_divergence"] > 0 for record in records(whole))
