"""A cell's directory is removed whatever is in it, and its removal costs no verdict and holds nobody up."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from pa_npu.rewards import sandbox
from tests.helpers.cells import run


@pytest.mark.parametrize("kind", ["nested", "full", "closed", "of links"])
def test_a_cells_directory_is_removed_however_deep_or_full_it_is(kind: str, tmp_path: Path) -> None:
    place, kept = tmp_path / "cell", tmp_path / "kept"
    place.mkdir()
    kept.mkdir()
    (kept / "file").write_text("stays")
    if kind == "nested":
        top = os.open(place, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d", dir_fd=top)
            below = os.open("d", os.O_RDONLY, dir_fd=top)
            os.close(top)
            top = below
        os.close(top)
    elif kind == "full":
        for number in range(5000):
            (place / str(number)).touch()
    elif kind == "closed":
        (place / "a" / "b").mkdir(parents=True)
        (place / "a" / "b" / "c").touch()
        (place / "a" / "b").chmod(0)
        (place / "a").chmod(0)
    else:
        (place / "to_a_directory").symlink_to(kept)
        (place / "to_a_file").symlink_to(kept / "file")
    sandbox.remove_tree(str(place), time.monotonic() + 60)
    assert not place.exists() and (kept / "file").read_text() == "stays"


def test_a_removal_that_takes_too_long_is_a_warning_and_costs_no_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cell").mkdir()
    (tmp_path / "cell" / "file").touch()
    monkeypatch.setattr(sandbox, "_REMOVAL_S", -1.0)
    sandbox._remove(str(tmp_path / "cell"))
    assert "take too long to remove" in caplog.text


async def test_the_event_loop_goes_on_while_a_cell_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removing, goes_on = asyncio.Event(), asyncio.Event()
    loop, remove = asyncio.get_running_loop(), sandbox._remove

    def slow(parent: str) -> None:
        loop.call_soon_threadsafe(removing.set)
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(60)
        remove(parent)

    monkeypatch.setattr(sandbox, "_remove", slow)
    task = asyncio.create_task(run("print(1)"))
    await asyncio.wait_for(removing.wait(), 60)
    goes_on.set()
    assert (await asyncio.wait_for(task, 60)).stdout == b"1\n"
