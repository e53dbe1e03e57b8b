"""Rows that are trained: which tokens are, for forms of public chat templates and layouts of rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pa_npu.config.sections.inputs import DataConfig, TrainingDataset
from pa_npu.data.row_sets import Row, RowSet, first_row_lines, load_rows
from pa_npu.errors import HIGHLIGHT, DataError, plain

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|endoftext|>",
    "<|User|>",
    "<|Assistant|>",
    "<|end|>",
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}"
    "<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<s>{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "<start_of_turn>{{ role }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GLM = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# thoughts of earlier turns are left out, and a generation begins with one
DEEPSEEK = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}{% else %}"
    "{% set text = m['content'] %}{% if '</think>' in text and not loop.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "<|Assistant|>{{ text }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# only the last answer has a thought, an empty one where the row has none
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and "
    "loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool>{{ call.function | tojson }}</tool>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As Qwen2.5 and Hermes write them: results of tools in a turn of the user.
QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}{% if m['content'] %}{{ '\n' }}{{ m['content'] }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_TOOLS = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
    "{% elif m['role'] == 'tool' %}[TOOL_RESULTS] {{ m['content'] }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] {% for call in m.tool_calls %}"
    "{{ call.function | tojson }}{% endfor %}</s>"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
LLAMA_TOOLS = (
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>"
    "{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ 'ipython' if m['role'] == 'tool' else m['role'] }}"
    "<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# calls with their arguments as tags; a generation begins with an empty thought
GLM_TOOLS = (
    "{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<|observation|>\n<tool_response>\n{{ m['content'] }}\n"
    "</tool_response>{% elif m['role'] == 'assistant' %}<|assistant|>\n<think></think>"
    "{% if m['content'] %}{{ '\n' }}{{ m['content'] }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ '\n' }}<tool_call>{{ call.function.name }}{% for k, v in call.function.arguments.items() %}{{ '\n' }}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>{% endfor %}{{ '\n' }}</tool_call>"
    "{% endfor %}{% else %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think></think>{% endif %}"
)
DEEPSEEK_TOOLS = (
    "<s>{% if tools %}{{ tools | tojson }}{% endif %}{% set ns = namespace(answers=false) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% elif m['role'] == 'tool' %}<tool_output>{{ m['content'] }}</tool_output>"
    "{% set ns.answers = true %}{% else %}{% if not ns.answers %}<|Assistant|>{% endif %}"
    "{{ m['content'] }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "<sep>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}</s>"
    "{% set ns.answers = false %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.answers %}<|Assistant|>{% endif %}"
)
# Of GPT-OSS: a channel for each kind of text.
CHANNELS = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|start|>functions<|message|>"
    "{{ m['content'] }}<|end|>{% elif m.tool_calls %}<|start|>assistant<|channel|>commentary to="
    "functions.{{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m['role'] == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m['content'] }}<|end|>{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

TURNS = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "ef"},
    {"role": "assistant", "content": "gh"},
]
# The text of TURNS with trained parts in double brackets.
FORMS = {
    "ChatML": (
        CHATML,
        "<|im_end|>",
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[[cd<|im_end|>]]\n"
        "<|im_start|>user\nef<|im_end|>\n<|im_start|>assistant\n[[gh<|im_end|>]]\n",
    ),
    "marks": (
        MARKED,
        "<|im_end|>",
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[[cd<|im_end|>]]\n"
        "<|im_start|>user\nef<|im_end|>\n<|im_start|>assistant\n[[gh<|im_end|>]]\n",
    ),
    "Llama": (
        LLAMA,
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nab<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[cd<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nef<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[gh<|eot_id|>]]",
    ),
    "Mistral": (
        MISTRAL,
        "</s>",
        "<s>[INST] ab [/INST][[ cd</s>]][INST] ef [/INST][[ gh</s>]]",
    ),
    "Gemma": (
        GEMMA,
        "<end_of_turn>",
        "<s><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n[[cd<end_of_turn>]]\n"
        "<start_of_turn>user\nef<end_of_turn>\n<start_of_turn>model\n[[gh<end_of_turn>]]\n",
    ),
    "GLM": (
        GLM,
        "<|user|>",
        "<|user|>\nab<|assistant|>\n[[cd<|user|>]]\nef<|assistant|>\n[[gh<|user|>]]",
    ),
    "DeepSeek": (
        DEEPSEEK,
        "</s>",
        "<s><|User|>ab<|Assistant|>[[cd</s>]]<|User|>ef<|Assistant|>[[gh</s>]]",
    ),
    "Qwen3": (
        QWEN3,
        "<|im_end|>",
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[[cd<|im_end|>]]\n"
        "<|im_start|>user\nef<|im_end|>\n<|im_start|>assistant\n"
        "[[<think>\n\n</think>\n\ngh<|im_end|>]]\n",
    ),
    "Phi": (
        PHI,
        "<|end|>",
        "<|user|>ab<|end|><|assistant|>[[cd<|end|>]]<|user|>ef<|end|><|assistant|>[[gh<|end|>]]"
        "<|endoftext|>",
    ),
}


def tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Of bytes, with the special tokens of all these templates."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos)
    fast.chat_template = template
    return fast


def load(
    directory: Path,
    *rows: dict[str, Any],
    template: str | None = CHATML,
    eos: str = "<|im_end|>",
    max_tokens: int = 1000,
    **keys: Any,
) -> RowSet:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(file), **keys)
    dataset = TrainingDataset(path=str(file))
    return load_rows(dataset, tokenizer(template, eos), config, "data.train", max_tokens=max_tokens)


def shown(row: Row, template: str | None = CHATML, eos: str = "<|im_end|>") -> str:
    """The row's text with its trained parts in double brackets."""
    fast = tokenizer(template, eos)
    text = ""
    is_open = False
    for token, weight in zip(row.tokens.tolist(), row.weight.tolist(), strict=True):
        if bool(weight) != is_open:
            text += "[[" if weight else "]]"
            is_open = bool(weight)
        text += fast.decode([token])
    return text + ("]]" if is_open else "")


@pytest.mark.parametrize("form", FORMS)
def test_what_the_assistant_writes_is_trained(form: str, tmp_path: Path) -> None:
    template, eos, expected = FORMS[form]
    (row,) = load(tmp_path, {"messages": TURNS}, template=template, eos=eos).rows
    assert shown(row, template, eos) == expected


def test_a_thought_of_an_earlier_turn_that_the_template_leaves_out_is_not_trained(
    tmp_path: Path,
) -> None:
    turns = [dict(message) for message in TURNS]
    turns[1]["content"] = "<think>x</think>cd"
    turns[3]["content"] = "<think>y</think>gh"
    (row,) = load(tmp_path, {"messages": turns}, template=DEEPSEEK, eos="</s>").rows
    assert shown(row, DEEPSEEK, "</s>") == (
        "<s><|User|>ab<|Assistant|>[[cd</s>]]<|User|>ef<|Assistant|>[[<think>y</think>gh</s>]]"
    )


def test_a_call_of_a_tool_is_trained_and_its_result_is_not(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "gh"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    (row,) = load(tmp_path, {"messages": messages, "tools": tools}, template=TOOLS).rows
    text = shown(row, TOOLS)
    assert '[[<tool>{"name": "add", "arguments": {"a": 1}}</tool><|im_end|>]]\n' in text
    assert "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n[[gh<|im_end|>]]\n" in text
    assert text.count("[[") == 2


ADD = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLED = [
    {"role": "user", "content": "ab"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "gh"},
]
# The text of CALLED from the user's message on, with trained parts in double brackets.
FORMS_WITH_TOOLS = {
    "Qwen2.5": (
        QWEN_TOOLS,
        "<|im_end|>",
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[[<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[gh<|im_end|>]]\n",
    ),
    "Mistral": (
        MISTRAL_TOOLS,
        "</s>",
        '[INST] ab[/INST][[[TOOL_CALLS] {"name": "add", "arguments": {"a": 1}}</s>]]'
        "[TOOL_RESULTS] 7[/TOOL_RESULTS][[ gh</s>]]",
    ),
    "Llama 3.1": (
        LLAMA_TOOLS,
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nab<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '[[{"name": "add", "parameters": {"a": 1}}<|eot_id|>]]'
        "<|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[gh<|eot_id|>]]",
    ),
    "GLM-4.5": (
        GLM_TOOLS,
        "<|endoftext|>",
        "<|user|>\nab<|assistant|>\n<think></think>[[\n<tool_call>add\n<arg_key>a</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>]]<|observation|>\n<tool_response>\n7\n"
        "</tool_response><|assistant|>\n<think></think>[[\ngh<|endoftext|>]]",
    ),
    "DeepSeek-V3": (
        DEEPSEEK_TOOLS,
        "</s>",
        '<|User|>ab<|Assistant|>[[<tool_call>add<sep>{"a": 1}</tool_call></s>]]'
        "<tool_output>7</tool_output>[[gh</s>]]",
    ),
    "GPT-OSS": (
        CHANNELS,
        "<|end|>",
        "<|start|>user<|message|>ab<|end|><|start|>assistant[[<|channel|>commentary to="
        'functions.add<|message|>{"a": 1}<|call|>]]<|start|>functions<|message|>7<|end|>'
        "<|start|>assistant[[<|channel|>final<|message|>gh<|end|>]]",
    ),
}


@pytest.mark.parametrize("form", FORMS_WITH_TOOLS)
def test_calls_are_trained_and_results_are_not_in_every_form(form: str, tmp_path: Path) -> None:
    template, eos, expected = FORMS_WITH_TOOLS[form]
    (row,) = load(tmp_path, {"messages": CALLED, "tools": ADD}, template=template, eos=eos).rows
    beginning = expected.partition("ab")[0] + "ab"
    tools, _, conversation = shown(row, template, eos).partition(beginning)
    assert beginning + conversation == expected
    assert '"parameters": {}' in tools, "the tools stand before the conversation"


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["compared", "marks"])
def test_weights_are_those_of_the_message_and_the_row(template: str, tmp_path: Path) -> None:
    turns = [dict(message) for message in TURNS]
    turns[1]["weight"], turns[3]["weight"] = 0.5, 2
    (row,) = load(tmp_path, {"messages": turns, "weight": 3}, template=template).rows
    assert sorted(set(row.weight.tolist())) == [0.0, 1.5, 6.0]
    turns[1]["weight"] = 0
    (row,) = load(tmp_path, {"messages": turns}, template=template).rows
    assert "\ncd<|im_end|>" in shown(row, template) and "[[gh<|im_end|>]]" in shown(row, template)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "ab", "completion": "cd"}, "ab[[cd<|im_end|>]]"),
        ({"text": "abcd"}, "a[[bcd<|im_end|>]]"),
        (
            {"question": "ab", "answer": "cd #### 7"},
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[[cd #### 7<|im_end|>]]\n",
        ),
        (
            {"prompt": TURNS[:3], "completion": TURNS[3:]},
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>\n"
            "<|im_start|>user\nef<|im_end|>\n<|im_start|>assistant\n[[gh<|im_end|>]]\n",
        ),
        (
            {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]},
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[[cd<|im_end|>]]\n",
        ),
    ],
    ids=["completion", "text", "question", "conversational completion", "ShareGPT"],
)
def test_layouts_of_rows(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (read,) = load(tmp_path, row).rows
    assert shown(read) == expected


def test_a_question_without_a_template_is_followed_by_its_answer(tmp_path: Path) -> None:
    (row,) = load(tmp_path, {"question": "ab", "answer": "cd"}, template=None).rows
    assert shown(row, None) == "ab[[cd<|im_end|>]]"


FORGETFUL = (
    "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{{ messages[-1]['content'] }}"
    "{% endfor %}"
)
SILENT = MARKED.replace("'assistant' %}{% gen", "'nobody' %}{% gen")


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"messages": TURNS[:1]}, {}, "no message of role assistant"),
        ({"question": "ab"}, {}, r"\(columns: question\)"),
        ({"messages": [{**TURNS[0]}, {**TURNS[1], "weight": 0}]}, {}, "no token of the row"),
        ({"messages": TURNS}, {"template": SILENT}, "no token of the row .* generation marks"),
        ({"messages": TURNS}, {"template": FORGETFUL}, "nothing says which tokens of message 3"),
        ({"messages": TURNS, "weight": -1}, {}, "weight is -1, not a number of at least 0"),
        ({"messages": TURNS, "weight": "much"}, {}, 'weight is "much"'),
        ({"messages": TURNS}, {"template": None}, "several answers needs a chat template"),
        ({"messages": TURNS}, {"max_tokens": 5}, "more than data.max_prompt_tokens .* = 5"),
        ({"messages": TURNS}, {"instruction": "Think."}, "data.instruction"),
        ({"prompt": "ab", "answer": True}, {}, "the answer is true"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_row_that_cannot_be_trained_is_one_line(
    row: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as refused:
        load(tmp_path, row, **keys)
    assert "rows.jsonl:1: " in str(refused.value) and "\n" not in str(refused.value)


def test_rows_that_are_too_long_are_cut_or_skipped_and_counted(tmp_path: Path) -> None:
    rows = ({"prompt": "ab", "completion": "c" * 20}, {"prompt": "a", "completion": "d"})
    cut = load(tmp_path, *rows, max_tokens=8, overlong_prompt="truncate")
    assert (cut.num_truncated, cut.num_skipped) == (1, 0)
    assert not cut.rows[0].finished and len(cut.rows[0].tokens) == 8
    skipped = load(tmp_path, *rows, max_tokens=8, overlong_prompt="skip")
    assert (skipped.num_truncated, skipped.num_skipped, len(skipped.rows)) == (0, 1, 1)
    assert skipped.rows[0].row_id == 1, "rows keep their numbers"


def test_the_first_row_shows_what_is_trained(tmp_path: Path) -> None:
    (row,) = load(tmp_path, {"messages": TURNS}).rows
    coloured = first_row_lines(row, tokenizer())
    lines = [plain(line) for line in coloured]
    assert f"{len(row.tokens)} tokens, of which {row.num_trained} are trained" in lines[0]
    assert "  [[cd<|im_end|>]]" in lines and "  ab<|im_end|>" in lines
    begin, end = HIGHLIGHT
    assert f"  {begin}[[cd<|im_end|>]]{end}" in coloured, "on a terminal"


def test_the_identity_of_a_row_has_its_weights() -> None:
    tokens = np.arange(4, dtype=np.int32)
    rows = [Row(0, tokens, np.full(4, weight, np.float32), "", 0) for weight in (0.0, 1.0)]
    assert rows[0].identity != rows[1].identity


def test_a_role_at_which_responses_stop_is_trained_behind_a_message(tmp_path: Path) -> None:
    """As GLM's generation_config.json names roles among the end tokens; without it the role that
    follows is nobody's.
    """
    eos = "<|endoftext|>"
    made = tokenizer(GLM, eos)
    stop = made.convert_tokens_to_ids("<|user|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    made.name_or_path = str(tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n")
    config, dataset = DataConfig(train=str(file)), TrainingDataset(path=str(file))
    (with_stop,) = load_rows(dataset, made, config, "data.train", max_tokens=1000).rows
    beginning = "<|user|>\nab<|assistant|>\n"
    end = "\nef<|assistant|>\n[[gh<|endoftext|>]]"
    assert shown(with_stop, GLM, eos) == f"{beginning}[[cd<|user|>]]{end}"
    (without,) = load(tmp_path, {"messages": TURNS}, template=GLM, eos=eos).rows
    assert shown(without, GLM, eos) == f"{beginning}[[cd]]<|user|>{end}"
