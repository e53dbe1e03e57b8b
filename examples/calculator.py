"""What the agents of this folder that calculate have in common: a tool, and the reward of an answer. Standard library only."""

from __future__ import annotations

import ast
import operator
from typing import Any

SESSIONS_AT_ONCE = 8
TURNS = 3  # environment.max_turns
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "string"}},
    "required": ["x"],
}


def calculator(x: str) -> str:
    """The value of an arithmetic expression.

    Args:
        x: such as 6*7.
    """
    try:
        return str(_value(ast.parse(x, mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, TypeError):
        return "error"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**9:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("not an expression")


def reward(answer: object, task: dict[str, Any]) -> float:
    """Returns 1.0 for the right answer, which may stand behind `####`."""
    return float(str(answer).strip().removeprefix("####").strip() == task["answer"])
