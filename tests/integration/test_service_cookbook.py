"""`pa-npu serve` and the loops of tinker's cookbook, unmodified: what is learned moves in each of them.

tests/helpers/served.py says where the cookbook is, cookbook_loops.py what the loops are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.served import CookbookLoop, Server, needs_cookbook, needs_sdk, served

pytestmark = [pytest.mark.integration, pytest.mark.nightly, *needs_sdk, needs_cookbook]


@pytest.fixture(scope="module")
def server(slipping: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("cookbook")
    with served(slipping / "model", directory, rollout__max_num_seqs=128) as server:
        yield server


@pytest.fixture(scope="module")
def supervised(
    server: Server, slipping: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the supervised loop has seen, whose last weights teach the students of distillation."""
    directory = tmp_path_factory.mktemp("supervised")
    loop = CookbookLoop(server, "supervised", directory, train=slipping / "train.jsonl", steps=8)
    return dict(loop.result())


def metric(seen: dict[str, Any], name: str) -> list[float]:
    """Returns a metric by step, of the steps that have it."""
    return [step[name] for step in seen["steps"] if name in step]


def test_supervised(supervised: dict[str, Any]) -> None:
    losses = metric(supervised, "train_mean_nll")
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("minibatches", [None, 4])
def test_reinforcement_on_arithmetic(
    server: Server, tmp_path: Path, minibatches: int | None
) -> None:
    streamed = {} if minibatches is None else {"minibatches": minibatches}
    seen = CookbookLoop(server, "rl", tmp_path, **streamed).result()
    before, after = metric(seen, "test/env/all/correct")
    assert after > before + 0.1
    differences = metric(seen, "optim/kl_sample_train_v1")
    assert len(differences) == 10 and max(map(abs, differences)) < 1e-5, "trained as sampled"


def test_preference(server: Server, slipping: Path, tmp_path: Path) -> None:
    train = slipping / "train.jsonl"
    seen = CookbookLoop(server, "preference", tmp_path, train=train, batch=8).result()
    losses = metric(seen, "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert sum(losses[-3:]) / 3 < 0.95 * math.log(2) and metric(seen, "margin")[-1] > 0


@pytest.mark.parametrize(
    ("loop", "name"), [("on_policy", "teacher_kl"), ("off_policy", "train/loss:sum")]
)
def test_distillation(
    server: Server,
    supervised: dict[str, Any],
    slipping: Path,
    tmp_path: Path,
    loop: str,
    name: str,
) -> None:
    teacher = supervised["last"]["sampler_path"]
    train = slipping / "train.jsonl"
    seen = CookbookLoop(server, loop, tmp_path, train=train, teacher=teacher, batch=16).result()
    values = metric(seen, name)
    assert len(values) == 6 and values[-1] < 0.8 * values[0]
