"""`pa-npu verify` and `diff` on files: what was changed after it was written is named, whichever file it is in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from pa_npu.checkpoints.provenance import Change, change_of
from pa_npu.config.load import load_config
from pa_npu.launcher.cli import main
from pa_npu.launcher.replay import ReplayProgress, _settings
from pa_npu.telemetry.chain import CHAIN
from tests.helpers.chained_run import make_chained_run, step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_chained_run(tmp_path / "run", [step(i) for i in range(4)], tmp_path / "model")


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def kept(run: Path, column: str, change: Callable[[list], None]) -> None:
    """Changes a column of the kept samples of iteration 1."""
    path = run / "samples" / "iteration_000001.parquet"
    table = pyarrow.parquet.read_table(path)
    values = table.column(column).to_pylist()
    change(values)
    place = table.column_names.index(column)
    array = pyarrow.array(values, table.schema.field(column).type)
    replaced = table.set_column(place, table.schema.field(column), array)
    pyarrow.parquet.write_table(replaced, path)


def flip_reward(values: list) -> None:
    bits = np.array(values, np.float32).view(np.uint32)
    bits[4] ^= 1
    values[:] = bits.view(np.float32).tolist()


def flip_token(values: list) -> None:
    values[2][3] += 1


def resign(run: Path) -> None:
    """Changes a checkpoint, and makes its digests anew."""
    from pa_npu.checkpoints import directories

    directory = run / "checkpoints" / "iteration_000002"
    (directory / "weights").write_bytes(bytes(64))
    values = json.loads((directory / "pa_npu.json").read_text())
    values.pop("digest")
    values["digests"] = {"weights": directories.digest_of(directory / "weights")}
    meta = directories.CheckpointMeta(**values)
    (directory / "pa_npu.json").write_text(meta.dump())
    assert directories.content_problem(directory) == "", "by its own digests it is whole"


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a line changed": (
        lambda run: changed(run / CHAIN, "0x1.0", "0x1.1"),
        "chain.jsonl: the line of iteration 0 is not the one that was written",
    ),
    "a line removed": (
        lambda run: (run / CHAIN).write_text(
            "".join((run / CHAIN).read_text().splitlines(True)[i] for i in (0, 1, 3))
        ),
        "chain.jsonl: iteration 3 stands behind iteration 1",
    ),
    "the first line removed": (
        lambda run: (run / CHAIN).write_text(
            "".join((run / CHAIN).read_text().splitlines(True)[1:])
        ),
        "chain.jsonl: lines before iteration 1 are missing",
    ),
    "a key of the configuration": (
        lambda run: changed(run / "config.yaml", "clip_low: 0.2", "clip_low: 0.25"),
        "config.yaml: its keys are not those that iteration 3 was trained with",
    ),
    "the model": (
        lambda run: (run.parent / "model" / "config.json").write_text("{ }"),
        "is not the model that the run began with",
    ),
    "a record": (
        lambda run: changed(
            run / "metrics.jsonl",
            '"iteration": 2, "reward_mean": 0.',
            '"iteration": 2, "reward_mean": 1.',
        ),
        "metrics.jsonl: iteration 2 is not what was written",
    ),
    "a record removed": (
        lambda run: (run / "metrics.jsonl").write_text(
            "".join((run / "metrics.jsonl").read_text().splitlines(True)[i] for i in (0, 2, 3))
        ),
        "metrics.jsonl: iteration 1 is missing",
    ),
    "a short sample": (
        lambda run: changed(
            run / "samples.jsonl", '"iteration": 1, "index": 0', '"iteration": 1, "index": 1'
        ),
        "samples.jsonl: iteration 1 is not what was written",
    ),
    "one bit of a reward": (
        lambda run: kept(run, "reward", flip_reward),
        "samples: iteration 1, group 1, response 1: its reward is ",
    ),
    "a token": (
        lambda run: kept(run, "tokens", flip_token),
        "samples: iteration 1, group 0, response 2: its tokens are not those that were trained",
    ),
    "a byte of a checkpoint": (
        lambda run: (run / "checkpoints/iteration_000002/weights").write_bytes(bytes(64)),
        "iteration_000002: weights is not what was written",
    ),
    "a checkpoint with digests made anew": (
        resign,
        "iteration_000002: it is whole, but not the one that the run wrote",
    ),
}


def test_a_run_as_it_was_written_holds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "chain: 4 lines, iterations 0 to 3" in printed and "samples: 24 responses" in printed
    assert "checkpoints: 2, every file as written" in printed
    digest = json.loads((run / CHAIN).read_text().splitlines()[-1])["digest"]
    assert (
        printed.splitlines()[-1]
        == f"{run}: all of it holds; its newest line has the digest {digest}"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_was_changed_is_named_with_its_iteration(
    run: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, named = FAULTS[fault]
    change(run)
    assert main(["verify", str(run)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not hold: ") and named in last


def test_a_record_that_a_killed_run_wrote_before_its_line_is_no_fault(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "reward_mean": 0.5}\n{"iteration": 5, "rew')
    assert main(["verify", str(run)]) == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ard_mean": 0.5}\n')
    assert main(["verify", str(run)]) == 1, "but no run writes two"


def test_bad_input_is_one_line_and_exit_code_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        ("verify", str(tmp_path)): "is a folder of runs, not a run",
        ("verify", str(run), "--replay", "4"): "is not A:B with A below B",
        ("verify", str(run), "--replay", "3:2"): "is not A:B with A below B",
        ("verify", str(run), "--replay", "2:9"): "has iterations 0 to 3",
        (
            "verify",
            str(run),
            "--replay",
            "1:3",
        ): "has no complete checkpoint of version 1; begin at one that it has (0, 2)",
        ("verify", str(run), "run.seed=2"): "unknown argument",
        ("verify", str(run), "--work", "x"): "--work is for --replay",
        ("verify", str(run), "--replay", "2:3", "--work", str(tmp_path)): "exists already",
        ("diff", str(run), str(tmp_path)): "is a folder of runs, not a run",
    }
    for arguments, words in cases.items():
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1, error


def test_diff_names_the_token_that_differs_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [step(i) for i in range(4)]
    steps[2].tokens[1, 0, 4] += 7
    another = make_chained_run(tmp_path / "other", steps, tmp_path / "model")
    assert main(["diff", str(run), str(another)]) == 1
    printed = capsys.readouterr().out
    token = step(2).tokens[1, 0, 4]
    assert (
        "differ in iteration 2, first in the responses: response 0 of group 1 has other tokens"
        in printed
    )
    assert f"token 4 differs: it is {token} and {token + 7}" in printed
    assert main(["diff", str(run), str(run)]) == 0 and "equal to the bit" in capsys.readouterr().out


def test_diff_says_where_it_cannot_name_the_token(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [step(i) for i in range(4)]
    steps[2].tokens[3, 0, 4] += 7  # of a group that is not kept
    another = make_chained_run(tmp_path / "other", steps, tmp_path / "model")
    assert main(["diff", str(run), str(another)]) == 1
    assert "not both runs kept this response (telemetry.samples)" in capsys.readouterr().out


@pytest.mark.parametrize("decay", ["constant", "linear"])
def test_a_repetition_changes_no_key_that_would_make_it_another_run(
    decay: str, run: Path, tmp_path: Path
) -> None:
    file = str(run / "config.yaml")
    config = load_config([file], [f"optimizer.decay={decay}", "schedule.iterations=9"])
    settings = _settings(config, run / "checkpoints" / "iteration_000002", tmp_path / "scratch", 3)
    keys = [setting.partition("=")[0] for setting in settings]
    assert {change_of(key) for key in keys} <= {Change.SILENT, Change.SAME_RUN}
    assert ("schedule.iterations" in keys) == (decay == "constant"), (
        "a rate that decays depends on their number"
    )
    repeated = load_config([file], settings)
    assert repeated.run.dir == str(tmp_path / "scratch") and repeated.telemetry.samples == "all"
    assert (
        str(repeated.checkpoint.load).endswith("iteration_000002")
        and repeated.checkpoint.resume is None
    )


def test_a_repetition_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ReplayProgress(tmp_path / "scratch", 1, 3)
    assert not progress.look(), "there is nothing yet"
    make_chained_run(tmp_path / "scratch", [step(1)], tmp_path / "model", first=1)
    assert not progress.look() and not progress.look()
    assert capsys.readouterr().out == "repeated iteration 1 (1 of 2)\n"
    make_chained_run(tmp_path / "scratch", [step(2), step(3)], tmp_path / "model", first=2)
    assert progress.look()
    assert capsys.readouterr().out == "repeated iteration 2 (2 of 2)\n"
