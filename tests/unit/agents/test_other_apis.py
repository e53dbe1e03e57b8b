"""Clients of the Responses and of the Messages API train over the same session tree as those of chat completions."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from pa_npu.agents import gateway, responses_format
from pa_npu.agents.environment import AgentEnvironment
from tests.helpers.agents import (
    CALL,
    TOKENIZER,
    Client,
    Policy,
    asks_then_answers,
    client_of,
    user,
)
from tools.make_tiny_model import END_OF_TURN

CALCULATOR: Any = {
    "type": "function",
    "name": "calculator",
    "description": "Calculates.",
    "parameters": {"type": "object"},
    "strict": False,
}
CALCULATOR_BLOCK: Any = {
    "name": "calculator",
    "description": "Calculates.",
    "input_schema": {"type": "object"},
}


def claude(client: Client) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=client.root, api_key=client.key, max_retries=0)


def trained_texts(client: Client) -> list[str]:
    return [str(TOKENIZER.decode(s.tokens[s.trained].tolist())) for s in client.samples()]


@pytest.mark.parametrize("stored", [True, False], ids=["previous_response_id", "whole input"])
async def test_a_response_that_goes_on_extends_its_branch(
    agents: AgentEnvironment, stored: bool
) -> None:
    policy = Policy(asks_then_answers)
    client = await client_of(agents, policy)
    create = client.openai.responses.create
    first = await create(
        model="any",
        input="What is 6*7?",
        instructions="Calculate.",
        tools=[CALCULATOR],
        store=stored,
    )
    (text, call) = first.output
    assert text.content[0].text == "so " and call.name == "calculator"
    assert first.output_text == "so " and first.status == "completed" and not first.error
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    common: Any = {"model": "any", "instructions": "Calculate.", "tools": [CALCULATOR]}
    if stored:
        second = await create(input=[result], previous_response_id=first.id, **common)
    else:
        whole = [user("What is 6*7?"), *(item.model_dump() for item in first.output), result]
        second = await create(input=whole, store=False, **common)
    assert second.output_text == "#### 42"
    (leaf,) = client.session.tree.leaves()
    assert len(leaf.path) == 2, "one branch of two turns, both trained"
    assert trained_texts(client) == [f"so {CALL}{END_OF_TURN}#### 42{END_OF_TURN}"]
    assert second.usage.input_tokens == len(policy.turns[1].tokens)
    status, _ = await client.send("/reward", {"reward": 1.0, "turn": first.id})
    assert status == 200 and leaf.path[0].reward == 1.0


async def test_a_tool_in_a_namespace_is_called_by_both_names(agents: AgentEnvironment) -> None:
    """As Codex declares its tools for sub-agents. What comes back extends the branch."""
    call = '<tool_call>{"name": "office.calculator", "arguments": {"x": "6*7"}}</tool_call>'
    answer = f"#### 42{END_OF_TURN}"
    policy = Policy(lambda shown: answer if "<|user|>42" in shown else f"so {call}{END_OF_TURN}")
    client = await client_of(agents, policy)
    office = {"type": "namespace", "name": "office", "description": "Of the office."}
    common: Any = {
        "model": "any",
        "tools": [{**office, "tools": [CALCULATOR]}, {**CALCULATOR, "name": "other"}],
        "store": False,
        "extra_body": {"client_metadata": {"turn": "1"}},
    }
    asked = {"role": "user", "content": "What is 6*7?"}
    first = await client.openai.responses.create(input=[asked], **common)
    (_, item) = first.output
    assert (item.namespace, item.name) == ("office", "calculator")
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
    whole = [asked, *(item.model_dump() for item in first.output), result]
    second = await client.openai.responses.create(input=whole, **common)
    assert second.output_text == "#### 42"
    assert trained_texts(client) == [f"so {call}{END_OF_TURN}{answer}"]


def test_the_policy_is_shown_a_namespace_in_its_functions() -> None:
    office = {"type": "namespace", "name": "office", "description": "Of the office."}
    body = {"input": "q", "tools": [{**office, "tools": [CALCULATOR]}, CALCULATOR]}
    inner, outer = (tool["function"] for tool in responses_format.chat_body(body, {})["tools"])
    assert inner == {
        "name": "office.calculator",
        "description": "Of the office.\nCalculates.",
        "parameters": {"type": "object"},
    }
    assert outer["name"] == "calculator" and outer["description"] == "Calculates."


async def test_a_stream_of_a_response_is_the_response(agents: AgentEnvironment) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    async with client.openai.responses.stream(
        model="any",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "q"}]}],
        tools=[CALCULATOR],
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].arguments == '{"x": "6*7"}'
    (sample,) = client.samples()
    written = sample.logprobs[sample.trained].tolist()
    logprobs = [token.logprob for token in final.output[0].content[0].logprobs]
    np.testing.assert_allclose(logprobs, written, rtol=1e-6)


async def test_a_response_that_a_limit_ends_is_incomplete(agents: AgentEnvironment) -> None:
    client = await client_of(agents, Policy(lambda shown: "w" * 50 + END_OF_TURN))
    answer = await client.openai.responses.create(model="any", input="q", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.output_text == "www"
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.2), ("tool_choice", "required"), ("reasoning", {"effort": "high"}), ("truncation", "auto"),
        ("background", True), ("tools", [{"type": "web_search"}]), ("tools", [{"type": "namespace", "name": "n"}]),
        ("tools", [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "tools": []}]}]),
        ("tools", [{"type": "namespace", "name": "n", "tools": 3}]), ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [user("q"), {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", 3), ("input", []), ("input", [3]), ("previous_response_id", "resp-none"),
        ("include", ["file_search_call.results"]),
        ("text", {"format": {"type": "json_object"}}), ("instructions", 3), ("reasoning", 3), ("nothing", 1),
    ],
)  # fmt: skip
async def test_what_a_response_cannot_be_is_refused_in_openais_form(
    agents: AgentEnvironment, field: str, value: Any
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    status, answer = await client.send("/v1/responses", {"input": "q", field: value})
    assert status == 400 and answer["error"]["type"] == "invalid_request_error", answer
    assert "\n" not in answer["error"]["message"] and len(client.session.tree.nodes) == 1
    assert (await client.send("/v1/responses", {"input": "q"}))[0] == 200


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_message_that_goes_on_extends_its_branch(
    agents: AgentEnvironment, streamed: bool
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    messages: list[Any] = [{"role": "user", "content": "What is 6*7?"}]

    async def ask() -> Any:
        arguments: Any = {
            "model": "any",
            "max_tokens": 100,
            "system": [
                {"type": "text", "text": "Calculate.", "cache_control": {"type": "ephemeral"}}
            ],
            "tools": [CALCULATOR_BLOCK],
            "tool_choice": {"type": "auto"},
            "messages": messages,
        }
        if not streamed:
            return await claude(client).messages.create(**arguments)
        async with claude(client).messages.stream(**arguments) as stream:
            return await stream.get_final_message()

    first = await ask()
    assert first.stop_reason == "tool_use" and [block.type for block in first.content] == [
        "text",
        "tool_use",
    ]
    assert first.content[1].input == {"x": "6*7"}
    messages.append({"role": "assistant", "content": [b.model_dump() for b in first.content]})
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "42"}
    messages.append({"role": "user", "content": [result]})
    second = await ask()
    assert second.stop_reason == "end_turn" and second.content[0].text == "#### 42"
    (leaf,) = client.session.tree.leaves()
    assert len(leaf.path) == 2, "one branch of two turns, both trained"
    assert trained_texts(client) == [f"so {CALL}{END_OF_TURN}#### 42{END_OF_TURN}"]


async def test_why_a_message_ended_and_how_long_it_was_is_said(agents: AgentEnvironment) -> None:
    policy = Policy(lambda shown: f"one two{END_OF_TURN}")
    client = await client_of(agents, policy)
    ask: Any = {"model": "any", "messages": [user("q")]}
    short = await claude(client).messages.create(max_tokens=2, **ask)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    stopped = await claude(client).messages.create(max_tokens=50, stop_sequences=["two"], **ask)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    assert stopped.content[0].text == "one "
    counted = await claude(client).messages.count_tokens(**ask)
    assert counted.input_tokens == stopped.usage.input_tokens == len(policy.turns[-1].tokens)


@pytest.mark.parametrize(
    "value",
    [{}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}],
)
async def test_a_context_that_stays_as_it_is_may_be_asked_for(
    agents: AgentEnvironment, value: Any
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    body = {"messages": [user("q")], "max_tokens": 10, "context_management": value}
    assert (await client.send("/v1/messages", body))[0] == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.2), ("tool_choice", {"type": "any"}), ("tool_choice", "auto"), ("thinking", {"type": "enabled"}),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]), ("messages", []), ("messages", [3]),
        ("messages", [{"role": "critic", "content": "x"}]), ("system", 3), ("max_tokens", 0), ("nothing", 1),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]), ("thinking", 3),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}), ("context_management", 3),
        ("context_management", {"edits": [3]}), ("context_management", {"edits": 3}), ("context_management", {"x": 1}),
    ],
)  # fmt: skip
async def test_what_a_message_cannot_be_is_refused_in_anthropics_form(
    agents: AgentEnvironment, field: str, value: Any
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    body = {"messages": [user("q")], "max_tokens": 10, field: value}
    status, answer = await client.send("/v1/messages", body)
    assert status == 400 and answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert "\n" not in answer["error"]["message"] and len(client.session.tree.nodes) == 1
    with pytest.raises(anthropic.AuthenticationError):
        await anthropic.AsyncAnthropic(
            base_url=client.root, api_key="wrong", max_retries=0
        ).messages.create(model="any", max_tokens=5, messages=[{"role": "user", "content": "q"}])


FIELDS: Any = {
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "temperature": 0,
    "seed": 3,
    "top_p": 0.5,
    "top_k": 20,
    "reasoning_effort": "low",
}


@pytest.mark.parametrize("field", FIELDS)
async def test_a_field_that_is_served_as_sampled_has_no_effect_and_is_counted(
    agents: AgentEnvironment, field: str
) -> None:
    policy = Policy(asks_then_answers)
    client = await client_of(agents, policy)
    body = {"messages": [user("q")], field: FIELDS[field]}
    status, answer = await client.send("/v1/chat/completions", body)
    assert status == 400 and "agent.serve_as_sampled" in answer["error"]["message"]
    client.session.rules = type(client.session.rules)(as_sampled=frozenset([field]))
    assert (await client.send("/v1/chat/completions", body))[0] == 200
    assert client.session.as_sampled == {field}
    assert (await client.send("/v1/chat/completions", {"messages": [user("q")]}))[0] == 200
    first, second = (turn.tokens.tolist() for turn in policy.turns)
    assert first == second, "the policy is asked the same"
    if field in ("temperature", "seed", "top_p", "top_k"):
        assert (await client.send("/v1/chat/completions", {**body, field: "hot"}))[0] == 400


async def test_ids_and_log_probs_of_tokens_are_the_sessions(agents: AgentEnvironment) -> None:
    client = await client_of(agents, Policy(lambda shown: f"one two{END_OF_TURN}"))
    answer = await client.chat(
        [user("q")], logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True}
    )
    (sample,) = client.samples()
    shown = len(sample.tokens) - len(answer.choices[0].token_ids)
    assert answer.prompt_token_ids + answer.choices[0].token_ids == sample.tokens.tolist()
    assert len(answer.prompt_token_ids) == shown > 0
    for token in answer.choices[0].logprobs.content:
        assert [top.logprob for top in token.top_logprobs] == [token.logprob]
    stream = await client.chat([user("q")], stream=True, extra_body={"return_token_ids": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    written = [token for c in chunks for token in getattr(c.choices[0], "token_ids", None) or ()]
    assert written == answer.choices[0].token_ids


async def test_options_of_the_template_that_the_run_has_are_accepted(
    agents: AgentEnvironment,
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    options = {"enable_thinking": False}
    client.session.rules = type(client.session.rules)(template_options=options)
    body = {"messages": [user("q")], "chat_template_kwargs": options}
    assert (await client.send("/v1/chat/completions", body))[0] == 200
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        await client.chat(
            [user("q")], extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        )


NESTED = {depth: "[" * depth + "]" * depth for depth in (300, 900, 980, 20_000)}
HOSTILE = [
    ("responses", '{"input": "x\\ud800"}'),
    ("responses", '{"input": [{"role": "user", "content": [{"type": "input_text", "text": "\\udfff"}]}]}'),
    ("responses", '{"input": "q", "metadata": {"\\uDC00": 1}}'),
    ("messages", '{"max_tokens": 5, "messages": [{"role": "user", "content": "x\\ud800"}]}'),
    ("messages", '{"max_tokens": 5, "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}'),
    ("responses", '{"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}'),
    ("responses", '{"input": [{"type": "function_call", "call_id": "c", "name": 3, "arguments": 4}]}'),
    ("responses", '{"input": "q", "max_output_tokens": 1%s}' % ("0" * 5_000)),
    ("messages", '{"max_tokens": -1, "messages": [{"role": "user", "content": "x"}]}'),
    *(
        (path, body % nested)
        for nested in NESTED.values()
        for path, body in (
            ("responses", '{"input": %s}'),
            ("responses", '{"input": "q", "tools": %s}'),
            ("responses", '{"input": "q", "tool_choice": %s}'),
            ("responses", '{"input": "q", "text": {"format": %s}}'),
            ("responses", '{"input": "q", "previous_response_id": %s}'),
            ("responses", '{"input": [{"type": "function_call", "name": "f", "arguments": %s}]}'),
            ("responses", '{"input": [{"role": "user", "content": %s}]}'),
            ("messages", '{"max_tokens": 5, "messages": %s}'),
            ("messages", '{"max_tokens": 5, "messages": [{"role": "user", "content": %s}]}'),
            ("messages", '{"max_tokens": 5, "messages": [{"role": "user", "content": "q"}], "tools": %s}'),
            ("messages", '{"max_tokens": 5, "messages": [{"role": "user", "content": "q"}], "thinking": %s}'),
            ("messages", '{"max_tokens": 5, "messages": [{"role": "user", "content": "q"}], "tool_choice": {"type": %s}}'),
        )
    ),
]  # fmt: skip


async def test_hostile_bodies_of_other_apis_are_refused_in_their_form(
    agents: AgentEnvironment,
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    headers = {"Authorization": f"Bearer {client.key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession() as http:
        for path, body in HOSTILE:
            url = f"{client.root}/v1/{path}"
            async with http.post(url, data=body.encode(), headers=headers) as reply:
                answer = await reply.json()
            about = (path, body[:80], answer)
            assert reply.status == 400, about
            message = answer["error"]["message"]
            assert message and "\n" not in message and len(message) < 500, about
            assert answer["error"]["type"] == "invalid_request_error", about
            assert (answer.get("type") == "error") == (path == "messages"), about
    assert len(client.session.tree.nodes) == 1 and not client.session.conversations


async def test_what_is_too_long_for_any_branch_is_refused_by_other_apis_before_it_is_parsed(
    agents: AgentEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    parsed: list[int] = []
    loads = gateway.json.loads
    monkeypatch.setattr(gateway.json, "loads", lambda data: parsed.append(len(data)) or loads(data))
    status, answer = await client.send("/v1/responses", {"input": [user("q")] * 10**5})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, answer = await client.send(path, {"messages": [user("q")] * 10**5})
        assert status == 400 and answer["error"]["message"].startswith("prompt is too long")
    assert max(parsed, default=0) < 2**16, "the client's own answers are parsed here too"
