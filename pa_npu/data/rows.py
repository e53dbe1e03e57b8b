"""Rows of a dataset on disk, each with the place it came from: a file, or a directory as libraries of datasets write them.

    file.jsonl, file.csv, .tsv, .parquet   told apart by content and ending, in any case
    DIR/dataset_dict.json, DIR/SPLIT/      datasets.DatasetDict.save_to_disk
    DIR/state.json, DIR/*.arrow            datasets.Dataset.save_to_disk
    DIR/**/*.parquet (or .jsonl, .csv, ...) a hub's repository: files and directories named by
    split, train-00000-of-00002.parquet
    datasets:NAME                          what the library itself loads (library_rows.py)

pyarrow reads the files; only the last needs the library.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import open_plain, reason
from pa_npu.config.words import as_json
from pa_npu.data.library_rows import are_of_library, library_batches
from pa_npu.errors import DataError

PARQUET_MAGIC = b"PAR1"
ARROW_FILE_MAGIC = b"ARROW1"
BATCH_ROWS = 4096
BATCH_ROWS_WITH_BYTES = 32  # of rows with images, which may have megabytes each
LONGEST_ROW_BYTES = 16 << 20

_SEPARATORS = {".csv": ",", ".tsv": "\t"}

Rows = Iterator[tuple[str, Any]]


class TableRow(dict[str, Any]):
    """A row of a typed table: a struct in it has all fields that any row's has, null where there is
    none.
    """


_ENDINGS = (".parquet", ".jsonl", ".csv", ".tsv", ".arrow")
_DEEPEST = 3  # DIR/CONFIGURATION/SPLIT/0000.parquet
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}


def read_rows(
    path: str, key: str, split: str | None = None, usual: Sequence[str] = ("train",)
) -> Rows:
    """Locations ("file:line", or "file: row n" from 1) and rows of the dataset at `path`, in order.

    key: the configuration key that names it, for messages. split: of a directory; None takes the
    first of `usual` that is there, or the only one. Raises DataError.
    """
    if are_of_library(path):
        yield from _library_rows(path, key, split, usual)
        return
    file = Path(path)
    if not file.exists():
        raise DataError(
            f"{key}: {path} does not exist; name a JSONL or parquet file, or a directory of a "
            "dataset"
        )
    if file.is_dir():
        for part in _parts(file, key, split, usual):
            yield from _file_rows(part, key)
        return
    if split is not None:
        raise DataError(
            f"{key}: {path} is one file, which has no split {split}; remove split, or name a "
            "directory"
        )
    yield from _file_rows(file, key)


def read_objects(
    path: str, key: str, split: str | None, usual: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the rows of a dataset, each with its location; arguments as read_rows.

    Raises DataError at the first that is no JSON object.
    """
    for location, row in read_rows(path, key, split, usual):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{location}: a JSON {type(row).__name__}, not an object; each line must be one "
                "JSON object"
            )
        yield location, row


def _file_rows(file: Path, key: str) -> Rows:
    if not file.is_file():
        raise DataError(
            f"{key}: {file} is a device or a pipe, not an ordinary file; name a JSONL or parquet "
            "file"
        )
    try:
        with open_plain(file) as stream:
            magic = stream.read(len(ARROW_FILE_MAGIC))
    except OSError as error:
        raise DataError(
            f"{key}: {file} cannot be read ({reason(error)}); give a file that can be"
        ) from None
    if magic.startswith(PARQUET_MAGIC):
        return _table_rows(file, "parquet")
    ending = file.suffix.lower()
    if ending == ".arrow":
        return _table_rows(file, "arrow file" if magic == ARROW_FILE_MAGIC else "arrow stream")
    if ending in _SEPARATORS:
        return _csv_rows(file, _SEPARATORS[ending])
    return _jsonl_rows(file)


def _parts(directory: Path, key: str, split: str | None, usual: Sequence[str]) -> list[Path]:
    """Returns the files of one split of a directory, in order."""
    if (listing := directory / "dataset_dict.json").exists():
        splits = _read_json(listing, key, lambda content: [str(name) for name in content["splits"]])
        chosen = _choose(splits, split, usual, directory, key)
        return _saved_files(directory / chosen, key)
    if (directory / "state.json").exists():
        if split is not None:
            raise DataError(
                f"{key}: {directory} is one dataset, which has no split {split}; remove split"
            )
        return _saved_files(directory, key)
    return _loose_files(directory, key, split, usual)


def _saved_files(directory: Path, key: str) -> list[Path]:
    """List the files that Dataset.save_to_disk wrote, in the order of its rows."""
    names = _read_json(
        directory / "state.json", key, lambda state: [f["filename"] for f in state["_data_files"]]
    )
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(
            f"{key}: {directory}/state.json names files of other directories; save the dataset "
            "again"
        )
    files = [directory / name for name in names]
    if missing := [file for file in files if not file.exists()]:
        raise DataError(
            f"{key}: {missing[0]} does not exist, which state.json names; copy the whole directory"
        )
    return files


def _loose_files(directory: Path, key: str, split: str | None, usual: Sequence[str]) -> list[Path]:
    """Data files of a directory that nothing describes, by the split that their names say."""
    try:
        files = sorted(
            file
            for file in directory.rglob("*")
            if file.suffix.lower() in _ENDINGS
            and len(file.relative_to(directory).parts) <= _DEEPEST
            and not any(part.startswith((".", "_")) for part in file.relative_to(directory).parts)
        )
    except OSError as error:
        raise DataError(
            f"{key}: {directory} cannot be read ({error.strerror}); check its permissions"
        ) from None
    if not files:
        raise DataError(
            f"{key}: {directory} holds no dataset (neither dataset_dict.json, state.json nor "
            f"{', '.join(_ENDINGS)} files); name a file, or the directory of one dataset"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(directory)), []).append(file)
    if set(by_split) == {""}:
        by_split = {split or usual[0]: files}  # nothing says what these are
    chosen = by_split[_choose([name for name in by_split if name], split, usual, directory, key)]
    for kind_of_part, places in (
        ("formats", {file.suffix.lower() for file in chosen}),
        ("directories", {file.parent for file in chosen}),
    ):
        if len(places) > 1:
            several = ", ".join(sorted(str(place) for place in places))
            raise DataError(
                f"{key}: {directory} holds files of several {kind_of_part} ({several}); name one "
                "file or directory"
            )
    return chosen


def _split_of(file: Path) -> str:
    """Returns the split that a directory or the first word of the file's name says; "" where none
    does.
    """
    for part in reversed([*file.parts[:-1], file.stem]):
        if (split := _SPLITS.get(re.split(r"[-_.]", part.lower(), maxsplit=1)[0])) is not None:
            return split
    return ""


def _choose(
    splits: Sequence[str], split: str | None, usual: Sequence[str], directory: Path, key: str
) -> str:
    wanted = (split,) if split is not None else tuple(usual)
    for name in wanted:
        if name in splits:
            return name
    if split is None and len(splits) == 1:
        return splits[0]
    raise DataError(
        f"{key}: {directory} has the splits {', '.join(splits) or 'none'}, not "
        f"{' or '.join(wanted)}; name one of them with split"
    )


def _read_json(file: Path, key: str, take: Callable[[Any], list[str]]) -> list[str]:
    try:
        return take(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(
            f"{key}: {file} does not describe a dataset ({reason(error)}); save the dataset again"
        ) from None


def _csv_rows(file: Path, separator: str) -> Rows:
    """Yields the rows behind a first line of names; cells are texts."""
    csv.field_size_limit(LONGEST_ROW_BYTES)  # of the whole process; the library's own is 128 KiB
    first_line = 1  # of the row that is being read, which may be several lines long
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, delimiter=separator, strict=True)
            _refuse_repeated(f"{file}:1", [name for name in reader.fieldnames or () if name])
            first_line = reader.line_num + 1
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}:{reader.line_num}: another number of cells than the first line; "
                        "correct the row"
                    )
                yield f"{file}:{reader.line_num}", row
                first_line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is no CSV in UTF-8 ({error}); write the file again") from None
    except csv.Error as error:
        raise DataError(
            f"{file}:{first_line}: the row is no CSV ({error}); correct its quotes (a quote inside "
            "a quoted cell is written twice), or write the file again"
        ) from None


def _refuse_repeated(location: str, names: Sequence[str]) -> None:
    """Raises if two columns have one name, since only one of them could be read."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"{location}: two columns are called {as_json(repeated[0])}; rename or remove one of "
            "them"
        )


def _jsonl_rows(file: Path) -> Rows:
    with file.open("rb") as stream:
        for number, line in enumerate(
            iter(lambda: stream.readline(LONGEST_ROW_BYTES + 1), b""), start=1
        ):
            if len(line) > LONGEST_ROW_BYTES:
                raise DataError(
                    f"{file}:{number}: the line is longer than {LONGEST_ROW_BYTES >> 20} MiB; "
                    "write one JSON object per line"
                )
            if not line.strip():
                continue
            location = f"{file}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text, object_pairs_hook=_without_repeated)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{location}: byte {error.start} is not UTF-8; save the file as UTF-8 JSONL or "
                    "as parquet"
                ) from None
            except (ValueError, RecursionError) as error:
                problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise DataError(
                    f"{location}: not valid JSON ({problem}); each line must be one JSON object"
                ) from None
            if rb"\ud" in line.lower() and not is_text(row):
                raise DataError(
                    f"{location}: half of a surrogate pair (\\uD800 to \\uDFFF), which is no text; "
                    "correct the row"
                )
            yield location, row


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON from its pairs.

    Raises ValueError where a name occurs twice, of which the first would be lost.
    """
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        (repeated, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {as_json(repeated)} occurs twice in an object")
    return by_name


def is_text(row: Any) -> bool:
    """Returns whether a JSON value can be written as UTF-8: escapes can name code points that are
    no characters.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _table_rows(file: Path, form: str) -> Rows:
    """form: parquet, arrow stream or arrow file."""
    import pyarrow

    number = 0
    try:
        for batch in _batches(file, form):
            _refuse_repeated(str(file), batch.schema.names)
            for row in batch.to_pylist():
                number += 1
                yield f"{file}: row {number}", TableRow(_plain_numbers(row))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: after row {number}, a text column is not UTF-8 (byte {error.start} of a "
            "value); write the file again"
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: unreadable {form} after row {number} ({reason(error)}); write the file again"
        ) from None


def _library_rows(path: str, key: str, split: str | None, usual: Sequence[str]) -> Rows:
    number = 0
    for rows in library_batches(path, key, split, usual):
        for row in rows:
            number += 1
            yield f"{path}: row {number}", TableRow(_plain_numbers(row))


def _plain_numbers(value: Any) -> Any:
    """Returns the value without decimals, which JSON does not know: as numbers, as texts where a
    float is not exact.
    """
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        nearest = float(value)
        return nearest if Decimal(repr(nearest)) == value else format(value, "f")
    if isinstance(value, dict):
        return {name: _plain_numbers(item) for name, item in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], (str, int, float)):
        return [_plain_numbers(item) for item in value]
    return value


def _batches(file: Path, form: str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if form == "parquet":
        with pyarrow.parquet.ParquetFile(file) as table:
            if "binary" not in str(table.schema_arrow):
                yield from table.iter_batches(batch_size=BATCH_ROWS)
                return
            # one group of rows after another, each with its memory given back: else that of all of
            # them stays with the process
            for number in range(table.num_row_groups):
                yield from table.iter_batches(BATCH_ROWS_WITH_BYTES, row_groups=[number])
                pyarrow.default_memory_pool().release_unused()
        return
    with pyarrow.memory_map(str(file)) as source:
        if form == "arrow file":
            reader = pyarrow.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        else:
            yield from pyarrow.ipc.open_stream(source)
