"""Datasets on disk, files or directories of them, become the same rows, and what is ambiguous is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from pa_npu.data.rows import read_rows
from pa_npu.errors import DataError

ROWS = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(7)]


def rows(path: Path, split: str | None = None, *usual: str) -> list[Any]:
    return [row for _, row in read_rows(str(path), "data.train", split, usual or ("train",))]


def refusal(path: Path, split: str | None = None, *usual: str) -> str:
    with pytest.raises(DataError) as caught:
        rows(path, split, *usual)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["{split}-0000{part}-of-00002.parquet", "data/{split}-0000{part}-of-00002.parquet"])
def test_a_hubs_repository_of_parquet_files(tmp_path: Path, layout: str) -> None:
    for split, parts in (("train", [ROWS[:2], ROWS[2:5]]), ("test", [ROWS[5:]])):
        for number, part in enumerate(parts):
            file = tmp_path / layout.format(split=split, part=number)
            file.parent.mkdir(exist_ok=True)
            pyarrow.parquet.write_table(pa.Table.from_pylist(part), file)
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "train.jsonl").write_text("{}")
    assert rows(tmp_path) == ROWS[:5] and rows(tmp_path, "test") == ROWS[5:]
    assert "has the splits test, train, not validation" in refusal(tmp_path, "validation")


def test_directories_that_say_nothing_or_too_much(tmp_path: Path) -> None:
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"")
    (tmp_path / "state.json").write_text("{}")
    assert "holds no dataset" in refusal(tmp_path) and "its to_parquet" in refusal(tmp_path)
    (tmp_path / "part-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:4]))
    (tmp_path / "part-2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[4:]))
    assert rows(tmp_path) == ROWS, "one split, whatever it is"
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "all.parquet")
    assert "files of several formats (.jsonl, .parquet)" in refusal(tmp_path)
    for name in ("main", "socratic"):
        (tmp_path / "r" / name).mkdir(parents=True)
        (tmp_path / "r" / name / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert "files of several directories" in refusal(tmp_path / "r")
    assert rows(tmp_path / "r" / "main") == ROWS[:1]
    assert "is one file, which has no split test" in refusal(tmp_path / "part-1.jsonl", "test")


def test_what_the_datasets_library_writes_as_parquet_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    chosen = datasets.Dataset.from_list(ROWS).shuffle(seed=1).select(range(4))
    chosen.to_parquet(tmp_path / "train.parquet")
    assert rows(tmp_path / "train.parquet") == chosen.to_list()
