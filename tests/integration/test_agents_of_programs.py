"""Coding programs train, unmodified, by the session's base URL alone: Codex over the Responses API, Claude Code over Messages."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from pa_npu.config.schema import Config
from tests.helpers.agents import TOKENIZER, ids, rollout
from tests.helpers.agents_on_engine import samples_as_sampled
from tests.helpers.engine_process import EngineProcess
from tests.helpers.environments import needs, python_of
from tools import make_tiny_model
from tools.make_tiny_model import END_OF_TURN

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(400),
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


@pytest.fixture(autouse=True)
def at_home_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The programs read no configuration of who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))


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


async def test_what_claude_code_was_answered_by_vllm_is_trained_as_it_was_sampled(
    tmp_path: Path,
) -> None:
    """By a model that calls a tool which Claude Code does not have, and is told so."""
    task = ["--task", "agent", "--train-questions", "64", "--test-questions", "8"]
    assert make_tiny_model.main(["--out", str(tmp_path / "taught"), *task]) == 0
    rows = [json.loads((tmp_path / "taught" / "train.jsonl").read_text().splitlines()[0])]
    model = tmp_path / "taught" / "model"
    engine = EngineProcess(
        "vllm", model, tmp_path, {"kv_cache_gib": 0.25}, more=["--max-model-len", "2048"]
    )
    try:
        samples = await samples_as_sampled(engine, configuration("claude"), rows, 4, TIMEOUT_S)
    finally:
        engine.kill()
    assert len(samples) >= 4
    assert any("<tool_call>" in str(TOKENIZER.decode(sample.tokens)) for sample in samples)
