"""The page's data of a chain: its extent, a line that was changed, and since when another run differs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pa_npu.telemetry.chain import CHAIN
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import answer
from tests.helpers.chained_run import make_chained_run, step


def test_the_page_gets_the_chain_and_since_when_other_runs_differ(tmp_path: Path) -> None:
    steps = [step(i) for i in range(3)]
    run = make_chained_run(tmp_path / "run", steps, tmp_path / "model")
    equal = make_chained_run(tmp_path / "equal", steps, tmp_path / "model")
    steps[1].rewards.view(np.uint32)[2, 1] ^= 1
    other = make_chained_run(tmp_path / "other", steps, tmp_path / "model")
    bare = tmp_path / "bare"
    (bare / "logs").mkdir(parents=True)
    runs = [RunDirectory(path) for path in (run, equal, other, bare)]
    view = json.loads(json.dumps(answer(runs, "chain")))
    assert (view["first"], view["last"], view["problem"]) == (0, 2, "")
    assert view["weights"] == {"0": "w1", "1": "w2", "2": "w3"}
    same, differs, without = view["differences"]
    assert same["verdict"] == "equal" and same["iterations"] == 3 and same["found"] == []
    assert (differs["verdict"], differs["since"]) == ("different", 1)
    assert differs["found"][0]["aspect"] == "rewards" and "response 1 of group 2" in differs["found"][0]["text"]
    assert without["verdict"] is None and "chain.jsonl" in without["problem"]


def test_a_changed_line_and_a_run_without_a_chain_are_shown(tmp_path: Path) -> None:
    run = make_chained_run(tmp_path / "run", [step(i) for i in range(3)], tmp_path / "model")
    text = (run / CHAIN).read_text().replace('"weights_after": "w2"', '"weights_after": "w9"')
    (run / CHAIN).write_text(text)
    view = answer([RunDirectory(run)], "chain")
    assert view["last"] == 0 and view["problem"] == "the line of iteration 1 is not the one that was written"
    (run / CHAIN).unlink()
    assert answer([RunDirectory(run)], "chain")["last"] is None
