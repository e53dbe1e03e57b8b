"""A timeline of millions of events: its landmarks and any stretch of it, without keeping or parsing the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pa_npu.viewer import timeline_file
from pa_npu.viewer.timeline_file import TimelineFile


def event(name: str, start_s: float, end_s: float, **more: Any) -> str:
    return json.dumps({"name": name, "lane": "main", "start": start_s, "end": end_s, **more}) + "\n"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One group a second for 5,000 s, and a publish every 100 s."""
    monkeypatch.setattr(timeline_file, "INDEX_EVERY_BYTES", 2048)
    path = tmp_path / "coordinator.jsonl"
    with path.open("w") as file:
        file.write(json.dumps({"process": "coordinator", "pid": 1, "start": 0.0}) + "\n")
        for second in range(5000):
            file.write(event(f"group {second}", second, second + 1.0))
            if second % 100 == 99:
                file.write(
                    event("publish", second + 0.5, second + 1.0, args={"version": second // 100})
                )
    return path


def test_landmarks_and_the_last_event_are_kept(path: Path) -> None:
    file = TimelineFile(path)
    assert [landmark.get("name") for landmark in file.landmarks()] == [None, *["publish"] * 50]
    assert file.last() == ("publish", 5000.0)
    with path.open("a") as more:
        more.write(event("group x", 5000.0, 5001.0) + '{"name": "half')
    assert file.last() == ("group x", 5001.0) and len(file.landmarks()) == 51


def test_a_stretch_has_what_overlaps_it_and_costs_no_more_than_it_is_long(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TimelineFile(path)
    file.landmarks()
    parsed: list[bytes] = []
    parse = timeline_file.parse_object

    def counted(line: bytes) -> dict[str, Any] | None:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(timeline_file, "parse_object", counted)
    actual = [one["name"] for one in file.between(2500.0, 2510.0, margin_s=5.0)]
    assert actual == [f"group {second}" for second in range(2500, 2510)]
    assert len(parsed) < 150, "of 5,000"


def test_an_event_that_ends_behind_the_stretch_is_seen_within_the_margin(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.jsonl"
    path.write_text(event("group 0", 0.0, 1.0) + event("checkpoint write", 0.5, 20.0))
    names = [one["name"] for one in TimelineFile(path).between(0.0, 2.0, margin_s=60.0)]
    assert names == ["group 0", "checkpoint write"]


def test_a_shorter_file_is_read_again_and_lines_that_are_no_events_are_left_out(path: Path) -> None:
    file = TimelineFile(path)
    assert len(file.landmarks()) == 51
    path.write_text(
        "[]\n"
        + "nonsense publish\n"
        + '"publish"\n'
        + event("publish", 1.0, 2.0)
        + "x" * 3000
        + "\n"
    )
    assert [landmark["name"] for landmark in file.landmarks()] == ["publish"] and file.last() == (
        "publish",
        2.0,
    )
    path.unlink()
    assert [landmark["name"] for landmark in file.landmarks()] == ["publish"], (
        "as long as it is not there, what was read stays"
    )


def test_no_more_events_than_a_page_can_draw(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_file, "MAX_EVENTS", 7)
    assert len(TimelineFile(path).between(0.0, 5000.0, 0.0)) == 7
