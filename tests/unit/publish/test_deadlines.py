"""Deadlines follow from each other: what stands behind another deadline comes after it, down to the device's own."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.engines.transformers.kind import server_command
from pa_npu.errors import ConfigError, DeadlineExceeded
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.process import commands
from pa_npu.platform.base import Platform
from pa_npu.publish import while_healthy
from pa_npu.publish.engine_loads import EngineLoads

ROOT = Path(__file__).resolve().parents[3]
TREE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}, "run": {"device": "cpu"}}
JUDGED: dict[str, Any] = {
    "functions": [{"name": "judge"}],
    "judge": {"url": "http://127.0.0.1:1/v1", "model": "j"},
}


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Ascend platform, whose deadlines need no device, beside an empty torch_npu."""
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.delitem(sys.modules, "pa_npu.platform.npu", raising=False)
    yield importlib.import_module("pa_npu.platform.npu").NpuPlatform()
    sys.modules.pop("pa_npu.platform.npu", None)


@pytest.mark.parametrize(
    "recipe", sorted(ROOT.glob("configs/grpo_*.yaml")), ids=lambda path: path.stem
)
def test_in_every_recipe_each_deadline_comes_after_what_it_stands_behind(
    recipe: Path, npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config([str(recipe)])
    device = npu.collective_environment(config.deadlines.longest_collective_s, deterministic=False)[
        "HCCL_EXEC_TIMEOUT"
    ]
    device_s = int(device)
    assert device_s % 68 == 0, "HCCL wants multiples of 68"
    waits = [
        config.deadlines.request_limit_s,
        config.deadlines.wait_timeout_s,
        config.deadlines.collective_timeout_s,
        device_s,
    ]
    assert waits == sorted(waits) and waits[-1] > waits[-2] > waits[-3]
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", device)
    assert npu.group_timeout_s(config.deadlines.collective_timeout_s) > device_s, (
        "torch_npu's rule: else the device leaves no records"
    )
    assert 2 * config.publish.timeout_s < config.deadlines.collective_timeout_s


def test_the_users_own_deadline_of_the_device_is_refused_where_it_comes_first(
    npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "1836")
    with pytest.raises(
        ConfigError, match=r"HCCL_EXEC_TIMEOUT=1836 .* deadline of 7320 s.* set it to 7412 or more"
    ):
        npu.collective_environment(7320.0, deterministic=False)
    for users in ("0", "7412"):
        monkeypatch.setenv("HCCL_EXEC_TIMEOUT", users)
        assert npu.collective_environment(7320.0, deterministic=False) == {}, "0 is no deadline"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"rollout": {"request_timeout_s": 3400}, "trainer": {"wait_timeout_s": 3450}},
            "trainer.wait_timeout_s: 3450 s is shorter than the 3464 s that a request may take",
        ),
        (
            {"rollout": {"max_response_tokens": 8192}, "trainer": {"wait_timeout_s": 2000}},
            "trainer.wait_timeout_s: 2000 s is shorter than the 2648 s that a request may take "
            ".*max_response_tokens = 8192",
        ),
        (
            {"reward": JUDGED, "trainer": {"wait_timeout_s": 1200}},
            r"1200 s is shorter than the 664 s of a request and the 570 s that the group's rewards may take then "
            r"\(reward.judge: timeout_s and concurrency.*set it to at least 1234, remove it",
        ),
        (
            {
                "environment": {"name": "agents", "timeout_s": 1700},
                "trainer": {"wait_timeout_s": 3300},
            },
            "trainer.wait_timeout_s: 3300 s is shorter than the 3400 s that the sessions of a "
            "group may take",
        ),
        (
            {"publish": {"timeout_s": 1000}},
            "trainer.wait_timeout_s: 1800 s is shorter than twice publish.timeout_s = 1000 s",
        ),
    ],
)
def test_deadlines_that_stand_upside_down_are_refused(
    sections: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        Config.model_validate(TREE | sections)
    Config.model_validate(TREE | sections | {"trainer": {"wait_timeout_s": 3800}})


def test_where_it_is_left_out_trainers_wait_as_long_as_a_request_and_its_rewards_may_take() -> None:
    """Defaults: 16 requests to the judge at once, 60 s each and 4 for a score; 2 programs at once,
    32 tests of 10 s.
    """

    def waits(responses: int, *functions: str, **reward: Any) -> float:
        inputs = {"functions": [{"name": name} for name in functions]}
        inputs |= {"judge": JUDGED["judge"]} if "judge" in functions else {}
        tree = {"rollout": {"responses_per_prompt": responses}, "reward": inputs | reward}
        return Config.model_validate(TREE | tree).deadlines.wait_timeout_s

    request_s = 600 + 0.25 * 256
    pauses_s = 3 * 30
    assert waits(8, "judge") == 1800, (
        "which is more than a request's 664 s and 4 times a free turn and 60 s"
    )
    assert waits(64, "judge") == request_s + 4 * 60 * (2 + 64 / 16) + pauses_s
    slow = JUDGED["judge"] | {"timeout_s": 600.0}
    assert waits(8, "judge", judge=slow) == request_s + 4 * 600 * 2 + pauses_s
    assert waits(8, "code") == request_s + 32 * 10 * (2 + 8 / 2)
    assert waits(64, "code", "judge") == request_s + 32 * 10 * (2 + 64 / 2), (
        "the slower one: they run beside each other"
    )
    assert waits(16, "math") == 1800


def test_every_reward_function_bounds_how_long_a_group_is_waited_for() -> None:
    """`math` has 5 s of processor time for a response and 4 comparisons of 2 s; a user's function
    ends at ten times its time.
    """

    def limit_s(responses: int, *functions: Any, **reward: Any) -> float:
        inputs = {"functions": [{"name": name} for name in functions]} | reward
        tree = {"rollout": {"responses_per_prompt": responses}, "reward": inputs}
        return Config.model_validate(TREE | tree).deadlines.reward_limit_s

    assert limit_s(8, "math") == 8 * (5 + 4 * 2)
    assert limit_s(8, "math", "mine:f", timeout_s=20.0) == limit_s(8, "math") + 10 * 20
    assert limit_s(8, "mine:f", "code") == max(10 * 10, limit_s(8, "code"))
    assert limit_s(8, "overlong") == 0
    with pytest.raises(
        ValueError, match=r"50 s that the group's rewards may take then .*reward\.timeout_s"
    ):
        tree = {
            "reward": {"functions": [{"name": "mine:f"}], "timeout_s": 5.0},
            "trainer": {"wait_timeout_s": 700},
        }
        Config.model_validate(TREE | tree)


def test_where_it_is_left_out_trainers_wait_as_long_as_a_request_may_take() -> None:
    def waits(rollout: dict[str, Any], **trainer: Any) -> float:
        return Config.model_validate(
            TREE | {"rollout": rollout, "trainer": trainer}
        ).deadlines.wait_timeout_s

    rewards_s = Config.model_validate(TREE).deadlines.reward_limit_s
    assert waits({}) == 1800
    assert waits({"max_response_tokens": 8192}, devices=2) == 600 + 0.25 * 8192 + rewards_s
    assert waits({"request_timeout_s": 7200.0}) == 7200 + 0.25 * 256 + rewards_s
    assert waits({"max_response_tokens": 8192}, wait_timeout_s=4000) == 4000
    # a group of 8 waits for the room of others, and begins in rounds where it has less
    agents: Any = {"name": "agents", "timeout_s": 1000}
    for concurrent, rounds in ((8, 2), (4, 4)):
        tree = TREE | {"environment": agents, "agent": {"concurrent": concurrent}}
        config = Config.model_validate(tree)
        assert config.deadlines.group_limit_s == 1000 * rounds
        assert (
            config.deadlines.wait_timeout_s
            == config.deadlines.group_limit_s + config.deadlines.reward_limit_s
        )
        assert config.deadlines.engine_wait_s > config.deadlines.group_limit_s
    with pytest.raises(ValueError, match="max_response_tokens"):
        waits({"max_response_tokens": "8k"})


@pytest.mark.parametrize(
    ("deterministic", "batch_invariant"), [(True, False), (False, True), (False, False)]
)
def test_engines_and_trainers_of_a_publish_group_have_the_same_settings(
    npu: Any, monkeypatch: pytest.MonkeyPatch, deterministic: bool, batch_invariant: bool
) -> None:
    """HCCL wants one configuration on all ranks of a group; determinism was the trainers' alone."""
    monkeypatch.delenv("HCCL_DETERMINISTIC", raising=False)
    run = {
        "run": {"device": "cpu", "deterministic": deterministic},
        "rollout": {"batch_invariant": batch_invariant},
    }
    config = Config.model_validate(TREE | run)
    placement = Placement((), (0,), (), ((),), (), (0,))
    trainer = commands.trainer_command(
        config, npu, placement, commands.Store("127.0.0.1", 29500), rank=0
    )
    monkeypatch.setattr("pa_npu.platform.get", lambda _: npu)
    spec: Any = SimpleNamespace(path="m", max_positions=9999, num_heads=4, num_kv_heads=2)
    engine = server_command(config, spec, index=0, port=8000)
    shared = [
        {name: value for name, value in env.items() if name.startswith("HCCL_")}
        for env in (trainer.env, engine.env)
    ]
    assert shared[0] == shared[1] and shared[0]["HCCL_EXEC_TIMEOUT"] == "2040"
    assert shared[0].get("HCCL_DETERMINISTIC") == (
        "strict" if deterministic or batch_invariant else None
    )


def test_processes_do_not_inherit_what_would_break_their_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK_TABLE_FILE", "/etc/hccl.json")
    monkeypatch.setenv("ROOTINFO_SUBCOMM_ENABLE", "1")
    config = Config.model_validate(TREE)
    inherited: dict[str, set[str]] = {}
    for backend in ("hccl", "gloo"):
        platform: Platform = SimpleNamespace(comm_backend=backend)  # type: ignore[assignment]
        inherited[backend] = {"RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE"} & commands._common_env(
            config, platform
        ).keys()
    assert not inherited["hccl"] and len(inherited["gloo"]) == 2


async def test_an_engine_that_hangs_has_a_publishs_time_from_when_the_trainers_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was asked to load long before; its health page stays green."""
    monkeypatch.setattr(while_healthy, "_HEALTH_EVERY_S", 0.02)
    loads = EngineLoads(num_workers=1, limit_s=0.2, health_timeout_s=1.0)
    looks: list[float] = []

    async def look(deadline_s: float) -> None:
        looks.append(deadline_s)

    engine: Any = SimpleNamespace(name="http://engine", check_health=look)
    sending: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def work(hangs: bool, sending: asyncio.Future[float]) -> str:
        await asyncio.sleep(0.5)  # the trainers' work, longer than a publish may take
        sending.set_result(time.perf_counter())
        await asyncio.sleep(60 if hangs else 0.05)
        return "loaded"

    assert await loads.while_healthy(engine, work(False, sending), sending) == "loaded"
    sending = asyncio.get_running_loop().create_future()
    start_s = time.perf_counter()
    with pytest.raises(
        DeadlineExceeded,
        match=r"http://engine: it has not loaded the weights 0.2 s after the trainers began",
    ):
        await asyncio.wait_for(loads.while_healthy(engine, work(True, sending), sending), 30)
    assert time.perf_counter() - start_s > 0.7 and looks
