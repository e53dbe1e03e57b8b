"""The coordinator's API in a real coordinator process, with the trainers played by the test, and the examples that use it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from pa_npu import Client
from pa_npu.api.client import ApiError
from pa_npu.coordinator.service.http_api import API_FILE, LARGEST_REQUEST_BYTES
from tests.helpers.coordinator_run import GROUPS, RESPONSES, WAIT_S, Run
from tests.helpers.launched import Launched, settings
from tests.helpers.stand_in_engine import API_KEY, stand_in_engines
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.process.kill()
        run.process.wait(10)


def started(run: Run) -> Client:
    """Its client, once engines hold version 0."""
    (run.dir / "api_key").write_text(API_KEY + "\n")
    run.announce_weights()
    run.announce(0, None)
    assert run.published(0)["done"]
    return Client.of_run(run.dir)


def example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S * 2, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def asked(client: Client, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(client._host, client._port, timeout=WAIT_S)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read()).get("error", "")


def test_other_programs_use_the_rollout_side_while_the_run_trains_its_own(tmp_path: Path, runs: list[Run]) -> None:
    """One run for the API's own promises and for the example of another data source and trainer."""
    with stand_in_engines(1, Speed(step_s=0.001, stride=4)) as engines:
        run = Run(
            tmp_path,
            engines,
            placement={"api_port": 0},
            schedule={"iterations": 1, "prompts_per_iteration": GROUPS},
        )
        runs.append(run)
        client = started(run)

        first = run.consume(0)
        state = client.state()
        assert (state["weights_version"], state["iterations"], state["engines"]) == (0, 1, 1)
        assert urlsplit(json.loads((run.dir / API_FILE).read_text())["url"]).hostname == "127.0.0.1", "loopback"

        # a task gets a group once, with the columns that it named, bit for bit what the environment made
        ids = client.put_prompts([{"question": "w5 w6", "answer": "1"}, {"question": "w7", "answer": "2"}], samples=3)
        columns = ["about", "tokens", "trained", "logprobs", "versions", "lengths", "rewards", "advantages"]
        found: list[dict] = []
        while len(found) < 2:
            found += client.get_groups("trainer", columns, wait_s=20)
        assert sorted(group["id"] for group in found) == sorted(ids)
        for group in found:
            assert group.keys() == {"id", *columns} and len(group["lengths"]) == 3
            assert set(np.array(group["versions"])[group["trained"]].tolist()) == {0}
            assert len(group["tokens"]) == len(group["logprobs"]) == sum(group["lengths"])
            assert len(group["about"]["responses"]) == 3 and "w" in group["about"]["prompt"]
        assert client.get_groups("trainer", columns) == [], "no group twice"
        with pytest.raises(ApiError, match=r"task trainer takes .* already; give another set another name"):
            client.get_groups("trainer", ["tokens"])

        printed = example("use_rollouts.py", "--run", str(run.dir), "--model", str(tmp_path / "model"))
        assert "trained 4 groups" in printed and printed.count("of version 0: loss") == 4

        # what is wrong is one line, and the run goes on
        key = {"Authorization": f"Bearer {API_KEY}"}
        assert asked(client, "GET", "/v1/state", None, {})[0] == 401
        assert asked(client, "GET", "/v1/state", None, {"Authorization": "Bearer other"})[0] == 401
        assert asked(client, "GET", "/health", None, {})[0] == 200
        for method, path, body, status, line in (
            ("POST", "/v1/prompts", b"{", 400, "truncated"),
            ("POST", "/v1/prompts", b'{"prompts": [{"question": "w5"}]}', 400, "no answer"),
            (
                "POST",
                "/v1/prompts",
                b'{"prompts": [{"question": "w5", "answer": "1"}], "n": 1}',
                400,
                "unknown field `n`",
            ),
            ("POST", "/v1/groups", b'{"task": "t", "columns": ["secrets"]}', 400, "secrets"),
            ("POST", "/v1/tasks", b"{}", 400, "environment.name=clients"),
            ("POST", "/v1/pause", b'{"for_s": 1e9}', 400, "must be above 0 and at most"),
            ("GET", "/v1/nothing", None, 404, "docs/services.md"),
            ("POST", "/v1/prompts", b"x" * (LARGEST_REQUEST_BYTES + 1), 413, "longer than"),
        ):
            code, error = asked(client, method, path, body, key)
            assert code == status and line in error and "\n" not in error, (path, code, error)
        with pytest.raises(ApiError, match="no answer"):
            Client("http://127.0.0.1:9", "key", timeout_s=2).state()

        run.announce(1, {})
        run.published(1)
        output = run.end()
    assert run.process.returncode == 0, output
    assert sorted(group.index for group in first) == list(range(GROUPS)), "I2 for the run's own"
    assert not (run.dir / API_FILE).exists(), "and nothing points to it any more"


def test_a_pause_holds_back_further_groups_and_clients_prompts_wait_for_the_next_weights(
    tmp_path: Path, runs: list[Run]
) -> None:
    with stand_in_engines(1, Speed(step_s=0.001, stride=4)) as engines:
        run = Run(
            tmp_path,
            engines,
            placement={"api_port": 0},
            rollout={"engines": 1, "responses_per_prompt": RESPONSES, "max_response_tokens": 24, "window": 4},
            schedule={"iterations": 2, "prompts_per_iteration": GROUPS},
        )
        runs.append(run)
        client = started(run)
        client.get_groups("copy", ["about"], source="run")
        first = run.consume(0)
        client.pause(for_s=20)
        run.announce(1, {"loss": 0.0, "train_s": 1.0, "wait_s": 0.0})
        assert run.published(1)["done"]
        assert client.state()["paused_s"] > 0
        ids = client.put_prompts([{"question": "w5", "answer": "1"}])
        assert client.get_groups("t", ["versions", "trained"], wait_s=1.0) == [], "paused"
        before = time.monotonic()
        client.resume()
        second = run.consume(1)
        (group,) = client.get_groups("t", ["versions", "trained"], wait_s=20)
        assert group["id"] == ids[0] and set(np.array(group["versions"])[group["trained"]].tolist()) == {1}
        assert time.monotonic() - before < 15, "the pause did not end by itself"
        # each of the run's groups once, since the task's first call
        copies: list[dict] = []
        while got := client.get_groups("copy", ["about"], source="run", most=64):
            copies += got
        indices = [(copy["about"]["iteration"], copy["about"]["index"]) for copy in copies]
        assert len(set(indices)) == len(indices) and {(1, g.index) for g in second} <= set(indices)
        run.announce(2, {"loss": 0.0, "train_s": 1.0, "wait_s": 0.0})
        run.published(2)
        output = run.end()
    assert run.process.returncode == 0, output
    assert len(first) == len(second) == GROUPS


def test_another_engine_side_feeds_the_trainer(tmp_path: Path, runs: list[Run]) -> None:
    """The example writes the samples; wrong ones are refused and wait for right ones."""
    with stand_in_engines(1, Speed(step_s=0.001, stride=4)) as engines:
        run = Run(
            tmp_path,
            engines,
            placement={"api_port": 0},
            environment={"name": "clients", "timeout_s": 60},
            rollout={"engines": 1, "responses_per_prompt": RESPONSES, "max_response_tokens": 6, "window": 64},
            schedule={"iterations": 1, "prompts_per_iteration": GROUPS},
        )  # fmt: skip
        runs.append(run)
        client = started(run)
        answer = client.take_work(wait_s=20)
        (work,) = answer["work"]
        assert answer["version"] == 0 and work["samples"] == RESPONSES and work["max_tokens"] == 6
        good = {"tokens": [5, 6, 2], "logprobs": [-0.1, -0.2, -0.3], "version": 0, "text": "w5 w6", "reward": 1.5}
        changes: tuple[tuple[dict[str, Any], str], ...] = (
            ({"version": 1}, "version 1 wrote it, but version 0 is trained"),
            ({"logprobs": [-0.1]}, "1 log-probs for 3 tokens"),
            ({"tokens": [5, 6, 200]}, "outside of the vocabulary"),
            ({"logprobs": [0.5, 0.0, 0.0]}, "at most 0"),
            ({"tokens": [5] * 7, "logprobs": [-0.1] * 7}, "max_response_tokens = 6"),
        )
        for change, line in changes:
            with pytest.raises(ApiError, match=line):
                client.put_samples(work["id"], [good, good, good, {**good, **change}])
        with pytest.raises(ApiError, match="wants 4 samples, not 1"):
            client.put_samples(work["id"], [good])
        rewarded = [{**good, "reward": float(number)} for number in range(RESPONSES)]
        client.put_samples(work["id"], rewarded)
        with pytest.raises(ApiError, match="is not waiting for samples"):
            client.put_samples(work["id"], rewarded)
        with ThreadPoolExecutor(1) as thread:
            fed = thread.submit(
                example,
                *("feed_trainer.py", "--run", str(run.dir), "--model", str(tmp_path / "model")),
                *("--prompts", str(GROUPS - 1)),
            )
            groups = run.consume(0)
            assert f"wrote the samples of {GROUPS - 1} prompts" in fed.result(WAIT_S)
        run.announce(1, {})
        run.published(1)
        output = run.end()
    assert run.process.returncode == 0, output
    assert sorted(group.index for group in groups) == list(range(GROUPS)), "I2"
    (own,) = [group for group in groups if group.prompt_id == work["prompt_id"]]
    assert own.rewards.tolist() == [0.0, 1.0, 2.0, 3.0], "the client's rewards"
    assert own.tokens[own.trained].tolist() == [5, 6, 2] * RESPONSES
    trained = np.concatenate([group.logprobs[group.trained] for group in groups if group is not own])
    assert (trained < 0).all() and len(set(trained.tolist())) >= 1
    training = [request for request in engines[0].engine.requests if request["n"] == RESPONSES]
    assert not training, "the run's own engine wrote none of it"


@pytest.mark.nightly
def test_the_real_trainer_learns_from_another_engine_side_and_agrees_with_its_log_probs(
    tiny: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    keys = {
        "environment__name": "clients",
        "environment__timeout_s": 300,
        "placement__api_port": 0,
        "schedule__iterations": 1,
    }
    launched = Launched(tmp_path, "run", *settings(tiny, run_dir, data__test="null", **keys))
    try:
        launched.wait_for(lambda: (run_dir / API_FILE).is_file(), "the API is served", 240)
        example("feed_trainer.py", "--run", str(run_dir), "--model", str(tiny / "model"), "--prompts", "4")
        assert launched.popen.wait(240) == 0, launched.output
    finally:
        launched.close()
    (record,) = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert record["groups"] == 4 and record["tokens_response"] > 0
    assert record["logprob_diff_mean"] < 1e-4, "the trainer computes what the other engine said (I5)"
    assert (run_dir / "hf" / "config.json").is_file()
