"""An agent on the openai package that trains while it works: it answers products, and has a calculator to call.

    python tools/make_tiny_model.py --out .cache/agent --task agent
    pa-npu run --config configs/grpo_tiny_agent.yaml

The run starts agent.programs of this program. It asks the gateway for tasks, works on several of
them at once, calls the policy through `openai` as it would call any model, and says how good each
session was. Nothing in it knows about training.
"""

from __future__ import annotations

import ast
import json
import operator
from typing import Any

from agent_client import Session, serve
from openai import OpenAI, OpenAIError

TURNS = 3
SESSIONS_AT_ONCE = 16
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


def work(session: Session) -> float:
    """Lets the policy answer up to TURNS times. Returns the reward."""
    client = OpenAI(base_url=session.openai_url, api_key=session.api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": session.task["row"]["question"]}]
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
    return float(content.strip() == f"#### {session.task['answer']}")


def calculate(arguments: str) -> str:
    """Returns the calculator's answer to a call; a mistake in the call is answered too."""
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


if __name__ == "__main__":
    serve(work, SESSIONS_AT_ONCE)
