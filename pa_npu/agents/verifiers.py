"""Plays episodes of verifiers' environments (environment.name=verifiers), in an interpreter that has verifiers.

    taskset ──rows──> data.train=verifiers:NAME ──task──> program ──> harness's program ──requests──> gateway ──> policy
                                                             └──the task's rewards──> the session's reward

The program (verifiers_program.py) stays and has several sessions at once, as those of
agent.programs. An episode that failed ends its session as failed; agent.discards decides whether it
is trained. Its environment may have several agents, of which one is the policy.

environment.options:
    environments    by name, what a file of verifiers has: {env: {taskset: {id: ...}, ...}, select:
                    {...}}, or the path of such a file (TOML or JSON)
    python          the interpreter that has verifiers; unset, or `python`: the run's own
    processes       how many programs play episodes (default 1)
"""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pa_npu.agents.environment import AgentEnvironment
from pa_npu.agents.session import Session
from pa_npu.config.sections.rollout import AgentConfig
from pa_npu.data.prompts import Prompt
from pa_npu.data.taskset_rows import COLUMN, PROGRAM, interpreter
from pa_npu.environments.protocol import EnvironmentContext, EnvironmentFailed, Generate
from pa_npu.errors import ConfigError

_MAX_PROCESSES = 256
_SLACK_S = 1.0  # a session's time is over before its episode's, so that its outcome is `time`


@dataclass(frozen=True)
class VerifiersOptions:
    """environment.options, as the module's docstring describes them."""

    environments: Mapping[str, Any]
    python: str = "python"
    processes: int = 1


class VerifiersEnvironment(AgentEnvironment):
    """Lets a program in another interpreter play each session as an episode of verifiers."""

    _command_key = "environment.options.environments"

    def __init__(self, context: EnvironmentContext) -> None:
        context.refuse_options("verifiers", ("environments", "python", "processes"))
        self._options = read_options(context.options)
        super().__init__(replace(context, options={}))

    def _program_settings(self) -> AgentConfig:
        directory = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="pa_npu-verifiers-")
        )
        file = Path(directory) / "options.json"
        options = {
            "environments": dict(self._options.environments),
            "sessions_at_once": math.ceil(self._settings.concurrent / self._options.processes),
            "timeout_s": self._config.deadlines.environment_timeout_s + _SLACK_S,
        }
        file.write_text(json.dumps(options), encoding="utf-8")
        command = [interpreter(self._options.python), "-P", str(PROGRAM), "play", str(file)]
        return self._settings.model_copy(
            update={"command": shlex.join(command), "programs": self._options.processes}
        )

    async def _attempt(self, prompt: Prompt, number: int, generate: Generate) -> Session:
        if COLUMN not in prompt.row:
            raise EnvironmentFailed(
                f"environment.name: verifiers: prompt {prompt.prompt_id} is no task of a taskset; "
                "let data.train and held-out sets name verifiers:NAME"
            )
        return await super()._attempt(prompt, number, generate)


def read_options(options: Mapping[str, Any]) -> VerifiersOptions:
    """Reads environment.options. Raises ConfigError."""
    environments = options.get("environments")
    if not isinstance(environments, Mapping) or not environments:
        raise ConfigError(
            "environment.options: environments must name at least one environment of verifiers, "
            f"such as {{train: {{env: {{taskset: {{id: NAME}}}}}}}}, not {environments!r:.80}"
        )
    for name, environment in environments.items():
        if not isinstance(environment, (str, Mapping)):
            raise ConfigError(
                f"environment.options: environments.{name} must be a mapping with env, or the path "
                f"of a file of verifiers, not {environment!r:.80}"
            )
    python = options.get("python", "python")
    if not isinstance(python, str) or not python:
        raise ConfigError(
            f"environment.options: python must be the path of an interpreter, not {python!r:.80}"
        )
    processes = options.get("processes", 1)
    if type(processes) is not int or not 1 <= processes <= _MAX_PROCESSES:
        raise ConfigError(
            f"environment.options: processes must be 1 to {_MAX_PROCESSES}, not {processes!r:.60}"
        )
    return VerifiersOptions(environments, python, processes)
