"""The log: what was acknowledged is there after any end, an incomplete record is cut off, damage is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pa_npu.errors import DataError
from pa_npu.service.log import Accepted, Finished, Kept, Log, Record


def records() -> list[Record]:
    accepted = Accepted("optim_step", "m/1", "s", "m", 1, b"d", b"body", {"version": 3}, 1.5)
    return [accepted, Finished("m/1", b"answer", True), Kept("m", 1, "file")]


def test_records_come_back_and_more_are_appended(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with Log(file) as log:
        for record in records():
            log.write(record)
    with Log(file) as log:
        assert log.records == records()
        log.write(Finished("m/2"))
    with Log(file) as log:
        assert log.records == [*records(), Finished("m/2")]


@given(st.integers(1, 200))
def test_whatever_the_last_write_left_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    file = tmp_path_factory.mktemp("log") / "log"
    with Log(file) as log:
        for record in records():
            log.write(record)
    data = file.read_bytes()
    file.write_bytes(data[: max(0, len(data) - cut)])
    with Log(file) as log:
        kept = len(log.records)
        assert log.records == records()[:kept] and kept < 3
        log.write(Finished("after"))
    with Log(file) as log:
        assert log.records == [*records()[:kept], Finished("after")]


def test_damage_before_the_end_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with Log(file) as log:
        for record in records():
            log.write(record)
    data = bytearray(file.read_bytes())
    data[12] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="is damaged"):
        Log(file)


def test_a_rewritten_log_is_the_new_one(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        for record in records():
            log.write(record)
        log.rewrite(records()[2:])
        log.write(Finished("later"))
    with Log(tmp_path / "log") as log:
        assert log.records == [records()[2], Finished("later")]
