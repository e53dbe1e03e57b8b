"""`pa_npu.Run`: rewards of the caller's process, rows as a file, records as they come, a bad end as an error, and its stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import pa_npu
from pa_npu import Run, RunFailed, load_config
from pa_npu.api import reward_client
from pa_npu.api.reward_server import RewardServer, answer
from pa_npu.errors import ConfigError, UserError
from pa_npu.rewards.types import RewardInput
from tests.unit.test_launcher_cli import ROOT

GROUP = RewardInput("What is 1+1?", "2", ("#### 2", "#### 3"), (4, 5), {"question": "What is 1+1?", "number": 7})
KEYS = {"model.path": "m", "data.test": None}


def lengths(group: RewardInput) -> list[int]:
    return list(group.response_tokens)


def test_a_function_of_the_caller_that_waits_is_awaited() -> None:
    async def waits(group: RewardInput) -> list[float]:
        await asyncio.sleep(0)
        return [float(tokens) for tokens in group.response_tokens]

    group = {**asdict(GROUP), "row": dict(GROUP.row)}
    line = json.dumps({"function": "waits", "group": group}).encode()
    assert json.loads(answer({"waits": waits}, line)) == {"rewards": [4.0, 5.0]}


def test_a_worker_hears_from_the_callers_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def whole(group: RewardInput) -> list[float]:
        heard.append((threading.current_thread(), group))
        return [1.0, 0.5]

    def fails(group: RewardInput) -> list[float]:
        raise KeyError("no such row")

    server = RewardServer([whole, lengths, fails, lambda group: [0.0, 0.0]])
    assert [name.partition(":")[2] for name in server.names] == ["whole", "lengths", "fails", "reward_3"]
    for name, value in server.start().items():
        monkeypatch.setenv(name, value)
        assert Path(value).parent.stat().st_mode & 0o777 == 0o700
    try:
        assert reward_client.whole(GROUP) == [1.0, 0.5]
        assert reward_client.lengths(GROUP) == [4.0, 5.0] and reward_client.reward_3(GROUP) == [0.0, 0.0]
        with pytest.raises(RuntimeError, match="KeyError: 'no such row'"):
            reward_client.fails(GROUP)
        with pytest.raises(RuntimeError, match="nobody"):
            reward_client.nobody(GROUP)
    finally:
        server.close()
    ((thread, group),) = heard
    assert thread is not threading.main_thread() and (group.row["number"], group.answer) == (7, "2")
    monkeypatch.delenv(reward_client.SOCKET_VARIABLE)
    with pytest.raises(UserError, match="lives in the process that made the run"):
        reward_client.whole(GROUP)


def test_objects_become_keys_and_files(tmp_path: Path) -> None:
    rows = ({"question": f"What is {n}?", "answer": str(n)} for n in range(40))
    run = Run(
        ROOT / "configs" / "grpo_tiny.yaml",
        {**KEYS, "run.dir": str(tmp_path / "r"), "schedule.iterations": 3},
        reward=lengths,
        train=rows,
    )
    assert (run.config.schedule.iterations, run.config.data.test, run.dir) == (3, None, tmp_path / "r")
    assert [function.name for function in run.config.reward.functions] == ["pa_npu.api.reward_client:lengths"]
    written = [json.loads(line) for line in Path(run.config.data.train).read_text().splitlines()]
    assert len(written) == 40 and written[7] == {"question": "What is 7?", "answer": "7"}
    again = Run(run.config, {"run.seed": 5}, say=None)
    assert again.config.run.seed == 5 and again.config.schedule.iterations == 3
    with pytest.raises(ConfigError, match=r"did you mean algorithm\.kl_coef"):
        Run(run.config, {"algorithm.beta": 1})
    with pytest.raises(UserError, match="no function"):
        Run(run.config, reward=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot be written as JSON"):
        Run(run.config, train=[{"question": object()}])


FAKE = """
import json, pathlib, signal, sys, time
run = pathlib.Path({directory!r})
run.mkdir(exist_ok=True)
signal.signal(signal.SIGINT, lambda *_: (print("stopping", flush=True), sys.exit(130)))
print("pa_npu: a launcher", flush=True)
for iteration in range({iterations}):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({{"iteration": iteration, "time": time.time(), "reward_mean": 0.5}}) + "\\n")
    time.sleep(0.02)
print({last!r}, flush=True)
{ending}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Run whose launcher is a script."""

    def make(iterations: int, last: str, ending: str, said: list[str]) -> Run:
        script = FAKE.format(directory=str(tmp_path / "r"), iterations=iterations, last=last, ending=ending)
        interpreter = tmp_path / "python"
        interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{script.replace(chr(39), chr(34))}'\n")
        interpreter.chmod(0o755)
        monkeypatch.setattr("pa_npu.api.run.sys.executable", str(interpreter))
        keys = {**KEYS, "run.dir": str(tmp_path / "r"), "data.train": "t.jsonl"}
        return Run(str(ROOT / "configs" / "grpo_tiny.yaml"), keys, say=said.append)

    return make


def test_records_come_until_the_run_ends(fake: Any, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text(json.dumps({"iteration": 9, "time": 1.0}) + "\n")
    said: list[str] = []
    with fake(3, "done", "", said) as run:
        assert [record["iteration"] for record in run] == [0, 1, 2], "records of an earlier run are not this one's"
    assert said == ["pa_npu: a launcher", "done"] and not run.is_running
    with pytest.raises(UserError, match="started already"):
        run.start()


def test_a_bad_end_is_an_error_with_the_launchers_line(fake: Any) -> None:
    said: list[str] = []
    with (
        fake(1, "error: model.path: no such directory", "sys.exit(2)", said) as run,
        pytest.raises(RunFailed) as failed,
    ):
        list(run)
    assert failed.value.code == 2 and "error: model.path: no such directory" in str(failed.value)


def test_leaving_the_block_stops_the_run(fake: Any) -> None:
    said: list[str] = []
    with fake(1, "working", "time.sleep(600)", said) as run:
        next(iter(run))
        pid = run._process.pid
        while "working" not in said:
            time.sleep(0.01)
    assert said[-1] == "stopping" and not run.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def test_the_names_of_the_package_are_those_of_its_parts() -> None:
    from pa_npu.config.schema import Config

    assert pa_npu.Config is Config and pa_npu.load_config is load_config
    with pytest.raises(AttributeError):
        pa_npu.Trainer  # noqa: B018
