"""A request that the gateway cannot serve is refused in OpenAI's form, before it costs anything."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from pa_npu.agents import gateway
from pa_npu.agents.environment import AgentEnvironment
from tests.helpers.agents import Policy, asks_then_answers, client_of, user
from tools.make_tiny_model import END_OF_TURN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5), ("top_p", 0.9), ("n", 2), ("logit_bias", {"5": 1}), ("seed", 1), ("presence_penalty", 0.1),
        ("response_format", {"type": "json_object"}), ("echo", True), ("top_k", 5), ("repetition_penalty", 1.1), ("min_p", 0.1),
        ("reasoning_effort", "high"), ("tool_choice", "required"), ("top_logprobs", 3), ("max_tokens", 0),
        ("stop", [""]), ("messages", []), ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ],
)  # fmt: skip
async def test_what_would_change_what_is_trained_or_is_no_request_is_refused_in_openais_form(
    agents: AgentEnvironment, field: str, value: Any
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    body = {
        "messages": [user("q")],
        "temperature": 1.0,
        "top_p": 1,
        "n": 1,
        "user": "me",
        field: value,
    }
    status, answer = await client.send("/v1/chat/completions", body)
    assert (
        status == 400
        and answer["error"]["param"] in (field, None)
        and field in answer["error"]["message"]
    )
    assert (
        answer["error"]["type"] == "invalid_request_error"
        and "\n" not in answer["error"]["message"]
    )
    assert len(client.session.tree.nodes) == 1
    status, _ = await client.send(
        "/v1/chat/completions", {**body, field: {"messages": [user("q")]}.get(field)}
    )
    assert status == 200, "without it the request is right"


async def test_what_is_too_long_for_any_limit_is_refused_before_the_template_sees_it(
    agents: AgentEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    rendered: list[str] = []
    render = agents._chat.rendered
    monkeypatch.setattr(
        agents._chat, "rendered", lambda *args, **more: rendered.append("") or render(*args, **more)
    )
    for long in ([user("x" * 64 * 400)], [user("x")] * 64 * 400):
        with pytest.raises(
            openai.BadRequestError, match=r"about [0-9]+ tokens do not fit"
        ) as refused:
            await client.chat(long)
        assert refused.value.code == "context_length_exceeded" and not rendered
    with pytest.raises(openai.BadRequestError, match="about"):
        await client.chat(
            [user("q")], tools=[{"type": "function", "function": {"name": "x" * 64 * 400}}]
        )
    await client.chat([user("q")])
    assert rendered


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", '{"messages": [{"role": "user", "content": "x\\ud800"}]}'),
        ("chat/completions", '{"messages": [{"role": "\\udfff", "content": "x"}]}'),
        ("chat/completions", '{"messages": [{"role": "user", "content": "x"}], "\\uDC00": 1}'),
        ("completions", '{"prompt": "x\\uDBff"}'),
        ("chat/completions", '{"messages": [{"role": "assistant", "tool_calls": [{"function": '
                             '{"name": "f", "arguments": "%s"}}]}]}'
         % ("[" * 10_000)),
        ("chat/completions", '{"messages": [{"role": "assistant", "tool_calls": [{"function": '
                             '{"name": "f", "arguments": %s}}]}]}'
         % ("[" * 10_000 + "]" * 10_000)),
        ("../reward", '{"reward": 1%s}' % ("0" * 400)),
        ("../reward", '{"reward": 1%s}' % ("0" * 5_000)),
        ("../reward", '{"reward": 1e308}'),
        ("../reward", '{"reward": -4e38}'),
        ("../reward", '{"reward": 1, "turn": "chatcmpl-%%s-%s"}' % ("1" * 5_000)),
    ],
)  # fmt: skip
async def test_hostile_bodies_are_refused_in_openais_form(
    agents: AgentEnvironment, path: str, body: str
) -> None:
    client = await client_of(agents, Policy(lambda shown: f"w{END_OF_TURN}"))
    await client.chat([user("q")])
    headers = {"Authorization": f"Bearer {client.key}", "Content-Type": "application/json"}
    data = (body.replace("%s", client.session.id)).encode()
    url = f"{client.root}/v1/{path}".replace("/v1/../", "/")
    async with aiohttp.ClientSession() as http, http.post(url, data=data, headers=headers) as reply:
        answer = await reply.json()
    assert (
        reply.status == 400
        and answer["error"]["message"]
        and "\n" not in answer["error"]["message"]
    ), answer
    assert client.session.reward is None and len(client.session.tree.nodes) == 2


async def test_a_body_longer_than_a_branch_may_hold_is_refused_before_it_is_parsed(
    agents: AgentEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    parsed: list[int] = []
    loads = gateway.json.loads
    monkeypatch.setattr(gateway.json, "loads", lambda data: parsed.append(len(data)) or loads(data))
    monkeypatch.setattr(
        agents._chat, "render", lambda *args, **more: pytest.fail("it must not be rendered")
    )
    many = {"messages": [user("q")], "tools": [{}] * 10**6}
    for path, body in (
        ("/v1/completions", {"prompt": [0] * 10**6}),
        ("/v1/chat/completions", many),
    ):
        status, answer = await client.send(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await client.send("/reward", {"reward": 1.0, "turn": "x" * 10**6}))[0] == 413
    assert max(parsed, default=0) < 2**16, "the client's own answers are parsed here too"
    # what is below that bound and still too much is not taken apart either
    status, answer = await client.send(
        "/v1/chat/completions", {"messages": [user("q")], "tools": [0] * 30_000}
    )
    assert status == 400
