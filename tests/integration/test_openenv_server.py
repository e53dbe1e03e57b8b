"""OpenEnv's own server plays episodes with the policy (environment.name=remote, protocol=openenv)."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError
from pa_npu.samples.types import Sample
from tests.helpers.agents import TOKENIZER, Policy, ids
from tests.helpers.environments import needs, python_of
from tests.helpers.waiting import wait_for_port
from tools.make_tiny_model import END_OF_TURN

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    needs("openenv"),
]

TIMEOUT_S = 200.0
AT_ONCE = 8  # episodes, of the server
ROW = {"question": "Count.", "first": 5}
PROMPT = Prompt(4, np.zeros(3, np.int32), "", "", ROW)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(ROOT / "tests" / "helpers" / "openenv_server.py")
    server = subprocess.Popen([str(python_of("openenv")), program, str(port)])
    try:
        wait_for_port(port, server, TIMEOUT_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def config(url: str, **options: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 400},
            "environment": {
                "name": "remote",
                "max_turns": 4,
                "timeout_s": 60.0,
                "options": {"protocol": "openenv", "url": url, "concurrent": AT_ONCE, **options},
            },
        }
    )


async def played(
    chosen: Config, texts: list[str], num_samples: int = 1, prompt: Prompt = PROMPT
) -> tuple[list[Sample], Policy]:
    """Sessions in which the policy writes these texts, one a turn."""
    policy = Policy(lambda shown: texts[shown.count("<|assistant|>") - 1] + END_OF_TURN)
    async with opened(make_environment(chosen, TOKENIZER), 60.0) as environment:
        await environment.trial(prompt)  # type: ignore[attr-defined]
        rollout = environment.rollout(prompt, num_samples, policy)
        return await asyncio.wait_for(rollout, TIMEOUT_S), policy


async def test_episodes_are_samples_with_their_rewards(url: str) -> None:
    """More of them than the server plays at once. The row's column reaches its reset."""
    texts = ["#5", "#6", "lost"]
    chosen = config(url, action="message", observation="text")
    samples, policy = await played(chosen, texts, 2 * AT_ONCE)
    assert [sample.reward for sample in samples] == [1.0] * (2 * AT_ONCE)
    written = list(itertools.chain(*(ids(text + END_OF_TURN) for text in texts)))
    for sample in samples:
        assert sample.finished and sample.tokens[sample.trained].tolist() == written
    shown = str(TOKENIZER.decode(policy.turns[0].tokens.tolist()))
    assert "count from 5, seed 4" in shown


async def test_an_action_that_the_server_refuses_is_shown_to_the_policy(url: str) -> None:
    texts = ['{"massage": "#5"}', '{"message": "#5"}', '{"message": "#6"}', '{"message": "#7"}']
    (sample,), policy = await played(config(url), texts)
    assert sample.reward == 1.5
    shown = str(TOKENIZER.decode(policy.turns[1].tokens.tolist()))
    assert "error: " in shown and "massage" in shown, "with the field that is wrong"


async def test_the_seed_is_the_prompts_whatever_its_row_says(url: str) -> None:
    prompt = replace(PROMPT, row={**ROW, "seed": 1, "episode_id": "row's"})
    (sample,), policy = await played(config(url, action="message"), ["#5", "#6", "#7"], 1, prompt)
    assert sample.reward == 1.5
    assert "seed 4" in str(TOKENIZER.decode(policy.turns[0].tokens.tolist()))


async def test_a_field_that_the_observation_does_not_have_is_named(url: str) -> None:
    with pytest.raises((ConfigError, EnvironmentFailed), match="no field 'board'") as failed:
        await played(config(url, action="message", observation="board"), ["#5"])
    assert "\n" not in str(failed.value)


async def test_more_episodes_than_the_server_plays_are_one_line(url: str) -> None:
    chosen = config(url, action="message", concurrent=2 * AT_ONCE)
    with pytest.raises(EnvironmentFailed, match="takes 8 episodes at once") as failed:
        await played(chosen, ["#5", "#6", "#7"], 2 * AT_ONCE)
    assert "\n" not in str(failed.value)
