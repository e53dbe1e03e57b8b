"""A class of TRL's environment_factory form runs as it is: reset, methods as tools, get_reward."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_npu.agents.tool_class_worker import Episodes
from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt
from pa_npu.environments.protocol import Environment, EnvironmentFailed
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError
from pa_npu.samples.types import Sample
from tests.helpers.agents import TOKENIZER, Policy, ids
from tools.make_tiny_model import END_OF_TURN

PLACE = "tests.helpers.tool_classes:"
QUESTION = {"role": "user", "content": "What is 6*7?"}


def config(factory: Any = f"{PLACE}Calculator", timeout_s: float = 20.0, **options: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 300},
            "environment": {
                "name": "tool_class",
                "max_turns": 4,
                "timeout_s": timeout_s,
                "options": {"factory": factory, "processes": 1, **options},
            },
        }
    )


def prompt_of(**row: Any) -> Prompt:
    row = {"question": "What is 6*7?", "answer": "42", **row}
    return Prompt(4, np.zeros(3, np.int32), "42", "What is 6*7?", row, messages=(QUESTION,))


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{body}</tool_call>{END_OF_TURN}"


def turns(*texts: str) -> Any:
    """A policy that writes one text after another, by the number of its turn."""
    return lambda shown: texts[shown.count("<|assistant|>") - 1]


async def play(
    environment: Environment, script: Any, num_samples: int = 1, prompt: Prompt | None = None
) -> tuple[list[Sample], Policy]:
    policy = Policy(script)
    return await environment.rollout(prompt or prompt_of(), num_samples, policy), policy


def at_work(chosen: Config) -> AbstractAsyncContextManager[Environment]:
    return opened(make_environment(chosen, TOKENIZER), 60.0)


def shown(policy: Policy) -> str:
    """The text of the last turn's prompt."""
    return str(TOKENIZER.decode(policy.turns[-1].tokens.tolist()))


async def test_methods_answer_calls_and_the_class_gives_the_reward() -> None:
    script = turns(call("calculator", x="6*7"), f"42{END_OF_TURN}")
    async with at_work(config()) as environment:
        samples, policy = await play(environment, script, 3)
        assert [sample.reward for sample in samples] == [1.0, 1.0, 1.0]
        assert all(sample.finished for sample in samples)
        assert "<|user|>42<|assistant|>" in shown(policy)
        written = [call("calculator", x="6*7"), f"42{END_OF_TURN}"]
        trained = [token for text in written for token in ids(text)]
        assert samples[0].tokens[samples[0].trained].tolist() == trained
        script = turns(call("calculator", x="6*8"), f"48{END_OF_TURN}")
        (half,), _ = await play(environment, script)
        (none,), policy = await play(
            environment, lambda text: f"42{END_OF_TURN}", prompt=prompt_of(by=1)
        )
        assert (half.reward, none.reward) == (0.5, 0.0), "an instance is reset between episodes"
        assert "What is 6*7? (by True)<|assistant|>" in shown(policy), "what reset returned"
        (cut,), policy = await play(environment, lambda text: call("calculator", x="6*7"))
        assert cut.reward == 1.0 and not cut.finished, "a limit of the run ended it"
        assert len(policy.turns) == 4


async def test_a_call_that_fails_is_an_answer_and_the_episode_goes_on() -> None:
    async with at_work(config()) as environment:
        for wrong, answer in (
            (call("wait", seconds=-1), "{'error': 'no time machine'}"),
            (call("divide", x="1"), "{'error': 'Tool divide not found.'}"),
            (call("reset", question="1"), "not found"),
            (call("calculator", y="1"), "unexpected keyword"),
        ):
            script = turns(wrong, call("calculator", x="6*7"), f"42{END_OF_TURN}")
            (sample,), policy = await play(environment, script)
            assert sample.reward == 1.0
            assert answer in shown(policy)


async def test_a_call_that_hangs_or_ends_the_process_fails_its_episode_alone(
    tmp_path: Path,
) -> None:
    mark = str(tmp_path / "mark")
    script = turns(call("hang", mark=mark), call("calculator", x="6*7"), f"42{END_OF_TURN}")
    async with at_work(config(timeout_s=3.0)) as environment:
        samples, policy = await play(environment, script, 2)
        # the failed one is not trained; the other one began again in a new process
        assert [sample.reward for sample in samples] == [1.0]
        assert policy.counted["sessions_failed"] == 1 and policy.counted["sessions_done"] == 1
        gone = turns(call("leave", code=3), f"42{END_OF_TURN}")
        (only,), policy = await play(environment, gone)
        assert only.reward == 0.0 and policy.counted["sessions_failed"] == 1


async def test_several_classes_are_chosen_by_the_row_and_one_without_rewards_leaves_them_to_the_run() -> (
    None
):
    both = {"one": f"{PLACE}Calculator", "two": f"{PLACE}Silent"}
    script = turns(call("calculator", x="6*7"), f"42{END_OF_TURN}")
    async with at_work(config(both)) as environment:
        (one,), _ = await play(environment, script, prompt=prompt_of(environment="one"))
        (two,), _ = await play(environment, script, prompt=prompt_of(environment="two"))
        assert one.reward == 1.0 and two.reward is None
        with pytest.raises(EnvironmentFailed, match="not one of one, two"):
            await play(environment, script, prompt=prompt_of(environment="three"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"factory": None}, "module:Class"),
        ({"factory": {}}, "names no class"),
        ({"factory": f"{PLACE}Calculator", "processes": 0}, "processes"),
        ({"factory": f"{PLACE}Unmade"}, "no licence"),
    ],
)
async def test_a_class_that_cannot_be_used_is_one_line_before_the_run(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        async with at_work(config(**options)):
            pass
    assert "environment.options" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Absent", "Absent"),
        ("NoTools", "tool"),
        ("NoReset", "reset"),
        ("Undescribed", "type hints"),
    ],
)
def test_a_class_without_what_a_tool_class_needs_is_refused(name: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Episodes({"": PLACE + name})


async def test_a_class_that_fails_names_its_method() -> None:
    script = turns(call("calculator", x="6*7"), f"42{END_OF_TURN}")
    both = {"wrong": f"{PLACE}Wrong", "refuses": f"{PLACE}Refuses"}
    async with at_work(config(both)) as environment:
        with pytest.raises(EnvironmentFailed, match="get_reward"):
            await play(environment, script, prompt=prompt_of(environment="wrong"))
        with pytest.raises(ConfigError, match="no such level"):
            await environment.trial(prompt_of(environment="refuses"))  # type: ignore[attr-defined]
