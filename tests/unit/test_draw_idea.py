"""The picture of the idea shows what a timeline holds: who was at work when, of a synchronous and the next periodic iteration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import draw_idea

pytest.importorskip("matplotlib")


def write(run: Path, process: str, events: list[dict[str, object]]) -> None:
    (run / "timeline").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"process": process, "pid": 1, "start": 0.0}), *map(json.dumps, events), '{"name": "half']
    (run / "timeline" / f"{process}.jsonl").write_text("\n".join(lines))


def a_run(run: Path) -> Path:
    """Iteration 0: generate for 4 s, then train for 4; iteration 1: both at once; publishes of a second after each."""

    def publish(version: int, end: float) -> dict[str, object]:
        return {"name": "publish", "lane": "main", "start": end - 1, "end": end, "args": {"version": version}}

    def group(iteration: int, start: float, end: float) -> dict[str, object]:
        return {"name": "group 0", "lane": "engine a", "start": start, "end": end, "args": {"iteration": iteration}}

    def trained(start: float, end: float) -> dict[str, object]:
        return {"name": "group 0", "lane": "microbatches", "start": start, "end": end}

    coordinator = [publish(0, 10.0), group(0, 10.0, 13.0), group(0, 10.0, 14.0), publish(1, 19.0)]
    coordinator += [group(1, 19.0, 23.0), publish(2, 25.0)]
    write(run, "coordinator", coordinator)
    write(run, "trainer-0", [trained(9.2, 9.4), trained(14.0, 16.0), trained(16.0, 18.0), trained(20.0, 24.0)])
    return run


def test_spans_are_those_of_the_timeline(tmp_path: Path) -> None:
    synchronous, periodic = draw_idea.choose(draw_idea.iterations(a_run(tmp_path)), None)
    assert (synchronous.number, synchronous.seconds, periodic.seconds) == (0, 9.0, 6.0)
    assert draw_idea.merged(synchronous.generated) == [(0.0, 4.0)] and draw_idea.merged(synchronous.trained) == [
        (4.0, 8.0)
    ]
    assert synchronous.busy_share(synchronous.generated) == pytest.approx(4 / 9)
    assert periodic.trained == [(1.0, 5.0)] and periodic.border == [(5.0, 6.0)]


def test_the_command_writes_the_same_picture_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run")
    for name in ("a.svg", "b.svg"):
        assert draw_idea.main([str(run), "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "periodic    iteration 1: 6.00 s, engine at work 67%, trainer 67%" in capsys.readouterr().out
    assert draw_idea.main([str(run), "--pair", "1", "--output", str(tmp_path / "c.svg")]) == 2
    assert draw_idea.main([str(tmp_path / "none")]) == 2
    assert "schedule.compare_iterations" in capsys.readouterr().err
