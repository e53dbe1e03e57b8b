r"""Final answers: found in a response, and compared with the reference.

An answer is what follows the last `####` (GSM8K), else the content of the last `\boxed{}`, else, for a numeric
reference, the last number. Numbers are compared exactly as fractions. Everything else goes to math-verify where it is
installed (https://github.com/huggingface/Math-Verify), and is compared as normalised text where it is not.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pa_npu.data.records import ANSWER_MARK

# Digits and exponents are bounded, so that "1e999999999" costs nothing.
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,300})(?:\.\d{1,300})?(?:[eE][-+]?\d{1,2})?|\.\d{1,300}"
_CURRENCY = r"(?:\\?[$€£¥])?"
_PLAIN_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*{_CURRENCY}\s*(?:(?P<number>{_NUMBER})(?:\s*/\s*(?P<divisor>\d{{1,300}}))?"
    r"|\\[dt]?frac\s*\{\s*(?P<upper>\d{1,300})\s*\}\s*\{\s*(?P<lower>\d{1,300})\s*\})"
    r"\s*(?:\\?%|\\?[$€£¥]|\\(?:text|mathrm)\s*\{[^{}]*\}|(?<=\s)[A-Za-z][A-Za-z .]*)?"  # 50%, 18$, 18 dollars
)
_LAST_NUMBER = re.compile(rf"(?:(?<![\w.)])[-+])?(?<![\w.])(?:{_NUMBER})(?:\s*/\s*\d{{1,300}}(?![\w.]))?")
_LATEX_SPACE = re.compile(r"\\[,;:! ]|\\left(?![a-z])|\\right(?![a-z])")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}")
_MARKDOWN = "*_` \t"  # around an answer: **42**
_MOST_BOXES = 4  # how many \boxed from the end are tried, which bounds the time for a response full of open ones
_ARITHMETIC = re.compile(r"(?:[\d\s.,+\-*/^(){}$×·÷]|\\(?:times|cdot|div)(?![a-z]))*")
_TOLERANCE = Fraction(1, 10**6)  # only between a decimal and something else, e.g. 0.333333 and 1/3
_PARSE_TIMEOUT_S = 1  # per expression; math-verify takes whole seconds


def extract_answer(response: str, reference: str) -> str | None:
    """The final answer of a response as text, None without one. reference: decides if the last number may count."""
    line = response.rpartition(ANSWER_MARK)[2].strip().partition("\n")[0].strip() if ANSWER_MARK in response else ""
    if line:
        return last_boxed(line) or line
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    if parse_number(reference) is None:
        return None
    numbers = _LAST_NUMBER.findall(response)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces balanced."""
    end = len(text)
    for _ in range(_MOST_BOXES):
        start = text.rfind("\\boxed{", 0, end)
        if start < 0:
            return None
        depth = 0
        for position in range(start + len("\\boxed"), len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : position].strip()
        end = start
    return None


def parse_number(text: str) -> Fraction | None:
    """An integer, decimal or fraction with common decoration ($1,234.50, 50%, 18 dollars); None for anything else."""
    plain = _LATEX_SPACE.sub("", text).strip(_MARKDOWN).rstrip(".").strip("$")
    match = _PLAIN_NUMBER.fullmatch(plain.strip())
    if match is None:
        return None
    upper = Fraction((match["number"] or match["upper"]).replace(",", ""))
    lower = int(match["divisor"] or match["lower"] or 1)
    if lower == 0:
        return None
    return -upper / lower if match["sign"] == "-" else upper / lower


def is_correct(response: str, reference: str) -> bool:
    """Whether the response's final answer equals the reference."""
    reference = last_boxed(reference) or reference.rpartition(ANSWER_MARK)[2].strip()
    answer = extract_answer(response, reference)
    if answer is None:
        # No mark, not a number: math-verify searches the response for expressions by itself.
        return _math_verify_available() and _equal_expressions(response, reference)
    return equal_answers(answer, reference)


def equal_answers(answer: str, reference: str) -> bool:
    """Whether two final answers mean the same. Of an equation (`x = 46`) the right-hand side is meant."""
    expected = parse_number(reference)
    if expected is None:
        if _normalised(answer) == _normalised(reference):
            return True
        return _math_verify_available() and _equal_expressions(f"\\boxed{{{answer}}}", reference)
    answer = answer.rpartition("=")[2]
    value = parse_number(answer)
    if value is None:
        # The task left undone ("12+34" for 46) is no answer, though math-verify would work it out.
        undone = _ARITHMETIC.fullmatch(answer) is not None
        return not undone and _math_verify_available() and _equal_expressions(f"\\boxed{{{answer}}}", reference)
    if value.denominator == 1 and expected.denominator == 1:
        return value == expected
    return abs(value - expected) <= _TOLERANCE * max(Fraction(1), abs(expected))


def _normalised(text: str) -> str:
    plain = _LATEX_TEXT.sub(r"\1", _LATEX_SPACE.sub("", text)).strip(_MARKDOWN).rstrip(".").strip("$")
    return re.sub(r"\s+", "", plain).lower()


def preload() -> str:
    """Imports the comparison's back end, which takes seconds, and says which it is: math-verify or numeric."""
    if not _math_verify_available():
        return "numeric"
    equal_answers("x+1", "1+x")
    return "math-verify"


@lru_cache(maxsize=1)
def _math_verify_available() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _equal_expressions(response: str, reference: str) -> bool:
    expected = _parsed(f"\\boxed{{{reference}}}")
    if not expected:
        return False
    import math_verify

    return bool(math_verify.verify(expected, _parsed(response), timeout_seconds=_timeout_s()))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback per expression it cannot read
    return math_verify.parse(text, parsing_timeout=_timeout_s())


def _timeout_s() -> int | None:
    """math-verify keeps its time limits with signals, which only a main thread receives; elsewhere it has none."""
    return _PARSE_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
