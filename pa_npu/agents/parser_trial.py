"""Tries agent.tool_parser before a run, in a process of its own: vLLM's parsers import vLLM.

python -m pa_npu.agents.parser_trial    reads {"config"} as JSON from stdin
                                        (pa_npu.control.worker_process.serve)
"""

from __future__ import annotations

import json

from pa_npu.config.load import load_tree
from pa_npu.config.schema import Config
from pa_npu.control.worker_process import run_trial, serve
from pa_npu.errors import ConfigError

_TIME_LIMIT_S = 120.0  # importing vLLM on a busy machine


def check_tool_parser(config: Config) -> None:
    """Raises ConfigError if a run with agents cannot make its parser of tool calls."""
    has_calls = config.environment.has_gateway or config.environment.name == "tool_class"
    if not has_calls or config.agent.tool_parser in ("auto", "hermes"):
        return
    setting = f"agent.tool_parser: {config.agent.tool_parser}"
    request = json.dumps({"config": config.model_dump(mode="json")}).encode()
    too_slow = f"has not been made within {_TIME_LIMIT_S:.0f} s; set another, such as hermes"
    problem = run_trial("pa_npu.agents.parser_trial", request, _TIME_LIMIT_S, setting, too_slow)
    if problem is None:
        return
    if not problem.startswith("agent.tool_parser"):
        problem = f"{setting}: {problem}"
    raise ConfigError(problem)


def _attempt(request: bytes) -> None:
    # imported here because the launcher, which only starts this process, does not need them
    from pa_npu.agents.chat import make_parser
    from pa_npu.families.model_directory import load_tokenizer

    config = load_tree(json.loads(request)["config"], "agent.tool_parser")
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    make_parser(config.agent.tool_parser, tokenizer)


if __name__ == "__main__":
    serve(_attempt)
