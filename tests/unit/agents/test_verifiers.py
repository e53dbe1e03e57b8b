"""environment.name=verifiers, with a stand-in of the package in another interpreter; tests/integration has the package."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.data import verifiers_program
from pa_npu.data.prompts import Prompt, PromptSet, load_prompts
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError, DataError
from pa_npu.samples.types import Sample
from tests.helpers.agents import TOKENIZER, Policy
from tools.make_tiny_model import END_OF_TURN

STAND_INS = str(Path(__file__).parents[2] / "helpers/stand_ins")
SUMS = {"taskset": {"id": "sums-v1", "count": 9}}


@pytest.fixture(autouse=True)
def with_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", STAND_INS, prepend=":")


def config(env: Any = SUMS, timeout_s: float = 60.0, **options: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "verifiers:train", "max_prompt_tokens": 64},
            "environment": {
                "name": "verifiers",
                "timeout_s": timeout_s,
                "options": {"environments": {"train": {"env": env}}, **options},
            },
        }
    )


def prompts_of(chosen: Config, max_rows: int | None = None) -> PromptSet:
    dataset = chosen.data.datasets[0].model_copy(update={"max_rows": max_rows})
    return load_prompts(dataset, TOKENIZER, chosen.data, "data.train", needs_answer=False)


async def played(
    chosen: Config, prompt: Prompt, script: Callable[[str], str], num_samples: int = 2
) -> list[Sample]:
    async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
        return await asyncio.wait_for(
            environment.rollout(prompt, num_samples, Policy(script)), 60.0
        )


async def test_rows_are_the_tasksets_and_rewards_the_tasks() -> None:
    chosen = config()
    prompts = prompts_of(chosen).prompts
    assert len(prompts) == 9 and prompts[7].answer == "42"
    assert prompts[7].row["verifiers"] == {"environment": "train", "number": 7, "key": "7"}
    samples = await played(chosen, prompts[7], lambda shown: f"#### 42{END_OF_TURN}")
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    wrong = await played(chosen, prompts[6], lambda shown: f"#### 42{END_OF_TURN}")
    assert [sample.reward for sample in wrong] == [0.0, 0.0]


def test_a_taskset_without_an_end_gives_a_thousand_rows_or_what_is_asked_for() -> None:
    endless = config({"taskset": {"id": "sums-v1", "silent": True, "system": "Be brief."}})
    assert len(prompts_of(endless).prompts) == 1000
    few = prompts_of(endless, max_rows=3).prompts
    assert len(few) == 3 and few[1].text.count("Be brief.\n\nWhat is 6*1?") == 1
    assert few[1].answer == ""


async def test_an_episode_that_hangs_or_fails_ends_its_session_as_failed() -> None:
    chosen = config(timeout_s=3.0)
    (prompt, *_) = prompts_of(chosen).prompts
    script = iter([f"sleep{END_OF_TURN}", f"#### 0{END_OF_TURN}"])
    samples = await played(chosen, prompt, lambda shown: next(script))
    assert [sample.reward for sample in samples] == [1.0], "the other is discarded"


@pytest.mark.parametrize(
    ("env", "answer", "line"),
    [
        (SUMS, "crash", "RuntimeError: the environment is broken"),
        (SUMS, "1+1", "an episode has 2 runs of agents that train the policy"),
        ({"taskset": {"id": "sums-v1", "count": 9, "salt": "new"}}, "1", "another one than when"),
    ],
)
async def test_what_breaks_every_episode_ends_the_run_in_one_line(
    env: Any, answer: str, line: str
) -> None:
    (prompt, *_) = prompts_of(config()).prompts
    with pytest.raises((ConfigError, EnvironmentFailed), match=line) as failed:
        await played(config(env), prompt, lambda shown: f"{answer}{END_OF_TURN}")
    assert "\n" not in str(failed.value) and "environments" in str(failed.value)


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        (config({"taskset": {"id": "other-v1"}}), "taskset 'other-v1' not found"),
        (config({**SUMS, "roles": {"a": {}, "b": {}}}), r"play 2 of its agents \(a, b\)"),
        (config(python="/nowhere/python"), "python: /nowhere/python cannot be started"),
    ],
)
def test_a_taskset_that_gives_no_rows_is_one_line(chosen: Config, line: str) -> None:
    with pytest.raises(DataError, match=line) as refused:
        prompts_of(chosen)
    assert "\n" not in str(refused.value)


def test_rows_of_an_environment_that_there_is_not_are_one_line() -> None:
    chosen = config()
    other = chosen.data.datasets[0].model_copy(update={"path": "verifiers:b", "task_options": {}})
    with pytest.raises(DataError, match=r"options\.environments\.b"):
        load_prompts(other, TOKENIZER, chosen.data, "data.train", needs_answer=False)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"environments": {}}, "at least one environment"),
        ({"environments": {"a": 3}}, "environments.a must be a mapping"),
        ({"processes": 0}, "processes must be 1 to 256"),
        ({"python": 3}, "python must be the path"),
        ({"taskset": "sums-v1"}, "'taskset' is unknown to verifiers"),
    ],
)
def test_wrong_options_are_one_line(options: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        make_environment(config(**options), TOKENIZER)


def test_a_file_of_verifiers_is_read_and_what_the_run_decides_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sums.toml"
    file.write_text('[env.taskset]\nid = "sums-v1"\ncount = 5\n[select]\nlimit = 2\n')
    chosen = config()
    options = {"environments": {"train": str(file)}}
    chosen = Config.model_validate(
        {**chosen.model_dump(), "environment": {"name": "verifiers", "options": options}}
    )
    assert len(prompts_of(chosen).prompts) == 2
    file.write_text('model = "m"\n' + file.read_text())
    with pytest.raises(DataError, match="not model, which the run decides"):
        prompts_of(chosen)


async def test_servers_begin_anew_after_a_number_of_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interception server keeps a client for each session's URL."""
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setattr(verifiers_program, "SESSIONS_PER_SERVING", 3)
    import verifiers.v1 as stand_in

    player = verifiers_program.Player({"env": SUMS})
    served: list[Any] = []
    for _ in range(7):
        serving = await player._current()
        async with serving.session() as env:
            served.append(env)
            env._num_played += 1
    await asyncio.sleep(0)
    assert len({id(env) for env in served}) == 3 and stand_in.SERVED == [3, 3]


def test_a_request_whose_connection_is_lost_is_sent_again_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = 2
    sent = []

    def careless(request: Any, **_: Any) -> io.BytesIO:
        sent.append(request.full_url)
        if len(sent) <= lost:
            raise ConnectionResetError("the network was careless")
        return io.BytesIO(b'{"task": null}')

    monkeypatch.setattr(verifiers_program, "PAUSE_S", 0.0)
    monkeypatch.setattr(verifiers_program.urllib.request, "urlopen", careless)
    assert verifiers_program._request("http://gateway/tasks", "key", None) == {"task": None}
    assert sent == ["http://gateway/tasks"] * 3
    sent.clear()
    lost = 100
    with pytest.raises(ConnectionResetError):
        verifiers_program._request("http://gateway/tasks", "key", None)
    assert len(sent) == verifiers_program.REQUEST_ATTEMPTS
