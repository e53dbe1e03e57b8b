"""A run that is asked to end early ends behind a publish, equally on all ranks, with a checkpoint and an export."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import CARRIED, EARLY_END, CarriedGroups, EarlyEnd
from pa_npu.control.milestones import Milestones
from pa_npu.coordinator.token_budget import BudgetedUpdates
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer import loop
from pa_npu.trainer.border import TrainerBorder
from tests.unit.trainer.test_profiling import (
    PLATFORM,
    NoCheckpoints,
    NoChecks,
    NoMicrobatches,
    OneLayerLearner,
    QuietBorder,
    make_config,
)


@pytest.mark.parametrize(("ends_at", "left"), [(1, 1), (None, 3)])
def test_the_version_that_it_ends_with_is_saved_and_exported(
    ends_at: int | None, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    saved: list[int] = []
    exported: list[Path] = []

    class Checkpoints(NoCheckpoints):
        def finish(self, version: int) -> None:
            saved.append(version)

    class Learner(OneLayerLearner):
        backend = SimpleNamespace(export=exported.append)

    def rollouts(iteration: int) -> NoMicrobatches:
        trained.append(iteration)
        return NoMicrobatches()

    monkeypatch.setattr(loop, "Checkpointing", Checkpoints)
    config = make_config(tmp_path, {})
    loop.train(
        config,
        Learner(),  # type: ignore[arg-type]
        QuietBorder(),  # type: ignore[arg-type]
        rollouts,  # type: ignore[arg-type]
        Timeline(None, ""),
        partial(loop.profiled, config, PLATFORM, 0),
        NoChecks(),
        lambda version: version == ends_at,
    )
    assert (trained, saved, exported) == (list(range(left)), [left], [tmp_path / "hf"])


@pytest.fixture
def channel() -> Iterator[StoreChannel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield StoreChannel(dist.HashStore(), "pa/0/")
    dist.destroy_process_group()


def asked(channel: StoreChannel, trained_groups: int | None, version: int) -> bool:
    border: Any = SimpleNamespace(
        _rank=0,
        _channel=channel,
        _config=SimpleNamespace(schedule=SimpleNamespace(trained_groups=trained_groups)),
    )
    return TrainerBorder.ends(border, version)


def test_ranks_end_once_the_launcher_has_asked(channel: StoreChannel) -> None:
    assert not asked(channel, 4, 1)
    EARLY_END.put(channel, EarlyEnd())
    assert asked(channel, 4, 2)


def test_a_run_with_carried_groups_ends_where_these_can_be_saved(channel: StoreChannel) -> None:
    """The coordinator may have passed the version's end before it could know; then the run ends
    with the next one.
    """
    updates: Any = SimpleNamespace(
        milestones=Milestones(last=10),
        channel=channel,
        freshness=SimpleNamespace(iterations_ahead=1),
        buffer=SimpleNamespace(written=lambda version: None),
        _last=9,
        _carried=(),
        _budget=SimpleNamespace(group_tokens=None),
    )
    BudgetedUpdates.save(updates, 1)
    EARLY_END.put(channel, EarlyEnd())
    assert not CARRIED.exists(channel, version=1) and not asked(channel, None, 1)
    BudgetedUpdates.save(updates, 2)
    assert CARRIED.get(channel, version=2) == CarriedGroups(3, [], None) and asked(channel, None, 2)
