"""What integration tests share: a tiny model with random weights and its questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model/, train.jsonl and test.jsonl. Read only."""
    directory = tmp_path_factory.mktemp("tiny")
    arguments = ["--out", str(directory), "--random", "--train-questions", "64", "--test-questions", "8"]
    assert make_tiny_model.main(arguments) == 0
    return directory
