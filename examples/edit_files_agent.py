"""An agent on the openai package that repairs files: it reads and writes them by tool calls, and its tests are the reward.

    python tools/make_tiny_model.py --out .cache/edit --task edit
    pa-npu run --config configs/grpo_tiny_edit.yaml

The run starts it as a program that stays (agent.programs), or, without that key, once per session
with the task in its environment. Files live in this process; whatever the policy writes is run in a
sandbox alone (no network, no files but the task's, limits of time and memory). The reward is the
share of the task's tests that pass in the end. A test passes when the sandbox says a word that it
was given; a file that goes looking for the word in its own process could say it too, so read what a
policy writes before you trust a high reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

from agent_client import Session, serve, session_from_environment
from openai import OpenAI, OpenAIError

from pa_npu.rewards.sandbox import CellLimits, run

TURNS = 8
SESSIONS_AT_ONCE = 16
LIMITS = CellLimits(wall_s=10.0, cpu_s=5, memory_bytes=1 << 28)
# What one test is: the word comes on standard input, before anything of the policy's is imported.
RUNNER = """
import sys, pathlib
word = sys.stdin.readline()
sys.path.insert(0, str(pathlib.Path(__file__).parent))
exec(sys.argv[1], {})
print(word)
"""


def tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {one: {"type": "string"} for one in parameters},
        "required": [*parameters],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS: Any = [
    tool("read_file", "The text of a file.", "name"),
    tool("write_file", "Replaces the text of a file.", "name", "text"),
    tool("run_tests", "Which tests pass."),
]


def work(session: Session) -> float:
    """Lets the policy answer up to TURNS times. Returns the share of tests that pass."""
    client = OpenAI(base_url=session.openai_url, api_key=session.api_key, max_retries=0)
    row = session.task["row"]
    files = dict(row["files"])
    tests = row["tests"]
    listing = "\n".join(["Files:", *files, "Tests:", *tests])
    messages: list[Any] = [{"role": "user", "content": f"{row['question']}\n{listing}"}]
    try:
        for _ in range(TURNS):
            message = (
                client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                .choices[0]
                .message
            )
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                answer = called(call.function.name, call.function.arguments, files, tests)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    except OpenAIError as error:  # a limit of the run: the files as they are by now are judged
        print(error)
    passed = asyncio.run(passing(files, tests))
    return sum(passed) / len(passed)


def called(name: str, arguments: str, files: dict[str, str], tests: list[str]) -> str:
    """Returns the answer to a tool call; a mistake in the call is answered too."""
    try:
        given = json.loads(arguments)
        if name == "run_tests":
            passed = asyncio.run(passing(files, tests))
            return "\n".join(
                f"{'passes' if right else 'fails'}: {test}"
                for right, test in zip(passed, tests, strict=True)
            )
        if given["name"] not in files:
            return "error: there is no such file"
        if name == "write_file":
            files[given["name"]] = str(given["text"])
            return "written"
        return files[given["name"]] if name == "read_file" else "error: there is no such tool"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}: {error}"


async def passing(files: Mapping[str, str], tests: list[str]) -> list[bool]:
    """Returns whether each test passes, in a sandbox of its own."""

    async def passes(test: str) -> bool:
        word = secrets.token_hex(8)
        given = {**files, "run_one_test.py": RUNNER}
        outcome = await run(["{files}/run_one_test.py", test], word.encode() + b"\n", LIMITS, given)
        return outcome.code == 0 and outcome.stdout.decode("utf-8", "replace").split()[-1:] == [
            word
        ]

    return [await passes(test) for test in tests]


def main() -> None:
    if "PROGRAM" in os.environ:
        serve(work, SESSIONS_AT_ONCE)
        return
    session = session_from_environment()
    session.give_reward(work(session))


if __name__ == "__main__":
    main()
