"""Compares what a program printed or returned with what a test expects.

Numbers with a fraction may be rounded, at every depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_RELATIVE_TOLERANCE = 1e-6  # of numbers with a fraction, as graders of programming contests have it
_ABSOLUTE_TOLERANCE = 1e-9  # beside zero no relative tolerance helps
# between a whole number and a result with a fraction, however large the number is
_WHOLE_TOLERANCE = 1e-6
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WHOLE = re.compile(r"[+-]?\d+")


def same_output(written: str, wanted: str) -> bool:
    """Returns whether two texts are equal, line by line or word by word.

    Space at the ends of lines does not count. Two words are equal as well if both are numbers, at
    least one of them has a fraction, and they differ only by rounding.
    """
    if _lines(written) == _lines(wanted):
        return True
    written_words = written.split()
    wanted_words = wanted.split()
    return len(written_words) == len(wanted_words) and all(
        map(_same_word, written_words, wanted_words)
    )


def same_result(result: Any, wanted: Any) -> bool:
    """Returns whether two results of a call, both read from JSON, are equal.

    Numbers with a fraction may differ by rounding.
    """
    if isinstance(result, list) and isinstance(wanted, list):
        return len(result) == len(wanted) and all(map(same_result, result, wanted))
    if isinstance(result, Mapping) and isinstance(wanted, Mapping):
        return result.keys() == wanted.keys() and all(
            same_result(result[key], wanted[key]) for key in wanted
        )
    if isinstance(result, float) or isinstance(wanted, float):
        if isinstance(result, (int, float)) and isinstance(wanted, (int, float)):
            return _same_number(result, wanted)
        return False
    return bool(result == wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_word(written: str, wanted: str) -> bool:
    if written == wanted:
        return True
    if not (_NUMBER.fullmatch(written) and _NUMBER.fullmatch(wanted)):
        return False
    if _WHOLE.fullmatch(written) and _WHOLE.fullmatch(wanted):
        return False  # "007" is not "7", and the digits of large numbers all count
    return _same_number(_number(written), _number(wanted))


def _number(word: str) -> int | float:
    if _WHOLE.fullmatch(word) and len(word) < 300:  # as far as a float goes
        return int(word)
    return float(word)


def _same_number(first: int | float, second: int | float) -> bool:
    """Compares two numbers of which at least one has a fraction."""
    if first == second:
        return True
    try:
        first_float = float(first)
        second_float = float(second)
    except OverflowError:  # a whole number beyond what a float can be
        return False
    if math.isnan(first_float) and math.isnan(second_float):
        return True
    if not (math.isfinite(first_float) and math.isfinite(second_float)):
        return False
    if isinstance(first, int) or isinstance(second, int):
        return abs(first - second) <= _WHOLE_TOLERANCE
    return math.isclose(first, second, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
