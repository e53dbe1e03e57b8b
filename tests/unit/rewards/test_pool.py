"""Rewards come from worker processes, each group's from any of them, and nothing that ends a worker costs the run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pa_npu.config.sections.reward import RewardConfig
from pa_npu.control.worker_process import WorkerProcess
from pa_npu.errors import PaNpuError
from pa_npu.rewards import worker_processes
from pa_npu.rewards.pool import RewardPool
from tests.helpers.processes import running
from tests.helpers.users_rewards import group, users_config

pytestmark = pytest.mark.usefixtures("users_module")


async def until_gone(pid: int, deadline_s: float = 10.0) -> None:
    async def gone() -> None:
        while running(pid):
            await asyncio.sleep(0.01)

    await asyncio.wait_for(gone(), deadline_s)


async def written_pids(
    pid_file: Path, may_still_write: Callable[[], bool], deadline_s: float = 120.0
) -> tuple[int, int]:
    """Returns the process numbers of a worker and its child, once the worker has written them."""

    async def written() -> None:
        while not pid_file.exists() or not pid_file.read_text():
            assert may_still_write(), "it ended before a worker scored the group"
            await asyncio.sleep(0.01)

    await asyncio.wait_for(written(), deadline_s)
    worker, child = map(int, pid_file.read_text().split())
    return worker, child


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
    assert [(another.total.tolist(), another.errors) for another in others] == [([4, 1], ())] * 6
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
    assert [another.total.tolist() for another in others] == [[2, 3]] * 40 and result.errors == ()


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
        worker, child = await written_pids(pid_file, lambda: not waiting.done())
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
from pa_npu.config.sections.reward import RewardConfig, RewardFunction
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
    worker, child = await written_pids(pid_file, lambda: parent.returncode is None)
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
