"""The kind of transformers engines: the command that starts one, what it cannot do, what it needs."""

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
    """Returns the command of engine `index` (0 .. config.rollout.engines - 1) on `port`.

    The API key is the environment's VLLM_API_KEY, since command lines are public on a machine. The
    engine refuses every request without it. Raises ConfigError.
    """
    check_keys(config, spec)
    check_engine(config, spec)
    python = config.rollout.python or sys.executable
    argv = [python, "-m", SERVER, "--model", spec.path]
    argv += ["--host", config.placement.address, "--port", str(port)]
    argv += ["--dtype", config.model.dtype, "--device", config.run.device]
    argv += ["--max-model-len", str(config.engine_tokens)]
    argv += ["--max-num-seqs", str(config.rollout.max_num_seqs)]
    if config.model.trust_remote_code:
        argv.append("--trust-remote-code")
    env = common_environment(config, python)
    if platform.get(config.run.device).visible_devices_env is None:
        env["OMP_NUM_THREADS"] = "1"  # a device is one core
    return EngineCommand(tuple(argv), env | config.rollout.env)


def check_keys(config: Config, spec: ModelSpec | None) -> None:
    """Raises ConfigError for a key that these engines do not have."""
    rollout = config.rollout
    problem = None
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
    """Raises ConfigError if the engines' interpreter lacks what the server imports."""
    _, missing = describe(config)
    if missing is not None:
        raise ConfigError(missing)


def describe(config: Config | None) -> tuple[str, str | None]:
    """Returns the versions in the engines' interpreter, and in one line what is missing."""
    python = config.rollout.python if config else None
    interpreter = python or sys.executable
    try:
        versions = distributions(python, _NEEDED)
    except UserError as error:
        return f"none in {interpreter}", str(error)
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    if missing := [name for name in _NEEDED if name not in versions]:
        return names, (
            f"rollout.python: {interpreter} has no {', '.join(missing)}, which "
            "rollout.backend=transformers needs; install it"
        )
    return f"{names} ({interpreter})", None


TRANSFORMERS = EngineKind(
    command=server_command,
    client=partial(EngineClient, kind="transformers"),
    check_keys=check_keys,
    check=check,
    describe=describe,
    served_model=served_model,
    merges_adapters=True,
    records_expert_choices=True,
    reads_images=True,
)
