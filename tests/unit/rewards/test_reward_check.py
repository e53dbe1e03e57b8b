"""Functions that cannot be used are refused in one line before a run, and usable ones are waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.sections.reward import RewardFunction
from pa_npu.errors import DataError
from pa_npu.rewards import loading
from pa_npu.rewards.check import check_reward_functions
from pa_npu.rewards.pool import RewardPool
from tests.helpers.users_rewards import full_config, group, users_config

pytestmark = pytest.mark.usefixtures("users_module")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:f", "ModuleNotFoundError"),
        ("users_rewards:no_such_function", "AttributeError"),
        ("users_rewards:not_a_function", "is a int, not a function"),
        (
            "users_rewards:two_parameters",
            "takes (group, more), which is neither one group, nor verl's",
        ),
        ("broken_rewards:f", "SyntaxError"),
        ("exiting_rewards:f", "SystemExit: 0"),
        ("raising_rewards:f", "Own: x, "),
        ("interrupting_rewards:f", "KeyboardInterrupt, "),
        ("dying_rewards:f", "the reward worker died while loading them"),
    ],
)
def test_the_check_before_a_run_refuses_functions_that_cannot_be_used(
    name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "broken_rewards.py").write_text("def f(:")
    (tmp_path / "exiting_rewards.py").write_text("raise SystemExit(0)")
    (tmp_path / "raising_rewards.py").write_text("class Own(BaseException): pass\nraise Own('x')")
    (tmp_path / "interrupting_rewards.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "dying_rewards.py").write_text("import os; os._exit(1)")
    with pytest.raises(DataError) as caught:
        check_reward_functions(full_config(RewardFunction(name=name)))
    assert reason in str(caught.value) and str(caught.value).startswith("reward.functions: ")
    assert "\n" not in str(caught.value)


def test_the_check_before_a_run_accepts_usable_functions_and_refuses_a_broken_pattern() -> None:
    check_reward_functions(
        full_config(RewardFunction(name="math"), RewardFunction(name="users_rewards:by_row"))
    )
    with pytest.raises(DataError, match=r"format pattern '\(' is not a regular expression"):
        check_reward_functions(full_config(RewardFunction(name="format", pattern="(")))


@pytest.mark.parametrize("deaths", [2, 3])
async def test_a_worker_that_is_killed_while_it_loads_is_started_again_twice(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as it takes to tell somebody's signal from a function that ends its process that
    way.
    """
    starts = tmp_path / "starts"
    (tmp_path / "killed_rewards.py").write_text(
        "import os, signal\n"
        f"with open({str(starts)!r}, 'a') as file: file.write('.')\n"
        f"if os.path.getsize({str(starts)!r}) <= {deaths}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "def f(group): return [1.0] * len(group.responses)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if deaths == 3:
        with pytest.raises(DataError, match="the reward worker died while loading them"):
            async with RewardPool(users_config("killed_rewards:f")):
                pytest.fail("the pool must not start")
    else:
        async with RewardPool(users_config("killed_rewards:f")) as pool:
            assert (await pool.score(group())).total.tolist() == [1.0] * len(group().responses)
    assert len(starts.read_text()) == 3
    assert caplog.text.count("was killed while it began (SIGKILL); started again") == 2


async def test_entering_a_pool_with_an_unusable_function_says_the_same() -> None:
    with pytest.raises(DataError, match="no_such_module"):
        async with RewardPool(users_config("no_such_module:f")):
            pytest.fail("the pool must not start")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("time.sleep(3600)", "has waited for 1.5 s without an end"),
        ("while True: pass", "has computed for 1 s without"),
        ("import re; re.match('(a+)+$', 'a' * 60 + 'b')", "has computed for 1 s without"),
    ],
)
def test_a_module_whose_import_never_ends_is_refused_in_one_line_that_names_it(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PATIENCE_S", (1.5, 1.0))
    (tmp_path / "endless_rewards.py").write_text(f"import time\n{body}\n")
    with pytest.raises(
        DataError, match=rf"reward\.functions: endless_rewards:f cannot be imported.*{reason}"
    ) as refused:
        check_reward_functions(full_config(RewardFunction(name="endless_rewards:f")))
    assert "\n" not in str(refused.value)


def test_an_import_that_loads_modules_or_computes_now_and_then_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = {"wall": 0.0, "processor": 0.0}
    modules: dict[str, Any] = {}
    monkeypatch.setattr(loading.time, "monotonic", lambda: clock["wall"])
    monkeypatch.setattr(loading.time, "process_time", lambda: clock["processor"])
    monkeypatch.setattr(loading.sys, "modules", modules)
    progress = loading._Progress(20.0, 60.0)
    for step in range(100):  # a slow disk: a module every 15 s
        clock["wall"] += 15.0
        modules[f"module{step}"] = None
        assert not progress.stands_still()
    for _ in range(8):  # a busy machine: a tenth of a processor, and no new module
        clock["wall"] += 60.0
        clock["processor"] += 6.0
        assert not progress.stands_still()
    clock["wall"], clock["processor"] = clock["wall"] + 600.0, clock["processor"] + 20.0
    assert "has computed for 60 s" in progress.stands_still()
