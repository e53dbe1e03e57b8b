"""The gateway in a real coordinator process, with the trainers played by the test: agents, and what other programs get."""

from __future__ import annotations

import http.client
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from pa_npu.agents.gateway import GATEWAY_FILE
from pa_npu.samples.group import Group
from tests.helpers.coordinator_run import GROUPS, RESPONSES, WAIT_S, Run
from tests.helpers.stand_in_engine import API_KEY, stand_in_engines
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
NUM_GROUPS = 4

# Two turns of every task, eight tasks at once. The first program is killed among them where KILLED does not exist yet.
AGENT = """
import json, os, threading, urllib.request
def ask(url, key, body=None):
    headers = {"Authorization": "Bearer " + key, "x-program": os.environ["PROGRAM"]}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))
def serve():
    while True:
        taken = ask(os.environ["GATEWAY_URL"] + "/tasks?wait_s=20", os.environ["OPENAI_API_KEY"])
        if taken["task"] is None: continue
        url, key = taken["base_url"], taken["api_key"]
        prompt = taken["task"]["row"]["question"]
        first = ask(url + "/completions", key, {"model": "m", "prompt": prompt, "max_tokens": 5})
        if KILLED and not os.path.exists(KILLED): open(KILLED, "w").close(); os.kill(os.getpid(), 9)
        prompt += first["choices"][0]["text"] + " w9"
        second = ask(url + "/completions", key, {"model": "m", "prompt": prompt, "max_tokens": 6})
        ask(url.removesuffix("/v1") + "/reward", key, {"reward": len(second["choices"][0]["text"])})
        ask(url.removesuffix("/v1") + "/end", key, {})
for _ in range(8): threading.Thread(target=serve).start()
"""


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.process.kill()
        run.process.wait(10)


def begin(run: Run) -> None:
    """Engines hold version 0."""
    (run.dir / "api_key").write_text(API_KEY + "\n")
    run.announce_weights()
    run.announce(0, None)
    assert run.published(0)["done"]


def trained_by_agents(directory: Path, runs: list[Run], killed: Path | None) -> list[Group]:
    """The groups of an iteration, by index."""
    directory.mkdir()
    agent = directory / "agent.py"
    agent.write_text(AGENT.replace("KILLED", repr(str(killed)) if killed else "None"))
    with stand_in_engines(1, Speed(step_s=0.001, stride=4)) as engines:
        run = Run(
            directory,
            engines,
            environment={"name": "agents", "max_turns": 2},
            agent={"command": shlex.join([sys.executable, str(agent)]), "programs": 1},
            schedule={"iterations": 1, "prompts_per_iteration": NUM_GROUPS},
            data={
                "train": str(directory / "train.jsonl"),
                "max_prompt_tokens": 16,
            },
        )
        runs.append(run)
        begin(run)
        groups = run.consume(0, NUM_GROUPS // 2)
        run.announce(1, {})
        run.published(1)
        output = run.end()
    assert run.process.returncode == 0, output
    assert not (run.dir / GATEWAY_FILE).exists()
    return sorted(groups, key=lambda group: group.index)


def test_agents_sessions_are_trained_and_a_killed_agents_begin_again_to_the_bit(
    tmp_path: Path, runs: list[Run]
) -> None:
    quiet = trained_by_agents(tmp_path / "quiet", runs, None)
    killed = tmp_path / "killed"
    disturbed = trained_by_agents(tmp_path / "disturbed", runs, killed)
    assert killed.exists(), "nothing was killed"
    assert [group.index for group in quiet] == list(range(NUM_GROUPS)), "I2"
    assert any(len(group.runs[0]) > group.num_samples for group in quiet), "two turns in one sample"
    assert any(len(set(group.rewards.tolist())) > 1 for group in quiet)
    for group, again in zip(quiet, disturbed, strict=True):
        # an answer that ended by itself is no text to go on from: that session has two branches
        assert RESPONSES <= group.num_samples <= 2 * RESPONSES
        assert set(group.versions[group.trained].tolist()) == {0}, "one version per session"
        for name in ("tokens", "trained", "logprobs", "versions", "rewards", "advantages", "lengths"):
            assert np.array_equal(getattr(group, name), getattr(again, name)), name


def asked(run: Run, method: str, path: str, body: Any = None, key: str = API_KEY) -> tuple[int, Any]:
    url = urlsplit(json.loads((run.dir / GATEWAY_FILE).read_text())["url"])
    assert url.hostname == "127.0.0.1", "loopback"
    connection = http.client.HTTPConnection(url.netloc, timeout=WAIT_S)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body)
    connection.request(method, path, data, {"Authorization": f"Bearer {key}"})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def test_other_programs_sample_from_the_current_version_and_take_groups_as_columns(
    tmp_path: Path, runs: list[Run]
) -> None:
    with stand_in_engines(1, Speed(step_s=0.001, stride=4)) as engines:
        run = Run(tmp_path, engines, agent={"port": 0}, schedule={"iterations": 1, "prompts_per_iteration": GROUPS})
        runs.append(run)
        begin(run)
        body = {"prompt": "w5 w6", "n": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 4}
        status, sampled = asked(run, "POST", "/v1/completions", body)
        assert status == 200 and len(sampled["choices"]) == 3 and sampled["weight_version"] == 0
        (sent,) = [request for request in engines[0].engine.requests if request["seed"] == 7]
        assert (sent["n"], sent["temperature"], sent["top_p"], sent["max_tokens"]) == (3, 0.5, 0.9, 4)
        assert asked(run, "POST", "/v1/completions", body)[1]["choices"] == sampled["choices"], "by its seed"
        assert asked(run, "GET", "/v1/models")[1]["data"][0]["weight_version"] == 0

        first = {group.index: group for group in run.consume(0)}
        columns = ["about", "tokens", "trained", "logprobs", "versions", "lengths", "rewards", "advantages"]
        wanted = {"task": "t", "columns": columns, "policy": "age", "most": GROUPS}
        found: list[dict[str, Any]] = []
        while len(found) < GROUPS:
            found += asked(run, "POST", "/groups", {**wanted, "wait_s": 20})[1]["groups"]
        assert asked(run, "POST", "/groups", wanted)[1]["groups"] == [], "no group twice"
        for copy in found:
            group = first.pop(copy["about"]["index"])
            assert copy.keys() == {"id", *columns} and len(copy["about"]["responses"]) == RESPONSES
            assert all(copy[name] == getattr(group, name).tolist() for name in columns[1:]), "bit for bit"
        assert not first
        example = [sys.executable, str(ROOT / "examples" / "use_rollouts.py"), "--run", str(run.dir)]
        example += ["--model", str(tmp_path / "model")]
        done = subprocess.run(example, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S * 2, check=False)
        assert done.returncode == 0 and "trained 4 groups" in done.stdout, done.stdout + done.stderr

        # what is wrong is one line, and the run goes on
        for method, path, wrong, status, line in (
            ("POST", "/v1/completions", b"{", 400, "no JSON"),
            ("POST", "/v1/completions", {"prompt": [1, 10**6]}, 400, "none of the model's"),
            ("POST", "/v1/completions", {"prompt": "w5 " * 100}, 400, "at most"),
            (
                "POST",
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "w5"}]},
                400,
                "no chat template",
            ),
            ("POST", "/groups", {**wanted, "task": "s", "columns": ["secrets"]}, 400, "secrets"),
            ("POST", "/groups", {**wanted, "columns": ["tokens"]}, 400, "another set another name"),
            ("POST", "/groups", {**wanted, "more": 1}, 400, "more"),
            ("GET", "/nothing", None, 404, "docs/agents.md"),
            ("POST", "/sessions/x/end", {}, 404, "never was"),
        ):
            code, answer = asked(run, method, path, wrong)
            assert code == status and line in answer["error"]["message"], (path, code, answer)
        assert asked(run, "POST", "/groups", wanted, "other")[0] == 401
        run.announce(1, {})
        run.published(1)
        output = run.end()
    assert run.process.returncode == 0, output
