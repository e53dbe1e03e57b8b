"""Fixtures of integration tests: tiny models with random weights and their questions, and runs of the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.coordinator_run import Run, coordinator_run, write_inputs
from tests.helpers.launched import random_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model/, train.jsonl and test.jsonl. Read only."""
    return random_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a mixture of experts."""
    return random_tiny(tmp_path_factory.mktemp("mixture"), "--family", "qwen3_moe")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs of `start` read. Read only."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def start(tmp_path: Path, inputs: Path) -> Iterator[Callable[..., Run]]:
    """Starts stand-in engines and a coordinator, with the arguments of `coordinator_run`; they end with the test."""
    with ExitStack() as started:
        yield lambda **arguments: started.enter_context(coordinator_run(tmp_path, inputs, **arguments))
