"""The page's data of a chain: its extent, a line that was changed, and since when another run differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pa_npu.launcher.cli import main
from pa_npu.telemetry.chain import CHAIN
from pa_npu.viewer import chain as viewer_chain
from pa_npu.viewer.chain import ChainViews
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import answer
from tests.helpers.chained_run import SOFTWARE, Step, make_chained_run, step


def steps() -> list[Step]:
    return [step(i) for i in range(3)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_chained_run(tmp_path / "run", steps(), tmp_path / "model")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run in which one bit of a reward of iteration 1 differs."""
    changed = steps()
    changed[1].rewards.view(np.uint32)[2, 1] ^= 1
    return make_chained_run(tmp_path / "other", changed, tmp_path / "model")


def test_the_page_gets_the_chain_and_since_when_other_runs_differ(
    tmp_path: Path, run: Path, other: Path
) -> None:
    equal = make_chained_run(tmp_path / "equal", steps(), tmp_path / "model")
    parted = steps()
    parted[2].tokens[0, 0, 0] += 1
    software = {**SOFTWARE, "engines": "vllm 0.12.0"}
    upgraded = make_chained_run(
        tmp_path / "upgraded", parted, tmp_path / "model", software=software
    )
    bare = tmp_path / "bare"
    (bare / "logs").mkdir(parents=True)
    runs = [RunDirectory(path) for path in (run, equal, other, upgraded, bare)]
    view = json.loads(json.dumps(answer(runs, "chain")))
    newest = json.loads((run / CHAIN).read_text().splitlines()[-1])
    assert (view["first"], view["last"], view["problem"]) == (0, 2, "")
    assert view["newest"] == newest["digest"]
    same, differs, undecided, without = view["differences"]
    assert (
        same["verdict"] == "equal"
        and same["iterations"] == "iterations 0 to 2"
        and same["since"] is None
    )
    assert (differs["verdict"], differs["since"], differs["group"]) == ("different", 1, 2)
    assert "first in the rewards: the reward of response 1 of group 2" in differs["sentences"][0]
    assert (undecided["verdict"], undecided["since"], undecided["group"]) == ("undecided", 2, 0)
    assert undecided["sentences"][0] == "bits may differ: engines: vllm 0.11.0 and vllm 0.12.0"
    assert without["verdict"] is None and "chain.jsonl" in without["problem"]


def test_the_page_says_what_the_command_prints(
    run: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(run), str(other)]) == 1
    header, *printed = capsys.readouterr().out.splitlines()
    (difference,) = answer([RunDirectory(run), RunDirectory(other)], "chain")["differences"]
    assert printed[: len(difference["sentences"])] == difference["sentences"] != []
    assert header.endswith(difference["iterations"])


def remove_line(run: Path, number: int) -> None:
    lines = (run / CHAIN).read_text().splitlines(keepends=True)
    (run / CHAIN).write_text("".join(lines[:number] + lines[number + 1 :]))


def change_weights(run: Path) -> None:
    text = (run / CHAIN).read_text()
    (run / CHAIN).write_text(text.replace('"weights_after": "w2"', '"weights_after": "w9"'))


FAULTS: dict[str, tuple[Callable[[Path], None], int | None, str]] = {
    "a line changed": (
        change_weights,
        0,
        "the line of iteration 1 is not the one that was written",
    ),
    "a line removed": (lambda run: remove_line(run, 1), 0, "iteration 2 stands behind iteration 0"),
    "the first line removed": (
        lambda run: remove_line(run, 0),
        None,
        "lines before iteration 1 are missing",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_chain_that_is_not_whole_is_shown_until_where_it_is_in_the_words_of_the_command(
    run: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, newest, problem = FAULTS[kind]
    damage(run)
    view = answer([RunDirectory(run)], "chain")
    assert (view["last"], view["problem"]) == (newest, problem)
    assert main(["verify", str(run)]) == 1 and f"{CHAIN}: {problem}" in capsys.readouterr().out


def test_a_run_without_a_chain_has_none(run: Path) -> None:
    (run / CHAIN).unlink()
    view = answer([RunDirectory(run)], "chain")
    assert view["last"] is None and view["problem"] == ""


def test_a_chain_is_read_again_when_it_has_changed_and_a_long_one_not_at_once_while_the_run_is_at_work(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    clock_s = 0.0
    original = viewer_chain.chain_view

    def slow_view(*arguments: object) -> object:
        nonlocal clock_s
        clock_s += 2.0
        read.append(1)
        return original(*arguments)

    monkeypatch.setattr(viewer_chain, "chain_view", slow_view)
    monkeypatch.setattr(viewer_chain.time, "monotonic", lambda: clock_s)
    views = ChainViews(run)
    assert views.view([], True)["last"] == 2 and views.view([], True)["last"] == 2
    assert len(read) == 1, "nothing has changed"
    make_chained_run(run, [step(3)], tmp_path / "model", first=3)
    clock_s += 2.0
    assert views.view([], True)["last"] == 2, "reading takes 2 s, so that it waits"
    clock_s += 2.0 / viewer_chain.MAX_SHARE
    assert views.view([], True)["last"] == 3
    make_chained_run(run, [step(4)], tmp_path / "model", first=4)
    assert views.view([], False)["last"] == 4, "the run has ended: at once"


@pytest.mark.parametrize("text", ["0x1p99999", "nothing", ""])
def test_a_norm_that_is_no_number_is_named_and_ends_no_page(
    run: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / CHAIN).write_text((damaged / CHAIN).read_text().replace((0.25).hex(), text))
    (difference,) = answer([RunDirectory(run), RunDirectory(damaged)], "chain")["differences"]
    assert "is no gradient norm; the line is damaged" in difference["problem"]
    assert (
        main(["diff", str(run), str(damaged)]) == 2
        and "is no gradient norm" in capsys.readouterr().err
    )
