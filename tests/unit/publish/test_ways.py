"""Engines on the trainers' devices get weights in groups that the backend of collectives allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.engines.member import Member
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.plan_text import derived_lines
from pa_npu.publish.engines import Connection, EngineProcessGroups
from pa_npu.publish.messages import StageManifest

GIB = 2**30


def shared(**sections: Any) -> Any:
    placement = {"colocate": True}
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "placement": placement, **sections}
    )


@pytest.mark.parametrize(
    ("backend", "has_host_groups"), [("gloo", False), ("nccl", True), ("hccl", True)]
)
def test_no_publish_group_has_two_ranks_on_a_device_where_the_backend_forbids_it(
    backend: str, has_host_groups: bool
) -> None:
    """Two engines of two workers, the one on a trainer's device started first, and one stage."""
    config = shared(rollout={"tensor_parallel": 2}, trainer={"devices": 2})
    connection = Connection(
        ("127.0.0.1", 1), backend, [StageManifest("stage", {})], [StageManifest("late", {})]
    )
    engines: list[Any] = [SimpleNamespace(name=name) for name in ("shared", "own")]
    members = [
        Member(number, 0, True, engine, shared=number == 0) for number, engine in enumerate(engines)
    ]
    groups = EngineProcessGroups(config.rollout, connection, config.publish.timeout_s)
    joined = groups.of_members(members, 0)
    receivers = groups.receivers(members, 0)
    actual = {member.name: one for member, one in zip(members, joined, strict=True)}
    shape = {
        name: (g.backend, g.stages[0]["name"], g.first_rank, g.world_size)
        for name, g in actual.items()
    }
    if has_host_groups:
        assert shape == {
            "shared": ("gloo", "stage/0/host", 1, 3),
            "own": (backend, "stage/0/group", 1, 3),
        }
        assert (receivers.workers, receivers.host_workers) == (2, 2)
    else:
        assert shape == {
            "shared": ("gloo", "stage/0/group", 1, 5),
            "own": ("gloo", "stage/0/group", 3, 5),
        }
        assert (receivers.workers, receivers.host_workers) == (4, 0)


def test_the_dry_run_says_how_engines_on_trainers_devices_get_weights() -> None:
    spec = known_spec("models/Qwen2.5-7B")
    assert spec is not None
    for kind, own_memory, way in (
        ("npu", True, "through host memory"),
        ("cpu", False, "in the group of the other"),
    ):
        lines = derived_lines(
            shared(run={"device": kind}),
            spec,
            64 * GIB if own_memory else None,
            own_memory=own_memory,
        )
        (line,) = [line for line in lines if line.startswith("shared weights")]
        assert way in line
