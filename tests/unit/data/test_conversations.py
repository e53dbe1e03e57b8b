"""Conversations with calls, reasoning, names and tools are rendered whole, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.helpers.datasets import load, refusal, write
from tools.make_tiny_model import make_tokenizer

# As Qwen3's: tools before the conversation, calls and reasoning where they were written, names of
# tools with their answers.
TOOL_TEMPLATE = (
    "{%- if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}[/tools]{% endif "
    "%}{%- for message in messages %}<|{{ message.role }}{% if message.name %}:{{ message.name "
    "}}{% endif %}{% if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}|>{% if "
    "message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ "
    "message.content }}{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}({{ "
    "call.function.arguments | tojson }})</call>{% endfor %}{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}"
)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "required": ["x"]}},
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"x": 2, "y": null}'},
}
TOOL_ROW = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"},
    ],
    "tools": [ADD],
    "answer": "4",
}
TOOL_TEXT = (
    '<|user|>2+2?<|assistant|><think>I add.</think><call>add({"x": 2, "y": '
    "null})</call><|tool:add#c1|>4<|assistant|>"
)


@pytest.fixture
def tool_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


def without_tools(text: str) -> str:
    return text.partition("[/tools]")[2]


def test_calls_reasoning_names_tools_and_parts_of_a_row_are_rendered_whole(
    tmp_path: Path, tool_tokenizer: Any
) -> None:
    (prompt,) = load(write(tmp_path / "a.jsonl", TOOL_ROW), tool_tokenizer)
    assert without_tools(prompt.text) == TOOL_TEXT
    assert '"name": "add"' in prompt.text.partition("[/tools]")[0], "the row's tools"
    as_objects = json.loads(json.dumps(TOOL_ROW))
    as_objects["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"x": 2, "y": None}
    as_objects["messages"][1]["content"] = ""
    as_objects["tools"] = json.dumps([ADD])  # as columns of a table hold them
    (another,) = load(write(tmp_path / "b.jsonl", as_objects), tool_tokenizer)
    assert another.text == prompt.text


def test_a_tables_nulls_are_fields_that_a_message_does_not_have(
    tmp_path: Path, tool_tokenizer: Any
) -> None:
    first = json.loads(json.dumps(TOOL_ROW))
    first["messages"][0]["content"] = "2+2?"
    first["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"x": 2}
    second = json.loads(json.dumps(first))
    second["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"y": 2}
    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([first, second]), table)
    (user, called, _), _ = pyarrow.parquet.read_table(table)["messages"].to_pylist()
    assert "tool_calls" in user and "y" in called["tool_calls"][0]["function"]["arguments"], (
        "the table has nulls there"
    )
    texts = [without_tools(prompt.text) for prompt in load(str(table), tool_tokenizer)]
    assert texts == [TOOL_TEXT.replace('{"x": 2, "y": null}', f'{{"{name}": 2}}') for name in "xy"]


def test_what_a_template_would_drop_is_one_line_or_goes_into_the_text(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "a.jsonl", TOOL_ROW)
    assert "the chat template leaves out the call of add (tool_calls)" in refusal(path, tokenizer)
    assert "plain text (there is no chat template) leaves out the call" in refusal(
        path, tokenizer, chat_template="never"
    )
    only_tools = {"question": "2+2?", "answer": "4", "tools": [ADD]}
    assert "leaves out the tool add (tools)" in refusal(
        write(tmp_path / "t.jsonl", only_tools), tokenizer
    )
    (named,) = load(write(tmp_path / "n.jsonl", only_tools | {"tools": ["add"]}), tokenizer)
    assert named.row["tools"] == ["add"], (
        "names are no functions that a template could describe; they stay the row's"
    )
    thinking = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            thinking,
            {"role": "user", "content": "sure?"},
        ],
        "answer": 4,
    }
    (prompt,) = load(write(tmp_path / "r.jsonl", row), tokenizer)
    assert "<think>\n2 and 2\n</think>\n\n4" in prompt.text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            "1 image, but no model was given; set model.path to one of qwen2_5_vl",
        ),
        (
            {"role": "user", "content": [{"type": "audio", "audio": "x"}]},
            "only parts of type text can be read, and of type image",
        ),
        ({"role": "user", "content": 5}, "content is 5, not a text or a list of text parts"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]},
            "which names no function",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": "add"},
            'tool_calls is "add", not a list',
        ),
        ({"role": 1, "content": "q"}, "has no role that is a text"),
    ],
)
def test_a_message_that_cannot_be_read_is_one_line(
    message: Any, expected: str, tmp_path: Path, tokenizer: Any
) -> None:
    row = {"messages": [message, {"role": "user", "content": "q"}], "answer": "1"}
    assert expected in refusal(write(tmp_path / "a.jsonl", row), tokenizer)


# As ShareGPT's rows and those of its descendants say what TOOL_ROW says.
SHARED_ROW = {
    "conversations": [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 2, "y": null}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "It is 4.\n#### 4"},
    ],
    "tools": json.dumps([ADD["function"]]),
}
SHARED_TEXT = '<|user|>2+2?<|assistant|><call>add({"x": 2, "y": null})</call><|tool|>4<|assistant|>'


@pytest.mark.parametrize("column", ["conversations", "conversation", "messages", "prompt"])
def test_a_conversation_of_sharegpt_is_a_prompt_with_its_calls_and_tools(
    column: str, tmp_path: Path, tool_tokenizer: Any
) -> None:
    *asked, solved = SHARED_ROW["conversations"]
    row = {column: asked if column == "prompt" else [*asked, solved], "tools": SHARED_ROW["tools"]}
    answered = {**row, "answer": "4"} if column == "prompt" else row
    (prompt,) = load(write(tmp_path / "a.jsonl", answered), tool_tokenizer)
    assert (without_tools(prompt.text), prompt.answer) == (SHARED_TEXT, "4")
    assert '"name": "add"' in prompt.text.partition("[/tools]")[0], "the row's tools"


def test_a_conversation_has_its_system_prompt_from_its_own_message_or_from_its_column(
    tmp_path: Path, tokenizer: Any
) -> None:
    asked = [{"from": "human", "value": "2+2?"}]
    beside = {"conversations": asked, "system": "Be brief.", "answer": "4"}
    inside = {**beside, "conversations": [{"from": "system", "value": "Be long."}, *asked]}
    as_text = {**beside, "conversations": json.dumps(asked)}
    first, second, third = load(write(tmp_path / "a.jsonl", beside, inside, as_text), tokenizer)
    assert first.text == third.text == "<|system|>Be brief.<|user|>2+2?<|assistant|>"
    assert second.text == "<|system|>Be long.<|user|>2+2?<|assistant|>"
    assert first.row["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    ], "reward functions find the messages in the field's form"


def test_a_conversation_beside_the_same_question_is_no_second_question(
    tmp_path: Path, tokenizer: Any
) -> None:
    talk = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    same = {"problem": "2+2?", "conversations": talk, "answer": "4"}
    titled = {"question": "2+2?", "conversation": 17, "answer": "4"}
    for prompt in load(write(tmp_path / "a.jsonl", same, titled), tokenizer):
        assert prompt.text == "<|user|>2+2?<|assistant|>"
    another = write(tmp_path / "b.jsonl", {**same, "problem": "2+3?"})
    assert "problem and conversations ask different things" in refusal(another, tokenizer)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"from": "alien", "value": "q"}, 'is from "alien", who is none of human, user, gpt'),
        ({"from": 5, "value": "q"}, "is from 5, who is none of"),
        ({"from": "human"}, 'conversations holds {"from": "human"}; each must be'),
        (
            {"from": "function_call", "value": "add(2)"},
            "is a function_call whose value is not the JSON of one",
        ),
        ({"from": "function_call", "value": "[1]"}, "tool_calls has 1, which names no function"),
        ("Human: q", '"Human: q" is not an object'),
    ],
)
def test_a_message_of_sharegpt_that_cannot_be_read_is_one_line(
    message: Any, expected: str, tmp_path: Path, tokenizer: Any
) -> None:
    row = {"conversations": [message, {"from": "human", "value": "q"}], "answer": "1"}
    assert expected in refusal(write(tmp_path / "a.jsonl", row), tokenizer)


def test_a_last_message_of_the_assistant_is_the_answer_of_messages_and_the_beginning_of_one_in_a_prompt(
    tmp_path: Path, tokenizer: Any
) -> None:
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]
    (solved,) = load(write(tmp_path / "m.jsonl", {"messages": talk, "answer": "4"}), tokenizer)
    assert (solved.text, solved.answer) == ("<|user|>2+2?<|assistant|>", "4"), (
        "the solution is no part of the question"
    )
    (begun,) = load(write(tmp_path / "p.jsonl", {"prompt": talk, "answer": "4"}), tokenizer)
    assert begun.text == "<|user|>2+2?<|assistant|>It is 4."
