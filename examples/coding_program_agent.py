"""Codex or Claude Code, unmodified, as an agent that trains: its shell is the tool, its last message the answer.

    agent.command="python examples/coding_program_agent.py codex PROGRAM"     over the Responses API
    agent.command="python examples/coding_program_agent.py claude PROGRAM"    over the Messages API

PROGRAM is the installed command, such as `codex` or `claude`. Its commands run as this process does:
use agent.container for a policy that you do not trust.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from agent_client import session_from_environment
from calculator import reward

TIMEOUT_S = 600.0  # the run has limits of its own


def codex(program: str, question: str, home: str) -> list[str]:
    """Returns the command. A provider of the session's URL replaces the vendor's."""
    os.environ["CODEX_HOME"] = home
    provider = {
        "name": "run",
        "base_url": os.environ["OPENAI_BASE_URL"],
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    command = [program, "exec", "--skip-git-repo-check", "--ephemeral", "--model", "policy"]
    command += ["--dangerously-bypass-approvals-and-sandbox", "--config", "model_provider=run"]
    for key, value in provider.items():
        command += ["--config", f"model_providers.run.{key}={value}"]
    command += ["--config", "web_search=disabled"]  # which the vendor's servers would execute
    return [*command, question]


def claude(program: str, question: str, home: str) -> list[str]:
    """Returns the command. It reads the session's URL and key from ANTHROPIC_BASE_URL and ..._API_KEY."""
    os.environ |= {
        "CLAUDE_CONFIG_DIR": home,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    command = [program, "--bare", "--print", "--model", "policy"]
    command += ["--effort", "medium"]  # which asks for nothing else than the run samples
    command += ["--tools", "Bash", "--allowedTools", "Bash"]
    return [*command, "--", question]


def main() -> None:
    kind, program = sys.argv[1:]
    make_command = {"codex": codex, "claude": claude}[kind]
    session = session_from_environment()
    with tempfile.TemporaryDirectory() as home:
        command = make_command(program, session.task["row"]["question"], home)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    print(done.stderr[-2000:], file=sys.stderr)
    session.give_reward(reward(done.stdout.strip(), session.task))


if __name__ == "__main__":
    main()
