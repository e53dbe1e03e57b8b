"""Fixtures of integration tests: tiny models with random weights and their questions, and runs of the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.shelf import Shelf
from tests.helpers.browser import Browser, find_browser
from tests.helpers.chained_run import step, write_chain
from tests.helpers.coordinator_run import Run, coordinator_run, write_inputs
from tests.helpers.engine_process import EngineProcess
from tests.helpers.finished_run import ITERATIONS, make_run
from tests.helpers.launched import random_tiny
from tests.helpers.viewer_site import make_states, served
from tools import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model/, train.jsonl and test.jsonl. Read only."""
    return random_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def slipping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a model that slips at sums, as the quick start has it: about a minute. Read only."""
    directory = tmp_path_factory.mktemp("slipping") / "tiny"
    assert make_tiny_model.main(["--out", str(directory)]) == 0
    return directory


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a mixture of experts."""
    return random_tiny(tmp_path_factory.mktemp("mixture"), "--family", "qwen3_moe")


@pytest.fixture(scope="session")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Gives rollout.attach for runs of a model that do not test an engine's start: a transformers
    engine that all of them share.

    Such a run needs KEY in its environment.
    """
    with ExitStack() as started:

        @cache
        def attach(model: Path) -> str:
            engine = EngineProcess(
                "transformers", model, tmp_path_factory.mktemp("engine"), {"max_num_seqs": 256}
            )
            started.callback(engine.kill)
            asyncio.run(engine.wait_ready())
            return f"[{engine.url}]"

        yield attach


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and questions of the runs of `start`. Read only."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def start(tmp_path: Path, inputs: Path) -> Iterator[Callable[..., Run]]:
    """Starts stand-in engines and a coordinator, with the arguments of `coordinator_run`; they end
    with the test.
    """
    with ExitStack() as started:
        yield lambda **arguments: started.enter_context(
            coordinator_run(tmp_path, inputs, **arguments)
        )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    started = Browser(program)
    yield started
    started.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("browser")
    run = make_run(directory / "grpo_math")
    another = make_run(directory / "grpo_math_lr1e-6", optimizer={"learning_rate": 2e-6})
    for directory in (run, another):
        write_chain(directory, [step(number) for number in range(ITERATIONS)])
    with served(RunDirectory(run), RunDirectory(another)) as server:
        yield server.url


@pytest.fixture(scope="module")
def folder_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a folder of runs in each state."""
    folder = make_states(tmp_path_factory.mktemp("folder") / "runs")
    with served(Shelf(folder)) as server:
        yield server.url
