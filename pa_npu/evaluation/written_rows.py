"""Rows of data written by a model: the answers of an evaluation as conversations for the supervised stage, with their digest.

    questions ──engines of the teacher──> answers ──write_rows──> rows.jsonl, rows.jsonl.about.json
                                                                  │
    student   <──────────── algorithm.name=sft, without a teacher ┘

The file beside the rows says which model wrote them, of which questions and how, and holds the
digest by which a run that trains them knows that they are unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import reason
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.data.prompts import dataset_options, made_of
from pa_npu.data.records import Columns, Record, read_records
from pa_npu.errors import DataError
from pa_npu.evaluation.results import Judged

ABOUT_SUFFIX = ".about.json"
_DIGEST_BYTES = 16
_USUAL_SPLITS = ("test", "validation")


@dataclass(frozen=True)
class WrittenRows:
    """rows: how many were written. cut, wrong: answers that were left out: without an end, and,
    where only correct ones are wanted, the others.
    """

    rows: int
    cut: int
    wrong: int

    def line(self, file: Path) -> str:
        left_out = [
            f"{number} {why}"
            for number, why in ((self.cut, "without an end"), (self.wrong, "wrong"))
            if number
        ]
        more = f"; left out: {', '.join(left_out)}" if left_out else ""
        return f"{counted(self.rows, 'row')} for the supervised stage: {file}{more}"


def write_rows(
    file: Path,
    config: Config,
    responses: Sequence[Judged],
    *,
    fingerprint: str,
    only_correct: bool,
) -> WrittenRows:
    """Writes the answers as rows, and what they are beside them.

    fingerprint: of the model that gave them.

    Raises DataError if nothing is left to write, or the file cannot be written.
    """
    records = {name: _records(config, name) for name in config.evaluate.all_sets(config.data.test)}
    lines = []
    cut = wrong = 0
    for response in responses:
        if not response.finished:
            cut += 1
        elif only_correct and not response.correct:
            wrong += 1
        else:
            row = _row(records[response.name][response.question], response.text)
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    written = WrittenRows(len(lines), cut, wrong)
    if not lines:
        raise DataError(
            f"{file}: no answer is left to write: {cut} without an end and {wrong} wrong; raise "
            "rollout.max_response_tokens, or take another model"
        )
    data = "".join(lines).encode()
    about = {**_about(config, data, written), "fingerprint": fingerprint}
    about["only_correct"] = only_correct
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
        about_file(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{file}: the rows cannot be written ({error.strerror}); name another file"
        ) from None
    return written


def about_file(file: Path) -> Path:
    return file.with_name(file.name + ABOUT_SUFFIX)


def check_written_rows(path: str, key: str) -> dict[str, Any] | None:
    """Returns what is known of rows that a model wrote; None of other data.

    key: the configuration key that names them, for messages. Raises DataError if they are not what
    was written.
    """
    about = about_file(Path(path))
    if not about.exists():
        return None
    try:
        description: dict[str, Any] = json.loads(about.read_text(encoding="utf-8"))
        digest = description["digest"]
        content = Path(path).read_bytes()
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{key}: {about} cannot be read ({reason(error)}); write the rows again, or remove it"
        ) from None
    if digest != _digest(content):
        raise DataError(
            f"{key}: {path} is not what {description.get('model')} wrote, by the digest in {about}; "
            "restore it, or remove that file if you have changed the rows on purpose"
        )
    return description


def _records(config: Config, name: str) -> list[Record]:
    """Returns the set's rows, in the order in which its questions are numbered."""
    dataset = config.evaluate.all_sets(config.data.test)[name]
    options = dataset_options(dataset, config.data)
    columns = Columns(
        options.question_column,
        options.answer_column,
        optional=not (dataset.question_column or dataset.answer_column),
        needs_answer=False,
    )
    key = config.evaluate.key_of(name)
    made = made_of(dataset)
    return list(read_records(dataset.path, key, columns, dataset.split, _USUAL_SPLITS, made))


def _row(record: Record, text: str) -> dict[str, Any]:
    messages: list[Mapping[str, Any]] = [dict(message) for message in record.messages]
    if record.continues:
        begun = messages.pop()
        text = f"{begun['content']}{text}"
    row: dict[str, Any] = {"messages": [*messages, {"role": "assistant", "content": text}]}
    if record.tools:
        row["tools"] = list(record.tools)
    return row


def _about(config: Config, data: bytes, written: WrittenRows) -> dict[str, Any]:
    sets = config.evaluate.all_sets(config.data.test)
    return {
        "digest": _digest(data),
        "rows": written.rows,
        "model": config.model.path,
        "questions": {name: dataset.path for name, dataset in sets.items()},
        "samples": config.evaluate.samples,
        "temperature": config.evaluate.temperature,
        "top_p": config.evaluate.top_p,
        "seed": config.run.seed,
    }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
