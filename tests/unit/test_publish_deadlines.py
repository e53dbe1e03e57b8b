"""Deadlines follow from each other: what stands behind another deadline comes after it, down to the device's own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.launcher.process import commands
from pa_npu.platform.base import Platform

ROOT = Path(__file__).resolve().parents[2]
TREE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}, "run": {"device": "cpu"}}


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Ascend platform, whose deadlines need no device, beside an empty torch_npu."""
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    for name in ("pa_npu.platform.npu", "pa_npu.platform.npu_ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("pa_npu.platform.npu").NpuPlatform()
    for name in ("pa_npu.platform.npu", "pa_npu.platform.npu_ops"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("configs/grpo_*.yaml")), ids=lambda path: path.stem)
def test_in_every_recipe_the_device_gives_up_last(recipe: Path, npu: Any) -> None:
    config = load_config([str(recipe)])
    longest_s = max(config.collective_timeout_s, config.publish_collective_timeout_s)
    device_s = int(npu.deadline_environment(longest_s)["HCCL_EXEC_TIMEOUT"])
    assert device_s % 68 == 0, "HCCL wants multiples of 68"
    waits = [config.rollout.request_timeout_s, config.trainer.wait_timeout_s, config.collective_timeout_s, device_s]
    assert waits == sorted(waits) and waits[-1] > waits[-2] > waits[-3]
    assert 2 * config.publish.timeout_s < config.collective_timeout_s


def test_the_users_own_deadline_of_the_device_is_refused_where_it_comes_first(
    npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "1836")
    with pytest.raises(ConfigError, match=r"HCCL_EXEC_TIMEOUT=1836 .* deadline of 7320 s.* set it to 7412 or more"):
        npu.deadline_environment(7320.0)
    for users in ("0", "7412"):
        monkeypatch.setenv("HCCL_EXEC_TIMEOUT", users)
        assert npu.deadline_environment(7320.0) == {}, "0 is no deadline"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"rollout": {"request_timeout_s": 3600}},
            "trainer.wait_timeout_s: 1800 s is shorter than rollout.request_timeout_s = 3600 s",
        ),
        (
            {"publish": {"timeout_s": 1000}},
            "trainer.wait_timeout_s: 1800 s is shorter than twice publish.timeout_s = 1000 s",
        ),
    ],
)
def test_deadlines_that_stand_upside_down_are_refused(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Config.model_validate(TREE | sections)
    Config.model_validate(TREE | sections | {"trainer": {"wait_timeout_s": 3600}})


def test_processes_do_not_inherit_what_would_break_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_TABLE_FILE", "/etc/hccl.json")
    monkeypatch.setenv("ROOTINFO_SUBCOMM_ENABLE", "1")
    config = Config.model_validate(TREE)
    found: dict[str, set[str]] = {}
    for backend in ("hccl", "gloo"):
        platform: Platform = SimpleNamespace(comm_backend=backend)  # type: ignore[assignment]
        found[backend] = {"RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE"} & commands._common_env(config, platform).keys()
    assert not found["hccl"] and len(found["gloo"]) == 2
