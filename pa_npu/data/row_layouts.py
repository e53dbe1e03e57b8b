"""Rows that are trained, by their layout: conversations with the weight of each message, or a text and what follows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.config.sections.inputs import DataConfig
from pa_npu.config.words import as_json
from pa_npu.data.messages import Message, read_tools, without_nulls
from pa_npu.data.records import (
    CONVERSATIONS,
    behind_system_column,
    column_names,
    named_column,
    refuse_images,
    row_messages,
)
from pa_npu.data.rows import TableRow, read_objects
from pa_npu.errors import DataError

_WEIGHT = "weight"
_TOOLS = "tools"
_PAIRS = (("question", "answer"), ("problem", "solution"), ("problem", "answer"))
_PAIRS_OF_PROMPT = (("prompt", "completion"), ("prompt", "answer"), ("prompt", "response"))


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template. weights: of each message, 0 where it is not trained."""

    location: str
    messages: tuple[Message, ...]
    weights: tuple[float, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class PlainText:
    """A text that is trained behind what it follows, without a template. weight: of its tokens."""

    location: str
    before: str
    text: str
    weight: float = 1.0


RowContent = Conversation | PlainText


def read_conversations(
    path: str,
    key: str,
    options: DataConfig,
    split: str | None,
    usual: Sequence[str],
    columns_optional: bool,
) -> Iterator[RowContent]:
    """Yields the rows of a dataset, in order. Raises DataError at the first that cannot be read.

    key: the configuration key that names the dataset. split, usual: as pa_npu.data.rows.read_rows.
    columns_optional: whether rows without the named columns go by their layout.
    """
    for location, row in read_objects(path, key, split, usual):
        refuse_images(location, row, options.images_column)
        yield _content(location, row, options, columns_optional)


def _content(
    location: str, row: Mapping[str, Any], options: DataConfig, optional: bool
) -> RowContent:
    weight = read_weight(location, row.get(_WEIGHT), "weight")
    tools_column = row.get(_TOOLS)
    tools = read_tools(without_nulls(tools_column) if isinstance(row, TableRow) else tools_column)
    question = named_column(location, row, "question_column", options.question_column, optional)
    answer = named_column(location, row, "answer_column", options.answer_column, optional)
    if question is not None and answer is not None:
        return _pair(location, row, str(options.question_column), question, answer, weight, tools)
    if question is not None:
        name = str(options.question_column)
        return _conversation(location, row, name, question, weight, tools)
    for name in ("messages", *CONVERSATIONS):
        if row.get(name) is not None:
            return _conversation(location, row, name, row[name], weight, tools)
    for asked, answered in _PAIRS_OF_PROMPT:
        before = row.get(asked)
        text = row.get(answered)
        if before is None or text is None:
            continue
        if answered == "completion" and isinstance(before, str) and isinstance(text, str):
            return PlainText(location, before, text, weight)
        return _pair(location, row, asked, before, text, weight, tools)
    for asked, answered in _PAIRS:
        if row.get(asked) is not None and row.get(answered) is not None:
            return _pair(location, row, asked, row[asked], row[answered], weight, tools)
    if isinstance(row.get("text"), str):
        return PlainText(location, "", row["text"], weight)
    raise DataError(
        f"{location}: no messages, conversations, prompt with completion, question with answer, or "
        f"text (columns: {column_names(row)}); add or rename a column, or name them with "
        "data.question_column and data.answer_column"
    )


def _conversation(
    location: str,
    row: Mapping[str, Any],
    name: str,
    value: Any,
    weight: float,
    tools: tuple[dict[str, Any], ...],
) -> Conversation:
    """Returns a conversation in which all messages of the assistant are trained that have no weight
    0.
    """
    messages = row_messages(location, value, name, isinstance(row, TableRow))
    if name in CONVERSATIONS:
        messages = behind_system_column(messages, row)
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(
            f"{location}: {name} has no message of role assistant, which is what is trained; add "
            "the answer, or remove the row"
        )
    plain, weights = without_weights(location, messages, weight)
    return Conversation(location, plain, weights, tools)


def _pair(
    location: str,
    row: Mapping[str, Any],
    name: str,
    asked: Any,
    answered: Any,
    weight: float,
    tools: tuple[dict[str, Any], ...],
) -> Conversation:
    """Returns a question, or messages, and the answer, a text or messages, which alone is trained."""
    is_table = isinstance(row, TableRow)
    before = row_messages(location, asked, name if isinstance(asked, str) else "messages", is_table)
    if isinstance(answered, bool) or not isinstance(answered, (str, int, float, list)):
        raise DataError(
            f"{location}: the answer is {as_json(answered)}, not a text or a list of messages; "
            "correct the row"
        )
    if isinstance(answered, list):
        after = row_messages(location, answered, "messages", is_table)
    else:
        after = ({"role": "assistant", "content": str(answered)},)
    if all(message["role"] != "assistant" for message in after):
        raise DataError(
            f"{location}: what follows {name} has no message of role assistant, which is what is "
            "trained; correct the row"
        )
    asked_messages, _ = without_weights(location, before, weight)
    answer_messages, weights = without_weights(location, after, weight)
    return Conversation(
        location,
        (*asked_messages, *answer_messages),
        (*(0.0 for _ in asked_messages), *weights),
        tools,
    )


def without_weights(
    location: str, messages: Sequence[Message], row_weight: float
) -> tuple[tuple[Message, ...], tuple[float, ...]]:
    """Returns the messages as templates read them, and the weight of each."""
    plain: list[Message] = []
    weights: list[float] = []
    for number, message in enumerate(messages):
        rest = {name: value for name, value in message.items() if name != _WEIGHT}
        of_message = read_weight(location, message.get(_WEIGHT), f"the weight of message {number}")
        plain.append(rest)
        weights.append(row_weight * of_message if message["role"] == "assistant" else 0.0)
    return tuple(plain), tuple(weights)


def read_weight(location: str, value: Any, named: str) -> float:
    if value is None:
        return 1.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise DataError(
            f"{location}: {named} is {as_json(value)}, not a number of at least 0; correct the row"
        )
    return float(value)
