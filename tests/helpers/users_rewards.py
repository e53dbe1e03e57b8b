"""A module of reward functions that a user wrote, and groups for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.config.sections.inputs import DataConfig, ModelConfig
from pa_npu.config.sections.reward import RewardConfig, RewardFunction
from pa_npu.rewards.functions import RewardInput

USERS_MODULE = '''
import json, os, subprocess, sys, time

class Own(BaseException):
    pass

def by_row(group):
    """What the row asks for, so that a test can misbehave group by group."""
    row = group.row
    if "pid_file" in row:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(row["pid_file"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
    if "wait_for" in row:
        while not os.path.exists(row["wait_for"]):
            time.sleep(0.005)
    if row.get("endless"):
        while True:
            pass
    if row.get("exit"):
        os._exit(row["exit"])
    if row.get("raise"):
        raise KeyError("no\\nsuch thing")
    if row.get("own"):
        raise Own("x")
    if row.get("print"):
        print('{"id": 1, "rewards": [[9, 9]], "errors": []}', flush=True)
        print(sys.stdin.read(), flush=True)
    return row.get("rewards", [len(text) for text in group.responses])

def everything(group):
    assert group.prompt == "What is 2+2?" and group.answer == "4" and group.row == {"level": [1, "a"], "day": "2026-01-02"}
    assert list(group.responses) == ["#### 4", "#### 5"] and list(group.response_tokens) == [3, 4]
    return [0.5, -0.5]

def graded(group):
    return [0.128, 0.5][: len(group.responses)]

def two_parameters(group, more):
    return []

not_a_function = 5
'''


def group(responses: Sequence[str] = ("ab", "abc"), **row: Any) -> RewardInput:
    return RewardInput("What is 2+2?", "4", responses, [3] * len(responses), row)


def users_config(name: str = "users_rewards:by_row", **settings: Any) -> RewardConfig:
    return RewardConfig(functions=(RewardFunction(name=name),), **settings)


def full_config(*functions: RewardFunction) -> Config:
    return Config(
        model=ModelConfig(path="m"),
        data=DataConfig(train="d"),
        reward=RewardConfig(functions=functions),
    )


SLOW = r"\boxed{\left(10^{10}\right)!}"  # one call of C that no exception ends
