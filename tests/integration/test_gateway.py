"""The gateway of a real coordinator process: what other programs get.

Sessions of agents: test_coordinator_matrix.py.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pa_npu.agents.gateway import GATEWAY_FILE
from tests.helpers.coordinator_run import GROUPS, RESPONSES, ROOT, WAIT_S, Run
from tests.helpers.stand_in_engine import API_KEY
from tools.stand_in import Speed, scored_logprob

pytestmark = pytest.mark.integration


def asked(
    run: Run, method: str, path: str, body: Any = None, key: str = API_KEY
) -> tuple[int, Any]:
    url = urlsplit(json.loads((run.dir / GATEWAY_FILE).read_text())["url"])
    assert url.hostname == "127.0.0.1", "loopback"
    connection = http.client.HTTPConnection(url.netloc, timeout=WAIT_S)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body)
    connection.request(method, path, data, {"Authorization": f"Bearer {key}"})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def test_other_programs_sample_from_the_current_version_and_take_groups_as_columns(
    start: Callable[..., Run], inputs: Path
) -> None:
    run = start(agent={"port": 0}, speed=Speed(step_s=0.001, stride=4), schedule={"iterations": 1})
    assert run.begin()["done"]
    body = {"prompt": "w5 w6", "n": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 4}
    status, sampled = asked(run, "POST", "/v1/completions", body)
    assert status == 200 and len(sampled["choices"]) == 3 and sampled["weight_version"] == 0
    (sent,) = [request for request in run.engines[0].requests if request["seed"] == 7]
    assert (sent["n"], sent["temperature"], sent["top_p"], sent["max_tokens"]) == (3, 0.5, 0.9, 4)
    assert asked(run, "POST", "/v1/completions", body)[1]["choices"] == sampled["choices"], (
        "by its seed"
    )
    several = {"prompt": [[5, 6, 7], "w8 w9"], "max_tokens": 1, "echo": True, "logprobs": 1}
    status, echoed = asked(run, "POST", "/v1/completions", {**several, "seed": 8})
    assert status == 200 and [choice["index"] for choice in echoed["choices"]] == [0, 1]
    for choice, prompt in zip(echoed["choices"], ([5, 6, 7], [8, 9]), strict=True):
        output = choice["logprobs"]
        expected = [scored_logprob(token, place) for place, token in enumerate(prompt)][1:]
        assert output["token_logprobs"][0] is None
        assert output["token_logprobs"][1:-1] == pytest.approx(expected)
        assert len(output["tokens"]) == len(prompt) + 1 == len(output["text_offset"])
        assert choice["text"].startswith(" ".join(f"w{token}" for token in prompt))
    only = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = asked(run, "POST", "/v1/completions", only)[1]["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 3

    assert asked(run, "GET", "/v1/models")[1]["data"][0]["weight_version"] == 0
    assert asked(run, "GET", "/v1/models/policy")[1]["weight_version"] == 0
    assert asked(run, "GET", "/v1/models/another")[0] == 404

    first = {group.index: group for group in run.consume(0)}
    columns = [
        "about",
        "tokens",
        "component",
        "trained",
        "written",
        "logprobs",
        "versions",
        "lengths",
        "rewards",
        "advantages",
    ]
    wanted = {"task": "t", "columns": columns, "policy": "age", "max_groups": GROUPS}
    actual: list[dict[str, Any]] = []
    while len(actual) < GROUPS:
        actual += asked(run, "POST", "/groups", {**wanted, "wait_s": 20})[1]["groups"]
    assert asked(run, "POST", "/groups", wanted)[1]["groups"] == [], "no group twice"
    for copy in actual:
        group = first.pop(copy["about"]["index"])
        assert copy.keys() == {"id", *columns} and len(copy["about"]["responses"]) == RESPONSES
        assert all(copy[name] == getattr(group, name).tolist() for name in columns[1:]), (
            "bit for bit"
        )
    assert not first
    example = [sys.executable, str(ROOT / "examples" / "use_rollouts.py"), "--run", str(run.dir)]
    example += ["--model", str(inputs / "model")]
    done = subprocess.run(
        example, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S * 2, check=False
    )
    assert done.returncode == 0 and "trained 4 groups" in done.stdout, done.stdout + done.stderr

    # what is wrong is one line, and the run goes on
    for method, path, wrong, status, line in (
        ("POST", "/v1/completions", b"{", 400, "not JSON"),
        ("POST", "/v1/completions", {"prompt": [1, 10**6]}, 400, "not in the model"),
        ("POST", "/v1/completions", {"prompt": "w5 " * 100}, 400, "at most"),
        ("POST", "/v1/completions", {**several, "logprobs": 50}, 400, "logprobs: 50"),
        ("POST", "/v1/completions", {**several, "stream": True}, 400, "stream"),
        ("POST", "/v1/completions", {"prompt": "w5", "max_tokens": 0}, 400, "max_tokens: 0"),
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
    run.publish(1)
    run.finish()
