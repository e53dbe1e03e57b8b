"""Requests become branches, and every sampled token is trained exactly as it was sampled, once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.tree import num_unique
from pa_npu.attention.trie import pack
from pa_npu.engines.protocol import Generation
from pa_npu.samples.types import Sample, SampleBuilder
from tests.helpers.agents import (
    CALL,
    TOKENIZER,
    TOOLS,
    VERSION,
    Policy,
    Turn,
    asks_then_answers,
    client_of,
    ids,
    user,
)
from tools.make_tiny_model import END_OF_TURN


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
    output = {"dropped reasoning": "yes", "other text": "no", "other question": first}[changed]
    question = "p" if changed == "other question" else "q"
    await client.chat([user(question), {"role": "assistant", "content": output}, user("more")])
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

    samples, second = await grow(["x", "yy"]), await grow(["yy", "x"])
    assert len(samples) == 3
    for one, two in zip(samples, second, strict=True):
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


async def test_a_turns_reward_counts_for_the_branches_that_hold_it(
    agents: AgentEnvironment,
) -> None:
    client = await client_of(agents, Policy(lambda shown: f"w{END_OF_TURN}"))
    first = await client.chat([user("q")])
    assert (await client.send("/reward", {"reward": 0.25, "turn": first.id}))[0] == 200
    second = first.id.replace(client.session.id, "0" * 16)
    for wrong in (
        "chatcmpl-x-9",
        second,
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
