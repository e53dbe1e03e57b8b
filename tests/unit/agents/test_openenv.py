"""An episode of an OpenEnv server is one sample; what the policy does wrong is shown to it, what the server does ends the run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from pa_npu.config.schema import Config
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError
from tests.helpers.agents import PROMPT, TOKENIZER, ids, rollout
from tools.make_tiny_model import END_OF_TURN


class Counting:
    """What OpenEnv's server answers on its WebSocket: a count, one number after another."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.answers: dict[str, Any] = {}
        self.drops = 0

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        self.keys.add(request.headers.get("Authorization"))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        at = 0
        async for message in socket:
            asked = json.loads(message.data)
            self.asked.append(asked)
            if asked["type"] == "close":
                break
            if self.drops and asked["type"] == "step":
                self.drops -= 1
                break
            if asked["type"] in self.answers:
                await socket.send_str(json.dumps(self.answers[asked["type"]]))
                continue
            if asked["type"] == "reset":
                await socket.send_str(observed(f"count from {asked['data']['seed']}", None, False))
            elif "message" not in asked["data"]:
                error = {"loc": ["message"], "msg": "Field required"}
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [error]}
                await socket.send_str(json.dumps({"type": "error", "data": data}))
            else:
                at += 1
                reward = 0.5 if asked["data"]["message"] == f"#{at}" else 0.0
                await socket.send_str(observed(f"next {at}", reward, at == 3))
        await socket.close()
        return socket


def observed(text: str, reward: Any, done: Any) -> str:
    observation = {"text": text, "metadata": {"note": "unseen"}}
    data = {"observation": observation, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


@pytest.fixture
async def counting() -> AsyncIterator[tuple[Counting, str]]:
    server = Counting()
    app = web.Application()
    app.router.add_get("/ws", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def config(url: Any, **options: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 200},
            "environment": {
                "name": "remote",
                "max_turns": 4,
                "timeout_s": 5.0,
                "options": {"protocol": "openenv", "url": url, **options},
            },
        }
    )


def counts(shown: str) -> str:
    return f"#{shown.count('<|user|>')}{END_OF_TURN}" if "from 4" in shown else f"lost{END_OF_TURN}"


async def test_an_episode_is_one_sample_with_its_steps_rewards(
    counting: tuple[Counting, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = counting
    monkeypatch.setenv("COUNTING_KEY", "k")
    chosen = config(url + "/", action="message", api_key_variable="COUNTING_KEY")
    samples, policy = await rollout(chosen, 2, counts)
    assert [sample.reward for sample in samples] == [1.5, 1.5]
    for sample in samples:
        written = [token for n in (1, 2, 3) for token in ids(f"#{n}{END_OF_TURN}")]
        assert sample.finished and sample.tokens[sample.trained].tolist() == written
        shown = str(TOKENIZER.decode(sample.tokens[~sample.trained].tolist()))
        assert "next 1" in shown and "unseen" not in shown
    resets = [asked["data"] for asked in server.asked if asked["type"] == "reset"]
    assert [reset["seed"] for reset in resets] == [4, 4]
    assert resets[0]["question"] == PROMPT.row["question"]
    assert resets[0]["episode_id"] != resets[1]["episode_id"]
    assert server.keys == {"Bearer k"} and server.asked[-1]["type"] == "close"
    assert policy.counted["sessions_done"] == 2


async def test_the_policy_writes_the_action_as_json_where_no_field_is_named_and_reads_what_is_wrong(
    counting: tuple[Counting, str],
) -> None:
    server, url = counting
    texts = ["no object", '{"wrong": 1}', '{"message": "#1"}', '{"message": "#2"}']
    script = lambda shown: texts[shown.count("<|assistant|>") - 1] + END_OF_TURN  # noqa: E731
    (sample,), policy = await rollout(config(url), 1, script)
    assert sample.reward == 1.0 and not sample.finished, "the limit of turns ended it"
    shown = str(TOKENIZER.decode(policy.turns[-1].tokens.tolist()))
    assert "error: write the action as a JSON object" in shown
    assert "error: Invalid message: message: Field required" in shown
    assert [asked["data"] for asked in server.asked if asked["type"] == "step"] == [
        json.loads(text) for text in texts[1:]
    ]


async def test_an_episode_whose_connection_ends_begins_again(
    counting: tuple[Counting, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pa_npu.agents.openenv._PAUSE_S", 0.01)
    server, url = counting
    server.drops = 1
    (sample,), policy = await rollout(config(url, action="message"), 1, counts)
    assert sample.reward == 1.5
    assert policy.turns[0].tokens.tolist() == policy.turns[1].tokens.tolist()
    server.drops = 100
    with pytest.raises(EnvironmentFailed, match=r"lost 4 times, .*closed its connection"):
        await rollout(config(url, action="message"), 1, counts)


FULL = {"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": 4}}


@pytest.mark.parametrize(
    ("kind", "answer", "named"),
    [
        ("reset", FULL, "concurrent: .* takes 4 episodes"),
        ("reset", {"type": "error", "data": {"message": "no\nsuch task"}}, "no such task"),
        ("reset", [], r"gave '\[\]'"),
        ("reset", {"type": "observation", "data": {"observation": "x"}}, "no observation"),
        ("step", json.loads(observed("", 1, None)), "true or false as `done`"),
        ("step", json.loads(observed("", "much", False)), "no finite number"),
        ("step", json.loads(observed("", 1e39, False)), "beyond"),
    ],
)
async def test_what_is_no_answer_of_a_server_ends_the_run_in_one_line(
    counting: tuple[Counting, str], kind: str, answer: Any, named: str
) -> None:
    server, url = counting
    server.answers[kind] = answer
    with pytest.raises(EnvironmentFailed, match=named) as failed:
        await rollout(config(url, action="message"), 1, counts)
    assert "environment.options" in str(failed.value) and "\n" not in str(failed.value)


async def test_a_field_that_the_observation_does_not_have_is_named(
    counting: tuple[Counting, str],
) -> None:
    with pytest.raises(EnvironmentFailed, match=r"no field .board. .*text"):
        await rollout(config(counting[1], action="message", observation="board"), 1, counts)


async def test_a_server_that_is_not_there_or_speaks_otherwise_is_one_line_before_the_run(
    counting: tuple[Counting, str],
) -> None:
    for url in (counting[1].rpartition(":")[0] + ":9", counting[1] + "/elsewhere"):
        async with opened(make_environment(config(url), TOKENIZER), 30.0) as environment:
            with pytest.raises(ConfigError, match="cannot be connected to") as refused:
                await environment.trial(PROMPT)  # type: ignore[attr-defined]
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"protocol": "openen"}, "did you mean openenv"),
        ({"protocol": 3}, "protocol"),
        ({"action": ""}, "action"),
        ({"observation": 3}, "observation"),
        ({"concurrent": 0}, "concurrent"),
        ({"actions": "x"}, "unknown"),
        ({"url": "ws://x"}, "url"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_environment(config(**{"url": "http://x", **options}), TOKENIZER)
