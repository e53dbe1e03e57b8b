"""An agent on the openai package that trains while it works: it answers products, and has a calculator to call.

    python tools/make_tiny_model.py --out .cache/agent --task agent
    pa-npu run --config configs/grpo_tiny_agent.yaml

The run starts this program (agent.programs of it). It asks the gateway for tasks, works at several
of them at once, calls the policy through `openai` as it would call any model, and says how good
each session was. Nothing in it knows about training.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI, OpenAIError

TURNS = 3
AT_ONCE = 16
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "The value of an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string"}},
                "required": ["x"],
            },
        },
    }
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def work(task: dict[str, Any], client: OpenAI) -> float:
    """One session: up to TURNS answers of the policy. Returns the reward."""
    messages: list[Any] = [{"role": "user", "content": task["row"]["question"]}]
    content = ""
    try:
        for _ in range(TURNS):
            message = (
                client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                .choices[0]
                .message
            )
            content = message.content or ""
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                answer = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    except OpenAIError as error:  # a limit of the run: what was written until then is judged
        content = f"{error}"
    return float(content.strip() == f"#### {task['answer']}")


def calculate(arguments: str) -> str:
    """The calculator's answer to a call; what is wrong with the call is an answer as well."""
    try:
        return str(value(ast.parse(json.loads(arguments)["x"], mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError):
        return "error"


def value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**9:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](value(node.left), value(node.right)))
    raise ValueError("not an expression")


def post(url: str, key: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=30
    ):
        pass


def next_task() -> dict[str, Any]:
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "x-program": os.environ["PROGRAM"],
    }
    request = urllib.request.Request(
        f"{os.environ['GATEWAY_URL']}/tasks?wait_s=30", headers=headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def serve(work: Callable[[dict[str, Any], OpenAI], float], at_once: int = AT_ONCE) -> None:
    """Works at as many tasks at once, for ever. work: has one session with a client, and returns
    its reward.
    """

    def take_tasks() -> None:
        while True:
            taken = next_task()
            if taken["task"] is None:
                continue
            url, key = taken["base_url"], taken["api_key"]
            reward = work(taken["task"], OpenAI(base_url=url, api_key=key, max_retries=0))
            post(url.removesuffix("/v1") + "/reward", key, {"reward": reward})
            post(url.removesuffix("/v1") + "/end", key, {})

    with ThreadPoolExecutor(at_once) as threads:
        for thread in [threads.submit(take_tasks) for _ in range(at_once)]:
            thread.result()


if __name__ == "__main__":
    serve(work)
