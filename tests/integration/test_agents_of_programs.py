"""Coding programs train, unmodified, by the session's base URL alone: Codex over the Responses API, Claude Code over Messages."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.config.schema import Config
from tests.helpers import taught_program
from tests.helpers.agents import TOKENIZER, ids, rollout
from tests.helpers.agents_on_engine import samples_as_sampled
from tests.helpers.engine_process import EngineProcess
from tests.helpers.environments import needs, python_of
from tools.make_tiny_model import END_OF_TURN

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    needs("programs"),
]

TIMEOUT_S = 300.0
COMMAND = "expr 6 \\* 7"
ANSWER = f"#### 42{END_OF_TURN}"
MAX_PROMPT = 60_000  # of bytes: the programs have long system prompts
MAX_RESPONSE = 20_000


def configuration(kind: str) -> Config:
    packages = next((python_of("programs").parents[1] / "lib").glob("python*")) / "site-packages"
    programs = {"codex": "codex_cli_bin/bin/codex", "claude": "claude_agent_sdk/_bundled/claude"}
    example = str(ROOT / "examples" / "coding_program_agent.py")
    command = [sys.executable, example, kind, str(packages / programs[kind])]
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": MAX_PROMPT},
            "rollout": {
                "max_response_tokens": MAX_RESPONSE,
                "max_num_batched_tokens": MAX_PROMPT + MAX_RESPONSE,
            },
            "environment": {"name": "agents", "max_turns": 8, "timeout_s": TIMEOUT_S},
            "agent": {"command": shlex.join(command)},
        }
    )


@pytest.fixture(autouse=True, scope="module")
def at_home_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The programs read no configuration of who runs the tests."""
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def call(name: str, **arguments: object) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"so <tool_call>{written}</tool_call>{END_OF_TURN}"


def last_shown(shown: str) -> str:
    """What the policy was shown last: a question, or a tool's result."""
    return shown.rpartition("<|user|>")[2].removesuffix("<|assistant|>")


CALLS = {"codex": call("exec_command", cmd=COMMAND), "claude": call("Bash", command=COMMAND)}


@pytest.mark.parametrize("kind", CALLS)
async def test_what_a_program_was_answered_is_what_is_trained_and_its_reward_counts(
    kind: str,
) -> None:
    """It runs the policy's command, and shows the policy what that wrote."""
    called = CALLS[kind]

    def script(shown: str) -> str:
        return ANSWER if "42" in last_shown(shown).split() else called

    samples, policy = await asyncio.wait_for(rollout(configuration(kind), 2, script), TIMEOUT_S)
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    for sample in samples:
        # byte by byte, as the policy wrote them: a text that is tokenised again has other tokens
        assert sample.tokens[sample.trained].tolist() == [*ids(called), *ids(ANSWER)]
    assert len(policy.turns) == 4, "one branch of two turns, in each session"


async def test_sub_agents_of_codex_are_branches_of_the_session() -> None:
    """It spawns one by a tool of a namespace, waits for it, and answers as it has answered."""
    sub_question, sub_answer = "Multiply 6 by 7.", f"it is 42{END_OF_TURN}"
    spawns = call("multi_agent_v1.spawn_agent", message=sub_question)

    def main(result: str) -> str:
        """The answer to a tool's result."""
        if "it is 42" in result:
            return ANSWER
        return call("multi_agent_v1.wait_agent", targets=[json.loads(result)["agent_id"]])

    def script(shown: str) -> str:
        if last_shown(shown) == sub_question:
            return sub_answer
        return main(last_shown(shown)) if spawns in shown else spawns

    samples, _ = await asyncio.wait_for(rollout(configuration("codex"), 1, script), TIMEOUT_S)
    texts = [str(TOKENIZER.decode(sample.tokens[sample.trained].tolist())) for sample in samples]
    assert sub_answer in texts, texts
    (own,) = [text for text in texts if text != sub_answer]
    assert own.startswith(spawns) and own.endswith(ANSWER), own
    assert [sample.reward for sample in samples] == [1.0, 1.0]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was taught behind the words of Claude Code, which come from Claude Code."""

    def script(shown: str) -> str:
        return ANSWER if "42" in last_shown(shown).split() else taught_program.call("6*7")

    played = rollout(configuration("claude"), 1, script)
    _, policy = asyncio.run(asyncio.wait_for(played, TIMEOUT_S))
    directory = tmp_path_factory.mktemp("taught")
    taught_program.teach(taught_program.Words.shown_to(policy), directory)
    return directory


@pytest.fixture(scope="module")
def engine(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    longest = str(taught_program.MAX_POSITIONS)
    process = EngineProcess(
        "vllm",
        taught,
        tmp_path_factory.mktemp("engine"),
        {"kv_cache_gib": 0.25},
        more=["--max-model-len", longest, "--max-num-batched-tokens", longest],
    )
    yield process
    process.kill()


def row(x: int, y: int) -> dict[str, str]:
    return {"question": f"What is {x}*{y}?", "answer": f"#### {x * y}"}


async def test_a_model_that_knows_the_words_of_claude_code_is_rewarded_and_trained_as_vllm_sampled_it(
    engine: EngineProcess,
) -> None:
    """It has the program's shell multiply in some sessions, and guesses in the others."""
    rows = [row(15, 47), row(62, 13)]
    samples = await samples_as_sampled(engine, configuration("claude"), rows, 4, TIMEOUT_S)
    texts = [str(TOKENIZER.decode(sample.tokens.tolist())) for sample in samples]
    rewarded = [sample for sample in samples if sample.reward]
    assert rewarded, texts
    for sample in rewarded:
        written = sample.tokens[sample.trained].tolist()
        assert written.count(TOKENIZER.eos_token_id) == 2, (
            "a call, and the answer behind its result"
        )


async def test_what_codex_was_answered_by_vllm_is_trained_as_it_was_sampled(
    engine: EngineProcess,
) -> None:
    """Behind 20,000 tokens that the model does not know, so that what it writes has no sense."""
    samples = await samples_as_sampled(engine, configuration("codex"), [row(15, 47)], 2, TIMEOUT_S)
    assert len(samples) >= 2
    assert min(len(sample.tokens) for sample in samples) > 10_000
