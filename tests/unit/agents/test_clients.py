"""Unmodified clients get the answers, streams and models that they expect."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from pa_npu.agents.environment import AgentEnvironment
from tests.helpers.agents import CALL, TOOLS, Policy, asks_then_answers, client_of, ids, user
from tools.make_tiny_model import END_OF_TURN


async def test_streams_completions_and_models_are_those_of_the_openai_package(
    agents: AgentEnvironment,
) -> None:
    client = await client_of(
        agents, Policy(lambda shown: f"<think>{CALL}{END_OF_TURN}" if "q" in shown else "w 12")
    )
    stream = await client.chat(
        [user("q")], tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    calls = [
        call
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert [call.function.name for call in calls] == ["calculator"] and chunks[
        -1
    ].usage.completion_tokens > 5
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [
        "tool_calls"
    ]
    assert [model.id async for model in client.openai.models.list()] == ["policy"]
    whole = await client.openai.completions.create(model="m", prompt="one", stop=[" "], logprobs=1)
    assert whole.choices[0].text == "w" and len(whole.choices[0].logprobs.token_logprobs) == 4
    # a text or ids that go on from what was written
    await client.openai.completions.create(model="m", prompt="one" + "w 12" + " and")
    tokens = client.session.tree.tokens(client.session.tree.nodes[-1]).tolist()
    await client.openai.completions.create(model="m", prompt=[*tokens, *ids("!")])
    assert [len(leaf.path) for leaf in client.session.tree.leaves()] == [1, 3] or [
        len(leaf.path) for leaf in client.session.tree.leaves()
    ] == [3, 1]


async def test_what_real_clients_send_and_what_changes_nothing_is_accepted(
    agents: AgentEnvironment,
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    harmless = {
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "cache_salt": "s", "verbosity": "low",
        "modalities": ["text"], "min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True,
    }  # fmt: skip
    assert (await client.send("/v1/chat/completions", {"messages": [user("q")], **harmless}))[
        0
    ] == 200
    for changed in ({"modalities": ["audio"]}, {"min_tokens": 5}, {"ignore_eos": True}):
        assert (await client.send("/v1/chat/completions", {"messages": [user("q")], **changed}))[
            0
        ] == 400, changed
    actual = await client.openai.models.retrieve("policy")
    assert actual.id == "policy"
    with pytest.raises(openai.NotFoundError, match="there is policy"):
        await client.openai.models.retrieve("gpt-4o")


async def test_a_developers_message_is_the_systems_where_the_template_knows_no_other(
    agents: AgentEnvironment,
) -> None:
    shown: list[str] = []
    client = await client_of(agents, Policy(lambda text: shown.append(text) or f"w{END_OF_TURN}"))
    for role in ("system", "developer"):
        await client.chat([{"role": role, "content": "Be brief."}, user("q")])
    assert shown[0] == shown[1] and "Be brief." in shown[0]
    agents._chat._template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(openai.BadRequestError, match="leaves out the message of role critic"):
        await client.chat([{"role": "critic", "content": "Too long."}, user("q")])


async def test_curl_reads_an_answer_and_a_stream(agents: AgentEnvironment) -> None:
    """With what clients of other servers send by habit, where it says what is so anyway."""
    client = await client_of(agents, Policy(asks_then_answers))
    neutral = {
        "echo": False,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1.0,
        "reasoning_effort": "medium",
        "n": 1,
    }
    for stream in (False, True):
        body = json.dumps({"model": "policy", "messages": [user("q")], "stream": stream, **neutral})
        command = [
            "curl",
            "-sS",
            "--fail-with-body",
            "--max-time",
            "30",
            f"{client.root}/v1/chat/completions",
            "-d",
            body,
        ]
        command += [
            "-H",
            f"Authorization: Bearer {client.key}",
            "-H",
            "Content-Type: application/json",
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output = (await asyncio.wait_for(process.communicate(), 60.0))[0].decode()
        assert process.returncode == 0, output
        if not stream:
            assert json.loads(output)["choices"][0]["message"]["content"].startswith("so ")
            continue
        events = [line.removeprefix("data: ") for line in output.splitlines() if line]
        assert events[-1] == "[DONE]"
        parts = [
            json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]
        ]
        assert "".join(parts).startswith("so ")
