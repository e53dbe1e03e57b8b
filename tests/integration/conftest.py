"""Fixtures of integration tests: a tiny model with random weights and its questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launched import random_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model/, train.jsonl and test.jsonl. Read only."""
    return random_tiny(tmp_path_factory.mktemp("tiny"))
