"""The calculator: an arithmetic expression in, its value out, exactly, and in bounded time for whatever text it is given."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_LONGEST = 200  # characters of an expression
_LARGEST = 10**30  # of a value in it
_LARGEST_EXPONENT = 100
_DECIMALS = 6

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """The value of + - * / ** and brackets over decimal numbers: whole, or rounded to 6 decimals. "error: ..." otherwise."""
    if len(expression) > _LONGEST:
        return f"error: more than {_LONGEST} characters"
    try:
        return _written(_value(ast.parse(expression.strip().replace(",", "").replace("^", "**"), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an expression"


def _value(node: ast.AST) -> Fraction:
    """Raises ValueError for everything that is no arithmetic."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _value(node.left), _value(node.right)
        if exponent.denominator != 1 or abs(exponent) > _LARGEST_EXPONENT:
            raise ValueError("exponent")
        value = base ** int(exponent)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("not arithmetic")
    if abs(value) > _LARGEST:
        raise ValueError("too large")
    return value


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**_DECIMALS)
    whole, rest = divmod(abs(scaled), 10**_DECIMALS)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}.{rest:0{_DECIMALS}d}".rstrip("0").rstrip(".")
