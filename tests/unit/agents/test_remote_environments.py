"""An episode of a remote environment is one sample, and a server that answers otherwise ends the run in one line."""

from __future__ import annotations

import asyncio
import socket
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
    """A server with reset and step: it asks for a count, one number after another, and gives a
    reward for each right one.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.answers: dict[str, Any] = {}
        self.wait_s = 0.0
        self._at: dict[str, int] = {}

    async def handle(self, request: web.Request) -> web.Response:
        path, body = request.path[1:], await request.json()
        self.asked.append((path, body, request.headers.get("Authorization")))
        await asyncio.sleep(self.wait_s)
        if path in self.answers:
            answer = self.answers[path]
            return answer() if callable(answer) else web.json_response(answer)
        if path == "reset":
            self._at[body["id"]] = 0
            return web.json_response({"observation": f"count from {body['seed']}", "info": {}})
        if body["id"] not in self._at:
            return web.Response(status=404, text="no such episode")
        self._at[body["id"]] += 1
        at = self._at[body["id"]]
        reward = 0.5 if body["action"] == f"#{at}" else 0.0
        return web.json_response(
            {
                "observation": f"next {at}",
                "reward": reward,
                "terminated": at == 3,
                "truncated": False,
                "info": {},
            }
        )


@pytest.fixture
async def counting() -> AsyncIterator[tuple[Counting, str]]:
    server = Counting()
    app = web.Application()
    app.router.add_post("/{path}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def remote(url: Any, **environment: Any) -> Config:
    options = {"options": {"url": url} | environment.pop("options", {})}
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 200},
            "environment": {
                "name": "remote",
                "max_turns": 4,
                "timeout_s": 5.0,
                **options,
                **environment,
            },
        }
    )


def counts(shown: str) -> str:
    return f"#{shown.count('<|user|>')}{END_OF_TURN}" if "from 4" in shown else f"lost{END_OF_TURN}"


async def test_an_episode_of_a_remote_environment_is_one_sample_with_its_steps_rewards(
    counting: tuple[Counting, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = counting
    monkeypatch.setenv("COUNTING_KEY", "k")
    samples, policy = await rollout(
        remote(url + "/", options={"api_key_variable": "COUNTING_KEY"}), 2, counts
    )
    assert [sample.reward for sample in samples] == [1.5, 1.5] and all(
        sample.finished for sample in samples
    )
    for sample in samples:
        assert sample.tokens[sample.trained].tolist() == [
            t for n in (1, 2, 3) for t in ids(f"#{n}{END_OF_TURN}")
        ]
        assert "next 1" in str(TOKENIZER.decode(sample.tokens[~sample.trained].tolist()))
    resets = [body for path, body, _ in server.asked if path == "reset"]
    assert [body["seed"] for body in resets] == [4, 4] and resets[0]["options"]["row"] == PROMPT.row
    assert {key for _, _, key in server.asked} == {"Bearer k"}
    assert (
        policy.counted["sessions_done"] == 2
        and policy.counted["tokens_unique"] < policy.counted["tokens"]
    )
    # a limit of the run ends it, and the server is told
    (short,), _ = await rollout(remote(url, max_turns=2), 1, counts)
    assert not short.finished and short.reward == 1.0 and server.asked[-1][0] == "close"


async def test_an_episode_whose_server_forgot_it_begins_again_and_one_that_is_gone_ends_the_run_in_one_line(
    counting: tuple[Counting, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pa_npu.agents.remote._PAUSE_S", 0.01)
    server, url = counting

    def step() -> web.Response:
        del server.answers["step"]
        return web.Response(status=404, text="who?")

    server.answers["step"] = step
    (sample,), policy = await rollout(remote(url), 1, counts)
    assert sample.reward == 1.5
    first, again = policy.turns[:2]
    assert (first.turn, first.sample, first.tokens.tolist()) == (
        again.turn,
        again.sample,
        again.tokens.tolist(),
    )
    server.wait_s = 30.0
    with pytest.raises(
        EnvironmentFailed, match=r"lost 4 times, .*reset gave no answer \(no complete answer"
    ) as failed:
        await rollout(remote(url, timeout_s=0.05), 1, counts)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("reset", {"observation": 5}, "neither a text nor a list"),
        (
            "reset",
            {"observation": [{"role": "user"}, {"content": [{"type": "image_url"}]}]},
            "cannot be shown",
        ),
        ("reset", [], r"gave 200 \[\]"),
        ("reset", lambda: web.Response(status=422, text="no\nsuch task"), "gave 422 no such task"),
        ("reset", lambda: web.Response(body=b"x" * 2**21), "longer than"),
        (
            "step",
            {"observation": "", "reward": None, "terminated": True, "truncated": False},
            "no finite number",
        ),
        (
            "step",
            {"observation": "", "reward": 1e39, "terminated": True, "truncated": False},
            "beyond",
        ),
        (
            "step",
            {"observation": "", "reward": 10**400, "terminated": True, "truncated": False},
            "more than 300 digits",
        ),
        (
            "step",
            {"observation": "", "reward": True, "terminated": True, "truncated": False},
            "no finite number",
        ),
        (
            "step",
            {"observation": "", "reward": "1", "terminated": True, "truncated": False},
            "no finite number",
        ),
        (
            "step",
            {"observation": "", "reward": 1, "terminated": 1, "truncated": False},
            "true or false",
        ),
        (
            "step",
            lambda: web.Response(body=b'{"reward": NaN, "terminated": true, "truncated": true}'),
            "no finite",
        ),
    ],
)
async def test_what_is_no_answer_of_an_environment_ends_the_run_in_one_line(
    counting: tuple[Counting, str], path: str, answer: Any, message: str
) -> None:
    server, url = counting
    server.answers[path] = answer
    with pytest.raises(
        EnvironmentFailed, match=rf"environment\.options: url: {url}/.*{message}"
    ) as failed:
        await rollout(remote(url), 1, counts)
    assert "\n" not in str(failed.value)


async def test_a_remote_server_that_is_not_there_is_one_line_before_the_run() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with opened(make_environment(remote(url), TOKENIZER), 30.0) as environment:
        with pytest.raises(
            ConfigError, match=r"environment\.options: url: .*/reset gave no answer .*; start the"
        ):
            await environment.trial(PROMPT)  # type: ignore[attr-defined]


async def test_a_remote_server_is_tried_with_one_episode_which_is_closed(
    counting: tuple[Counting, str],
) -> None:
    server, url = counting
    async with opened(make_environment(remote(url), TOKENIZER), 30.0) as environment:
        await environment.trial(PROMPT)  # type: ignore[attr-defined]
    assert [path for path, _, _ in server.asked] == ["reset", "close"]
    assert server.asked[0][1]["id"] == server.asked[1][1]["id"]


@pytest.mark.parametrize("url", [None, 5, "localhost:80", "ftp://x", "http://"])
def test_a_remote_environment_needs_an_address_and_a_key_that_is_set(url: Any) -> None:
    with pytest.raises(ConfigError, match=r"environment\.options: url must be"):
        make_environment(remote(url), TOKENIZER)
    with pytest.raises(ConfigError, match=r"names 'NOT_SET', which is not set"):
        make_environment(remote("http://x", options={"api_key_variable": "NOT_SET"}), TOKENIZER)
    with pytest.raises(ConfigError, match=r"'port' is unknown to remote"):
        make_environment(remote("http://x", options={"port": 1}), TOKENIZER)
