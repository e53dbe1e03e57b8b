"""`pa_npu.Run`: rewards by their names, rows as a file, records as they come, a bad end as an error, and its stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import pa_npu
from pa_npu import Run, RunFailed, load_config
from pa_npu.errors import ConfigError, UserError
from pa_npu.rewards.functions import RewardInput
from tests.unit.launcher.test_cli import ROOT

KEYS = {"model.path": "m", "data.test": None}


def lengths(group: RewardInput) -> list[int]:
    return list(group.response_tokens)


def test_a_reward_that_no_worker_can_import_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offset = 3

    def closes(group: RewardInput) -> list[float]:
        return [float(tokens + offset) for tokens in group.response_tokens]

    def of_the_script(group: RewardInput) -> list[float]:
        return [0.0]

    of_the_script.__module__ = "__main__"
    of_the_script.__qualname__ = "of_the_script"
    monkeypatch.setattr(sys.modules["__main__"], "of_the_script", of_the_script, raising=False)
    for reward in (closes, lambda group: [0.0], of_the_script, partial(lengths), 3):
        with pytest.raises(
            UserError,
            match="cannot be imported by the run's workers; write it at the top level of a mod",
        ) as refused:
            Run(ROOT / "configs" / "grpo_tiny.yaml", KEYS, reward=reward)  # type: ignore[arg-type]
        assert "\n" not in str(refused.value)


def test_a_reward_is_found_by_another_process_where_its_module_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is on this process's path only, and a package's own file is found from its parent."""
    (tmp_path / "own" / "mine").mkdir(parents=True)
    (tmp_path / "own" / "mine" / "__init__.py").write_text(
        "def lengths(group):\n    return group.response_tokens\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    keys = {**KEYS, "run.dir": str(tmp_path / "r"), "data.train": "t.jsonl"}
    run = Run(
        ROOT / "configs" / "grpo_tiny.yaml", keys, reward=[import_module("mine").lengths, "math"]
    )
    assert [function.name for function in run.config.reward.functions] == ["mine:lengths", "math"]
    script = (
        "from pa_npu.rewards.functions import "
        "import_reward\nimport_reward('mine:lengths')\nprint('found', flush=True)"
    )
    interpreter = tmp_path / "python"
    (tmp_path / "find.py").write_text(script)
    interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'find.py'}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr("pa_npu.api.sys.executable", str(interpreter))
    monkeypatch.chdir(tmp_path)
    run.start().wait(60)
    assert run._lines[-1] == "found"


def test_objects_become_keys_and_files(tmp_path: Path) -> None:
    rows = ({"question": f"What is {n}?", "answer": str(n)} for n in range(40))
    run = Run(
        ROOT / "configs" / "grpo_tiny.yaml",
        {**KEYS, "run.dir": str(tmp_path / "r"), "schedule.iterations": 3},
        reward=lengths,
        train=rows,
    )
    assert (run.config.schedule.iterations, run.config.data.test, run.dir) == (
        3,
        None,
        tmp_path / "r",
    )
    assert [function.name for function in run.config.reward.functions] == [
        "tests.unit.launcher.test_api:lengths"
    ]
    written = [json.loads(line) for line in Path(run.config.data.train).read_text().splitlines()]
    assert len(written) == 40 and written[7] == {"question": "What is 7?", "answer": "7"}
    again = Run(run.config, {"run.seed": 5}, on_line=None)
    assert again.config.run.seed == 5 and again.config.schedule.iterations == 3
    with pytest.raises(ConfigError, match=r"did you mean algorithm\.kl_coef"):
        Run(run.config, {"algorithm.kl_coeff": 1})
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

    def make(iterations: int, last: str, ending: str, message: list[str]) -> Run:
        script = FAKE.format(
            directory=str(tmp_path / "r"), iterations=iterations, last=last, ending=ending
        )
        interpreter = tmp_path / "python"
        interpreter.write_text(
            f"#!/bin/sh\nexec {sys.executable} -c '{script.replace(chr(39), chr(34))}'\n"
        )
        interpreter.chmod(0o755)
        monkeypatch.setattr("pa_npu.api.sys.executable", str(interpreter))
        keys = {**KEYS, "run.dir": str(tmp_path / "r"), "data.train": "t.jsonl"}
        return Run(str(ROOT / "configs" / "grpo_tiny.yaml"), keys, on_line=message.append)

    return make


def test_records_come_until_the_run_ends(fake: Any, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text(json.dumps({"iteration": 9, "time": 1.0}) + "\n")
    lines: list[str] = []
    with fake(3, "done", "", lines) as run:
        assert [record["iteration"] for record in run] == [0, 1, 2], (
            "records of an earlier run are not this one's"
        )
    assert lines == ["pa_npu: a launcher", "done"] and not run.is_running
    with pytest.raises(UserError, match="started already"):
        run.start()


def test_a_bad_end_is_an_error_with_the_launchers_line(fake: Any) -> None:
    lines: list[str] = []
    with (
        fake(1, "error: model.path: no such directory", "sys.exit(2)", lines) as run,
        pytest.raises(RunFailed) as failed,
    ):
        list(run)
    assert failed.value.code == 2 and "error: model.path: no such directory" in str(failed.value)


def test_leaving_the_block_stops_the_run(fake: Any) -> None:
    lines: list[str] = []
    with fake(1, "working", "time.sleep(600)", lines) as run:
        next(iter(run))
        pid = run._process.pid
        while "working" not in lines:
            time.sleep(0.01)
    assert lines[-1] == "stopping" and not run.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def test_stop_asks_for_an_end_after_the_iteration_and_is_no_failure(
    fake: Any, tmp_path: Path
) -> None:
    lines: list[str] = []
    with fake(2, "working", "time.sleep(600)", lines) as run:
        for record in run:
            if record["iteration"] == 1:
                while "working" not in lines:
                    time.sleep(0.01)
                run.stop()
    assert lines[-1] == "stopping", (
        "SIGINT, which the launcher was started to finish the iteration on"
    )
    arguments = run._process.args
    assert arguments[arguments.index("--on-interrupt") + 1] == "finish"
    with pytest.raises(RunFailed):  # only who waits for a good end hears of it
        run.wait()


def test_an_exception_in_the_block_stops_the_run_at_once(fake: Any) -> None:
    lines: list[str] = []
    with pytest.raises(ZeroDivisionError), fake(1, "working", "time.sleep(600)", lines) as run:
        while "working" not in lines:
            time.sleep(0.01)
        1 / 0  # noqa: B018
    assert run._process.returncode == -signal.SIGTERM and "stopping" not in lines


def test_the_final_weights_are_named_only_where_they_are(fake: Any, tmp_path: Path) -> None:
    run = fake(1, "done", "", [])
    (tmp_path / "r" / "hf").mkdir(parents=True)
    with pytest.raises(
        UserError,
        match=r"Run\.hf: .* is not there; a run writes it when it is done or ended by stop",
    ):
        run.hf  # noqa: B018
    (tmp_path / "r" / "hf" / "config.json").touch()
    assert run.hf == tmp_path / "r" / "hf"


def test_the_names_of_the_package_are_those_of_its_parts() -> None:
    from pa_npu.config.schema import Config

    assert pa_npu.Config is Config and pa_npu.load_config is load_config
    with pytest.raises(AttributeError):
        pa_npu.Trainer  # noqa: B018
