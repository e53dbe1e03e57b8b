"""A session ends at its limits, in its time and with a reward, or the run ends in one line."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest

from pa_npu.agents import environment as environment_module
from pa_npu.agents.environment import AgentEnvironment
from pa_npu.config.schema import Config
from pa_npu.coordinator import environment_trial
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.environments.registry import make_environment, opened
from pa_npu.rewards.functions import needs_answers
from tests.helpers.agents import (
    PROMPT,
    TOKENIZER,
    Client,
    Policy,
    asks_then_answers,
    client_of,
    config,
    rollout,
    user,
)
from tests.helpers.algorithms import checked
from tools.make_tiny_model import END_OF_TURN


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
    agents = config()
    assert agents.reward.reads_answers and not needs_answers(agents.reward, agents.environment)
    usual = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    assert needs_answers(usual.reward, usual.environment)
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


async def test_a_sessions_time_runs_from_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two is taken and forgotten; the other has waited for as long and has all of its
    time.
    """
    monkeypatch.setattr(environment_module, "_GRACE_S", 0.1)
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
