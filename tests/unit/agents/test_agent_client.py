"""examples/agent_client.py, the agent's side, works on tasks of a gateway until its run ends."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.environments.registry import make_environment, opened
from tests.helpers.agents import PROMPT, TOKENIZER, Policy, config
from tools.make_tiny_model import END_OF_TURN

EXAMPLES = Path(__file__).parents[3] / "examples"
WORK = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import openai
import agent_client

def work(session):
    client = openai.OpenAI(base_url=session.openai_url, api_key=session.api_key, max_retries=0)
    question = [{{"role": "user", "content": session.task["row"]["question"]}}]
    answer = client.chat.completions.create(model="policy", messages=question)
    session.give_reward(0.25, turn=answer.id)
    return 0.5
"""


def agent(directory: Path, *lines: str) -> str:
    file = directory / "agent.py"
    file.write_text(WORK + "\n".join(lines))
    return shlex.join([sys.executable, str(file)])


@pytest.mark.parametrize("programs", [None, 2], ids=["a program per session", "programs that stay"])
async def test_sessions_of_the_client_are_rewarded(programs: int | None, tmp_path: Path) -> None:
    last = "agent_client.serve(work, sessions_at_once=2)"
    if programs is None:
        last = "s = agent_client.session_from_environment(); s.give_reward(work(s))"
    chosen = config(command=agent(tmp_path, last), programs=programs)
    policy = Policy(lambda shown: f"w{END_OF_TURN}")
    async with opened(make_environment(chosen, TOKENIZER), 60.0) as environment:
        samples = await environment.rollout(PROMPT, 5, policy)
    assert [sample.reward for sample in samples] == [0.75] * 5


async def test_agents_from_elsewhere_work_until_the_run_ends(tmp_path: Path) -> None:
    """They know a run's directory alone, and end well when its gateway goes."""
    program = agent(
        tmp_path,
        "gateway = agent_client.gateway_of_run(sys.argv[1])",
        "agent_client.serve(work, 2, gateway)",
    )
    async with opened(make_environment(config(), TOKENIZER), 60.0) as environment:
        assert isinstance(environment, AgentEnvironment) and environment.sessions is not None
        (tmp_path / "gateway.json").write_text(json.dumps({"url": environment.sessions.url}))
        (tmp_path / "api_key").write_text(environment.sessions.key)
        process = await asyncio.create_subprocess_exec(*shlex.split(program), str(tmp_path))
        samples = await environment.rollout(PROMPT, 3, Policy(lambda shown: f"w{END_OF_TURN}"))
        assert [sample.reward for sample in samples] == [0.75] * 3
    assert await asyncio.wait_for(process.wait(), 60.0) == 0


async def test_asynchronous_work_has_an_event_loop_for_each_session(tmp_path: Path) -> None:
    """Which ends with the session, so that no other thread can reach what it leaves open."""
    command = agent(
        tmp_path,
        "import asyncio",
        "loops = []",
        "async def asks(session):",
        "    assert all(loop.is_closed() for loop in loops), 'one session at a time'",
        "    loops.append(asyncio.get_running_loop())",
        "    question = [{'role': 'user', 'content': session.task['row']['question']}]",
        "    client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.api_key)",
        "    async with client:",
        "        await client.chat.completions.create(model='policy', messages=question)",
        "    return len(set(map(id, loops)))",
        "agent_client.serve(asks)",
    )
    chosen = config(command=command, programs=1)
    async with opened(make_environment(chosen, TOKENIZER), 60.0) as environment:
        samples = await environment.rollout(PROMPT, 3, Policy(lambda shown: f"w{END_OF_TURN}"))
    assert sorted(sample.reward or 0.0 for sample in samples) == [1.0, 2.0, 3.0]


async def test_a_lost_connection_loses_neither_task_nor_reward(tmp_path: Path) -> None:
    """Every second request of the client meets a connection that is reset."""
    command = agent(
        tmp_path,
        "urlopen, requests = agent_client.urllib.request.urlopen, []",
        "def careless(*arguments, **options):",
        "    requests.append(1)",
        "    if len(requests) % 2:",
        "        raise ConnectionResetError('the network was careless')",
        "    return urlopen(*arguments, **options)",
        "agent_client.urllib.request.urlopen = careless",
        "agent_client.PAUSE_S = 0.01",
        "agent_client.serve(work)",
    )
    chosen = config(command=command, programs=1)
    async with opened(make_environment(chosen, TOKENIZER), 60.0) as environment:
        samples = await environment.rollout(PROMPT, 2, Policy(lambda shown: f"w{END_OF_TURN}"))
    assert [sample.reward for sample in samples] == [0.75] * 2


async def test_an_error_of_the_work_ends_the_program_and_the_session_begins_again(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "failed"
    command = agent(
        tmp_path,
        "import pathlib",
        f"mark = pathlib.Path({str(mark)!r})",
        "def fails_once(session):",
        "    if not mark.exists():",
        "        mark.touch()",
        "        raise ValueError('the first session')",
        "    return work(session)",
        "agent_client.serve(fails_once, sessions_at_once=2)",
    )
    chosen = config(command=command, programs=1)
    async with opened(make_environment(chosen, TOKENIZER), 60.0) as environment:
        samples = await environment.rollout(PROMPT, 2, Policy(lambda shown: f"w{END_OF_TURN}"))
    assert mark.exists() and [sample.reward for sample in samples] == [0.75] * 2
