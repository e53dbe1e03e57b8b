"""Rewards come from worker processes; whatever a reward function does costs rewards of its group, never the run."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.inputs import DataConfig, ModelConfig
from pa_npu.config.sections.rollout import STARVED_FACTOR, RewardConfig, RewardFunction
from pa_npu.control import running_time
from pa_npu.control.worker_process import WorkerProcess
from pa_npu.errors import DataError, PaNpuError
from pa_npu.rewards import loading, worker_processes
from pa_npu.rewards.check import check_reward_functions
from pa_npu.rewards.functions import RewardInput, call_function
from pa_npu.rewards.pool import LEAST, WINDOW, FailingShare, RewardPool

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


@pytest.fixture(autouse=True)
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_rewards.py").write_text(USERS_MODULE)
    monkeypatch.chdir(tmp_path)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_gone(pid: int, deadline_s: float = 10.0) -> None:
    async def gone() -> None:
        while running(pid):
            await asyncio.sleep(0.01)

    await asyncio.wait_for(gone(), deadline_s)


async def test_weighted_sum_verdict_and_labels() -> None:
    config = RewardConfig(
        functions=(
            RewardFunction(name="format", pattern=r"^<think>.*</think>", weight=0.25),
            RewardFunction(name="math"),
            RewardFunction(name="format", pattern=r"####", weight=-0.5),
        )
    )
    async with RewardPool(config) as pool:
        result = await pool.score(
            group(["<think>2\n2</think>\n#### 4", "#### 4", "4", "<think></think> 5"])
        )
    np.testing.assert_array_equal(result.functions["format"], [1, 0, 0, 1])
    np.testing.assert_array_equal(result.functions["math"], [1, 1, 1, 0])
    np.testing.assert_array_equal(result.functions["format#2"], [1, 1, 0, 0])
    np.testing.assert_array_equal(result.total, [0.75, 0.5, 1, 0.25])
    assert result.correct.tolist() == [True, True, True, False], (
        "the verdict is math's, not format's"
    )
    assert result.total.dtype == np.float32 and result.errors == ()


async def test_overlong_responses_lose_up_to_one_and_the_verdict_stays_maths() -> None:
    """DAPO, eq. 13, with L_max = 20 and L_cache = 5: 0 up to 15 tokens, (15 - length) / 5 up to 20,
    -1 beyond.
    """
    overlong = RewardFunction(name="overlong", buffer_tokens=5)
    lengths = [1, 15, 16, 18, 20, 21]
    config = RewardConfig(functions=(overlong, RewardFunction(name="math")))
    async with RewardPool(config, max_response_tokens=20) as pool:
        result = await pool.score(
            RewardInput("What is 2+2?", "4", ["#### 4"] * 5 + ["#### 5"], lengths, {})
        )
    np.testing.assert_allclose(result.functions["overlong"], [0, 0, -0.2, -0.6, -1, -1], rtol=1e-6)
    np.testing.assert_allclose(result.total, [1, 1, 0.8, 0.4, 0, -1], rtol=1e-6, atol=1e-7)
    assert result.correct.tolist() == [True] * 5 + [False]


async def test_a_graded_reward_counts_as_right_from_a_half_on() -> None:
    async with RewardPool(users_config("users_rewards:graded")) as pool:
        result = await pool.score(group())
    assert result.total.tolist() == pytest.approx([0.128, 0.5]) and result.correct.tolist() == [
        False,
        True,
    ]


async def test_a_users_function_receives_the_whole_group() -> None:
    row = {"level": [1, "a"], "day": datetime.date(2026, 1, 2)}
    async with RewardPool(users_config("users_rewards:everything")) as pool:
        result = await pool.score(
            RewardInput("What is 2+2?", "4", ["#### 4", "#### 5"], [3, 4], row)
        )
    assert (
        result.errors == ()
        and result.total.tolist() == [0.5, -0.5]
        and result.correct.tolist() == [True, False]
    )


async def test_what_a_function_prints_or_reads_does_not_disturb_the_protocol() -> None:
    async with RewardPool(users_config()) as pool:
        results = [await pool.score(group(print=True)), await pool.score(group())]
    assert [result.total.tolist() for result in results] == [[2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"raise": True}, "users_rewards:by_row: KeyError: 'no\\nsuch thing'"),
        ({"own": True}, "users_rewards:by_row: Own: x, "),
        ({"rewards": [1.0]}, "returned 1 rewards for 2 responses"),
        ({"rewards": [1.0, float("nan")]}, "not finite"),
        ({"rewards": None}, "returned a NoneType, not a list"),
        ({"rewards": "ab"}, "returned a str, not a list"),
        ({"exit": 3}, "its reward worker died 3 times (last: exit code 3)"),
    ],
)
async def test_a_failing_function_is_a_logged_zero_and_the_next_group_is_fine(
    row: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with RewardPool(users_config()) as pool:
        bad, good = await asyncio.gather(pool.score(group(**row)), pool.score(group()))
        later = await pool.score(group())
    assert bad.total.tolist() == [0, 0] and not bad.correct.any()
    assert len(bad.errors) == 1 and reason in bad.errors[0] and "\n" not in bad.errors[0]
    assert good.total.tolist() == later.total.tolist() == [2, 3] and good.errors == ()
    assert reason in caplog.text and "What is 2+2?" in caplog.text


async def test_only_the_failing_function_loses_its_reward() -> None:
    config = RewardConfig(
        functions=(RewardFunction(name="math"), RewardFunction(name="users_rewards:by_row"))
    )
    async with RewardPool(config) as pool:
        result = await pool.score(group(["#### 4", "#### 5"], **{"raise": True}))
    assert (
        result.total.tolist() == [1, 0]
        and result.correct.tolist() == [True, False]
        and len(result.errors) == 1
    )


@pytest.mark.parametrize("row", [{"raise": True}, {"exit": 3}])
async def test_a_function_that_keeps_failing_ends_the_run_and_the_line_says_what_it_raised(
    row: dict[str, Any],
) -> None:
    """Also when only one of several functions fails."""
    # a worker that ends imports it again
    others = (RewardFunction(name="math"),) if "raise" in row else ()
    async with RewardPool(
        RewardConfig(functions=(*others, RewardFunction(name="users_rewards:by_row")))
    ) as pool:
        for _ in range(LEAST - 1):
            assert (await pool.score(group(**row))).errors
        with pytest.raises(
            DataError, match=r"failed for 8 of the last 8 groups.*correct the function"
        ) as ended:
            await pool.score(group(**row))
    if "raise" in row:
        assert "users_rewards:by_row" in str(ended.value) and "users_rewards.py:" in str(
            ended.value
        )


async def test_functions_that_fail_now_and_then_do_not_end_the_run() -> None:
    async with RewardPool(users_config()) as pool:
        for number in range(3 * LEAST):
            await pool.score(group(**({"raise": True} if number % 2 else {})))


def test_the_failing_share_is_that_of_the_last_groups_only() -> None:
    share = FailingShare(["f", "g"])
    for _ in range(10 * WINDOW):
        share.record({})
    for _ in range(WINDOW // 2):
        share.record({"f": "ValueError: x"})
    with pytest.raises(
        DataError, match=r"f failed for 33 of the last 64 groups.*last: ValueError: y"
    ):
        share.record({"f": "ValueError: y"})


async def test_a_group_over_the_time_limit_is_killed_with_its_children_and_gets_zero(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pids"
    async with RewardPool(users_config(timeout_s=2.0)) as pool:
        start_s = time.perf_counter()
        slow, behind = await asyncio.gather(
            pool.score(group(endless=True, pid_file=str(pid_file))), pool.score(group())
        )
        assert time.perf_counter() - start_s >= 2.0
        worker, child = map(int, pid_file.read_text().split())
        await until_gone(worker)
        await until_gone(child)
    assert slow.total.tolist() == [0, 0] and "reward.timeout_s = 2 s" in slow.errors[0]
    assert behind.total.tolist() == [2, 3] and behind.errors == (), (
        "the group behind must not pay for the slow one"
    )


def starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the kernel say that the worker has waited for a processor ever since the machine began."""
    monkeypatch.setattr(running_time, "waits_of", lambda root: {"worker": time.monotonic_ns()})


async def test_a_busy_machine_costs_no_reward_of_a_users_function_and_a_hanging_one_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "release"
    limit_s = 0.4
    async with RewardPool(users_config(timeout_s=limit_s)) as pool:
        starve(monkeypatch)
        scored = asyncio.create_task(pool.score(group(wait_for=str(release))))
        done, _ = await asyncio.wait({scored}, timeout=3 * limit_s)
        release.touch()
        assert not done and (await scored).errors == (), "it had no processor"
        start_s = time.monotonic()
        hanging = await pool.score(group(endless=True))
        assert time.monotonic() - start_s >= STARVED_FACTOR * limit_s
    assert hanging.total.tolist() == [0, 0] and "reward.timeout_s = 0.4 s" in hanging.errors[0]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_group_whose_worker_is_killed_is_scored_again_with_those_behind_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    """I6: whoever kills a worker, rewards are those of the run in which nobody did."""
    pid_file, release = tmp_path / "pids", tmp_path / "release"
    async with RewardPool(users_config(workers=workers, timeout_s=60)) as pool:
        hit = asyncio.create_task(pool.score(group(wait_for=str(release), pid_file=str(pid_file))))
        behind = [asyncio.create_task(pool.score(group(["abcd", "a"]))) for _ in range(6)]
        killed = []
        for _ in range(2):
            while (
                not (pids := pid_file.read_text().split() if pid_file.exists() else [])
                or pids[0] in killed
            ):
                await asyncio.sleep(0.01)
            killed.append(pids[0])
            os.kill(int(pids[0]), signal.SIGKILL)
        release.touch()
        result = await asyncio.wait_for(hit, 30)
        others = await asyncio.wait_for(asyncio.gather(*behind), 30)
    assert result.total.tolist() == [2, 3] and result.errors == ()
    assert [(other.total.tolist(), other.errors) for other in others] == [([4, 1], ())] * 6
    assert caplog.text.count("died (SIGKILL); what it scored is scored again") == 2


async def test_one_slow_group_does_not_stall_the_others(tmp_path: Path) -> None:
    release = tmp_path / "release"
    async with RewardPool(users_config(workers=2, timeout_s=60)) as pool:
        slow = asyncio.create_task(pool.score(group(wait_for=str(release))))
        others = await asyncio.wait_for(
            asyncio.gather(*(pool.score(group()) for _ in range(40))), 30
        )
        assert not slow.done()
        release.touch()
        result = await asyncio.wait_for(slow, 30)
    assert [other.total.tolist() for other in others] == [[2, 3]] * 40 and result.errors == ()


async def test_waiting_does_not_count_towards_the_time_limit(tmp_path: Path) -> None:
    # Each takes 0.8 s of a limit of 3 s, in sequence 4 s.
    marks = [str(tmp_path / f"mark{number}") for number in range(5)]

    async def touch_later() -> None:
        for mark in marks:
            await asyncio.sleep(0.8)
            Path(mark).touch()

    async with RewardPool(users_config(timeout_s=3.0)) as pool:
        toucher = asyncio.create_task(touch_later())
        results = await asyncio.gather(*(pool.score(group(wait_for=mark)) for mark in marks))
        await toucher
    assert all(result.errors == () for result in results)


async def test_results_belong_to_their_groups_whatever_the_workers() -> None:
    groups = [group([f"#### {number % 5}", f"#### {(number + 1) % 5}"]) for number in range(200)]
    async with RewardPool(RewardConfig(workers=2)) as pool:
        results = await asyncio.gather(*map(pool.score, groups))
    expected = [[float(number % 5 == 4), float((number + 1) % 5 == 4)] for number in range(200)]
    assert [result.total.tolist() for result in results] == expected


async def test_closing_ends_workers_and_fails_what_waits(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    async with RewardPool(users_config()) as pool:
        waiting = asyncio.create_task(pool.score(group(endless=True, pid_file=str(pid_file))))
        while not pid_file.exists() or not pid_file.read_text():
            await asyncio.sleep(0.01)
    worker, child = map(int, pid_file.read_text().split())
    await until_gone(worker)
    await until_gone(child)
    with pytest.raises(PaNpuError, match="closed"):
        await waiting
    with pytest.raises(PaNpuError, match="closed"):
        await pool.score(group())


async def test_closing_ends_a_worker_that_is_being_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio.wait_for of Python 3.10 and 3.11 returns in place of being cancelled when what it
    waits for has just come.
    """
    replacing = asyncio.Event()

    async def reap(self: WorkerProcess) -> str:
        replacing.set()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            pass
        finally:
            self.kill()
        return "SIGKILL"

    async with RewardPool(users_config()) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(WorkerProcess, "reap", reap)
            scored = asyncio.create_task(pool.score(group(exit=9)))
            await asyncio.wait_for(replacing.wait(), 10)
        closing = asyncio.create_task(pool.close())
        assert (await asyncio.wait({closing}, timeout=30))[0], "the pool does not close"
    with pytest.raises(PaNpuError, match="closed"):
        await scored


async def test_a_cancelled_caller_does_not_disturb_the_pool(tmp_path: Path) -> None:
    release = tmp_path / "release"
    async with RewardPool(users_config()) as pool:
        tasks = [asyncio.create_task(pool.score(group(wait_for=str(release)))) for _ in range(6)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        release.touch()
        assert [(await task).total.tolist() for task in tasks[1::2]] == [[2, 3]] * 3
        assert (await pool.score(group())).total.tolist() == [2, 3]


async def test_what_a_function_has_started_ends_with_its_worker_however_that_ends(
    tmp_path: Path,
) -> None:
    """The child has a session of its own, so that no process group holds both; and the worker's
    keeper may be stopped.
    """
    async with RewardPool(users_config(timeout_s=60)) as pool:
        await pool.score(group(pid_file=str(tmp_path / "ended"), exit=9))
        await until_gone(int((tmp_path / "ended").read_text().split()[1]))
        await pool.score(group(pid_file=str(tmp_path / "closed")))
        worker, child = map(int, (tmp_path / "closed").read_text().split())
        os.kill(
            int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]),
            signal.SIGSTOP,
        )
    await until_gone(worker)
    await until_gone(child)


async def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    program = f"""
import asyncio
from pa_npu.config.sections.rollout import RewardConfig, RewardFunction
from pa_npu.rewards.pool import RewardPool
from pa_npu.rewards.functions import RewardInput, call_function
async def main():
    async with RewardPool(RewardConfig(functions=(RewardFunction(name="users_rewards:by_row"),))) as pool:
        await pool.score(RewardInput("", "4", ["a"], [1], {{"pid_file": {str(pid_file)!r}, "endless": True}}))
asyncio.run(main())
"""
    root = str(Path(__file__).parents[3])
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env={**os.environ, "PYTHONPATH": root}
    )
    while not pid_file.exists() or not pid_file.read_text():
        await asyncio.sleep(0.01)
    worker, child = map(int, pid_file.read_text().split())
    assert running(worker)
    parent.kill()
    await parent.wait()
    await until_gone(worker)
    await until_gone(child)


async def test_a_pool_whose_workers_cannot_start_any_more_fails_instead_of_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_processes, "FAILED_STARTS", 1)
    async with RewardPool(users_config()) as pool:
        (tmp_path / "users_rewards.py").write_text("raise ImportError('the disk is gone')")
        died, waited = await asyncio.gather(
            pool.score(group(exit=1)), pool.score(group(wait_for="never")), return_exceptions=True
        )
        for outcome in (died, waited):
            assert isinstance(outcome, PaNpuError) and "the disk is gone" in str(outcome)
        with pytest.raises(PaNpuError, match="the disk is gone"):
            await pool.score(group())


def full_config(*functions: RewardFunction) -> Config:
    return Config(
        model=ModelConfig(path="m"),
        data=DataConfig(train="d"),
        reward=RewardConfig(functions=functions),
    )


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


NO_REWARDS = [
    ([1e39, 1.0], "1e+39 is beyond 1e+15"),
    ([1e308, 1.0], "beyond 1e+15"),
    ([-1e16, 1.0], "-1e+16 is beyond 1e+15"),
    ([10**400, 1], "more than 300 digits"),
    ([float("inf"), 1.0], "inf is not finite"),
    ([["1"], 1.0], "is a list, not a number"),
    (["1", "2"], "'1' is a str, not a number"),
    ([None, 1.0], "None is a NoneType, not a number"),
    ([1j, 1.0], "is a complex, not a number"),
    ({"a": 1.0, "b": 2.0}, "returned a dict, not a list"),
    ({0: 1.0, 1: 2.0}, "returned a dict, not a list"),
    ({1.0, 2.0}, "returned a set, not a list"),
    ({"a": 1, "b": 2}.values(), None),
    ("12", "returned a str, not a list"),
    (b"12", "returned a bytes, not a list"),
    (5.0, "returned a float, not a list"),
    ([[1.0, 2.0]], "returned 1 rewards for 2 responses"),
    (np.ones((2, 2)), "is not one number"),
    ([1e15, -1e15], None),
    ([True, False], None),
    (np.array([0.5, 1.0]), None),
    ((value for value in (0.5, 1.0)), None),
    (map(float, (0.5, 1.0)), None),
    ([np.float32(0.5), np.int64(1)], None),
]


@pytest.mark.parametrize(("returned", "reason"), NO_REWARDS, ids=lambda value: f"{value!r:.40}")
def test_a_reward_is_one_finite_number_that_float32_holds_for_each_response_in_order(
    returned: Any, reason: str | None
) -> None:
    rewards, problem = call_function(lambda _: returned, group())
    if reason is None:
        assert problem is None and len(rewards) == 2
    else:
        assert (
            rewards == [0.0, 0.0]
            and problem is not None
            and reason in problem
            and "\n" not in problem
        )


async def test_a_weighted_sum_beyond_the_range_is_zero_and_counted_as_a_failure() -> None:
    functions = (RewardFunction(name="users_rewards:by_row", weight=1e15),)
    async with RewardPool(RewardConfig(functions=functions)) as pool:
        result = await pool.score(group(rewards=[1e3, 1.0]))
        assert (
            result.total.tolist() == [0.0, 0.0]
            and "weighted sum of 1e+18 is beyond" in result.errors[0]
        )
        assert (await pool.score(group(rewards=[0.5, -1.0]))).total.tolist() == pytest.approx(
            [5e14, -1e15]
        )


@pytest.mark.parametrize("weight", [1e39, -1e16, float("inf"), float("nan")])
def test_a_weight_beyond_the_range_is_refused_with_the_configuration(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        RewardFunction(name="math", weight=weight)


SLOW = r"\boxed{\left(10^{10}\right)!}"  # one call of C that no exception ends


async def test_slow_answers_get_zero_and_the_right_ones_of_their_group_keep_one_whatever_the_clock_says() -> (
    None
):
    responses = [
        SLOW,
        *[r"\boxed{2x+1}"] * 3,
        SLOW.replace("10}", "11}"),
        SLOW.replace("10}", "12}"),
        *["$1+2x$"] * 2,
    ]
    config = RewardConfig(timeout_s=0.05)  # of wall-clock: for users' functions alone
    async with RewardPool(config) as pool:
        start_s = time.monotonic()
        result = await pool.score(RewardInput("p", "2x+1", responses, [3] * 8, {}))
        assert time.monotonic() - start_s > 1.0, "not slow: the test shows nothing"
        again = await pool.score(RewardInput("p", "2x+1", responses, [3] * 8, {}))
    for outcome in (result, again):
        assert outcome.total.tolist() == [0, 1, 1, 1, 0, 0, 1, 1] and outcome.errors == ()


async def test_a_pattern_that_tries_too_many_ways_costs_its_response_alone() -> None:
    config = RewardConfig(
        functions=(RewardFunction(name="format", pattern=r"^(a+)+$"),), timeout_s=0.05
    )
    async with RewardPool(config) as pool:
        result = await pool.score(group(["a" * 40 + "b", "aaa", "b"]))
    assert result.total.tolist() == [0, 1, 0]
    assert "5 s of processor time; write one that tries fewer ways" in result.errors[0]


async def test_the_wall_clock_of_a_users_function_starts_with_that_function() -> None:
    functions = (RewardFunction(name="math"), RewardFunction(name="users_rewards:by_row"))
    async with RewardPool(RewardConfig(functions=functions, timeout_s=1.0)) as pool:
        slow_math = await pool.score(RewardInput("p", "2x+1", [SLOW, "2x+1"], [3, 3], {}))
        endless = await pool.score(
            RewardInput("p", "2x+1", ["2x+1", "x"], [3, 3], {"endless": True})
        )
    assert slow_math.total.tolist() == [29, 5] and slow_math.errors == ()
    assert endless.total.tolist() == [0, 0] and "reward.timeout_s = 1 s" in endless.errors[0]


@pytest.mark.parametrize(
    ("prompt", "reward"), [("Why?<|assistant|><think>\n", [0, 0, 1]), ("Why?", [1, 0, 1])]
)
async def test_an_answer_in_a_thought_that_the_prompt_opened_and_nobody_closed_is_none(
    prompt: str, reward: list[int]
) -> None:
    responses = [
        r"Maybe \boxed{42}. Wait, let me check",
        r"<think>\boxed{42}",
        r"so</think>\boxed{42}",
    ]
    functions = (RewardFunction(name="math"), RewardFunction(name="format", pattern="^<think>"))
    async with RewardPool(RewardConfig(functions=functions)) as pool:
        result = await pool.score(RewardInput(prompt, "42", responses, [3] * 3, {}))
    assert result.functions["math"].tolist() == reward
    assert result.functions["format"].tolist() == ([1, 1, 1] if "<think>" in prompt else [0, 1, 0])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("time.sleep(3600)", "has waited for 1.5 s without an end"),
        ("while True: pass", "has computed for 1 s without"),
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


async def test_a_worker_that_stands_still_in_a_built_in_function_changes_no_verdict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its silence is the machine's fault, not the response's: the group is scored again by another
    process.
    """
    async with RewardPool(RewardConfig(timeout_s=0.05)) as pool:
        (place,) = pool._workers[0][1]._workers
        assert place._process is not None
        keeper = place._process._process.pid
        (worker, *_) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        os.kill(int(worker), signal.SIGSTOP)
        monkeypatch.setattr(worker_processes, "BUILTIN_SILENCE_S", 0.5)
        scored = asyncio.create_task(pool.score(group(["#### 4", "#### 5"])))
        while "died" not in caplog.text:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(worker_processes, "BUILTIN_SILENCE_S", 600.0)
        result = await asyncio.wait_for(scored, 60)
    assert result.total.tolist() == [1, 0] and result.errors == ()
    assert "it said nothing for" in caplog.text and "is scored again" in caplog.text
