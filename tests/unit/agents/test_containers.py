"""A container of an agent has the gateway's variables, its network and limits, and is removed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from pa_npu.agents.open_sessions import Sessions
from pa_npu.agents.programs import Programs
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.environments.registry import make_environment, opened
from pa_npu.errors import ConfigError
from tests.helpers.agents import PROMPT, TOKENIZER, Policy, config, program, rollout
from tools.make_tiny_model import END_OF_TURN

# Stands for docker: says how it was called, and runs the command that follows the image as a
# process.
DOCKER = f"""#!{sys.executable}
import json, os, subprocess, sys
with open("RECORD", "a") as file:
    file.write(json.dumps([sys.argv[1:], sorted(os.environ)]) + "\\n")
if sys.argv[1] == "run":
    names = [part.removeprefix("--env=") for part in sys.argv if part.startswith("--env=")]
    kept = {{name: os.environ[name] for name in names}}
    code = subprocess.run(sys.argv[sys.argv.index("images/agent:1") + 1 :], env=kept).returncode
    sys.exit(code if code >= 0 else 128 - code)
"""


@pytest.fixture
def docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[tuple[list[str], list[str]]]]:
    """Its calls so far: arguments, and names of variables."""
    record = tmp_path / "record"
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "docker"
    file.write_text(DOCKER.replace("RECORD", str(record)))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return lambda: [json.loads(line) for line in record.read_text().splitlines()]


async def test_a_container_has_the_gateways_variables_its_network_and_limits_and_is_removed(
    tmp_path: Path,
    docker: Callable[[], list[tuple[list[str], list[str]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAIN", "x")
    lines = (
        'ask(os.environ["SESSION_URL"] + "/reward", {"reward": float("PLAIN" in os.environ) + 0.5})'
    )
    chosen = config(command=program(tmp_path, lines), container="images/agent:1")
    samples, _ = await rollout(chosen, 1, lambda shown: f"w{END_OF_TURN}")
    assert [sample.reward for sample in samples] == [0.5], "none of the coordinator's variables"
    (run, _), (removal, _) = docker()
    image = run.index("images/agent:1")
    assert not [part for part in run if part.startswith("--volume")], (
        "a task that fits is in the variable"
    )
    assert run[0] == "run" and run[image + 1 :] == shlex.split(chosen.agent.command or "")
    names = {"GATEWAY_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL", "SESSION_URL", "TASK"}
    names |= {"ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"}
    assert {part.removeprefix("--env=") for part in run if part.startswith("--env=")} == names, (
        "values are no arguments"
    )
    expected = {
        "--rm",
        "--init",
        "--network=host",
        "--cap-drop=ALL",
        "--memory=4g",
        "--pids-limit=512",
    }
    assert expected <= set(run[:image])
    assert ["--name=" + removal[2]] == [part for part in run if part.startswith("--name=")]
    assert removal[:2] == ["rm", "--force"]


async def test_a_container_reads_a_task_that_is_too_long_for_a_variable_from_a_file(
    tmp_path: Path,
    docker: Callable[[], list[tuple[list[str], list[str]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    prompt = replace(PROMPT, row={**PROMPT.row, "text": "x" * 180_000})
    chosen = config(command=program(tmp_path, "pass"), container="images/agent:1")
    async with opened(make_environment(chosen, TOKENIZER), 30.0) as environment:
        # it reads TASK
        with pytest.raises(EnvironmentFailed, match="asked the policy for anything"):
            await environment.rollout(prompt, 1, Policy(lambda shown: f"w{END_OF_TURN}"))
    (run, _), *_ = docker()
    names = {part.removeprefix("--env=") for part in run if part.startswith("--env=")}
    assert "TASK_FILE" in names and "TASK" not in names and {"NO_PROXY", "no_proxy"} <= names
    (volume,) = [part for part in run if part.startswith("--volume=")]
    assert volume.endswith("/task.json:/task.json:ro")


async def test_a_container_that_is_killed_begins_again_and_one_at_a_limit_is_removed(
    tmp_path: Path, docker: Callable[[], list[tuple[list[str], list[str]]]]
) -> None:
    flag = tmp_path / "was here"
    lines = (
        f"if not os.path.exists({str(flag)!r}): open({str(flag)!r}, 'w'); os.kill(os.getpid(), 9)"
    )
    options = ["--network=agents", "--memory=1g"]
    chosen = config(
        command=program(tmp_path, lines), container=" ".join([*options, "images/agent:1"])
    )
    samples, policy = await rollout(chosen, 1, lambda shown: f"w{END_OF_TURN}")
    assert len(samples) == 1 and samples[0].finished and len(policy.turns) == 2
    run = docker()[0][0]
    assert "--network=host" not in run and run.index("--memory=4g") < run.index("--memory=1g"), (
        "the last one counts"
    )
    slow = config(
        command=program(tmp_path, "import time; time.sleep(90)"),
        container="images/agent:1",
        timeout_s=4,
    )
    samples, _ = await rollout(slow, 1, lambda shown: f"w{END_OF_TURN}")
    assert [sample.finished for sample in samples] == [False]
    *_, (run, _), (removal, _) = docker()
    assert run[0] == "run" and removal == ["rm", "--force", run[3].removeprefix("--name=")]


def test_a_container_is_refused_in_one_line_where_nothing_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"agent\.container: x needs docker or podman, and neither is on PATH"
    ):
        Programs(config(command="agent", container="x").agent, Sessions("key"))
    with pytest.raises(ValidationError, match=r"agent\.container"):
        config(command="agent", container="--privileged")
    with pytest.raises(ValidationError, match=r"set agent\.command"):
        config(container="x")
