"""Bad input ends before anything starts: one line that names the key or file:line and the remedy, exit code 2."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pa_npu.launcher.cli import main
from tests.helpers.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_starts", "supported_versions")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.windw=8"], "rollout.windw: unknown key; did you mean rollout.window?"),
        (["run.seed=-1"], "run.seed: -1 is out of range"),
        (["trainer.devices=3"], "set it to a multiple of 3"),
        (["trainer.devices=4", "trainer.tensor_parallel=4"], "trainer.tensor_parallel: 4 does not "
                                                             "divide the 2"),
        (["model.path=/nowhere/model"], "model.path: /nowhere/model is not a directory"),
        (["data.train=/nowhere/train.jsonl"], "data.train: /nowhere/train.jsonl"),
        (["data.max_prompt_tokens=4"], "data.max_prompt_tokens"),
        (["data.train=[{path: /nowhere/a}, {path: b}]"], "data.train.0: /nowhere/a does not exist"),
        (["data.template_options.thinking=true"], "the model's chat template does not read "
                                                  "thinking"),
        (["data.train=[{path: TRAIN, max_rows: 7}]"], "has 7 prompts for "
                                                      "schedule.prompts_per_iteration = 16"),
        (["data.answer_column=solution"], "train.jsonl:1: no value in solution (columns: question, "
                                          "answer"),
        (["reward.functions=[{name: 'no_such_module:f'}]"], "no_such_module:f cannot be imported"),
        (["reward.functions=[{name: 'math:pi'}]"], "math:pi"),
        (["reward.functions=[{name: format, pattern: '['}]"], "pattern"),
        (["algorithm.loss=no_such_module:f"], "algorithm.loss: no_such_module:f cannot be "
                                              "imported"),
        (["--dry-run", "algorithm.loss=math:hypot"], "algorithm.loss: math:hypot (hypot) failed on "
                                                     "a made-up batch"),
        (["algorithm.advantage=math:pi"], "algorithm.advantage: math:pi is a float, not a "
                                          "function"),
        (["run.dir=/proc/run"], "run.dir: /proc is not writable"),
        (["--device", "npu"], "run.device: npu cannot be used: torch_npu"),
        (["--device", "cuda"], "run.device: cuda cannot be used"),
        (["algorithm.advantage=batch-std"], "set schedule.stream=false"),
        (["placement.host=203.0.113.1"], "placement.host: cannot listen on 203.0.113.1"),
        (["rollout.python=/nowhere/python"], "rollout.python: /nowhere/python is not an "
                                             "executable"),
        (["rollout.attach=[http://127.0.0.1:9]"], "rollout.attach: http://127.0.0.1:9 does not "
                                                  "answer as an engine"),
        (["checkpoint.load=/nowhere"], "checkpoint.load: /nowhere is not a directory"),
        (["environment.name=tools", "environment.options.tool=no_such_module:f"], "tool no_such_module:f"),
        (["environment.options.tool=calculator"], "environment.options: would be read by nothing"),
        (["telemetry.tensorboard=true"], "removed in an earlier release; use telemetry.trackers"),
        (["run.dir='  '"], "run.dir: '  ' is blank"),
        (["--nonsense"], "--nonsense: unknown option"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: no such configuration file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], base: list[str], overrides: list[str], expected: str
) -> None:
    if "cuda" in overrides and torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    overrides = [
        override.replace("TRAIN", base[1].removeprefix("data.train=")) for override in overrides
    ]
    assert expected in refused(capsys, *base, *overrides)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "empty"),
        (['{"question": "1+1?", "answer": "#### 2"}', '{"question": '], "train.jsonl:2"),
        (['{"question": "1+1?"}'], "train.jsonl:1"),
    ],
)
def test_a_bad_dataset_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str],
    base: list[str],
    tmp_path: Path,
    lines: list[str],
    expected: str,
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(lines))
    assert expected in refused(capsys, *base, f"data.train={file}")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (".lock", Path.mkdir),
        ("logs", Path.touch),
        ("api_key", Path.mkdir),
        ("checkpoints", Path.touch),
        ("logs", os.mkfifo),
    ],
)
def test_what_stands_in_the_way_in_the_run_directory_is_named(
    capsys: pytest.CaptureFixture[str],
    base: list[str],
    tmp_path: Path,
    name: str,
    make: Callable[[Path], object],
) -> None:
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / name)
    assert f"run.dir: {tmp_path / 'run' / name} is no " in refused(capsys, *base)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_refused(
    capsys: pytest.CaptureFixture[str], base: list[str], taken_port: int
) -> None:
    text = refused(capsys, *base, f"placement.port={taken_port}")
    assert f"placement.port: port {taken_port}" in text


def test_another_runs_directory_is_refused(
    capsys: pytest.CaptureFixture[str], base: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("run: {seed: 77}\n")
    assert "holds a run with another configuration" in refused(capsys, *base)


def test_export_names_its_own_options_for_a_checkpoint_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in (tmp_path / "nowhere", tmp_path):
        assert (
            main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")])
            == 2
        )
        error = capsys.readouterr().err
        assert error.startswith(
            f"error: --checkpoint: {checkpoint} is not a complete checkpoint"
        ), error
        assert (
            error.count("\n") == 1
            and "checkpoint.load" not in error
            and not (tmp_path / "out").exists()
        )
