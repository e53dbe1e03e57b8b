"""The command that starts a transformers engine, and what of the configuration it cannot do."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pa_npu import platform
from pa_npu.config.schema import Config
from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.engines.registry import EngineCommand, common_environment
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_engine

SERVER = "pa_npu.engines.transformers.server"


def server_command(config: Config, spec: ModelSpec, index: int, port: int) -> EngineCommand:
    """How to start engine `index` (0 .. config.rollout.engines - 1) on `port`. Raises ConfigError.

    The API key, without which it refuses every request, is the environment's VLLM_API_KEY: command lines are public on a machine.
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
        *("--max-model-len", str(config.data.max_prompt_tokens + config.rollout.max_response_tokens)),
        *("--max-num-seqs", str(config.rollout.max_num_seqs)),
        *(["--trust-remote-code"] if config.model.trust_remote_code else []),
    ]
    env = common_environment(config, python)
    if platform.get(config.run.device).visible_devices_env is None:
        env["OMP_NUM_THREADS"] = "1"  # a device is one core
    return EngineCommand(tuple(argv), env | config.rollout.env)


def check_keys(config: Config, spec: ModelSpec | None) -> None:
    """Raises ConfigError for a key that would be read by nothing."""
    for problem in _unread_keys(config.rollout):
        raise ConfigError(f"rollout.{problem}, or take rollout.backend=vllm")


def _unread_keys(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.tensor_parallel > 1:
        yield f"tensor_parallel: {rollout.tensor_parallel}: the transformers engine computes on one device; set it to 1"
    if rollout.extra_args:
        yield f"extra_args: the transformers engine knows no {rollout.extra_args[0]}; remove the key"
    if rollout.graph_mode:
        yield "graph_mode: the transformers engine computes eagerly; set it to false"
