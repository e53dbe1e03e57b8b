"""Makes the parser of agent.tool_parser before a run, in a process of its own, since vLLM's parsers import vLLM.

python -m pa_npu.agents.parser_trial      {"config"} as JSON on stdin; see
                                          pa_npu.control.worker_process
"""

from __future__ import annotations

import json

from pa_npu.config.load import load_tree
from pa_npu.config.schema import Config
from pa_npu.control.worker_process import ask, serve
from pa_npu.errors import ConfigError

_TIME_LIMIT_S = 120.0  # importing vLLM on a busy machine


def check_tool_parser(config: Config) -> None:
    """Raises ConfigError where a run with agents would have no parser for what its policy writes."""
    if config.environment.name != "agents" or config.agent.tool_parser in ("auto", "hermes"):
        return
    what = f"agent.tool_parser: {config.agent.tool_parser}"
    request = json.dumps({"config": config.model_dump(mode="json")}).encode()
    too_slow = f"has not been made within {_TIME_LIMIT_S:.0f} s; set another, such as hermes"
    if problem := ask("pa_npu.agents.parser_trial", request, _TIME_LIMIT_S, what, too_slow):
        raise ConfigError(
            problem if problem.startswith("agent.tool_parser") else f"{what}: {problem}"
        )


def _attempt(request: bytes) -> None:
    # what the launcher, which only starts this process, need not import
    from pa_npu.agents.chat import make_parser
    from pa_npu.families.model_directory import load_tokenizer

    config = load_tree(json.loads(request)["config"], "agent.tool_parser")
    make_parser(
        config.agent.tool_parser, load_tokenizer(config.model.path, config.model.trust_remote_code)
    )


if __name__ == "__main__":
    serve(_attempt)
