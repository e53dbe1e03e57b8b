"""The gateway: what unmodified clients get, what becomes of it token by token, who may do what, and what ends a session."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pa_npu.agents import environment as environment_module
from pa_npu.agents import gateway
from pa_npu.agents.chat import ParsedAnswer, make_parser, parse_hermes
from pa_npu.agents.environment import AgentEnvironment, evaluated
from pa_npu.agents.programs import Programs
from pa_npu.agents.session import Session, Sessions
from pa_npu.agents.tree import num_unique
from pa_npu.attention.trie import pack
from pa_npu.config.schema import Config
from pa_npu.coordinator import environment_trial
from pa_npu.coordinator.main import make_gateway
from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation
from pa_npu.engines.vllm.kind import tool_parser as vllm_parser
from pa_npu.environments.protocol import EnvironmentFailed, Generate
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError
from pa_npu.launcher.engine_key import run_key_file
from pa_npu.samples.types import Sample, SampleBuilder
from tests.helpers.algorithms import checked
from tools import tiny_edits
from tools.make_tiny_model import AGENT_TEMPLATE, END_OF_TURN, make_tokenizer

TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = AGENT_TEMPLATE
PROMPT = Prompt(4, np.zeros(3, np.int32), "42", "What is 6*7?", {"question": "What is 6*7?"})
TOOLS: Any = [
    {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>{"name": "calculator", "arguments": {"x": "6*7"}}</tool_call>'
VERSION = 5


def ids(text: str) -> list[int]:
    """Byte by byte: what a policy writes is not what its text tokenises to."""
    pieces = (
        [text.removesuffix(END_OF_TURN)]
        if text.startswith("<|")
        else list(text.removesuffix(END_OF_TURN))
    )
    found = [
        token
        for piece in pieces
        for token in TOKENIZER(piece, add_special_tokens=False)["input_ids"]
    ]
    return found + ([TOKENIZER.eos_token_id] if text.endswith(END_OF_TURN) else [])


@dataclass(frozen=True, eq=False)
class Turn:
    """The arguments of Generate, of one request."""

    tokens: np.ndarray
    sample: int
    turn: int
    max_tokens: int | None


class Policy(Generate):
    """Writes what `script` says to what it is shown; log-probs and a seed's part follow from the
    turn that it is asked for.
    """

    def __init__(self, script: Callable[[str], str]) -> None:
        self.script = script
        self.turns: list[Turn] = []
        self.wait: asyncio.Event | None = None

    async def __call__(
        self,
        tokens: np.ndarray,
        *,
        n: int = 1,
        sample: int = 0,
        turn: int = 0,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Generation]:
        return await self.write(Turn(tokens, sample, turn, max_tokens))

    async def write(self, turn: Turn) -> list[Generation]:
        self.turns.append(turn)
        if self.wait is not None:
            await self.wait.wait()
        text = self.script(str(TOKENIZER.decode(turn.tokens.tolist())))
        written = ids(text)[: turn.max_tokens]
        ended = len(written) == len(ids(text)) and text.endswith(END_OF_TURN)
        logprobs = -np.linspace(0.1, 1.0, len(written), dtype=np.float32) - turn.turn % 97
        reason: Any = "stop" if ended else "length"
        return [Generation(np.asarray(written, np.int32), logprobs, "", reason, version=VERSION)]


def asks_then_answers(shown: str) -> str:
    return f"#### 42{END_OF_TURN}" if shown.count("<|user|>") > 1 else f"so {CALL}{END_OF_TURN}"


def config(timeout_s: float | None = None, **agent: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 200},
            "environment": {"name": "agents", "max_turns": 4, "timeout_s": timeout_s},
            "agent": agent,
        }
    )


class Client:
    """One open session, and clients of it."""

    def __init__(self, sessions: Sessions, session: Session) -> None:
        self.sessions, self.session = sessions, session
        self.key = sessions.derive_key(f"session:{session.id}")
        self.openai = openai.AsyncOpenAI(
            base_url=sessions.base_url(session), api_key=self.key, max_retries=0
        )
        self.root = f"{sessions.url}/sessions/{session.id}"

    async def chat(self, messages: list[Any], **more: Any) -> Any:
        return await self.openai.chat.completions.create(model="any", messages=messages, **more)

    async def send(self, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.root + path, json=body, headers=headers) as reply,
        ):
            return reply.status, await reply.json()

    def samples(self) -> list[Sample]:
        return self.session.tree.samples("", ended=True, reward=None)


@pytest.fixture
async def agents() -> AsyncIterator[AgentEnvironment]:
    async with opened(make_environment(config(), TOKENIZER), 30.0) as environment:
        assert isinstance(environment, AgentEnvironment)
        yield environment


async def client_of(agents: AgentEnvironment, policy: Generate, number: int = 0) -> Client:
    assert agents.sessions is not None
    session = Session(agents.sessions.new_id(), number, {}, policy, agents._chat, agents._limits)
    agents.sessions.add(session)
    return Client(agents.sessions, session)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_tool_agent_on_the_openai_package_trains_exactly_the_ids_that_were_sampled(
    agents: AgentEnvironment,
) -> None:
    policy = Policy(asks_then_answers)
    client = await client_of(agents, policy)
    messages: list[Any] = [user("What is 6*7?")]
    first = await client.chat(messages, tools=TOOLS)
    (call,) = first.choices[0].message.tool_calls
    assert (
        first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content == "so "
    )
    assert call.function.name == "calculator" and json.loads(call.function.arguments) == {
        "x": "6*7"
    }
    messages += [
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    second = await client.chat(messages, tools=TOOLS)
    assert (
        second.choices[0].message.content == "#### 42" and second.choices[0].finish_reason == "stop"
    )
    assert second.usage.prompt_tokens == len(policy.turns[1].tokens)

    (sample,) = client.samples()
    sampled = ids(f"so {CALL}{END_OF_TURN}") + ids(f"#### 42{END_OF_TURN}")
    assert sample.tokens[sample.trained].tolist() == sampled
    assert (
        set(sample.versions[sample.trained].tolist()) == {VERSION}
        and (sample.logprobs[sample.trained] < 0).all()
    )
    assert policy.turns[1].tokens.tolist() == sample.tokens[: len(policy.turns[1].tokens)].tolist()
    whole = TOKENIZER.apply_chat_template(
        [*messages[:1], *map(dict, ())], tokenize=False, add_generation_prompt=True
    )
    assert str(TOKENIZER.decode(sample.tokens.tolist())).startswith(whole)
    # control: what tokenising the text again would have trained
    text = str(TOKENIZER.decode(sample.tokens.tolist()))
    assert TOKENIZER(text, add_special_tokens=False)["input_ids"] != sample.tokens.tolist()


async def test_tool_calls_whose_json_the_template_writes_otherwise_continue_their_branch(
    agents: AgentEnvironment,
) -> None:
    spaced = '<tool_call>\n{"arguments":{"x":"6*7"},  "name":"calculator"}\n</tool_call>'
    policy = Policy(
        lambda shown: "end<|end|>" if shown.count("<|user|>") > 1 else spaced + END_OF_TURN
    )
    client = await client_of(agents, policy)
    first = (await client.chat([user("q")], tools=TOOLS)).choices[0].message
    tool = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "42"}
    await client.chat([user("q"), first, tool], tools=TOOLS)
    (sample,) = client.samples()
    assert sample.tokens[sample.trained].tolist() == ids(spaced + END_OF_TURN) + ids(
        "end" + END_OF_TURN
    )
    # a call that the client changed is not what the policy wrote
    first.tool_calls[0].function.arguments = '{"x": "6*8"}'
    await client.chat([user("q"), first, tool], tools=TOOLS)
    assert len(client.samples()) == 2


@pytest.mark.parametrize("changed", ["dropped reasoning", "other text", "other question"])
async def test_what_does_not_continue_a_known_branch_opens_one(
    agents: AgentEnvironment, changed: str
) -> None:
    client = await client_of(agents, Policy(lambda shown: f"<think>hm</think>yes{END_OF_TURN}"))
    first = (await client.chat([user("q")])).choices[0].message.content
    assert first == "<think>hm</think>yes"
    said = {"dropped reasoning": "yes", "other text": "no", "other question": first}[changed]
    question = "p" if changed == "other question" else "q"
    await client.chat([user(question), {"role": "assistant", "content": said}, user("more")])
    samples = client.samples()
    assert len(samples) == 2 and all(
        sample.num_trained == len(ids(f"{first}{END_OF_TURN}")) for sample in samples
    )
    assert sorted(str(TOKENIZER.decode(s.tokens.tolist())).count(first) for s in samples) in (
        [1, 1],
        [1, 2],
    )


async def test_a_turn_that_several_branches_share_is_trained_once_in_an_order_that_time_does_not_change(
    agents: AgentEnvironment,
) -> None:
    async def grow(order: list[str]) -> list[Sample]:
        client = await client_of(agents, Policy(lambda shown: f"a{len(shown) % 7}{END_OF_TURN}"))
        first = (await client.chat([user("q")])).choices[0].message
        for text in order:
            await client.chat([user("q"), first, user(text)])
        await client.chat([user("sub-agent")])
        return client.samples()

    samples, other = await grow(["x", "yy"]), await grow(["yy", "x"])
    assert len(samples) == 3
    for one, two in zip(samples, other, strict=True):
        assert all(
            np.array_equal(getattr(one, n), getattr(two, n))
            for n in ("tokens", "trained", "logprobs")
        )
    shared = [
        sample for sample in samples if "sub" not in str(TOKENIZER.decode(sample.tokens.tolist()))
    ]
    assert [sample.num_trained for sample in shared] == [6, 3], (
        "the turn to q in the first of its branches alone"
    )
    assert shared[0].prompt_length < shared[1].prompt_length
    turns = [
        [(turn.number, turn.trained, turn.written) for turn in sample.turns] for sample in samples
    ]
    whole, branch = (turns[samples.index(sample)] for sample in shared)
    assert len(whole) == 2 and branch == [(whole[0][0], False, 3), (whole[1][0] + 1, True, 3)], (
        "as the viewer draws it"
    )
    assert all(turn.shown.startswith("<|user|>") for sample in samples for turn in sample.turns)


async def test_a_request_samples_the_same_whenever_it_comes_and_a_retry_samples_anew(
    agents: AgentEnvironment,
) -> None:
    policies = [Policy(asks_then_answers), Policy(asks_then_answers), Policy(asks_then_answers)]
    for policy, questions, number in zip(
        policies, (["q", "r", "q"], ["r", "q", "q"], ["q", "r", "q"]), (0, 0, 1), strict=True
    ):
        client = await client_of(agents, policy, number)
        for question in questions:
            await client.chat([user(question)])
    turns = [{turn.turn for turn in policy.turns} for policy in policies]
    assert turns[0] == turns[1] and len(turns[0]) == 3 and min(turns[0]) > 0
    assert {turn.sample for turn in policies[2].turns} == {1}, (
        "another number of the group: other seeds"
    )


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


async def test_limits_are_errors_that_agents_know_and_give_the_session_its_outcome(
    agents: AgentEnvironment,
) -> None:
    client = await client_of(agents, Policy(lambda shown: "w" * 150 + END_OF_TURN))
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat([user("long " * 50)])
    assert refused.value.code == "context_length_exceeded"
    first = (await client.chat([user("q")])).choices[0].message
    with pytest.raises(openai.BadRequestError, match=r"rollout\.max_response_tokens"):
        await client.chat([user("q"), first, user("more " * 10)])
    short = await client.chat([user("compacted")], max_tokens=3)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3
    for _ in range(2):
        await client.chat([user("q")])
    with pytest.raises(openai.BadRequestError, match="ended: turns"):
        await client.chat([user("q")])
    assert client.session.outcome == "turns"
    ended = await client_of(agents, Policy(lambda shown: f"w{END_OF_TURN}"))
    await ended.chat([user("q")])
    with pytest.raises(openai.BadRequestError):
        await ended.chat([user("long " * 50)])
    assert (await ended.send("/end", {}))[0] == 200 and ended.session.outcome == "tokens"


async def test_sessions_cannot_use_each_other_and_strangers_can_use_none(
    agents: AgentEnvironment,
) -> None:
    assert agents.sessions is not None
    mine, other = [await client_of(agents, Policy(asks_then_answers)) for _ in range(2)]
    for path in ("/v1/chat/completions", "/v1/completions", "/reward", "/end"):
        for key in (other.key, "", "nonsense", agents.sessions.derive_key("program:0")):
            assert (await mine.send(path, {}, key or "-"))[0] == 401
    assert (await mine.send("/reward", {"reward": 1.0}))[0] == 200
    assert (await mine.send("/reward", {"reward": 2.0}, agents.sessions.key))[0] == 200, (
        "the run's key may"
    )
    for reward in (float("nan"), "1", True, None, 1e39, 1e308, -1e16, 10**400, [1.0], {}):
        assert (await mine.send("/reward", {"reward": reward}))[0] == 400
    await agents.sessions.remove(mine.session)
    assert (await mine.send("/end", {}))[0] == 404
    with pytest.raises(openai.AuthenticationError):
        await openai.AsyncOpenAI(
            base_url=other.root + "/v1", api_key="x", max_retries=0
        ).models.list()


async def test_a_turns_reward_counts_for_the_branches_that_hold_it(
    agents: AgentEnvironment,
) -> None:
    client = await client_of(agents, Policy(lambda shown: f"w{END_OF_TURN}"))
    first = await client.chat([user("q")])
    assert (await client.send("/reward", {"reward": 0.25, "turn": first.id}))[0] == 200
    other = first.id.replace(client.session.id, "0" * 16)
    for wrong in (
        "chatcmpl-x-9",
        other,
        first.id.rpartition("-")[2],
        "-",
        "",
        f"{first.id}{'0' * 5000}",
    ):
        assert (await client.send("/reward", {"reward": 1, "turn": wrong}))[0] == 400, wrong
    await client.chat([user("another branch")])
    rewards = [sample.reward for sample in client.session.tree.samples("", ended=True, reward=1.0)]
    assert sorted(rewards) == [1.0, 1.25]  # type: ignore[type-var]


async def test_a_client_that_goes_and_asks_again_gets_what_it_would_have_got(
    agents: AgentEnvironment,
) -> None:
    policy = Policy(asks_then_answers)
    policy.wait = asyncio.Event()
    client = await client_of(agents, policy)
    with pytest.raises(openai.APITimeoutError):
        await client.chat([user("q")], timeout=0.2)
    while client.session._running:
        await asyncio.sleep(0.01)
    policy.wait = None
    await client.chat([user("q")])
    assert policy.turns[0].turn == policy.turns[1].turn and client.session._turns == 1


PROGRAM = """
import json, os, sys, urllib.request
def ask(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
task = json.loads(os.environ["TASK"])
messages = [{"role": "user", "content": task["row"]["question"]}]
answer = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
"""


def program(directory: Path, *lines: str) -> str:
    file = directory / "agent.py"
    file.write_text(PROGRAM + "\n".join(lines))
    return shlex.join([sys.executable, str(file)])


async def rollout(
    chosen: Config, num_samples: int, script: Callable[[str], str]
) -> tuple[list[Sample], Policy]:
    policy = Policy(script)
    async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
        return await environment.rollout(PROMPT, num_samples, policy), policy


@pytest.mark.parametrize("side_by_side", [True, False])
async def test_which_branch_is_judged_is_chance_neither_for_parallel_requests_nor_for_one_after_another(
    agents: AgentEnvironment, side_by_side: bool
) -> None:
    """Two sub-agents: side by side, the one that was shown more; one after another, the later one."""

    async def judged(questions: list[str]) -> str:
        policy = Policy(lambda shown: f"a{len(shown)}{END_OF_TURN}")
        client = await client_of(agents, policy)
        await client.chat([user("first")])
        if not side_by_side:
            for question in questions:
                await client.chat([user(question)])
            return agents._transcript(client.session)
        waits = dict(zip(questions, (asyncio.Event(), asyncio.Event()), strict=True))

        async def answer(turn: Turn, write: Any = policy.write) -> list[Generation]:
            shown = str(TOKENIZER.decode(turn.tokens.tolist()))
            await next(event for question, event in waits.items() if question in shown).wait()
            return await write(turn)  # type: ignore[no-any-return]

        policy.write = answer  # type: ignore[method-assign]
        asking = [asyncio.create_task(client.chat([user(question)])) for question in questions]
        while len(client.session._running) < 2:
            await asyncio.sleep(0.001)
        for question, task in zip(questions, asking, strict=True):
            waits[question].set()
            await task
        return agents._transcript(client.session)

    short, long = "a sub-task", "another and longer sub-task"
    answers = [await judged([short, long]), await judged([long, short])]
    assert (answers[0] == answers[1]) is side_by_side, answers


async def test_what_is_too_long_for_any_limit_is_refused_before_the_template_sees_it(
    agents: AgentEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await client_of(agents, Policy(asks_then_answers))
    rendered: list[str] = []
    render = agents._chat.render
    monkeypatch.setattr(
        agents._chat, "render", lambda *args, **more: rendered.append("") or render(*args, **more)
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
    found = await client.openai.models.retrieve("policy")
    assert found.id == "policy"
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


async def test_a_reward_after_a_limit_is_taken_until_the_agent_says_that_it_has_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def reward_of(grace_s: float, *, gives: bool, ends: bool) -> float | None:
        monkeypatch.setattr(environment_module, "_GRACE_S", grace_s)
        async with opened(make_environment(config(), TOKENIZER), 30.0) as agents:
            assert isinstance(agents, AgentEnvironment) and agents.sessions is not None
            policy = Policy(lambda shown: f"w{END_OF_TURN}")
            going = asyncio.ensure_future(agents.rollout(PROMPT, 1, policy))
            session = await agents.sessions.wait_task("", 30.0)
            assert session is not None
            client = Client(agents.sessions, session)
            with pytest.raises(openai.BadRequestError, match="ended: turns"):
                for number in range(9):
                    await client.chat([user(f"q{number}")])
            if gives:
                assert (await client.send("/reward", {"reward": 0.75}))[0] == 200
            if ends:
                assert (await client.send("/end", {}))[0] == 200
            sample, *_ = await asyncio.wait_for(going, 30.0)
            assert session.outcome == "turns", "the limit stays its outcome"
            return sample.reward

    assert await reward_of(300.0, gives=True, ends=True) == 0.75, "no longer than until /end"
    assert await reward_of(0.2, gives=True, ends=False) == 0.75
    assert await reward_of(0.2, gives=False, ends=False) is None


async def test_rows_need_no_answer_where_agents_reward_and_a_session_without_either_is_one_line() -> (
    None
):
    assert not config().needs_answers and config().rewards_read_answers
    assert Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}).needs_answers
    unanswered = replace(PROMPT, answer="")
    for reward in (0.5, None):
        async with opened(make_environment(config(), TOKENIZER), 30.0) as agents:
            assert isinstance(agents, AgentEnvironment) and agents.sessions is not None
            going = asyncio.ensure_future(
                agents.rollout(unanswered, 1, Policy(lambda shown: f"w{END_OF_TURN}"))
            )
            session = await agents.sessions.wait_task("", 30.0)
            assert session is not None
            client = Client(agents.sessions, session)
            await client.chat([user("q")])
            if reward is not None:
                await client.send("/reward", {"reward": reward})
            await client.send("/end", {})
            if reward is not None:
                assert [sample.reward for sample in await going] == [reward]
                continue
            with pytest.raises(
                EnvironmentFailed,
                match="no session of prompt 4 was given a reward, and its row has no answer",
            ):
                await going


async def test_a_stream_that_is_hung_up_logs_no_traceback(
    agents: AgentEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # clients of earlier tests say something when they are collected
    await asyncio.sleep(0)
    caplog.clear()
    client = await client_of(agents, Policy(lambda shown: "w" * 150 + END_OF_TURN))
    host, port = client.sessions.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": [user("q")], "stream": True, "logprobs": True}).encode()
    head = (
        f"POST /sessions/{client.session.id}/v1/chat/completions HTTP/1.1\r\nHost: "
        f"x\r\nContent-Length: {len(body)}\r\n"
    )
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Authorization: Bearer {client.key}\r\n\r\n".encode() + body)
        await reader.readline()
        writer.transport.abort()
    fine = await client.chat([user("q")])
    assert fine.choices and "Traceback" not in caplog.text and not caplog.records


def test_a_gateways_file_that_is_a_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / gateway.GATEWAY_FILE).mkdir()

    async def serve() -> None:
        async with gateway.Gateway(Sessions("key"), 1.0).serving("127.0.0.1", 0, tmp_path):
            pass

    with pytest.raises(ConfigError, match=r"run\.dir: .*gateway\.json cannot be written"):
        asyncio.run(serve())
    assert (tmp_path / gateway.GATEWAY_FILE).is_dir(), "it is not ours to remove"


async def test_a_program_gets_a_task_of_any_length_and_asks_the_gateway_past_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    file = tmp_path / "agent.py"
    lines = PROGRAM.replace(
        'json.loads(os.environ["TASK"])', 'json.load(open(os.environ["TASK_FILE"]))'
    )
    lines += """
same = json.loads(os.environ["TASK"]) == task if "TASK" in os.environ else None
kept = "example.org" in os.environ["no_proxy"]
ask(os.environ["SESSION_URL"] + "/reward", {"reward": len(task["row"]["text"]) + 0.5 * (same is True) + 0.25 * kept})
"""
    file.write_text(lines)
    chosen = config(command=shlex.join([sys.executable, str(file)]))
    for length, reward in ((180_000, 180_000.25), (10, 10.75)):
        prompt = replace(PROMPT, row={**PROMPT.row, "text": "é" * length})
        async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
            samples = await environment.rollout(prompt, 1, Policy(lambda shown: f"w{END_OF_TURN}"))
        assert [sample.reward for sample in samples] == [reward]


async def test_programs_inherit_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "VLLM_API_KEY",
        "PA_NPU_STORE",
        "JUDGE_API_KEY",
        "MY_PASSWORD",
    )
    for name in (*hidden, "PLAIN"):
        monkeypatch.setenv(name, "x")
    lines = f"found = [n for n in {(*hidden, 'PLAIN')} if n in os.environ]"
    lines += (
        '; ask(os.environ["SESSION_URL"] + "/reward", {"reward": len(found) + 10 * ("PLAIN" '
        "in found)})"
    )
    chosen = config(command=program(tmp_path, lines))
    samples, _ = await rollout(chosen, 1, lambda shown: f"w{END_OF_TURN}")
    assert [sample.reward for sample in samples] == [11.0]


def test_agents_are_refused_where_other_numbers_of_samples_would_end_the_run() -> None:
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, "environment": {"name": "agents"}}
    for section, keys in (
        ("trainer", {"pipeline_parallel": 2, "devices": 2}),
        ("algorithm", {"loss": "dpo", "advantage": "centred", "kl_coef": 0.1}),
        ("algorithm", {"kl_in": "reward", "advantage": "centred", "kl_coef": 0.1}),
    ):
        with pytest.raises(
            ValueError,
            match=r"environment\.name: agents, whose sessions are one sample, several or none",
        ):
            checked(tree | {section: keys})
    checked(tree)


def test_the_gateways_key_is_in_a_file_also_where_engines_are_attached(tmp_path: Path) -> None:
    def of(**rollout: Any) -> Config:
        return config().model_copy(
            update={
                "run": config().run.model_copy(update={"dir": str(tmp_path)}),
                "rollout": config().rollout.model_copy(update=rollout),
            }
        )

    for chosen, key in (
        (of(attach=("http://x",)), ""),
        (of(attach=("http://x",)), "engines"),
        (of(), "own"),
    ):
        with run_key_file(chosen, tmp_path, key):
            written = (tmp_path / "api_key").read_text().strip()
            gateway_of_run = make_gateway(
                chosen, make_environment(chosen, TOKENIZER), key or None, None
            )
            assert gateway_of_run is not None and gateway_of_run.sessions.key == written
            assert written == key or (not key and len(written) == 64)
        assert not (tmp_path / "api_key").exists()
    alone = of(attach=("http://x",)).model_copy(
        update={"environment": Config.model_fields["environment"].default}
    )
    with run_key_file(alone, tmp_path, "engines"):
        assert not (tmp_path / "api_key").exists(), "nobody needs another's key"


async def test_programs_are_started_with_a_task_and_their_reward_is_the_sessions(
    tmp_path: Path,
) -> None:
    command = program(
        tmp_path,
        'ask(os.environ["SESSION_URL"] + "/reward", {"reward": len(task["answer"]) + 0.5})',
    )
    samples, _ = await rollout(
        config(command=command, concurrent=2), 3, lambda shown: f"w{END_OF_TURN}"
    )
    assert [sample.reward for sample in samples] == [2.5] * 3 and all(
        sample.finished for sample in samples
    )
    assert [sample.text for sample in samples] == ["w"] * 3


async def test_a_killed_program_begins_again_with_the_same_seeds(tmp_path: Path) -> None:
    flag = tmp_path / "was here"
    lines = (
        f"if not os.path.exists({str(flag)!r}): open({str(flag)!r}, 'w'); os.kill(os.getpid(), 9)"
    )
    samples, policy = await rollout(
        config(command=program(tmp_path, lines)), 1, lambda shown: f"w{END_OF_TURN}"
    )
    assert len(samples) == 1 and samples[0].finished and flag.exists()
    first, again = policy.turns
    assert (first.turn, first.sample, first.tokens.tolist()) == (
        again.turn,
        again.sample,
        again.tokens.tolist(),
    )


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("sys.exit('broken on purpose')", "failed"),
        ("import time; time.sleep(90)", "time"),
        ("print('x' * 10**6); import time; time.sleep(90)", "output"),
    ],
)
async def test_outcomes_decide_what_is_trained(tmp_path: Path, line: str, outcome: str) -> None:
    """One session of a group ends so, the other is done."""
    number = tmp_path / "number"
    lines = f"if not os.path.exists({str(number)!r}):\n    open({str(number)!r}, 'w')\n    {line}"
    keys = {
        "command": program(tmp_path, lines),
        "concurrent": 1,
        "timeout_s": 8 if outcome == "time" else 60,
        "output_kib": 8,
    }
    samples, policy = await rollout(config(**keys), 2, lambda shown: f"w{END_OF_TURN}")
    assert len(samples) == 1 and samples[0].finished
    length = len(samples[0].tokens)
    assert policy.counted == {
        "sessions_done": 1,
        f"sessions_{outcome}": 1,
        "tokens": length,
        "tokens_unique": length,
    }
    if outcome != "time":  # which is long
        number.unlink()
        samples, _ = await rollout(config(**keys, discards=[]), 2, lambda shown: f"w{END_OF_TURN}")
        assert sorted(sample.finished for sample in samples) == [False, True]
    if outcome == "failed":
        number.unlink()
        samples, _ = await rollout(config(**keys), 1, lambda shown: f"w{END_OF_TURN}")
        assert [sample.reward for sample in samples] == [0.0], (
            "a group of which nothing may be trained has no advantages"
        )


async def test_an_agent_that_asks_for_nothing_ends_the_run_in_one_line_with_its_last_words() -> (
    None
):
    command = shlex.join([sys.executable, "-c", "raise SystemExit('no module named nonsense')"])
    with pytest.raises(
        EnvironmentFailed, match=r"prompt 4 asked the policy for anything.*no module named nonsense"
    ) as error:
        await rollout(config(command=command), 2, asks_then_answers)
    assert "\n" not in str(error.value)


STAYING = """
import json, os, urllib.request
def ask(url, key, body=None):
    headers = {"Authorization": "Bearer " + key, "x-program": os.environ["PROGRAM"]}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))
while True:
    taken = ask(os.environ["GATEWAY_URL"] + "/tasks?wait_s=5", os.environ["OPENAI_API_KEY"])
    if taken["task"] is None: continue
    if os.path.exists("FLAG"): os.unlink("FLAG"); os.kill(os.getpid(), 9)
    url, key = taken["base_url"], taken["api_key"]
    ask(url + "/chat/completions", key, {"messages": [{"role": "user", "content": "q"}]})
    ask(url.removesuffix("/v1") + "/reward", key, {"reward": 1})
    ask(url.removesuffix("/v1") + "/end", key, {})
"""


async def test_programs_that_stay_take_one_task_after_another_and_what_a_killed_one_had_begins_again(
    tmp_path: Path,
) -> None:
    flag, file = tmp_path / "flag", tmp_path / "agent.py"
    flag.touch()
    file.write_text(STAYING.replace("FLAG", str(flag)))
    command = shlex.join([sys.executable, str(file)])
    samples, _ = await rollout(
        config(command=command, programs=1), 4, lambda shown: f"w{END_OF_TURN}"
    )
    assert (
        len(samples) == 4 and not flag.exists() and {sample.reward for sample in samples} == {1.0}
    )


async def test_a_program_may_end_after_every_task_and_is_started_again(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(STAYING.replace("FLAG", str(tmp_path / "never")) + "    break\n")
    command = shlex.join([sys.executable, str(file)])
    samples, _ = await rollout(
        config(command=command, programs=1), 5, lambda shown: f"w{END_OF_TURN}"
    )
    assert len(samples) == 5, "more tasks than a program that ends without one may be started"


async def test_a_program_that_ends_without_a_task_done_ends_the_run_in_one_line() -> None:
    command = shlex.join([sys.executable, "-c", "raise SystemExit('no module named nonsense')"])
    with pytest.raises(
        ConfigError, match=r"ended 3 times without a session done.*no module named nonsense"
    ):
        await rollout(config(command=command, programs=1), 1, asks_then_answers)


async def test_a_sessions_time_runs_from_when_it_is_taken() -> None:
    """The first of two is taken and forgotten; the other has waited for as long and has all of its
    time.
    """
    async with opened(make_environment(config(timeout_s=0.3), TOKENIZER), 30.0) as agents:
        assert isinstance(agents, AgentEnvironment) and agents.sessions is not None
        working = asyncio.create_task(
            agents.rollout(PROMPT, 2, Policy(lambda shown: f"w{END_OF_TURN}"))
        )
        forgotten = await agents.sessions.wait_task("me", 30.0)
        assert forgotten is not None
        await forgotten.ended()
        session = await agents.sessions.wait_task("me", 0.0)
        assert forgotten.outcome == "time" and session is not None and session.outcome is None
        await Client(agents.sessions, session).chat([user("q")])
        session.end("done")
        (sample,) = await asyncio.wait_for(working, 30.0)
        assert sample.finished


async def test_a_run_whose_tasks_nobody_takes_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pa_npu.agents.environment._TASK_REQUEST_S", 0.1)
    with pytest.raises(EnvironmentFailed, match=r"no agent has taken a task for 0\.2 s"):
        await rollout(config(timeout_s=0.1), 2, asks_then_answers)


def test_agents_are_tried_for_as_long_as_their_sessions_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(
        environment_trial,
        "run_trial",
        lambda module, request, limit_s, *texts: asked.append(limit_s),
    )
    environment_trial.check_environment(config(command="agent", timeout_s=900.0), PROMPT)
    assert asked == [60.0 + 2 * 900.0], "one whose room is taken first, as in a run"


@settings(max_examples=200)
@given(
    st.lists(
        st.lists(st.sampled_from([1, 2, 256, 65536]), min_size=1, max_size=6),
        min_size=1,
        max_size=8,
    )
)
def test_unique_tokens_are_the_rows_of_the_trie(sequences: list[list[int]]) -> None:
    row = SampleBuilder(np.zeros(1, np.int32))
    row.write(np.ones(1, np.int32), np.zeros(1, np.float32), 0, {})
    sample = row.finish(True, "", None)
    samples = [replace(sample, tokens=np.asarray(tokens, np.int32)) for tokens in sequences]
    assert num_unique(samples) == pack(sequences).layout.total


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
    found = parse(plain + call, TOOLS, f"<|user|>q{'<|assistant|>'}")
    assert found.content.strip() == plain and [one.canonical for one in found.calls] == [
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
        said = (await asyncio.wait_for(process.communicate(), 60.0))[0].decode()
        assert process.returncode == 0, said
        if not stream:
            assert json.loads(said)["choices"][0]["message"]["content"].startswith("so ")
            continue
        events = [line.removeprefix("data: ") for line in said.splitlines() if line]
        assert events[-1] == "[DONE]"
        parts = [
            json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]
        ]
        assert "".join(parts).startswith("so ")


async def test_half_requests_slow_bodies_and_too_many_connections_are_bounded_and_clients_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "MAX_CONNECTIONS", 50)
    monkeypatch.setattr(gateway, "_IDLE_S", 0.4)
    monkeypatch.setattr(gateway, "_READ_S", 0.3)
    monkeypatch.setattr(gateway, "LARGEST_REQUEST_BYTES", 2**16)
    async with opened(make_environment(config(), TOKENIZER), 30.0) as agents:
        assert isinstance(agents, AgentEnvironment) and agents.sessions is not None
        client = await client_of(agents, Policy(asks_then_answers))
        host, port = agents.sessions.url.removeprefix("http://").split(":")
        path = f"/sessions/{client.session.id}/v1/chat/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            f"{client.key}\r\nContent-Length: 100\r\n\r\n"
        )

        async def half(text: str) -> bytes:
            """Returns the server's words before it closes the connection by itself."""
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(text.encode())
                return await asyncio.wait_for(reader.read(), 30.0)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        assert set(
            await asyncio.gather(*(half("POST /sessions/x HTTP/1.1\r\nHo") for _ in range(1000)))
        ) == {b""}
        assert b" 408 " in await half(head + "{")
        assert b" 401 " in await half(head.replace(client.key, "stranger") + "{" * 100)
        assert (await client.send("/v1/chat/completions", {"messages": "x" * 2**17}))[0] == 413
        answer = await client.chat([user("What is 6*7?")], tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"


async def test_an_evaluation_has_one_sample_of_every_session_whatever_its_outcome(
    tmp_path: Path,
) -> None:
    """Two branches in each session; the program is named by a path relative to the working
    directory.
    """
    lines = (
        'ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages + '
        'messages}); sys.exit("no good end")'
    )
    command = program(tmp_path, lines).replace(sys.executable, "python")
    command = command.replace(str(tmp_path), os.path.relpath(tmp_path))
    environment = make_environment(config(command=command), TOKENIZER)
    async with opened(environment, 30.0):
        samples = await evaluated(environment).rollout(
            PROMPT, 2, Policy(lambda shown: f"w{END_OF_TURN}")
        )
    assert len(samples) == 2
    assert all(
        str(TOKENIZER.decode(sample.tokens.tolist())).count("6*7") == 2 for sample in samples
    ), "the last branch"


class Counting:
    """A server with reset and step: it asks for a count, one number after another, and gives a
    reward for each right one.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.answers: dict[str, Any] = {}
        self.wait_s = 0.0
        self._at: dict[str, int] = {}

    async def handle(self, request: web.Request) -> web.Response:
        path, body = request.path[1:], await request.json()
        self.asked.append((path, body, request.headers.get("Authorization")))
        await asyncio.sleep(self.wait_s)
        if path in self.answers:
            answer = self.answers[path]
            return answer() if callable(answer) else web.json_response(answer)
        if path == "reset":
            self._at[body["id"]] = 0
            return web.json_response({"observation": f"count from {body['seed']}", "info": {}})
        if body["id"] not in self._at:
            return web.Response(status=404, text="no such episode")
        self._at[body["id"]] += 1
        at = self._at[body["id"]]
        reward = 0.5 if body["action"] == f"#{at}" else 0.0
        return web.json_response(
            {
                "observation": f"next {at}",
                "reward": reward,
                "terminated": at == 3,
                "truncated": False,
                "info": {},
            }
        )


@pytest.fixture
async def counting() -> AsyncIterator[tuple[Counting, str]]:
    server = Counting()
    app = web.Application()
    app.router.add_post("/{path}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def remote(url: Any, **environment: Any) -> Config:
    options = {"options": {"url": url} | environment.pop("options", {})}
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 200},
            "environment": {
                "name": "remote",
                "max_turns": 4,
                "timeout_s": 5.0,
                **options,
                **environment,
            },
        }
    )


def counts(shown: str) -> str:
    return f"#{shown.count('<|user|>')}{END_OF_TURN}" if "from 4" in shown else f"lost{END_OF_TURN}"


async def test_an_episode_of_a_remote_environment_is_one_sample_with_its_steps_rewards(
    counting: tuple[Counting, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = counting
    monkeypatch.setenv("COUNTING_KEY", "k")
    samples, policy = await rollout(
        remote(url + "/", options={"api_key_variable": "COUNTING_KEY"}), 2, counts
    )
    assert [sample.reward for sample in samples] == [1.5, 1.5] and all(
        sample.finished for sample in samples
    )
    for sample in samples:
        assert sample.tokens[sample.trained].tolist() == [
            t for n in (1, 2, 3) for t in ids(f"#{n}{END_OF_TURN}")
        ]
        assert "next 1" in str(TOKENIZER.decode(sample.tokens[~sample.trained].tolist()))
    resets = [body for path, body, _ in server.asked if path == "reset"]
    assert [body["seed"] for body in resets] == [4, 4] and resets[0]["options"]["row"] == PROMPT.row
    assert {key for _, _, key in server.asked} == {"Bearer k"}
    assert (
        policy.counted["sessions_done"] == 2
        and policy.counted["tokens_unique"] < policy.counted["tokens"]
    )
    # a limit of the run ends it, and the server is told
    (short,), _ = await rollout(remote(url, max_turns=2), 1, counts)
    assert not short.finished and short.reward == 1.0 and server.asked[-1][0] == "close"


async def test_an_episode_whose_server_forgot_it_begins_again_and_one_that_is_gone_ends_the_run_in_one_line(
    counting: tuple[Counting, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pa_npu.agents.remote._PAUSE_S", 0.01)
    server, url = counting

    def step() -> web.Response:
        del server.answers["step"]
        return web.Response(status=404, text="who?")

    server.answers["step"] = step
    (sample,), policy = await rollout(remote(url), 1, counts)
    assert sample.reward == 1.5
    first, again = policy.turns[:2]
    assert (first.turn, first.sample, first.tokens.tolist()) == (
        again.turn,
        again.sample,
        again.tokens.tolist(),
    )
    server.wait_s = 30.0
    with pytest.raises(
        EnvironmentFailed, match=r"lost 4 times, .*reset gave no answer \(no complete answer"
    ) as failed:
        await rollout(remote(url, timeout_s=0.05), 1, counts)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("reset", {"observation": 5}, "neither a text nor a list"),
        (
            "reset",
            {"observation": [{"role": "user"}, {"content": [{"type": "image_url"}]}]},
            "cannot be shown",
        ),
        ("reset", [], r"gave 200 \[\]"),
        ("reset", lambda: web.Response(status=422, text="no\nsuch task"), "gave 422 no such task"),
        ("reset", lambda: web.Response(body=b"x" * 2**21), "longer than"),
        (
            "step",
            {"observation": "", "reward": None, "terminated": True, "truncated": False},
            "no finite number",
        ),
        (
            "step",
            {"observation": "", "reward": 1e39, "terminated": True, "truncated": False},
            "beyond",
        ),
        (
            "step",
            {"observation": "", "reward": 10**400, "terminated": True, "truncated": False},
            "more than 300 digits",
        ),
        (
            "step",
            {"observation": "", "reward": True, "terminated": True, "truncated": False},
            "no finite number",
        ),
        (
            "step",
            {"observation": "", "reward": "1", "terminated": True, "truncated": False},
            "no finite number",
        ),
        (
            "step",
            {"observation": "", "reward": 1, "terminated": 1, "truncated": False},
            "true or false",
        ),
        (
            "step",
            lambda: web.Response(body=b'{"reward": NaN, "terminated": true, "truncated": true}'),
            "no finite",
        ),
    ],
)
async def test_what_is_no_answer_of_an_environment_ends_the_run_in_one_line(
    counting: tuple[Counting, str], path: str, answer: Any, said: str
) -> None:
    server, url = counting
    server.answers[path] = answer
    with pytest.raises(
        EnvironmentFailed, match=rf"environment\.options: url: {url}/.*{said}"
    ) as failed:
        await rollout(remote(url), 1, counts)
    assert "\n" not in str(failed.value)


async def test_a_remote_server_that_is_not_there_is_one_line_before_the_run() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with opened(make_environment(remote(url), TOKENIZER), 30.0) as environment:
        with pytest.raises(
            ConfigError, match=r"environment\.options: url: .*/reset gave no answer .*; start the"
        ):
            await environment.trial(PROMPT)  # type: ignore[attr-defined]


async def test_a_remote_server_is_tried_with_one_episode_which_is_closed(
    counting: tuple[Counting, str],
) -> None:
    server, url = counting
    async with opened(make_environment(remote(url), TOKENIZER), 30.0) as environment:
        await environment.trial(PROMPT)  # type: ignore[attr-defined]
    assert [path for path, _, _ in server.asked] == ["reset", "close"]
    assert server.asked[0][1]["id"] == server.asked[1][1]["id"]


@pytest.mark.parametrize("url", [None, 5, "localhost:80", "ftp://x", "http://"])
def test_a_remote_environment_needs_an_address_and_a_key_that_is_set(url: Any) -> None:
    with pytest.raises(ConfigError, match=r"environment\.options: url must be"):
        make_environment(remote(url), TOKENIZER)
    with pytest.raises(ConfigError, match=r"names 'NOT_SET', which is not set"):
        make_environment(remote("http://x", options={"api_key_variable": "NOT_SET"}), TOKENIZER)
    with pytest.raises(ConfigError, match=r"'port' is unknown to remote"):
        make_environment(remote("http://x", options={"port": 1}), TOKENIZER)


# Stands for docker: says how it was called, and runs the command that follows the image as a
# process.
DOCKER = f"""#!{sys.executable}
import json, os, subprocess, sys
with open("RECORD", "a") as file:
    file.write(json.dumps([sys.argv[1:], sorted(os.environ)]) + "\\n")
if sys.argv[1] == "run":
    names = [part.removeprefix("--env=") for part in sys.argv if part.startswith("--env=")]
    kept = {{name: os.environ[name] for name in names}}
    code = subprocess.run(sys.argv[sys.argv.index("images/agent:1") + 1 :], env=kept).returncode
    sys.exit(code if code >= 0 else 128 - code)
"""


@pytest.fixture
def docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[tuple[list[str], list[str]]]]:
    """Its calls so far: arguments, and names of variables."""
    record = tmp_path / "record"
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "docker"
    file.write_text(DOCKER.replace("RECORD", str(record)))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return lambda: [json.loads(line) for line in record.read_text().splitlines()]


async def test_a_container_has_the_gateways_variables_its_network_and_limits_and_is_removed(
    tmp_path: Path,
    docker: Callable[[], list[tuple[list[str], list[str]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAIN", "x")
    lines = (
        'ask(os.environ["SESSION_URL"] + "/reward", {"reward": float("PLAIN" in os.environ) + 0.5})'
    )
    chosen = config(command=program(tmp_path, lines), container="images/agent:1")
    samples, _ = await rollout(chosen, 1, lambda shown: f"w{END_OF_TURN}")
    assert [sample.reward for sample in samples] == [0.5], "none of the coordinator's variables"
    (run, _), (removal, _) = docker()
    image = run.index("images/agent:1")
    assert not [part for part in run if part.startswith("--volume")], (
        "a task that fits is in the variable"
    )
    assert run[0] == "run" and run[image + 1 :] == shlex.split(chosen.agent.command or "")
    names = {"GATEWAY_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL", "SESSION_URL", "TASK"}
    assert {part.removeprefix("--env=") for part in run if part.startswith("--env=")} == names, (
        "values are no arguments"
    )
    expected = {
        "--rm",
        "--init",
        "--network=host",
        "--cap-drop=ALL",
        "--memory=4g",
        "--pids-limit=512",
    }
    assert expected <= set(run[:image])
    assert ["--name=" + removal[2]] == [part for part in run if part.startswith("--name=")]
    assert removal[:2] == ["rm", "--force"]


async def test_a_container_reads_a_task_that_is_too_long_for_a_variable_from_a_file(
    tmp_path: Path,
    docker: Callable[[], list[tuple[list[str], list[str]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    prompt = replace(PROMPT, row={**PROMPT.row, "text": "x" * 180_000})
    chosen = config(command=program(tmp_path, "pass"), container="images/agent:1")
    async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
        # it reads TASK
        with pytest.raises(EnvironmentFailed, match="asked the policy for anything"):
            await environment.rollout(prompt, 1, Policy(lambda shown: f"w{END_OF_TURN}"))
    (run, _), *_ = docker()
    names = {part.removeprefix("--env=") for part in run if part.startswith("--env=")}
    assert "TASK_FILE" in names and "TASK" not in names and {"NO_PROXY", "no_proxy"} <= names
    (volume,) = [part for part in run if part.startswith("--volume=")]
    assert volume.endswith("/task.json:/task.json:ro")


async def test_a_container_that_is_killed_begins_again_and_one_at_a_limit_is_removed(
    tmp_path: Path, docker: Callable[[], list[tuple[list[str], list[str]]]]
) -> None:
    flag = tmp_path / "was here"
    lines = (
        f"if not os.path.exists({str(flag)!r}): open({str(flag)!r}, 'w'); os.kill(os.getpid(), 9)"
    )
    options = ["--network=agents", "--memory=1g"]
    chosen = config(
        command=program(tmp_path, lines), container=" ".join([*options, "images/agent:1"])
    )
    samples, policy = await rollout(chosen, 1, lambda shown: f"w{END_OF_TURN}")
    assert len(samples) == 1 and samples[0].finished and len(policy.turns) == 2
    run = docker()[0][0]
    assert "--network=host" not in run and run.index("--memory=4g") < run.index("--memory=1g"), (
        "the last one counts"
    )
    slow = config(
        command=program(tmp_path, "import time; time.sleep(90)"),
        container="images/agent:1",
        timeout_s=4,
    )
    samples, _ = await rollout(slow, 1, lambda shown: f"w{END_OF_TURN}")
    assert [sample.finished for sample in samples] == [False]
    *_, (run, _), (removal, _) = docker()
    assert run[0] == "run" and removal == ["rm", "--force", run[3].removeprefix("--name=")]


def test_a_container_is_refused_in_one_line_where_nothing_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"agent\.container: x needs docker or podman, and neither is on PATH"
    ):
        Programs(config(command="agent", container="x").agent, Sessions("key"))
    with pytest.raises(ValidationError, match=r"agent\.container"):
        config(command="agent", container="--privileged")
    with pytest.raises(ValidationError, match=r"set agent\.command"):
        config(container="x")


@pytest.mark.parametrize("text", ["right", "wrong", "leaves"])
async def test_the_example_that_edits_files_is_rewarded_by_its_tests(text: str) -> None:
    """The reward follows from what the policy wrote into the file, run in a sandbox; whoever ends
    the program passes nothing.
    """
    example = str(Path(__file__).parents[3] / "examples" / "edit_files_agent.py")
    row = tiny_edits.tasks(tiny_edits.NAMES)[0]
    (name,) = row["files"]
    written = {
        "right": row["answer"],
        "wrong": row["files"][name] + "# tried\n",
        "leaves": "raise SystemExit(0)",
    }[text]
    edit = {"name": "write_file", "arguments": {"name": name, "text": written}}
    calls = [edit, {"name": "run_tests", "arguments": {}}]

    def script(shown: str) -> str:
        turn = shown.count("<|assistant|>") - 1
        return (
            f"<tool_call>{json.dumps(calls[turn])}</tool_call>{END_OF_TURN}"
            if turn < 2
            else f"done{END_OF_TURN}"
        )

    chosen = config(command=shlex.join(["python", example]))
    chosen = chosen.model_copy(
        update={
            "data": chosen.data.model_copy(update={"max_prompt_tokens": 600}),
            "rollout": chosen.rollout.model_copy(update={"max_response_tokens": 900}),
        }
    )
    policy = Policy(script)
    async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
        (sample,) = await environment.rollout(replace(PROMPT, row=row), 1, policy)
    assert sample.reward == (1.0 if text == "right" else 0.0)
    last = str(TOKENIZER.decode(policy.turns[-1].tokens.tolist()))
    assert last.count("passes: ") == (3 if text == "right" else 0) and "written" in last


async def within(limit_s: float, holds: Callable[[], object], what: str) -> None:
    end_s = asyncio.get_running_loop().time() + limit_s
    while not holds():
        assert asyncio.get_running_loop().time() < end_s, (
            f"{what} did not come within {limit_s:g} s"
        )
        await asyncio.sleep(0.01)


class Endless(Policy):
    """Writes so much that no socket's buffers hold its log-probs."""

    async def write(self, turn: Turn) -> list[Generation]:
        tokens = np.full(turn.max_tokens or 1, 100, np.int32)
        return [
            Generation(
                tokens, np.full(len(tokens), -0.123456, np.float32), "", "length", version=VERSION
            )
        ]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_its_answer_is_cut_off_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made: list[gateway.Gateway] = []

    class Kept(gateway.Gateway):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("pa_npu.agents.environment.Gateway", Kept)
    monkeypatch.setattr(gateway, "_IDLE_S", 0.4)
    monkeypatch.setattr(gateway, "_READ_S", 0.3)
    plain = config()
    rollout_of = plain.rollout.model_copy(update={"max_response_tokens": 30_000})
    async with opened(
        make_environment(plain.model_copy(update={"rollout": rollout_of}), TOKENIZER), 30.0
    ) as agents:
        assert isinstance(agents, AgentEnvironment) and agents.sessions is not None
        slow = await client_of(agents, Endless(asks_then_answers))
        other = await client_of(agents, Policy(lambda shown: f"w{END_OF_TURN}"))
        host, port = agents.sessions.url.removeprefix("http://").split(":")
        body = json.dumps({"messages": [user("q")], "stream": stream, "logprobs": True})
        head = f"POST /sessions/{slow.session.id}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        head += f"Authorization: Bearer {slow.key}\r\nContent-Length: {len(body)}\r\n\r\n"
        loop, answer = asyncio.get_running_loop(), b""
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, (head + body).encode())
            await within(60.0, lambda: len(slow.session.tree.nodes) == 2, "the answer")
            assert (await other.chat([user("q")])).choices[0].message.content == "w"
            # the client has read nothing until its connection is given up
            await within(
                60.0,
                lambda: not (made[0]._busy or made[0]._last_busy),
                "the end of all connections",
            )
            with contextlib.suppress(ConnectionError):
                while part := await asyncio.wait_for(loop.sock_recv(connection, 2**20), 30.0):
                    answer += part
        begin, _, rest = answer.partition(b"\r\n\r\n")
        size = re.search(rb"Content-Length: ([0-9]+)", begin)
        assert b" 200 " in begin
        assert b"[DONE]" not in rest if stream else size is not None and len(rest) < int(size[1])
        assert (await other.chat([user("again")])).choices[0].message.content == "w"
