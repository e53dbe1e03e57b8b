"""Pairs by their layout: a chosen and a rejected answer to one prompt, as conversations or texts.

    prompt, chosen, rejected      texts: the answers are joined behind the prompt as it is, without
                                  a template; messages: by the template
    question, chosen, rejected    as a user's and an assistant's message, behind the column `system`
    chosen, rejected              conversations: what both begin with is the prompt, as far as
                                  whole messages; texts: as far as whole tokens

data.question_column may name the prompt's column. An answer is a text, a message or a list of
messages. Where chosen and rejected are whole conversations, a prompt beside them says nothing new.
"""

from __future__ import annotations

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
from pa_npu.data.row_layouts import (
    Conversation,
    PlainText,
    RowContent,
    read_weight,
    without_weights,
)
from pa_npu.data.rows import TableRow, read_objects
from pa_npu.errors import DataError

ANSWERS = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "problem", "messages", *CONVERSATIONS)


@dataclass(frozen=True)
class PairContent:
    """One row. shares_beginning: whether the prompt is what both texts begin with, and nothing
    else says where it ends.
    """

    location: str
    chosen: RowContent
    rejected: RowContent
    shares_beginning: bool = False


def read_pairs(
    path: str,
    key: str,
    options: DataConfig,
    split: str | None,
    usual: Sequence[str],
    columns_optional: bool,
) -> Iterator[PairContent]:
    """Yields the pairs of a dataset, in order; arguments as
    pa_npu.data.row_layouts.read_conversations.

    Raises DataError at the first row that is none.
    """
    for location, row in read_objects(path, key, split, usual):
        refuse_images(location, row, options.images_column)
        yield _pair(location, row, options, columns_optional)


def _pair(
    location: str, row: Mapping[str, Any], options: DataConfig, optional: bool
) -> PairContent:
    if missing := [name for name in ANSWERS if row.get(name) is None]:
        raise DataError(
            f"{location}: no {' and no '.join(missing)} (columns: {column_names(row)}); a pair "
            "needs both answers, so rename their columns to chosen and rejected, or take an "
            "algorithm that trains rows of one answer"
        )
    values = [_as_list(row[name]) for name in ANSWERS]
    if isinstance(values[0], str) != isinstance(values[1], str):
        raise DataError(
            f"{location}: chosen is {as_json(row['chosen'], 60)} and rejected is "
            f"{as_json(row['rejected'], 60)}; give two texts, or two lists of messages"
        )
    asked, name = _prompt(location, row, options, optional)
    if all(isinstance(value, str) for value in values):
        return _of_texts(location, row, values, asked, name)
    return _of_messages(location, row, values, asked, name)


def _as_list(value: Any) -> Any:
    """Returns a single message as a list of one; anything else unchanged."""
    return [value] if isinstance(value, Mapping) else value


def _prompt(
    location: str, row: Mapping[str, Any], options: DataConfig, optional: bool
) -> tuple[Any, str]:
    """Returns the prompt and its column; None where chosen and rejected are all that there is."""
    named = named_column(location, row, "question_column", options.question_column, optional)
    if named is not None:
        return named, str(options.question_column)
    for name in _PROMPTS:
        if row.get(name) is not None:
            return row[name], name
    return None, ""


def _of_texts(
    location: str, row: Mapping[str, Any], values: Sequence[str], asked: Any, name: str
) -> PairContent:
    for column, value in zip(ANSWERS, values, strict=True):
        if not value.strip():
            raise DataError(f"{location}: {column} is empty; give an answer or remove the row")
    weight = read_weight(location, row.get("weight"), "weight")
    if asked is None or (name == "prompt" and isinstance(asked, str)):
        chosen, rejected = (PlainText(location, asked or "", value, weight) for value in values)
        return PairContent(location, chosen, rejected, shares_beginning=asked is None)
    answers = [[{"role": "assistant", "content": value}] for value in values]
    return _of_messages(location, row, answers, asked, name)


def _of_messages(
    location: str, row: Mapping[str, Any], values: Sequence[Any], asked: Any, name: str
) -> PairContent:
    is_table = isinstance(row, TableRow)
    answers = []
    for column, value in zip(ANSWERS, values, strict=True):
        if not isinstance(value, list) or not value:
            raise DataError(
                f"{location}: {column} is {as_json(value)}, not a text or a list of messages; "
                "correct the row"
            )
        answers.append(row_messages(location, value, column, is_table))
    before: tuple[Message, ...] = ()
    if all(answer[0]["role"] == "assistant" for answer in answers) and asked is not None:
        before = row_messages(location, asked, name, is_table)
    elif isinstance(asked, list):
        asked_messages = row_messages(location, asked, name, is_table)
        is_repeated = all(answer[: len(asked_messages)] == asked_messages for answer in answers)
        before = () if is_repeated else asked_messages
    num_shared = 0
    while not before and _both_go_on_alike(answers, num_shared):
        num_shared += 1
    before = before + answers[0][:num_shared]
    answers = [answer[num_shared:] for answer in answers]
    if not before:
        raise DataError(
            f"{location}: chosen and rejected begin with different messages and there is no prompt "
            f"(columns: {column_names(row)}); add the messages that both answer"
        )
    before = behind_system_column(before, row)
    chosen, rejected = (
        _content(location, row, column, before, answer)
        for column, answer in zip(ANSWERS, answers, strict=True)
    )
    return PairContent(location, chosen, rejected)


def _both_go_on_alike(answers: Sequence[tuple[Message, ...]], number: int) -> bool:
    chosen, rejected = answers
    has_both = number < len(chosen) and number < len(rejected)
    return has_both and chosen[number] == rejected[number]


def _content(
    location: str,
    row: Mapping[str, Any],
    column: str,
    before: tuple[Message, ...],
    answer: tuple[Message, ...],
) -> Conversation:
    """Returns the prompt and one answer, of which the assistant's messages are compared."""
    if all(message["role"] != "assistant" for message in answer):
        same = "; the pair is equal" if not answer else ""
        raise DataError(
            f"{location}: {column} has no message of role assistant behind what both answers begin "
            f"with{same}; correct the row, or remove it"
        )
    tools_column = row.get("tools")
    tools = read_tools(without_nulls(tools_column) if isinstance(row, TableRow) else tools_column)
    weight = read_weight(location, row.get("weight"), "weight")
    asked, _ = without_weights(location, before, weight)
    answered, weights = without_weights(location, answer, weight)
    if any(value not in (0.0, weight) for value in weights):
        raise DataError(
            f"{location}: {column} has messages with weights of their own, but the loss of a pair "
            "is of all its tokens together; set a message's weight to 0 or 1, and that of the "
            "pair in the column weight"
        )
    nothing = (0.0,) * len(asked)
    return Conversation(location, (*asked, *answered), (*nothing, *weights), tools)
