"""Datasets on disk in every layout that libraries write become the same rows, and what is ambiguous is one line."""

from __future__ import annotations

import json
from decimal import Decimal
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


def save_to_disk(directory: Path, parts: list[list[dict[str, Any]]]) -> None:
    """The layout of Dataset.save_to_disk (datasets 2 to 4): arrow streams, and a state.json that
    lists them.
    """
    directory.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        table = pa.Table.from_pylist(part)
        with (
            pa.OSFile(str(directory / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=2)
    (directory / "dataset_info.json").write_text("{}")
    (directory / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names], "_split": None})
    )


def test_a_dataset_that_was_saved_to_disk_in_several_files(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "d", [ROWS[:3], ROWS[3:]])
    assert rows(tmp_path / "d") == ROWS
    locations = [location for location, _ in read_rows(str(tmp_path / "d"), "data.train")]
    assert locations[3].endswith("data-00001-of-00002.arrow: row 1")
    assert "has no split test" in refusal(tmp_path / "d", "test")
    (tmp_path / "d" / "data-00001-of-00002.arrow").unlink()
    assert "does not exist, which state.json names" in refusal(tmp_path / "d")
    (tmp_path / "d" / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}')
    assert "names files of other directories" in refusal(tmp_path / "d")
    (tmp_path / "d" / "state.json").write_text("[")
    assert "does not describe a dataset" in refusal(tmp_path / "d")


def test_a_dictionary_of_datasets_and_its_splits(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "d" / "train", [ROWS[:5]])
    save_to_disk(tmp_path / "d" / "validation", [ROWS[5:]])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    assert rows(tmp_path / "d") == ROWS[:5]
    assert rows(tmp_path / "d", None, "test", "validation") == ROWS[5:], (
        "held-out sets take what there is"
    )
    assert rows(tmp_path / "d", "validation") == ROWS[5:] == rows(tmp_path / "d" / "validation")
    assert "has the splits train, validation, not test" in refusal(tmp_path / "d", "test")


def test_damaged_arrow_files_are_one_line(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "d", [ROWS])
    file = tmp_path / "d" / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for cut in (0, 3, 100, len(whole) // 2):
        file.write_bytes(whole[:cut])
        assert "unreadable arrow stream" in refusal(tmp_path / "d"), cut
    with (
        pa.OSFile(str(file), "wb") as out,
        pa.ipc.new_file(out, pa.Table.from_pylist(ROWS).schema) as writer,
    ):
        writer.write_table(pa.Table.from_pylist(ROWS))
    assert rows(tmp_path / "d") == ROWS, "the other form of arrow is told by its content"


@pytest.mark.parametrize(
    "layout", ["{split}-0000{part}-of-00002.parquet", "data/{split}-0000{part}-of-00002.parquet"]
)
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
    assert "holds no dataset" in refusal(tmp_path)
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


def test_what_the_datasets_library_itself_writes_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.shuffle(seed=1).select(range(4)).save_to_disk(tmp_path / "chosen", num_shards=2)
    assert rows(tmp_path / "chosen") == whole.shuffle(seed=1).select(range(4)).to_list()
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(
        tmp_path / "both"
    )
    assert rows(tmp_path / "both") == ROWS and rows(tmp_path / "both", "test") == ROWS[:1]


def test_cells_of_megabytes_and_files_by_their_ending_in_any_case(tmp_path: Path) -> None:
    long = "x" * (1 << 18)
    for name, separator in (("a.csv", ","), ("b.CSV", ","), ("c.tsv", "\t"), ("d.TSV", "\t")):
        file = tmp_path / name
        file.write_text(f'question{separator}answer\n{long}{separator}"1, ""2"""\n')
        assert rows(file) == [{"question": long, "answer": '1, "2"'}], name
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.TSV").write_text("question\tanswer\n1+1?\t2\n")
    assert rows(tmp_path / "hub") == [{"question": "1+1?", "answer": "2"}]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "question,answer,answer\nq,1,2\n", 'a.csv:1: two columns are called "answer"'),
        ("a.csv", 'question,answer\nq,1\n"open,2\nr,3\n', "a.csv:3: the row is no CSV"),
        ("a.csv", 'question,answer\n"2"+"2",4\n', "a.csv:2: the row is no CSV"),
        (
            "a.jsonl",
            '{"question": "q", "answer": 1, "answer": 2}\n',
            'the name "answer" occurs twice',
        ),
    ],
)
def test_what_would_be_lost_without_a_word_is_one_line(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    (tmp_path / name).write_text(text)
    assert expected in refusal(tmp_path / name)


def test_columns_of_one_name_in_a_table_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays(
        [pa.array(["q"]), pa.array(["1"]), pa.array(["2"])], ["question", "answer", "answer"]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert 'two columns are called "answer"' in refusal(tmp_path / "a.parquet")


def test_decimals_of_a_table_are_numbers(tmp_path: Path) -> None:
    kinds = {
        "whole": ("27.00", 27),
        "part": ("12.50", 12.5),
        "exact": ("0.12345678901234567890", "0.12345678901234567890"),
    }
    columns = {name: pa.array([Decimal(text)]) for name, (text, _) in kinds.items()}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [{name: value for name, (_, value) in kinds.items()}]
