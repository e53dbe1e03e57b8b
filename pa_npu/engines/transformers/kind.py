"""Transformers engines as launcher and coordinator see them: the command that starts one, what it cannot do, and what it needs."""

from __future__ import annotations

import sys
from functools import partial

from pa_npu import platform
from pa_npu.config.schema import Config
from pa_npu.engines.client import EngineClient, served_model
from pa_npu.engines.registry import EngineCommand, EngineKind, common_environment, distributions
from pa_npu.errors import ConfigError, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_engine

SERVER = "pa_npu.engines.transformers.server"
_NEEDED = ("torch", "transformers", "aiohttp", "msgspec", "safetensors")


def server_command(config: Config, spec: ModelSpec, index: int, port: int) -> EngineCommand:
    """How to start engine `index` (0 .. config.rollout.engines - 1) on `port`. Raises ConfigError.

    The API key, without which it refuses every request, is the environment's VLLM_API_KEY: command
    lines are public on a machine.
    """
    check_keys(config, spec)
    check_engine(config, spec)
    python = config.rollout.python or sys.executable
    argv = [
        *(python, "-m", SERVER),
        *("--model", spec.path),
        *("--host", config.placement.address),
        *("--port", str(port)),
        *("--dtype", config.model.dtype),
        *("--device", config.run.device),
        *(
            "--max-model-len",
            str(config.data.max_prompt_tokens + config.rollout.max_response_tokens),
        ),
        *("--max-num-seqs", str(config.rollout.max_num_seqs)),
        *(["--trust-remote-code"] if config.model.trust_remote_code else []),
    ]
    env = common_environment(config, python)
    if platform.get(config.run.device).visible_devices_env is None:
        env["OMP_NUM_THREADS"] = "1"  # a device is one core
    return EngineCommand(tuple(argv), env | config.rollout.env)


def check_keys(config: Config, spec: ModelSpec | None) -> None:
    """Raises ConfigError for a key that would be read by nothing."""
    rollout, problem = config.rollout, None
    if rollout.tensor_parallel > 1:
        problem = (
            f"tensor_parallel: {rollout.tensor_parallel}: the transformers engine computes "
            "on one device; set it to 1"
        )
    elif rollout.extra_args:
        problem = (
            f"extra_args: the transformers engine knows no {rollout.extra_args[0]}; remove the key"
        )
    elif rollout.graph_mode:
        problem = "graph_mode: the transformers engine computes eagerly; set it to false"
    if problem is not None:
        raise ConfigError(f"rollout.{problem}, or take rollout.backend=vllm")


def check(config: Config) -> None:
    """The engines' interpreter has what the server imports."""
    _, missing = describe(config)
    if missing is not None:
        raise ConfigError(missing)


def describe(config: Config | None) -> tuple[str, str | None]:
    """Versions in the engines' interpreter, and what is missing."""
    python = config.rollout.python if config else None
    interpreter = python or sys.executable
    try:
        found = distributions(python, _NEEDED)
    except UserError as error:
        return f"none in {interpreter}", str(error)
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing := [name for name in _NEEDED if name not in found]:
        return names, (
            f"rollout.python: {interpreter} has no {', '.join(missing)}, which "
            "rollout.backend=transformers needs; install it"
        )
    return f"{names} ({interpreter})", None


TRANSFORMERS = EngineKind(
    server_command,
    partial(EngineClient, kind="transformers"),
    check_keys,
    check,
    describe,
    served_model,
    merges_adapters=True,
    records_routes=True,
)
