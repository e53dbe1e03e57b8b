"""Agents of frameworks train, unmodified: the examples, with a policy whose answers are written here and with real engines."""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.environments.protocol import EnvironmentFailed
from tests.helpers.agents import CALL, TOKENIZER, Turn, ids, rollout
from tests.helpers.agents_on_engine import samples_as_sampled
from tests.helpers.engine_process import EngineProcess
from tests.helpers.environments import needs, python_of
from tools import make_tiny_model
from tools.make_tiny_model import END_OF_TURN

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    needs("agents"),
]

TIMEOUT_S = 300.0  # importing some of these takes 20 s on a busy machine


def configuration(example: str, **agent: Any) -> Config:
    program, *arguments = example.split()
    command = [str(python_of("agents")), str(ROOT / "examples" / program), *arguments]
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 20_000},
            "rollout": {"max_response_tokens": 4000},
            "environment": {"name": "agents", "max_turns": 3, "timeout_s": TIMEOUT_S},
            "agent": {"command": shlex.join(command), "programs": 1, **agent},
        }
    )


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{written}</tool_call>{END_OF_TURN}"


def first_then(first: str, then: str, mark: str = "<|user|>42") -> Callable[[str], str]:
    """A policy that writes `then` once it is shown what `first` gave."""
    return lambda shown: then if mark in shown else first


CALCULATES = first_then(f"so {CALL}{END_OF_TURN}", f"#### 42{END_OF_TURN}")


@dataclass(frozen=True)
class Case:
    """An example, and a policy that solves its task.

    turns: of the policy, in each session.
    branches: of each session. A framework that sends the policy's own words back in another form
    opens one for every request.
    """

    example: str
    policy: Callable[[str], str] = CALCULATES
    turns: int = 2
    branches: int = 1
    as_sampled: Sequence[str] = ()


CASES = [
    Case("openai_agents_agent.py"),
    Case("openai_agents_agent.py chat"),
    Case("pydantic_ai_agent.py"),
    Case(
        "pydantic_ai_agent.py structured",
        first_then(f"so {CALL}{END_OF_TURN}", call("final_result", number=42)),
        as_sampled=["tool_choice"],
    ),
    Case("langchain_agent.py"),
    Case(
        "langchain_agent.py structured",
        lambda shown: f'{{"number": 42}}{END_OF_TURN}',
        turns=1,
        as_sampled=["response_format"],
    ),
    Case("anthropic_agent.py"),
    Case(
        "smolagents_agent.py",
        first_then(
            f"so {CALL}{END_OF_TURN}", call("final_answer", answer="42"), "Observation:\n42"
        ),
        branches=2,
        as_sampled=["tool_choice"],
    ),
    Case(
        "mini_swe_agent.py",
        first_then(
            call("bash", command="expr 6 \\* 7"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42"),
            "<output>\n42",
        ),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.example)
async def test_what_an_agent_was_answered_is_what_is_trained_and_its_reward_counts(
    case: Case,
) -> None:
    config = configuration(case.example, serve_as_sampled=case.as_sampled)
    samples, policy = await asyncio.wait_for(rollout(config, 2, case.policy), TIMEOUT_S)
    assert [sample.reward for sample in samples] == [1.0] * (2 * case.branches)
    for number in range(2):
        turns = sorted((t for t in policy.turns if t.sample == number), key=lambda t: len(t.tokens))
        # byte by byte, as the policy wrote them: a text that is tokenised again has other tokens
        written = [ids(case.policy(shown_to(turn))) for turn in turns]
        assert len(written) == case.turns
        own = samples[number * case.branches : (number + 1) * case.branches]
        trained = [sample.tokens[sample.trained].tolist() for sample in own]
        if case.branches == 1:
            assert trained == [list(itertools.chain(*written))]
        else:
            assert sorted(trained) == sorted(written)
    if case.as_sampled:
        refused = configuration(case.example)
        with pytest.raises(EnvironmentFailed, match="serve_as_sampled"):
            await asyncio.wait_for(rollout(refused, 1, case.policy), TIMEOUT_S)


def shown_to(turn: Turn) -> str:
    return str(TOKENIZER.decode(turn.tokens.tolist()))


SESSIONS = 8
TASK = ["--task", "agent", "--train-questions", "64", "--test-questions", "8"]
# The model was taught in words that it is asked in by these, and by no other system prompt.
ASKED = [
    "openai_agents_agent.py",
    "pydantic_ai_agent.py",
    "langchain_agent.py",
    "anthropic_agent.py",
]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("agent")
    assert make_tiny_model.main(["--out", str(directory), *TASK]) == 0
    return directory


@pytest.fixture(scope="module")
def engine(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp("engine")
    process = EngineProcess("vllm", taught / "model", directory, {"kv_cache_gib": 0.25})
    yield process
    process.kill()


@pytest.mark.parametrize("example", ASKED)
async def test_a_model_that_was_taught_the_task_is_rewarded_and_trained_as_vllm_sampled_it(
    example: str, taught: Path, engine: EngineProcess
) -> None:
    rows = [json.loads(line) for line in (taught / "train.jsonl").read_text().splitlines()[:4]]
    samples = await samples_as_sampled(engine, configuration(example), rows, SESSIONS, TIMEOUT_S)
    assert len(samples) == 4 * SESSIONS
    rewards = [sample.reward for sample in samples]
    assert 0 < sum(rewards) < len(rewards), rewards
