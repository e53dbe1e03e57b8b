"""rollout.extra_args, parsed by the engine's own parser before anything starts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError

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

# Where the parser lives differs between versions, so the server itself is run until it has parsed its arguments.
_PROGRAM = """
import argparse, os, runpy, sys
parse = argparse.ArgumentParser.parse_args
def parse_and_end(self, *args, **kwargs):
    parse(self, *args, **kwargs)
    os._exit(0)
argparse.ArgumentParser.parse_args = parse_and_end
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""


def check_extra_arguments(config: Config) -> None:
    """Raises ConfigError where rollout.extra_args holds what the engine does not know, or what training sets itself."""
    extra = config.rollout.extra_args
    for argument in extra:
        name = argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else argument
        if name in _OURS:
            key = _OURS[name]
            remedy = f"set {key} instead" if key else "training relies on its value; remove it"
            raise ConfigError(f"rollout.extra_args: {name} is set by the run; {remedy}")
    problem = _parser_problem(config.rollout.python or sys.executable, extra) if extra else None
    if problem:
        raise ConfigError(f"rollout.extra_args: vLLM refuses them ({problem}); correct or remove them")


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
    lines = finished.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {finished.returncode}"]
    return lines[-1].partition("error: ")[2][:_REASON_CHARACTERS] or lines[-1][-_REASON_CHARACTERS:]
