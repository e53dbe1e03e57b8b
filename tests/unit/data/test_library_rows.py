"""What the library `datasets` loads is read like a table of a file; names that it refuses are one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest

from pa_npu.data.rows import read_rows
from pa_npu.errors import DataError

ROWS = [
    {"question": f"{number}?", "answer": number, "image": {"bytes": b"\x00"}}
    for number in (1, 2, 3)
]


class _Split:
    """A split, which gives its rows as tables where these are asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self._format = ""

    def with_format(self, name: str) -> _Split:
        self._format = name
        return self

    def iter(self, batch_size: int) -> Any:
        assert self._format == "arrow", "images would be decoded"
        for start in range(0, len(self._rows), 2):
            yield pyarrow.Table.from_pylist(self._rows[start : start + 2])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Puts a stand-in of the library in place; returns what was asked of it."""
    asked = []

    def load_dataset(name: str, configuration: str | None) -> dict[str, _Split]:
        asked.append((name, configuration))
        if name == "owner/absent":
            raise ConnectionError("Couldn't reach it\non the Hub")
        if name == "owner/one":
            return {"everything": _Split(ROWS)}
        return {"train": _Split(ROWS), "test": _Split(ROWS[:1])}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_the_split_that_a_key_means_is_read_and_images_stay_bytes(
    loaded: list[tuple[str, str | None]],
) -> None:
    train = list(read_rows("datasets:owner/name:main", "data.train"))
    assert [row for _, row in train] == ROWS
    assert train[2][0] == "datasets:owner/name:main: row 3"
    held_out = list(read_rows("datasets:owner/name", "data.test", usual=("test", "validation")))
    assert [row for _, row in held_out] == ROWS[:1]
    assert len(list(read_rows("datasets:owner/one", "data.train"))) == 3
    assert loaded == [("owner/name", "main"), ("owner/name", None), ("owner/one", None)]


@pytest.mark.parametrize(
    ("path", "split", "named"),
    [
        ("datasets:owner/absent", None, "Couldn't reach it"),
        ("datasets:owner/name", "dev", "splits train, test"),
        ("datasets: ", None, "names no dataset"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    path: str, split: str | None, named: str, loaded: list[tuple[str, str | None]]
) -> None:
    with pytest.raises(DataError, match=named) as refused:
        list(read_rows(path, "data.train", split))
    assert "data.train" in str(refused.value) and "\n" not in str(refused.value)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        list(read_rows("datasets:owner/name", "data.train"))
