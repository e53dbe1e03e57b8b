"""publish.mode=delayed: which versions it is for, what a second buffer holds, and the memory that it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import CheckpointReport
from pa_npu.coordinator.publication import (
    BlockingPublication,
    DelayedPublication,
    publication_kind,
)
from pa_npu.errors import DeadlineExceeded
from pa_npu.planning.engine_memory import engine_memory
from pa_npu.planning.shortages import shortages
from pa_npu.publish.messages import (
    ENGINES_SWAPPED,
    MEMBERS,
    VERDICT,
    EnginesSwapped,
    PublishMembers,
    PublishVerdict,
)
from pa_npu.publish.trainer_side import TrainerPublish
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.receiver import Receiver
from pa_npu.weight_transfer.transport import WeightSyncError
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.policies import milestones, probe_plan, publication
from tests.helpers.trainer_rank import make_groups
from tests.unit.trainer.test_updates import GROUPS, RESPONSES, make_config, make_learner, source
from tools.bench_publish import MODELS

# these import megatron, which the helper above has prepared
from pa_npu.trainer.agreement import Agreement  # isort: skip
from pa_npu.trainer.border import TrainerBorder  # isort: skip
from pa_npu.trainer.publication import make_publication  # isort: skip
from pa_npu.algorithm.trainer_models import trainer_models  # isort: skip
from pa_npu.trainer.loop import consume  # isort: skip

GIB = 2**30


def config_of(**sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "schedule": {"max_staleness": 1},
        "publish": {"mode": "delayed"},
    }
    return Config.model_validate({**tree, **sections})


def test_the_first_and_the_last_version_are_published_at_the_border() -> None:
    config = config_of(schedule={"max_staleness": 1, "iterations": 4})
    delayed = publication(DelayedPublication, last=4)
    assert [version for version in range(5) if delayed.is_delayed(version)] == [1, 2, 3]
    assert publication_kind(config.publish) is DelayedPublication
    assert publication_kind(config_of(publish={}).publish) is BlockingPublication
    assert trainer_models(config).keeps_published, (
        "engines that come late get the version before the swap"
    )


class Stage(Receiver):
    """Hands out two tensors, views of one buffer, when it is let."""

    digests = ("digest",)

    def __init__(self) -> None:
        super().__init__([], [], 1, torch.device("cpu"), 1.0)
        self.go = threading.Event()
        self.error: Exception | None = None
        self.buffer = torch.arange(6.0)

    def receive(self, version: int, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.go.wait(10)
        yield "a", self.buffer[1:3]
        if self.error is not None:
            raise self.error
        yield "b", self.buffer[3:]


def arrived(stage: Stage, version: int) -> tuple[str, ...]:
    end_s = time.monotonic() + 10
    while (digests := stage.prepared(version)) is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return digests


def test_a_version_is_here_when_all_of_it_is() -> None:
    stage = Stage()
    with pytest.raises(WeightSyncError, match="never asked for"):
        stage.prepared(3)
    stage.prepare(3)
    assert stage.prepared(3) is None
    for too_early in (lambda: stage.pop_prepared(3), lambda: stage.prepare(4)):
        with pytest.raises(WeightSyncError, match="still being received"):
            too_early()
    stage.go.set()
    assert arrived(stage, 3) == ("digest",)
    with pytest.raises(WeightSyncError, match="weight version 4 was never asked for"):
        stage.pop_prepared(4)
    weights, digests = stage.pop_prepared(3)
    stage.buffer.zero_()
    assert {name: tensor.tolist() for name, tensor in weights} == {"a": [1, 2], "b": [3, 4, 5]}, (
        "memory of its own"
    )
    assert digests == ("digest",)
    with pytest.raises(WeightSyncError, match="never asked for"):
        stage.pop_prepared(3)


def test_a_version_that_broke_off_is_never_taken() -> None:
    stage = Stage()
    stage.error = WeightSyncError("the leader is gone")
    stage.prepare(3)
    stage.go.set()
    with pytest.raises(WeightSyncError, match="the leader is gone"):
        arrived(stage, 3)
    with pytest.raises(WeightSyncError, match="the leader is gone"):
        stage.pop_prepared(3)
    stage.error = None
    stage.prepare(3)
    assert arrived(stage, 3) == ("digest",), "the next attempt"


def test_the_second_buffer_is_in_the_plan_and_beside_the_engines_share() -> None:
    spec = MODELS["7b"]
    blocking, delayed = (
        dict(engine_memory(config, spec, 64 * GIB).parts)
        for config in (config_of(publish={}), config_of())
    )
    assert (
        blocking["second buffer"] == 0
        and delayed["second buffer"] == delayed["weights"] == blocking["weights"]
    )
    assert dict(engine_memory(config_of(), spec, None).parts)["second buffer"] == delayed["weights"]

    def lines(fraction: float) -> list[str]:
        config = config_of(rollout={"memory_fraction": fraction})
        return [
            actual.line()
            for actual in shortages(config, spec, 64 * GIB, True)
            if "second buffer" in actual.problem
        ]

    (line,) = lines(0.85)
    assert "set rollout.memory_fraction=0.77 (which leaves room for it)" in line and not lines(0.77)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


def test_trainers_keep_the_version_before_until_engines_have_swapped(model: Path) -> None:
    """The border and the loop's steps as a rank makes them, the coordinator's messages put in
    advance or by a thread.
    """
    schedule = {"max_staleness": 1, "iterations": 9}
    config = make_config(model, schedule=schedule, publish={"mode": "delayed", "probe_tokens": 0})
    learner, stage = make_learner(config)
    channel = StoreChannel(dist.HashStore(), "pa/0/")  # type: ignore[attr-defined]
    timeline = Timeline(None, "")
    probes = probe_plan(config)
    border = TrainerBorder(
        config=config,
        learner=learner,
        publication=make_publication(
            config.publish,
            learner=learner,
            publisher=None,
            channel=channel,
            timeline=timeline,
            timeout_s=config.deadlines.border_timeout_s,
            freshness=Freshness.from_sections(config.schedule, config.publish),
            milestones=milestones(config),
        ),
        channel=channel,
        timeline=timeline,
        agreement=Agreement(config, learner, probes),
        probes=probes,
    )
    policy = dict(stage.policy.named_parameters())
    kept = trainer_models(config).published_source

    def copied() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in policy.items()}

    def held(version: int) -> dict[str, torch.Tensor]:
        assert learner.gate.acquire(version), f"version {version} can be sent to a late engine"
        learner.gate.release()
        return {
            name: parameter.detach().clone()
            for name, parameter in stage.model(kept).named_parameters()
        }

    def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    for version, delayed in ((3, False), (4, True), (5, True)):
        place = {"version": version, "attempt": 0}
        MEMBERS.put(channel, PublishMembers(0, 1, delayed=delayed), **place)
        VERDICT.put(channel, PublishVerdict(True), **place)
    border.cross(3, None, lambda _: CheckpointReport())
    versions = {3: copied()}
    consume(
        learner,
        source(make_groups(3, GROUPS, RESPONSES, seed=5), 3),
        1,
        before_step=border.before_step,
    )
    for version in (4, 5):
        versions[version] = copied()
        border.cross(version, None, lambda _: CheckpointReport())
        assert equal(held(version - 1), versions[version - 1]) and not equal(
            versions[version], versions[version - 1]
        )
        late = {}

        def swap(version: int = version, late: dict[str, Any] = late) -> None:
            # an engine that comes right after the swap, before the trainers have heard of it
            if version == 5:
                late.update(held(version))
            ENGINES_SWAPPED.put(channel, EnginesSwapped(version), version=version)

        coordinator = threading.Timer(0.2, swap)
        coordinator.start()
        groups = make_groups(version, GROUPS, RESPONSES, seed=5)
        consume(learner, source(groups, version), 1, before_step=border.before_step)
        coordinator.join()
        assert equal(held(version), versions[version]), (
            "what engines have is kept, although the policy has moved on"
        )
        assert not late or equal(late, versions[version])
        assert not equal(copied(), versions[version])


def test_a_swap_that_never_comes_ends_the_wait() -> None:
    channel = StoreChannel(dist.HashStore(), "pa/0/")  # type: ignore[attr-defined]
    publish = TrainerPublish(channel, lambda *_: None, str, 0, 0, 0.2, Timeline(None, ""))
    with pytest.raises(DeadlineExceeded, match="the engines to swap to weight version 4"):
        publish.wait_swapped(4)
