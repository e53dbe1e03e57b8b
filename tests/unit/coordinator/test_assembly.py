"""A run constructs the objects of the features that it uses, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness
from pa_npu.coordinator import assembly
from pa_npu.engines.protocol import Sampling
from pa_npu.telemetry.timeline import Timeline
from tests.helpers.policies import milestones

USES: dict[str, dict[str, dict[str, Any]]] = {
    "BudgetedGroups": {"schedule": {"max_staleness": 1, "tokens_per_update": 4096}},
    "InformativeGroups": {"schedule": {"dynamic_sampling": True}},
    "ServedRun": {"agent": {"port": 0}},
    "Roles": {"placement": {"colocate": True}},
}


def constructed(sections: dict[str, dict[str, Any]]) -> set[str]:
    """Classes of the objects that a run with these keys has for features."""
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, **sections})
    pool: Any = SimpleNamespace(engines=[])
    tokenizer = SimpleNamespace(all_special_ids=(), chat_template=None)
    none: Any = None
    objects = (
        assembly.make_updates(
            config,
            freshness=Freshness.from_sections(config.schedule, config.publish),
            milestones=milestones(config),
            channel=none,
            buffer=none,
            train=none,
        ).choose(0, []),
        service := assembly.make_service(config, pool, Sampling(8, 1.0), tokenizer),
        assembly.make_gateway(none, "key", service),
        assembly.make_roles(config, pool, Timeline(None, ""), SimpleNamespace(speeds=none)),
    )
    return {type(part).__name__ for part in objects if part is not None}


@pytest.mark.parametrize("feature", USES)
def test_a_plain_run_constructs_nothing_of_a_feature_and_a_run_that_uses_it_does(
    feature: str,
) -> None:
    assert constructed({}) == {"EveryGroup"}
    assert feature in constructed(USES[feature]), "negative control"


def test_a_feature_constructs_nothing_of_another() -> None:
    for feature, sections in USES.items():
        beside = {"Gateway"} if feature == "ServedRun" else set()
        updates = set() if feature.endswith("Groups") else {"EveryGroup"}
        assert constructed(sections) == {feature} | beside | updates, feature
