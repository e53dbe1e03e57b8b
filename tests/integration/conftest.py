"""Fixtures of integration tests: tiny models with random weights and their questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launched import random_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model/, train.jsonl and test.jsonl. Read only."""
    return random_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a mixture of experts."""
    return random_tiny(tmp_path_factory.mktemp("mixture"), "--family", "qwen3_moe")
