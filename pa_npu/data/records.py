"""Dataset files to records: JSONL, CSV or parquet, one row after another, each with the place it came from.

These layouts are understood, told apart by the columns of each row:

    question, answer   GSM8K: the reference is what follows the last `####` of the answer (all of it without one)
    problem, answer    DeepScaleR, MATH; without an answer column the last \\boxed{} of the solution column is the reference
    prompt, answer     prompt is a text or a list of chat messages
    messages, answer   chat messages; without an answer column the last message, an assistant's, is the reference

and those of published benchmarks that benchmarks.py translates.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.data.benchmarks import published
from pa_npu.errors import DataError

PARQUET_MAGIC = b"PAR1"
PARQUET_BATCH_ROWS = 4096
LONGEST_ROW_BYTES = 16 << 20
ANSWER_MARK = "####"  # GSM8K puts the final answer behind it

Message = dict[str, str]


@dataclass(frozen=True)
class Record:
    """One row. location: "file:line" (JSONL) or "file: row n" (parquet, from 1). messages: up to the turn to generate."""

    location: str
    messages: tuple[Message, ...]
    answer: str
    row: dict[str, Any]


def read_records(path: str, key: str) -> Iterator[Record]:
    """Rows of the dataset at `path`, in order. key: the configuration key that names it, for messages.

    Raises DataError at the first row that cannot be used.
    """
    file = Path(path)
    if not file.exists():
        raise DataError(f"{key}: {path} does not exist; name a JSONL or parquet file")
    if file.is_dir():
        raise DataError(f"{key}: {path} is a directory; name one JSONL or parquet file in it")
    if not file.is_file():
        raise DataError(f"{key}: {path} is a device or a pipe, not an ordinary file; name a JSONL or parquet file")
    try:
        with file.open("rb") as stream:
            is_parquet = stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read ({error.strerror}); check its permissions") from None
    rows = _parquet_rows(file, key) if is_parquet else _csv_rows(file) if file.suffix == ".csv" else _jsonl_rows(file)
    for location, row in rows:
        yield _record(location, row)


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """A first line of names, then one row after another; cells are texts."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}:{reader.line_num}: another number of cells than the first line; correct the row"
                    )
                yield f"{file}:{reader.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file}: is no CSV in UTF-8 ({error}); write the file again") from None


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_ROW_BYTES + 1), b""), start=1):
            if len(line) > LONGEST_ROW_BYTES:
                raise DataError(
                    f"{file}:{number}: the line is longer than {LONGEST_ROW_BYTES >> 20} MiB; write one JSON object per line"
                )
            if not line.strip():
                continue
            location = f"{file}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{location}: byte {error.start} is not UTF-8; save the file as UTF-8 JSONL or as parquet"
                ) from None
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise DataError(f"{location}: not valid JSON ({reason}); each line must be one JSON object") from None
            if rb"\ud" in line.lower() and not _is_text(row):
                raise DataError(
                    f"{location}: half of a surrogate pair (\\uD800 to \\uDFFF), which is no text; correct the row"
                )
            yield location, row


def _is_text(row: Any) -> bool:
    """Whether a JSON value can be written as UTF-8: escapes can name code points that are no characters."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet_rows(file: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{key}: {file} is parquet, which needs pyarrow; pip install pyarrow, or use JSONL") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", row
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: after row {number}, a text column is not UTF-8 (byte {error.start} of a value); write the file again"
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file}: unreadable parquet after row {number} ({reason}); write the file again") from None


def _record(location: str, row: Any) -> Record:
    if not isinstance(row, Mapping):
        raise DataError(f"{location}: a JSON {type(row).__name__}, not an object; each line must be one JSON object")
    row = published(row)
    messages = _messages(location, row)
    answer = row.get("answer")
    if answer is None and row.get("question") is None and row.get("problem") is not None:
        answer = row.get("solution")
    if answer is None and "prompt" not in row and "question" not in row and messages[-1]["role"] == "assistant":
        answer, messages = messages[-1]["content"], messages[:-1]
        if not messages:
            raise DataError(f"{location}: messages hold an answer but no question; add the user's message before it")
    return Record(location, messages, _reference(location, answer), row)


def _messages(location: str, row: dict[str, Any]) -> tuple[Message, ...]:
    for name in ("question", "problem", "prompt", "messages"):
        if row.get(name) is not None:
            break
    else:
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"{location}: no question, problem, prompt or messages (columns: {columns}); add or rename a column"
        )
    value = row[name]
    if isinstance(value, str) and name != "messages":
        if not value.strip():
            raise DataError(f"{location}: {name} is empty; give a text or remove the row")
        return ({"role": "user", "content": value},)
    if name in ("question", "problem") or not isinstance(value, list) or not value:
        wanted = {
            "question": "a text",
            "problem": "a text",
            "prompt": "a text or a list of messages",
            "messages": "a list of messages",
        }[name]
        raise DataError(f"{location}: {name} is {_describe(value)}, not {wanted}; correct the row")
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(
                f'{location}: {name} holds {_describe(message)}; each must be {{"role": text, "content": text}}'
            )
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _reference(location: str, answer: Any) -> str:
    """The final answer as text: what follows the last `####`, or everything."""
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(f"{location}: answer is {answer}, which no response can equal; correct or remove the row")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is not None and not isinstance(answer, str):
        raise DataError(f"{location}: answer is {_describe(answer)}, not a text or a number; correct the row")
    final = (answer or "").rpartition(ANSWER_MARK)[2].strip()
    if not final:
        place = f" after {ANSWER_MARK}" if answer and ANSWER_MARK in answer else ""
        raise DataError(f"{location}: no answer{place}; rewards need one, so add it or remove the row")
    return final


def _describe(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
