"""Values and policies that a run's processes make of its configuration and hand to their parts, for tests of single parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

from pa_npu.config.schema import Config
from pa_npu.control.milestones import Milestones
from pa_npu.coordinator.publication import BlockingPublication
from pa_npu.publish.probes import ProbePlan
from pa_npu.telemetry.timeline import Timeline

P = TypeVar("P", bound=BlockingPublication)


def probe_plan(config: Config) -> ProbePlan:
    """Returns the probes of a run with this configuration."""
    return ProbePlan.from_sections(
        publish=config.publish,
        rollout=config.rollout,
        schedule=config.schedule,
        algorithm=config.algorithm,
    )


def milestones(config: Config) -> Milestones:
    """Returns the versions at which something is due in a run with this configuration."""
    return Milestones.from_sections(
        schedule=config.schedule,
        checkpoint=config.checkpoint,
        has_held_out=bool(config.evaluate.all_sets(config.data.test)),
    )


async def nothing_to_wait_for(version: int) -> None:
    """All groups of earlier versions are written."""


def publication(kind: type[P], *, last: int, **parts: Any) -> P:
    """Returns the coordinator's policy of a run that ends with version `last`.

    parts: those that the test looks at, in place of parts that do nothing.
    """
    usual: dict[str, Any] = {
        "channel": None,
        "membership": SimpleNamespace(size=2),
        "pool": SimpleNamespace(use=lambda: {}),
        "publish": None,
        "timeline": Timeline(None, ""),
        "guests": [],
        "written": nothing_to_wait_for,
        "probes": ProbePlan(num_tokens=4, num_responses=16, rides=True),
        "milestones": Milestones(last=last),
        "first": 0,
        "startup_timeout_s": 5.0,
        "wait_timeout_s": 5.0,
        "border_timeout_s": 5.0,
    }
    return kind(**{**usual, **parts})
