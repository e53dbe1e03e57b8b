"""Calls of tools are found in the model's own format, and what is no call stays text."""

from __future__ import annotations

import pytest

from pa_npu.agents.chat import ParsedAnswer, make_parser, parse_hermes
from pa_npu.agents.environment import AgentEnvironment
from pa_npu.engines.vllm.kind import tool_parser as vllm_parser
from pa_npu.errors import ConfigError
from tests.helpers.agents import CALL, TOOLS, Policy, client_of, user
from tools.make_tiny_model import AGENT_TEMPLATE, END_OF_TURN, make_tokenizer

ITEMS = (  # as templates that go through a call's arguments
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}|{% "
    "endfor %}"
)


@pytest.mark.parametrize(
    "arguments", ['{"bad', "", "[1, 2]", '"text"', "\\ud800", '{"x": "\\ud800"}']
)
@pytest.mark.parametrize("template", [AGENT_TEMPLATE, ITEMS])
async def test_calls_whose_arguments_are_no_object_are_a_text_of_the_conversation(
    agents: AgentEnvironment, template: str, arguments: str
) -> None:
    agents._chat._template = template
    shown: list[str] = []
    client = await client_of(agents, Policy(lambda text: shown.append(text) or f"w{END_OF_TURN}"))
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "calculator", "arguments": arguments},
    }
    asked = [user("q"), {"role": "assistant", "content": None, "tool_calls": [call]}, user("again")]
    status, answer = await client.send("/v1/chat/completions", {"messages": asked, "tools": TOOLS})
    assert status == 200, answer
    if arguments.startswith("{") and "x" not in arguments:
        assert "bad" in shown[-1], "it is shown, not dropped"


def test_what_is_no_call_stays_text() -> None:
    for text in (
        "",
        "a < b",
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        "<tool_call>[1]",
    ):
        assert parse_hermes(text).content == text and not parse_hermes(text).calls
    two = parse_hermes(f"a{CALL}\n{CALL}")
    assert two.content == "a" and len(two.calls) == 2


# What the files of a tokenizer may say of its answers, read by transformers.
RESPONSE_TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
LLAMA_CALL = '{"name": "calculator", "parameters": {"x": "6*7"}}'


@pytest.mark.parametrize(
    ("parser", "call", "plain"),
    [
        ("hermes", CALL, ""),
        ("template", CALL, "so"),
        ("auto", CALL, "so"),
        ("vllm hermes", CALL, "so"),
        ("llama3_json", LLAMA_CALL, ""),
    ],
)
def test_calls_are_found_by_the_models_own_format(
    parser: str, call: str, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    if parser in ("template", "auto"):
        tokenizer.response_template = RESPONSE_TEMPLATE
    elif parser != "hermes":
        pytest.importorskip("vllm")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    if parser == "vllm hermes":
        extract = vllm_parser("hermes", tokenizer)
        assert extract(plain + call, TOOLS) == (plain, [("calculator", '{"x": "6*7"}')])
        assert extract("no call", TOOLS) == ("no call", [])
        return
    parse = make_parser(parser, tokenizer)
    actual = parse(plain + call, TOOLS, f"<|user|>q{'<|assistant|>'}")
    assert actual.content.strip() == plain and [call.canonical for call in actual.calls] == [
        ("calculator", '{"x": "6*7"}')
    ]
    assert parse("no call", TOOLS, "<|assistant|>") == ParsedAnswer("no call")


def test_a_parser_that_there_is_not_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match="template, but the model's tokenizer has no response template"
    ):
        make_parser("template", make_tokenizer())
    pytest.importorskip("vllm")
    for name in ("nonsense", "llama3_json"):
        with pytest.raises(ConfigError, match=f"vLLM has no parser {name} for this model"):
            make_parser(name, make_tokenizer())
