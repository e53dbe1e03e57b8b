"""Reward functions that wait (`async def`) run for many groups at once, with the time limit and the failures of all others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.reward import RewardConfig, RewardFunction
from pa_npu.errors import DataError, PaNpuError
from pa_npu.rewards import worker_processes
from pa_npu.rewards.check import check_reward_functions
from pa_npu.rewards.functions import RewardInput
from pa_npu.rewards.pool import RewardPool

USERS_MODULE = """
import asyncio, os, time

class Own(BaseException):
    pass

async def waits(group):
    row = group.row
    if "pid_file" in row:
        with open(row["pid_file"], "a") as file:
            file.write(f"{os.getpid()}\\n")
    while "wait_for" in row and not os.path.exists(row["wait_for"]):
        await asyncio.sleep(0.005)
    if row.get("raise"):
        raise KeyError("no such thing")
    if row.get("leaves"):
        raise SystemExit("and all groups with it")
    if row.get("own"):
        raise Own("x")
    if row.get("blocks"):
        time.sleep(600)
    if row.get("exit"):
        os._exit(row["exit"])
    if row.get("hold"):
        await asyncio.sleep(600)
    return row.get("rewards", [len(text) for text in group.responses])

def computes(group):
    return [1.0] * len(group.responses)

class Object:
    async def __call__(self, group):
        return [2.0] * len(group.responses)

an_object = Object()
"""


@pytest.fixture(autouse=True)
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_waiting.py").write_text(USERS_MODULE)
    monkeypatch.chdir(tmp_path)


def group(responses: Sequence[str] = ("ab", "abc"), **row: Any) -> RewardInput:
    return RewardInput("What is 2+2?", "4", responses, [3] * len(responses), row)


def config(*names: str, **settings: Any) -> RewardConfig:
    names = names or ("waits",)
    return RewardConfig(
        functions=tuple(RewardFunction(name=f"users_waiting:{name}") for name in names), **settings
    )


async def test_functions_that_wait_and_those_that_compute_are_summed_in_the_configurations_order() -> (
    None
):
    async with RewardPool(config("computes", "waits", "an_object")) as pool:
        result = await pool.score(group())
    assert list(result.functions) == [
        f"users_waiting:{name}" for name in ("computes", "waits", "an_object")
    ]
    assert result.total.tolist() == [5.0, 6.0] and result.errors == ()


async def test_groups_do_not_wait_for_each_other_and_get_their_own_rewards(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with RewardPool(config(workers=1, timeout_s=60)) as pool:
        held = [
            asyncio.create_task(pool.score(group(["x" * n], wait_for=str(gate))))
            for n in range(1, 21)
        ]
        passing = await asyncio.wait_for(pool.score(group(["abcd"])), 30)
        assert passing.total.tolist() == [4.0] and not any(task.done() for task in held)
        gate.touch()
        results = await asyncio.wait_for(asyncio.gather(*held), 30)
    assert [result.total.tolist() for result in results] == [[float(n)] for n in range(1, 21)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"raise": True}, "KeyError: 'no such thing', "),
        ({"leaves": True}, "SystemExit: and all groups with it, "),
        ({"own": True}, "Own: x, "),
        ({"rewards": [1.0]}, "returned 1 rewards for 2 responses"),
        ({"rewards": [1.0, float("nan")]}, "not finite"),
        ({"rewards": None}, "returned a NoneType, not a list"),
        ({"hold": True}, "not done within reward.timeout_s = 1 s"),
    ],
)
async def test_a_failure_is_a_logged_zero_of_its_group_alone(
    row: dict[str, Any], reason: str
) -> None:
    async with RewardPool(config("waits", "computes", timeout_s=1.0)) as pool:
        bad, good = await asyncio.gather(pool.score(group(**row)), pool.score(group()))
    assert bad.total.tolist() == [1, 1] and len(bad.errors) == 1 and reason in bad.errors[0]
    assert good.total.tolist() == [3, 4] and good.errors == ()


async def test_a_process_that_is_killed_is_asked_again_and_rewards_do_not_change(
    tmp_path: Path,
) -> None:
    gate, pids = tmp_path / "gate", tmp_path / "pids"
    async with RewardPool(config(timeout_s=60)) as pool:
        hit = asyncio.create_task(pool.score(group(wait_for=str(gate), pid_file=str(pids))))
        while not pids.exists() or not pids.read_text().endswith("\n"):
            await asyncio.sleep(0.01)
        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
        gate.touch()
        result = await asyncio.wait_for(hit, 60)
    assert result.total.tolist() == [2, 3] and result.errors == ()


@pytest.mark.parametrize("row", [{"exit": 3}, {"blocks": True}])
async def test_a_group_that_kills_or_blocks_its_process_each_time_costs_its_reward(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "SILENCE_S", 2.0)
    async with RewardPool(config("waits", "computes", timeout_s=0.5)) as pool:
        result = await asyncio.wait_for(pool.score(group(**row)), 120)
        later = await asyncio.wait_for(pool.score(group()), 60)
    assert result.total.tolist() == [1, 1] and "died 3 times" in result.errors[0]
    assert later.total.tolist() == [3, 4]


async def test_closing_fails_what_waits() -> None:
    async with RewardPool(config(timeout_s=60)) as pool:
        waiting = asyncio.create_task(pool.score(group(hold=True)))
        await asyncio.sleep(0)  # it is on its way
    with pytest.raises(PaNpuError, match="closed"):
        await waiting


def test_the_check_before_a_run_calls_a_function_that_waits() -> None:
    def full(name: str) -> Config:
        reward = {"functions": [{"name": f"users_waiting:{name}"}], "timeout_s": 1.0}
        return Config.model_validate(
            {"model": {"path": "m"}, "data": {"train": "d"}, "reward": reward}
        )

    check_reward_functions(full("waits"), group())
    check_reward_functions(full("an_object"))
    with pytest.raises(
        DataError,
        match=r"users_waiting:waits fails for a group of the dataset: KeyError.*users_waiting\.py:",
    ):
        check_reward_functions(full("waits"), group(**{"raise": True}))
    with pytest.raises(DataError, match=r"not done within reward\.timeout_s"):
        check_reward_functions(full("waits"), group(hold=True))
