"""Rows to records: question and reference answer, by the names of columns that the user gives, or by the row's layout.

These layouts are understood, told apart by the columns of each row:

    question, answer   GSM8K: the reference is what follows the last `####` of the answer (all of it
                       without one)
    problem, answer    DeepScaleR, MATH; without an answer column the last \\boxed{} of the solution
                       column is the reference
    prompt, answer     prompt is a text or a list of chat messages
    messages, answer   chat messages; without an answer column the last message, an assistant's, is
                       the reference
    conversations      the same with ShareGPT's messages ({"from": "human", "value": ...}), behind
                       the column `system`

and those of published benchmarks that `published` translates. A column with images (Columns.images)
may stand beside each of them: one image or a list, which `<image>` in the text or parts of the
messages place; without either they stand before the first message of the user. A named column may be one inside
another, such as reward_model.ground_truth. Messages keep their fields (tool_calls, name,
reasoning_content, ...), and
functions that a column `tools` describes go with them to the chat template. A last message of the
assistant in `messages` is what the policy has to write, so it is no part of the prompt; one in
`prompt` is the beginning of the response, which goes on from there.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pa_npu.config.words import as_json
from pa_npu.data.made_rows import MadeRows, are_made, made_rows
from pa_npu.data.messages import (
    IMAGE_MARK,
    BadMessage,
    Message,
    is_of_sharegpt,
    read_tools,
    template_message,
    without_nulls,
)
from pa_npu.data.rows import TableRow, is_text, read_objects
from pa_npu.data.taskset_rows import are_of_taskset, taskset_rows
from pa_npu.errors import DataError

ANSWER_MARK = "####"  # GSM8K puts the final answer behind it
CONVERSATIONS = ("conversations", "conversation")
_OF_MESSAGES = ("messages", *CONVERSATIONS)
_QUESTIONS = ("question", "problem", "prompt", *_OF_MESSAGES)
_VIDEOS = "videos"
_TOOLS = "tools"
_SYSTEM = "system"
# Columns that hold the reference answer in datasets of this kind, for messages.
_LIKELY_ANSWERS = (
    "reward_model.ground_truth",
    "final_answer",
    "ground_truth",
    "expected_answer",
    "Answer",
    "solution",
    "target",
    "label",
)
_BOXES = ("\\boxed", "\\fbox")
_LONGEST_PLAIN_SOLUTION = 40  # characters of a solution that can be the final answer itself
LETTERS = "ABCDEFGHIJ"
CHOICE_COLUMN = "choice_letters"
_GPQA = (
    "Question",
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)


@dataclass(frozen=True)
class Columns:
    """Names that the user gives; None leaves it to the row's layout. optional: rows without them
    are read by their layout.

    needs_answer: whether a row without a reference answer is refused; rewards that run tests read
    none.
    images: of the column with images; None if no row's images are read.
    """

    question: str | None = None
    answer: str | None = None
    optional: bool = False
    needs_answer: bool = True
    images: str | None = None


_BY_LAYOUT = Columns()


@dataclass(frozen=True)
class Record:
    """One row.

    location: "file:line" (JSONL) or "file: row n" (parquet, from 1). messages: up to the turn to
    generate; of the assistant at the end is only what that turn begins with. tools: functions that
    the messages may call, as the row describes them. images: as the row holds or names them, one
    for each <image> of the messages.
    """

    location: str
    messages: tuple[Message, ...]
    answer: str
    row: dict[str, Any]
    tools: tuple[dict[str, Any], ...] = field(default=())
    images: tuple[Any, ...] = field(default=())

    @property
    def continues(self) -> bool:
        """Returns whether the response goes on from the last message."""
        return self.messages[-1]["role"] == "assistant"


def read_records(
    path: str,
    key: str,
    columns: Columns = _BY_LAYOUT,
    split: str | None = None,
    usual: Sequence[str] = ("train",),
    made: MadeRows | None = None,
) -> Iterator[Record]:
    """Yields the rows of the dataset at `path`, in order.

    Args:
        path: of a file or directory, or the name of tasks that make rows (made_rows.py).
        key: the configuration key that names it, for messages.
        columns: names that the user gives.
        split, usual: as pa_npu.data.rows.read_rows.
        made: how rows are made, for tasks.

    Raises DataError at the first row that cannot be used.
    """
    rows: Iterator[tuple[str, Mapping[str, Any]]]
    if are_made(path):
        rows = made_rows(path, key, split or usual[0], made or MadeRows())
    elif are_of_taskset(path):
        made = made or MadeRows()
        rows = taskset_rows(path, key, made.max_rows, made.options)
    else:
        rows = read_objects(path, key, split, usual)
    for location, row in rows:
        yield _record(location, row, columns)


def _record(location: str, row: Mapping[str, Any], columns: Columns) -> Record:
    question = named_column(location, row, "question_column", columns.question, columns.optional)
    reference = named_column(location, row, "answer_column", columns.answer, columns.optional)
    kept = published(row) if question is None else dict(row)
    asked, name = _question(location, kept, columns.question, question)
    is_table = isinstance(row, TableRow)
    inline: list[Any] | None = None if columns.images is None else []
    messages = row_messages(location, asked, name, is_table, inline)
    images: tuple[Any, ...] = ()
    if columns.images is not None:
        if row.get(_VIDEOS):
            raise DataError(
                f"{location}: {_VIDEOS}, which are not supported; remove the column, or the row"
            )
        messages, images = _with_images(location, messages, row.get(columns.images), inline or [])
        if images and any(value is not None for value in inline or ()):
            kept[name] = [dict(message) for message in messages]  # rewards need no pixels
    if name in CONVERSATIONS:
        messages = behind_system_column(messages, kept)
        # for rewards: in the field's form
        kept.setdefault("messages", [dict(message) for message in messages])
    if reference is not None:
        answer = reference
    elif kept.get("answer") is None and name == "problem":
        answer = _solution(location, kept, columns.needs_answer)
    else:
        answer = kept.get("answer")
    if messages[-1]["role"] == "assistant" and name != "prompt":
        if answer is None:
            answer = messages[-1]["content"]
        messages = messages[:-1]
        if not messages:
            raise DataError(
                f"{location}: {name} holds an answer but no question; add the user's message "
                "before it"
            )
    tools = read_tools(without_nulls(kept.get(_TOOLS)) if is_table else kept.get(_TOOLS))
    final = _reference(location, answer, columns.needs_answer, kept)
    return Record(location, messages, final, kept, tools, images)


def _question(
    location: str, row: Mapping[str, Any], named: str | None, value: Any
) -> tuple[Any, str]:
    """Returns the question and its column. value: of the column that the user named. Raises
    DataError.

    Several columns are fine where they ask the same: which of two different texts is asked would
    otherwise be a guess, and a system message could be lost with it.
    """
    if value is not None:
        assert named is not None
        return value, named
    present = [name for name in _QUESTIONS if row.get(name) is not None]
    others = [name for name in present if name not in CONVERSATIONS or isinstance(row[name], list)]
    # beside another question, `conversation` may be a number or a title
    present = others or present
    if not present:
        raise DataError(
            f"{location}: no question, problem, prompt, messages or conversations (columns: "
            f"{column_names(row)}); add or rename a column, or name it with data.question_column"
        )
    chosen = present[0]
    for name in present[1:]:
        if _plain_question(row[name]) != _plain_question(row[chosen]):
            raise DataError(
                f"{location}: {chosen} and {name} ask different things (columns: "
                f"{column_names(row)}); name the one to ask with data.question_column"
            )
    return row[chosen], chosen


def _plain_question(value: Any) -> Any:
    """Returns the text of a question: of messages, the user's where there is no other before the
    answer.
    """
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, list):
        return value
    try:
        messages = [template_message(message) for message in value]
    except BadMessage:
        return value
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"].strip()
    return messages


def column_names(row: Mapping[str, Any]) -> str:
    """Returns the row's columns for messages, those inside others by their dotted names."""
    names: list[str] = []
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            names += [f"{name}.{inner}" for inner in value]
        else:
            names.append(str(name))
    return ", ".join(names) or "none"


def named_column(
    location: str, row: Mapping[str, Any], key: str, name: str | None, optional: bool
) -> Any:
    """Returns the value of a column that the user names, or of one inside another by a dotted name;
    None where none is named.
    """
    if name is None:
        return None
    value: Any = row
    for part in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            value = None
            break
        value = value[part]
    if value is None and not optional:
        raise DataError(
            f"{location}: no value in {name} (columns: {column_names(row)}); correct the row or "
            f"data's {key}"
        )
    return value


def _with_images(
    location: str, messages: tuple[Message, ...], column: Any, inline: Sequence[Any]
) -> tuple[tuple[Message, ...], tuple[Any, ...]]:
    """Returns the messages with an <image> for each image of the row, and the images in their
    order.

    column: the row's images. inline: what parts of the messages hold.
    """
    if isinstance(column, (list, tuple)):
        images = list(column)
    else:
        images = [] if column is None or column == "" else [column]
    held = [value for value in inline if value is not None]
    if held and images:
        raise DataError(
            f"{location}: images both in the messages and in a column of their own; keep one of them"
        )
    if held and len(held) < len(inline):
        raise DataError(
            f"{location}: {len(inline)} parts of images, of which {len(held)} hold one; give all"
        )
    images = images or held
    if not images:
        if inline:
            raise DataError(
                f"{location}: {len(inline)} parts of images, but no image; add the images' column"
            )
        return messages, ()
    num_marks = sum(message["content"].count(IMAGE_MARK) for message in messages)
    if num_marks == 0:
        asked = next((m for m in messages if m["role"] == "user"), None)
        if asked is None:
            raise DataError(f"{location}: no message of role user to put its images before")
        before = {**asked, "content": IMAGE_MARK * len(images) + asked["content"]}
        messages = tuple(before if message is asked else message for message in messages)
    elif num_marks != len(images):
        raise DataError(
            f"{location}: {num_marks} times {IMAGE_MARK} for {len(images)} images; give one each"
        )
    return messages, tuple(images)


def refuse_images(location: str, row: Mapping[str, Any], column: str | None) -> None:
    """Raises DataError for a row with images where rows are trained as they are: its <image> would
    be a text.

    column: of images; None where none are read.
    """
    if column is not None and row.get(column):
        raise DataError(
            f"{location}: images in {column}, but rows that are trained as they are have text alone; "
            "remove the column, or set data.images_column=null"
        )


def row_messages(
    location: str, value: Any, name: str, is_table: bool, images: list[Any] | None = None
) -> tuple[Message, ...]:
    """Returns the messages of a question. name: of its column. is_table: nulls are fields that are
    not there. images: as for template_message.
    """
    if name in _OF_MESSAGES:
        value = _listed(value)
    elif isinstance(value, str):
        if not value.strip():
            raise DataError(f"{location}: {name} is empty; give a text or remove the row")
        return ({"role": "user", "content": value},)
    if name in ("question", "problem") or not isinstance(value, list) or not value:
        wanted = {
            "question": "a text",
            "problem": "a text",
            **dict.fromkeys(_OF_MESSAGES, "a list of messages"),
        }
        raise DataError(
            f"{location}: {name} is {as_json(value)}, not "
            f"{wanted.get(name, 'a text or a list of messages')}; correct the row"
        )
    messages = []
    for message in value:
        try:
            read = template_message(without_nulls(message) if is_table else message, images)
        except BadMessage as bad:
            raise DataError(f"{location}: {name}: {bad}; correct the row") from None
        is_assistant = read["role"] == "assistant"
        content = "value" if is_of_sharegpt(message) else "content"
        if message.get(content) is None and not is_assistant:
            raise DataError(
                f'{location}: {name} holds {as_json(message)}; each must be {{"role": text, '
                f'"content": text}}'
            )
        messages.append(read)
    return tuple(messages)


def _listed(value: Any) -> Any:
    """Returns the list of messages that a text is the JSON of, as in CSV files; anything else as it
    is.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return messages if is_text(messages) else value


def behind_system_column(
    messages: tuple[Message, ...], row: Mapping[str, Any]
) -> tuple[Message, ...]:
    """Returns the messages of a conversation behind the system prompt that ShareGPT's rows may have
    in a column of its own.

    A system message of the conversation itself goes before that column.
    """
    system = row.get(_SYSTEM)
    if not isinstance(system, str) or not system.strip() or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": system}, *messages)


def _solution(location: str, row: Mapping[str, Any], needed: bool) -> Any:
    """Returns the reference of a problem without an answer: its solution, where that says its final
    answer.
    """
    solution = row.get("solution")
    if (
        not needed
        or not isinstance(solution, str)
        or len(solution.strip()) <= _LONGEST_PLAIN_SOLUTION
    ):
        return solution
    if ANSWER_MARK in solution or any(box in solution for box in _BOXES):
        return solution
    raise DataError(
        f"{location}: no answer, and solution has no \\boxed{{}} that says the final one (columns: "
        f"{column_names(row)}); name the column of the answer with data.answer_column"
    )


def _reference(location: str, answer: Any, needed: bool, row: Mapping[str, Any]) -> str:
    """Returns the final answer as text: what follows the last `####`, or everything."""
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(
            f"{location}: answer is {answer}, which no response can equal; correct or remove the "
            "row"
        )
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is not None and not isinstance(answer, str):
        raise DataError(
            f"{location}: answer is {as_json(answer)}, not a text or a number; correct the row"
        )
    final = (answer or "").rpartition(ANSWER_MARK)[2].strip()
    if not final and needed:
        place = f" after {ANSWER_MARK}" if answer and ANSWER_MARK in answer else ""
        raise DataError(
            f"{location}: no answer{place} (columns: {column_names(row)}); rewards need one, so "
            f"name its column with data.answer_column{_likely(row)}, add it, or remove the row"
        )
    return final


def _likely(row: Mapping[str, Any]) -> str:
    """Returns the column that probably holds the answer, for a message."""
    for name in _LIKELY_ANSWERS:
        if named_column("", row, "", name, optional=True) is not None:
            return f"={name}"
    return ""


def published(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row with question and answer where it is of a published benchmark, told by its columns;
    else the row as it is.

        Problem, Answer                                AIME 2024 (Maxwell-Jia/AIME_2024)
        problem | question, answer as 27.0             AMC 2023 (math-ai/amc23, AI-MO/aimo-validation-amc)
        Question, Correct Answer, Incorrect Answer 1-3 GPQA (Idavidrein/gpqa): its CSV
        question, choices: list, answer: index         MMLU (cais/mmlu)
        question, choices: {text, label}, answerKey    ARC (allenai/ai2_arc)

    GSM8K, MATH-500 (problem, answer), AIME of HuggingFaceH4 and math-ai (problem | question,
    answer) need nothing. A multiple choice becomes a question with lettered options; the order of
    GPQA's is drawn from the question itself, so that it is the same everywhere and always. The row
    keeps its columns, and `choice_letters` tells the math reward to compare letters.
    """
    record = dict(row)
    if all(isinstance(row.get(name), str) for name in _GPQA):
        options = [row[name].strip() for name in _GPQA[1:]]
        order = random.Random(row["Question"]).sample(range(4), 4)
        return record | _choice(row["Question"], [options[i] for i in order], order.index(0))
    choices = row.get("choices")
    if isinstance(choices, Mapping) and "answerKey" in row:
        labels = list(choices.get("label", ()))
        texts = list(choices.get("text", ()))
        if row["answerKey"] in labels and len(labels) == len(texts):
            return record | _choice(str(row.get("question")), texts, labels.index(row["answerKey"]))
    right = row.get("answer")
    if (
        isinstance(choices, (list, tuple))
        and type(right) is int
        and 0 <= right < len(choices) <= len(LETTERS)
    ):
        return record | _choice(str(row.get("question")), choices, right)
    if (
        "Problem" in row
        and "Answer" in row
        and not {"problem", "question", "prompt", "messages"} & set(row)
    ):
        record |= {"problem": row["Problem"], "answer": row["Answer"]}
    answer = record.get("answer")
    if isinstance(answer, float) and answer.is_integer():
        record["answer"] = int(answer)
    return record


def _choice(question: str, options: Sequence[Any], right: int) -> dict[str, Any]:
    letters = LETTERS[: len(options)]
    lines = [f"{letter}) {option}" for letter, option in zip(letters, options, strict=True)]
    text = question.strip() + "\n\n" + "\n".join(lines)
    return {"question": text, "answer": letters[right], CHOICE_COLUMN: letters}
