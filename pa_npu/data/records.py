"""Rows to records: question and reference answer, by the names of columns that the user gives, or by the row's layout.

These layouts are understood, told apart by the columns of each row:

    question, answer   GSM8K: the reference is what follows the last `####` of the answer (all of it without one)
    problem, answer    DeepScaleR, MATH; without an answer column the last \\boxed{} of the solution column is the reference
    prompt, answer     prompt is a text or a list of chat messages
    messages, answer   chat messages; without an answer column the last message, an assistant's, is the reference

and those of published benchmarks that `published` translates. A named column may be one inside another, such as
reward_model.ground_truth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.config.words import as_json
from pa_npu.data.rows import read_rows
from pa_npu.errors import DataError

ANSWER_MARK = "####"  # GSM8K puts the final answer behind it
_QUESTIONS = ("question", "problem", "prompt", "messages")
LETTERS = "ABCDEFGHIJ"
CHOICE_COLUMN = "choice_letters"
_GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

Message = dict[str, str]


@dataclass(frozen=True)
class Columns:
    """Names that the user gives; None leaves it to the row's layout. optional: rows without them are read by their layout.

    needs_answer: whether a row without a reference answer is refused; rewards that run tests read none.
    """

    question: str | None = None
    answer: str | None = None
    optional: bool = False
    needs_answer: bool = True


_BY_LAYOUT = Columns()


@dataclass(frozen=True)
class Record:
    """One row. location: "file:line" (JSONL) or "file: row n" (parquet, from 1). messages: up to the turn to generate."""

    location: str
    messages: tuple[Message, ...]
    answer: str
    row: dict[str, Any]


def read_records(
    path: str, key: str, columns: Columns = _BY_LAYOUT, split: str | None = None, usual: Sequence[str] = ("train",)
) -> Iterator[Record]:
    """Rows of the dataset at `path`, in order. key: the configuration key that names it, for messages.

    split, usual: as pa_npu.data.rows.read_rows. Raises DataError at the first row that cannot be used.
    """
    for location, row in read_rows(path, key, split, usual):
        yield _record(location, row, columns)


def _record(location: str, row: Any, columns: Columns) -> Record:
    if not isinstance(row, Mapping):
        raise DataError(f"{location}: a JSON {type(row).__name__}, not an object; each line must be one JSON object")
    question = _column(location, row, "question_column", columns.question, columns.optional)
    reference = _column(location, row, "answer_column", columns.answer, columns.optional)
    kept = published(row) if question is None else dict(row)
    row = dict(kept)
    if question is not None:
        row = {name: value for name, value in row.items() if name not in _QUESTIONS} | {"prompt": question}
    if reference is not None:
        row["answer"] = int(reference) if isinstance(reference, float) and reference.is_integer() else reference
    messages = _messages(location, row, columns.question if question is not None else None)
    answer = row.get("answer")
    if answer is None and row.get("question") is None and row.get("problem") is not None:
        answer = row.get("solution")
    if answer is None and "prompt" not in row and "question" not in row and messages[-1]["role"] == "assistant":
        answer, messages = messages[-1]["content"], messages[:-1]
        if not messages:
            raise DataError(f"{location}: messages hold an answer but no question; add the user's message before it")
    return Record(location, messages, _reference(location, answer, columns.needs_answer), kept)


def _column(location: str, row: Mapping[str, Any], key: str, name: str | None, optional: bool) -> Any:
    """The value of a column that the user names, or of one inside another by a dotted name; None where none is named."""
    if name is None:
        return None
    value: Any = row
    for part in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            value = None
            break
        value = value[part]
    if value is None and not optional:
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(f"{location}: no value in {name} (columns: {columns}); correct the row or data's {key}")
    return value


def _messages(location: str, row: dict[str, Any], called: str | None) -> tuple[Message, ...]:
    """called: the user's name of the column that is prompt here."""
    for name in _QUESTIONS:
        if row.get(name) is not None:
            break
    else:
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"{location}: no question, problem, prompt or messages (columns: {columns}); add or rename a column, or name it with "
            f"data.question_column"
        )
    value = row[name]
    if isinstance(value, str) and name != "messages":
        if not value.strip():
            raise DataError(f"{location}: {called or name} is empty; give a text or remove the row")
        return ({"role": "user", "content": value},)
    if name in ("question", "problem") or not isinstance(value, list) or not value:
        wanted = {
            "question": "a text",
            "problem": "a text",
            "prompt": "a text or a list of messages",
            "messages": "a list of messages",
        }[name]
        raise DataError(f"{location}: {called or name} is {as_json(value)}, not {wanted}; correct the row")
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(
                f'{location}: {called or name} holds {as_json(message)}; each must be {{"role": text, "content": text}}'
            )
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _reference(location: str, answer: Any, needed: bool) -> str:
    """The final answer as text: what follows the last `####`, or everything."""
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(f"{location}: answer is {answer}, which no response can equal; correct or remove the row")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is not None and not isinstance(answer, str):
        raise DataError(f"{location}: answer is {as_json(answer)}, not a text or a number; correct the row")
    final = (answer or "").rpartition(ANSWER_MARK)[2].strip()
    if not final and needed:
        place = f" after {ANSWER_MARK}" if answer and ANSWER_MARK in answer else ""
        raise DataError(f"{location}: no answer{place}; rewards need one, so add it or remove the row")
    return final


def published(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with question and answer where it is of a published benchmark, told by its columns; else the row as it is.

        Problem, Answer                                AIME 2024 (Maxwell-Jia/AIME_2024)
        problem | question, answer as 27.0             AMC 2023 (math-ai/amc23, AI-MO/aimo-validation-amc)
        Question, Correct Answer, Incorrect Answer 1-3 GPQA (Idavidrein/gpqa): its CSV
        question, choices: list, answer: index         MMLU (cais/mmlu)
        question, choices: {text, label}, answerKey    ARC (allenai/ai2_arc)

    GSM8K, MATH-500 (problem, answer), AIME of HuggingFaceH4 and math-ai (problem | question, answer) need nothing. A multiple
    choice becomes a question with lettered options; the order of GPQA's is drawn from the question itself, so that it is the same
    everywhere and always. The row keeps its columns, and `choice_letters` tells the math reward to compare letters.
    """
    found = dict(row)
    if all(isinstance(row.get(name), str) for name in _GPQA):
        options = [row[name].strip() for name in _GPQA[1:]]
        order = random.Random(row["Question"]).sample(range(4), 4)
        return found | _choice(row["Question"], [options[i] for i in order], order.index(0))
    choices = row.get("choices")
    if isinstance(choices, Mapping) and "answerKey" in row:
        labels, texts = list(choices.get("label", ())), list(choices.get("text", ()))
        if row["answerKey"] in labels and len(labels) == len(texts):
            return found | _choice(str(row.get("question")), texts, labels.index(row["answerKey"]))
    right = row.get("answer")
    if isinstance(choices, (list, tuple)) and type(right) is int and 0 <= right < len(choices) <= len(LETTERS):
        return found | _choice(str(row.get("question")), choices, right)
    if "Problem" in row and "Answer" in row and not {"problem", "question", "prompt", "messages"} & set(row):
        found |= {"problem": row["Problem"], "answer": row["Answer"]}
    answer = found.get("answer")
    if isinstance(answer, float) and answer.is_integer():
        found["answer"] = int(answer)
    return found


def _choice(question: str, options: Sequence[Any], right: int) -> dict[str, Any]:
    letters = LETTERS[: len(options)]
    lines = [f"{letter}) {option}" for letter, option in zip(letters, options, strict=True)]
    text = question.strip() + "\n\n" + "\n".join(lines)
    return {"question": text, "answer": letters[right], CHOICE_COLUMN: letters}
