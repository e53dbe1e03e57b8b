"""Answers launcher and coordinator about vLLM engines: the row of the registry."""

from __future__ import annotations

import sys

from pa_npu.config.schema import Config
from pa_npu.engines.client import EngineClient, served_model
from pa_npu.engines.registry import EngineKind
from pa_npu.engines.vllm.arguments import check_extra_arguments
from pa_npu.engines.vllm.ascend import installation_problem
from pa_npu.engines.vllm.command import check_model, server_command
from pa_npu.engines.vllm.tool_calls import tool_parser
from pa_npu.engines.vllm.versions import engine_version, environment, installed, select
from pa_npu.errors import UserError
from pa_npu.families.spec import ModelSpec


def check_keys(config: Config, spec: ModelSpec | None) -> None:
    """All keys are vLLM's; what a release cannot do is found with its version."""
    if spec is not None:
        check_model(config, spec)


def check(config: Config) -> None:
    """The engines' interpreter has a vLLM of a supported version that can do what is configured, and what it needs around it."""
    version = engine_version(config)
    environment(config, version)
    problem = installation_problem(version, config.rollout.python)
    if problem:
        raise UserError(f"rollout.python: {problem}")
    check_extra_arguments(config)


def describe(config: Config | None) -> tuple[str, str | None]:
    """vLLM's version in the engines' interpreter with its row in the table, and what is missing."""
    python = config.rollout.python if config else None
    interpreter = python or sys.executable
    try:
        found = installed(python)
        row = select(found, config.run.device if config else "auto", interpreter)
    except UserError as error:
        return f"none that is supported in {interpreter}", str(error)
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"{names} ({row.name}, for {row.device}; {interpreter})", installation_problem(row, python)


VLLM = EngineKind(
    server_command,
    EngineClient,
    check_keys,
    check,
    describe,
    served_model,
    tool_parser,
    merges_adapters=True,
    records_routes=True,
)
