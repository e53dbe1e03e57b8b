"""Datasets become prompts in every layout, and each bad one ends in a DataError that names the place and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from pa_npu.config.sections.inputs import DataConfig, Dataset, TrainingDataset
from pa_npu.data.prompts import Prompt, PromptSet, first_prompt_lines, load_prompts, load_training
from pa_npu.data.template import template_variables
from pa_npu.errors import DataError
from tools.make_tiny_model import make_tokenizer

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
QUESTION = {"question": "What is 12+34?", "answer": "12+34=46\n#### 46"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def write(path: Path, *lines: Any) -> str:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return str(path)


def loaded(path: str, tokenizer: Any, **settings: Any) -> PromptSet:
    (found,) = load_training(DataConfig(train=path, **settings), tokenizer)
    return found


def load(path: str, tokenizer: Any, **settings: Any) -> tuple[Prompt, ...]:
    return loaded(path, tokenizer, **settings).prompts


def refusal(path: str, tokenizer: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, **settings)
    message = str(caught.value)
    assert "\n" not in message, f"not one line: {message!r}"
    return message


def test_gsm8k_row_gives_the_template_tokens_and_the_final_answer(
    tmp_path: Path, tokenizer: Any
) -> None:
    (prompt,) = load(write(tmp_path / "a.jsonl", QUESTION), tokenizer)
    assert prompt.text == "<|user|>What is 12+34?<|assistant|>"
    assert tokenizer.convert_ids_to_tokens(prompt.tokens.tolist()) == [
        *("<|user|>", "What", "Ġis", "Ġ", "1", "2", "+", "3", "4", "?", "<|assistant|>")
    ]
    assert (prompt.answer, prompt.prompt_id, prompt.row) == ("46", 0, QUESTION)
    assert prompt.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("row", "text", "answer"),
    [
        ({"prompt": "2+2?", "answer": 4}, "<|user|>2+2?<|assistant|>", "4"),
        (
            {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},
            "<|user|>2+2?<|assistant|>",
            "4",
        ),
        ({"question": "2+2?", "answer": " x=4 "}, "<|user|>2+2?<|assistant|>", "x=4"),
        ({"problem": "2+2?", "solution": "So 4.", "answer": "4"}, "<|user|>2+2?<|assistant|>", "4"),
        (
            {"problem": "2+2?", "solution": r"So \boxed{4}."},
            "<|user|>2+2?<|assistant|>",
            r"So \boxed{4}.",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "2+2?"},
                ],
                "answer": "#### 4",
            },
            "<|system|>S<|user|>2+2?<|assistant|>",
            "4",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "2+2=4\n#### 4"},
                ]
            },
            "<|user|>2+2?<|assistant|>",
            "4",
        ),
    ],
)
def test_layouts(
    row: dict[str, Any], text: str, answer: str, tmp_path: Path, tokenizer: Any
) -> None:
    (prompt,) = load(write(tmp_path / "a.jsonl", row), tokenizer)
    assert (prompt.text, prompt.answer) == (text, answer)


def test_parquet_and_jsonl_of_the_same_rows_give_the_same_prompts(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [QUESTION, {"question": "What is 50+49?", "answer": "#### 99"}]
    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    from_parquet = load(str(table), tokenizer)
    from_jsonl = load(write(tmp_path / "a.jsonl", *rows), tokenizer)
    assert [(p.prompt_id, p.text, p.answer, p.row) for p in from_parquet] == [
        (p.prompt_id, p.text, p.answer, p.row) for p in from_jsonl
    ]


def test_system_prompt_and_instruction_are_rendered_where_they_belong(
    tmp_path: Path, tokenizer: Any
) -> None:
    own = {
        "messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}],
        "answer": "1",
    }
    path = write(tmp_path / "a.jsonl", QUESTION, own)
    settings = {"system_prompt": "Be brief.", "instruction": "End with ####."}
    first, second = load(path, tokenizer, **settings)
    assert first.text == "<|system|>Be brief.<|user|>What is 12+34?\nEnd with ####.<|assistant|>"
    assert second.text == "<|system|>own<|user|>q\nEnd with ####.<|assistant|>"
    plain, _ = load(path, tokenizer, chat_template="never", **settings)
    assert plain.text == "Be brief.\nWhat is 12+34?\nEnd with ####."


def test_template_policy_follows_the_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION)
    without = make_tokenizer()
    without.chat_template = None
    assert load(path, without)[0].text == QUESTION["question"]
    assert "data.chat_template: always" in refusal(path, without, chat_template="always")
    refusing = make_tokenizer()
    refusing.chat_template = "{{ raise_exception('no system role here') }}"
    message = refusal(path, refusing, system_prompt="S")
    assert (
        f"{path}:1" in message
        and "no system role here" in message
        and "data.chat_template=never" in message
    )


def test_blank_lines_are_skipped_and_lines_still_counted(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION, "", QUESTION, "", '{"question": "q"}')
    assert refusal(path, tokenizer).startswith(f"{path}:5: no answer")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"question": "q", "answer": ', "not valid JSON"),
        ("[1, 2]", "a JSON list, not an object"),
        ("42", "a JSON int, not an object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"question": "q"}', "no answer (columns: question); "),
        ('{"question": "q", "answer": null}', "no answer (columns: question, answer); "),
        ('{"question": "q", "answer": "  "}', "no answer (columns: question, answer); "),
        (
            '{"question": "q", "answer": "so 5\\n#### "}',
            "no answer after #### (columns: question, answer);",
        ),
        ('{"question": "q", "answer": [5]}', "answer is [5], not a text or a number"),
        ('{"question": "q", "answer": true}', "answer is true, not a text or a number"),
        ('{"question": " ", "answer": "5"}', "question is empty"),
        ('{"question": 7, "answer": "5"}', "question is 7, not a text"),
        (
            '{"input": "q", "answer": "5"}',
            "no question, problem, prompt, messages or conversations (columns: input, answer)",
        ),
        ("{}", "no question, problem, prompt, messages or conversations (columns: none)"),
        ('{"messages": [], "answer": "5"}', "messages is [], not a list of messages"),
        ('{"messages": "q", "answer": "5"}', 'messages is "q", not a list of messages'),
        (
            '{"messages": [{"role": "user"}], "answer": "5"}',
            'each must be {"role": text, "content": text}',
        ),
        ('{"messages": [{"role": "user", "content": "q"}]}', "no answer (columns: messages); "),
        ('{"messages": [{"role": "assistant", "content": "q"}]}', "an answer but no question"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(
    line: str, expected: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "bad.jsonl", QUESTION, line, QUESTION)
    message = refusal(path, tokenizer)
    assert message.startswith(f"{path}:2: ") and expected in message, message


def test_unusable_files_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    missing = str(tmp_path / "none.jsonl")
    named = "name a JSONL or parquet file, or a directory of a dataset"
    assert refusal(missing, tokenizer) == f"data.train: {missing} does not exist; {named}"
    assert "holds no dataset" in refusal(str(tmp_path), tokenizer)
    assert "is empty" in refusal(write(tmp_path / "empty.jsonl"), tokenizer)
    assert "is empty" in refusal(write(tmp_path / "blank.jsonl", "", " "), tokenizer)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(QUESTION).encode() + b'\n{"question": "caf\xe9", "answer": "1"}\n')
    assert refusal(str(latin), tokenizer).startswith(f"{latin}:2: byte 17 is not UTF-8")
    damaged = tmp_path / "damaged.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([QUESTION] * 100), damaged)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert "unreadable parquet" in refusal(str(damaged), tokenizer)
    holes = tmp_path / "holes.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([QUESTION, {"question": "q", "answer": None}]), holes
    )
    assert refusal(str(holes), tokenizer).startswith(f"{holes}: row 2: no answer")


def test_the_key_of_the_test_set_is_named(tmp_path: Path, tokenizer: Any) -> None:
    config = DataConfig(train="train.jsonl", test=str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"^data\.test: "):
        load_prompts(Dataset(path=str(config.test)), tokenizer, config, "data.test")


def test_overlong_prompts_are_refused_truncated_or_skipped_and_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    long = {"question": "What is 12+34+56+78?", "answer": "180"}  # 17 tokens; QUESTION has 11
    path = write(tmp_path / "a.jsonl", QUESTION, long, QUESTION, long)
    message = refusal(path, tokenizer, max_prompt_tokens=11)
    assert message.startswith(
        f"{path}:2: the prompt has 17 tokens and 1 more, more than data.max_prompt_tokens = 11"
    )
    assert "longest: 17" in message and "truncate or skip" in message

    skipped = loaded(path, tokenizer, max_prompt_tokens=11, overlong_prompt="skip")
    assert [prompt.prompt_id for prompt in skipped.prompts] == [0, 2]
    assert (skipped.num_read, skipped.num_truncated, skipped.num_skipped) == (4, 0, 2)

    truncated = loaded(path, tokenizer, max_prompt_tokens=11, overlong_prompt="truncate")
    assert [len(prompt.tokens) for prompt in truncated.prompts] == [11] * 4
    second = truncated.prompts[1].text
    assert second == "12+34+56+78?<|assistant|>"[-len(second) :]
    assert second.endswith("+34+56+78?<|assistant|>")
    assert (truncated.num_read, truncated.num_truncated, truncated.num_skipped) == (4, 2, 0)
    assert "read 4, truncated 2, skipped 0" in truncated.summary

    everything = refusal(path, tokenizer, max_prompt_tokens=3, overlong_prompt="skip")
    assert "all 4 prompts" in everything and "shortest: 11" in everything


VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"style": "rule", "ground_truth": 4.0},
}


def test_columns_are_taken_by_name_and_the_row_stays_as_it_was(
    tmp_path: Path, tokenizer: Any
) -> None:
    own = {"frage": "2+2?", "loesung": "so #### 4", "question": "another", "answer": "5"}
    path = write(tmp_path / "a.jsonl", own)
    (prompt,) = load(path, tokenizer, question_column="frage", answer_column="loesung")
    assert (prompt.text, prompt.answer, prompt.row) == ("<|user|>2+2?<|assistant|>", "4", own)
    (only_answer,) = load(path, tokenizer, answer_column="loesung")
    assert (only_answer.text, only_answer.answer) == ("<|user|>another<|assistant|>", "4")
    (nested,) = load(
        write(tmp_path / "v.jsonl", VERL), tokenizer, answer_column="reward_model.ground_truth"
    )
    assert (nested.text, nested.answer, nested.row) == ("<|user|>2+2?<|assistant|>", "4", VERL)
    message = refusal(path, tokenizer, question_column="fragen")
    assert message.startswith(
        f"{path}:1: no value in fragen (columns: frage, loesung, question, answer)"
    )
    assert "question_column" in message
    bad = write(tmp_path / "b.jsonl", {"frage": 7, "answer": "1"}, {"frage": " ", "answer": "1"})
    assert "frage is 7, not a text or a list of messages" in refusal(
        bad, tokenizer, question_column="frage"
    )


def test_held_out_sets_go_by_their_layout_where_they_lack_the_named_columns(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "a.jsonl", QUESTION)
    config = DataConfig(train="t", question_column="frage", answer_column="loesung")
    for key in ("evaluate.sets.gsm8k", "data.test"):
        (prompt,) = load_prompts(Dataset(path=path), tokenizer, config, key).prompts
        assert prompt.answer == "46"
    with pytest.raises(DataError, match="no value in frage"):
        load_prompts(TrainingDataset(path=path), tokenizer, config, "data.train")
    strict = Dataset(path=path, answer_column="x")
    with pytest.raises(DataError, match="no value in x"):
        load_prompts(strict, tokenizer, DataConfig(train="t"), "evaluate.sets.gsm8k")


def test_a_dataset_may_have_options_of_its_own_and_prompts_are_told_apart(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"question": f"{i}+1?", "answer": i + 1} for i in range(5)]
    first, second = write(tmp_path / "one.jsonl", *rows), write(tmp_path / "two.jsonl", *rows)
    config = DataConfig.model_validate(
        {
            "train": [
                {"path": first, "max_rows": 2},
                {
                    "path": second,
                    "name": "zwei",
                    "max_rows": 3,
                    "instruction": "Think.",
                    "system_prompt": "S",
                },
            ],
            "system_prompt": "all",
        }
    )
    one, two = (found.prompts for found in load_training(config, tokenizer))
    assert [(p.prompt_id, p.source) for p in (*one, *two)] == [
        *((0, "one"), (1, "one")),
        *((2, "zwei"), (3, "zwei"), (4, "zwei")),
    ]
    assert one[0].text == "<|system|>all<|user|>0+1?<|assistant|>"
    assert two[0].text == "<|system|>S<|user|>0+1?\nThink.<|assistant|>"
    assert (
        len(load_prompts(Dataset(path=first, max_rows=1), tokenizer, config, "data.test").prompts)
        == 1
    )


# Like Qwen3's: thinking is left out by an empty block that the model finds already written.
THINKING = (
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and enable_thinking is "
    "false %}(no thoughts){% endif %}{% endif %}"
)


def test_thinking_is_switched_by_the_templates_own_variable(tmp_path: Path) -> None:
    path, thinking = write(tmp_path / "a.jsonl", QUESTION), make_tokenizer()
    thinking.chat_template = THINKING
    text = "<|user|>What is 12+34?<|assistant|>"
    assert load(path, thinking)[0].text == text
    assert load(path, thinking, template_options={"enable_thinking": True})[0].text == text
    assert (
        load(path, thinking, template_options={"enable_thinking": False})[0].text
        == f"{text}(no thoughts)"
    )
    message = refusal(path, thinking, template_options={"enable_thought": False})
    assert "does not read enable_thought (it reads enable_thinking)" in message
    for how in ("tokenize", "messages"):
        assert f"does not read {how} " in refusal(path, thinking, template_options={how: True})
    # whose variables cannot be told
    thinking.chat_template = THINKING + "{% generation %}{% endgeneration %}"
    assert "does not read messages " in refusal(path, thinking, template_options={"messages": []})
    thinking.chat_template = None
    assert "no chat template to read them" in refusal(
        path, thinking, template_options={"enable_thinking": False}
    )


def test_a_template_of_ones_own_is_a_file(tmp_path: Path, tokenizer: Any) -> None:
    path, own = write(tmp_path / "a.jsonl", QUESTION), tmp_path / "own.jinja"
    own.write_text("Q: {{ messages[-1].content }}{% if brief %} (brief){% endif %}")
    plain = make_tokenizer()
    plain.chat_template = None
    for model in (tokenizer, plain):
        assert load(path, model, chat_template=str(own))[0].text == "Q: What is 12+34?"
        options = {"chat_template": str(own), "template_options": {"brief": True}}
        assert load(path, model, **options)[0].text == "Q: What is 12+34? (brief)"
    for content, words in (
        (None, "No such file"),
        (b"", "is empty"),
        (b"\xff", "cannot be read"),
        (b"x" * (1 << 21), "larger"),
    ):
        bad = tmp_path / "bad.jinja"
        if content is not None:
            bad.write_bytes(content)
        assert words in refusal(path, tokenizer, chat_template=str(bad))


def test_variables_of_a_template_are_found_where_they_can_be_told() -> None:
    assert template_variables(THINKING) == {"enable_thinking"}
    assert template_variables(
        "{% for m in messages %}{{ bos_token }}{{ tools }}{% endfor %}{% set x = 1 %}{{ x }}"
    ) == {"tools"}
    assert template_variables("{% generation %}{% endgeneration %}") is None
    assert template_variables({"default": THINKING}) is None
    assert template_variables("{{ " + "(" * 50_000) is None


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
    found = make_tokenizer()
    found.chat_template = TOOL_TEMPLATE
    return found


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
    (other,) = load(write(tmp_path / "b.jsonl", as_objects), tool_tokenizer)
    assert other.text == prompt.text


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
            "only parts of type text can be read",
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
    other = write(tmp_path / "b.jsonl", {**same, "problem": "2+3?"})
    assert "problem and conversations ask different things" in refusal(other, tokenizer)


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


def test_columns_that_ask_different_things_are_named(tmp_path: Path, tokenizer: Any) -> None:
    asked = [{"role": "system", "content": "Box it."}, {"role": "user", "content": "2+2?"}]
    row = {"question": "2+2?", "prompt": asked, "answer": "4"}
    path = write(tmp_path / "a.jsonl", row)
    message = refusal(path, tokenizer)
    assert "question and prompt ask different things (columns: question, prompt, answer)" in message
    assert "data.question_column" in message
    (prompt,) = load(path, tokenizer, question_column="prompt")
    assert prompt.text == "<|system|>Box it.<|user|>2+2?<|assistant|>"
    (plain,) = load(path, tokenizer, question_column="question")
    assert plain.text == "<|user|>2+2?<|assistant|>"
    same = row | {
        "prompt": asked[1:],
        "messages": [asked[1], {"role": "assistant", "content": "4"}],
    }
    (prompt,) = load(write(tmp_path / "s.jsonl", same), tokenizer)
    assert prompt.text == "<|user|>2+2?<|assistant|>", (
        "the same question in several forms is no doubt"
    )


@pytest.mark.parametrize(
    ("row", "columns", "remedy"),
    [
        (VERL, "data_source, prompt, reward_model.style, ", "data.answer_column=reward_model.ground_truth"),
        ({"question": "q", "final_answer": "5", "topic": "t"}, "question, final_answer, topic", "data.answer_column=final_answer"),
        ({"prompt": "q", "solution": "5", "ability": "MATH"}, "prompt, solution, ability", "data.answer_column=solution"),
        ({"problem": "q", "solution": "First add. " * 9}, "problem, solution", "data.answer_column"),
    ],
)  # fmt: skip
def test_a_row_without_an_answer_names_its_columns_and_the_key(
    row: dict[str, Any], columns: str, remedy: str, tmp_path: Path, tokenizer: Any
) -> None:
    message = refusal(write(tmp_path / "a.jsonl", row), tokenizer)
    assert "no answer" in message and f"(columns: {columns}" in message and remedy in message, (
        message
    )


def test_a_row_that_cannot_fit_is_not_tokenised(tmp_path: Path, tokenizer: Any) -> None:
    whole = "2 " * (1 << 20) + "the end"
    path = write(tmp_path / "a.jsonl", {"question": whole, "answer": "1"}, QUESTION)
    calls: list[int] = []

    class Counting:
        chat_template = tokenizer.chat_template

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, texts: list[str], **options: Any) -> Any:
            calls.extend(map(len, texts))
            return tokenizer(texts, **options)

    message = refusal(path, Counting())
    assert "a.jsonl:1: the prompt has at least" in message and "data.overlong_prompt" in message
    assert max(calls) < 100_000, "a row of megabytes would take seconds"
    assert len(load(path, Counting(), overlong_prompt="skip")) == 1
    cut, _ = load(path, Counting(), overlong_prompt="truncate", max_prompt_tokens=64)
    assert cut.tokens.tolist() == tokenizer("2 " * 999 + "the end<|assistant|>")["input_ids"][-64:]


def test_the_first_prompt_is_shown_as_engines_get_it(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(
        write(tmp_path / "a.jsonl", QUESTION), tokenizer, instruction="End\twith ####."
    )
    lines = first_prompt_lines(prompt, tokenizer)
    assert lines[0] == f"first prompt, {len(prompt.tokens)} tokens:"
    assert lines[1:] == ["  <|user|>What is 12+34?", "  End\\twith ####.<|assistant|>"]
    long = {"question": "\n".join(["1+1?"] * 50), "answer": "2"}
    lines = first_prompt_lines(load(write(tmp_path / "b.jsonl", long), tokenizer)[0], tokenizer)
    assert len(lines) == 14 and lines[-1] == "  ... 38 more lines"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here")
def test_gsm8k_loads_whole(tokenizer: Any) -> None:
    found = loaded(str(GSM8K / "test.jsonl"), tokenizer, max_prompt_tokens=1024)
    prompts = found.prompts
    assert len(prompts) == 1319 and found.num_read == 1319
    assert [prompt.answer for prompt in prompts[:3]] == ["18", "3", "70000"]
    texts = [tokenizer.decode(prompt.tokens) for prompt in prompts]
    assert texts == [prompt.text for prompt in prompts], "tokens must stand for the rendered text"
