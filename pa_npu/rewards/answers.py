r"""Final answers: found in a response, and compared with the reference.

Where the answer is, first that applies:

1. behind the last `####` (GSM8K): the last box there, else the rest of the line. A line without a digit is a heading when
   the reference is a number, and the answer is looked for below it.
2. the content of the last `\boxed{...}` or `\fbox{...}` that is closed and not empty.
3. for a reference that is a number: what follows the last "answer is" or "answer:" if that is a number, else the last
   number, with its sign, fraction, percent sign and unit; inside $...$, \(...\) or \[...\] it is the whole formula.
4. for any other reference: whatever math-verify finds in the response (https://github.com/huggingface/Math-Verify).

What it is worth, when the reference is a number (numbers.py says what is read as one):

- Numbers are compared exactly, with any number of digits; a decimal stands for a fraction only if no decimal can be that
  fraction and it is rounded to six digits or more. A percentage equals its number and a hundredth of it.
- Of an equation (`x = 46`, `12+34 = 46`) the right-hand side counts. Relations (`x >= 5`, `x != 5`) and several answers
  (`x = 5, y = 6`, `5 or 6`) equal no number.
- The task left undone (`12+34` for 46) is no answer. Anything else (`2\sqrt{529}`) goes to math-verify.

Any other reference is compared as text without spaces, case and decoration, then by math-verify. Without math-verify
installed, what would go to it is not equal.
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
from pa_npu.rewards.numbers import CURRENCY, DIGITS, plain_text, read_number, same_number

_MOST_BOXES = 4  # how many \boxed from the end are tried, which bounds the time for a response full of open ones
_SEARCHED_CHARACTERS = 10_000  # at the end of a response, for an answer without a mark
_FORMULA_CHARACTERS = 300
_COMPARED_CHARACTERS = 2000  # of an answer or reference that math-verify gets
_COMPARED_NESTING = 40
_PARSE_TIMEOUT_S = 1  # per expression; math-verify takes whole seconds

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$.,;]+)|\\boxed(\d+)")
_MINUSES = "-\u2212\u2013"
_TOKEN = re.compile(
    rf"(?:(?<![\w.)\]}}])[+{_MINUSES}])?(?:{CURRENCY}\s?[+{_MINUSES}]?)?"
    r"(?:\\[dtc]?frac\s*(?:\{[^{}]{1,50}\}|\d)\s*(?:\{[^{}]{1,50}\}|\d)"
    rf"|(?<![\w.^])(?<!\^\{{)(?:{DIGITS})(?:\s*/\s*\d{{1,300}}(?!\w|\.\d))?)"
    r"(?:\s?\\?%|\^\{?\\circ\}?|°|\^\{[^{}]{1,20}\}|\^\d{1,3}|\s?\\(?:pi|sqrt)(?![a-z])|[π√∞]|[A-Za-z]+)?"
)
_PHRASE = re.compile(r"answer\s*(?:is\s*:?|:|=)[\s*_]*(?:\\\(|\\\[|\$(?=[^$\n]{1,300}\$))?\s*", re.IGNORECASE)
_REMARK = re.compile(r"\s+\(|\s*(?:,|;|\s-|\u2013|\u2014)\s+[A-Za-z]{2}")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_ARITHMETIC = re.compile(r"(?:[\d\s.,+\-*/^(){}$×·÷]|\\(?:times|cdot|div)(?![a-z]))*")
_INEQUALITY = re.compile(
    r"[<>≤≥≠∈]|!=|\\(?:not|neq?|geq?|leq?|gt|lt|in|geqslant|leqslant|pm|mp)(?![a-z])|:=|±", re.IGNORECASE
)
_SEVERAL = re.compile(r",(?!\d{3}(?!\d))|;|\\\\|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
_EQUALS = re.compile(r"=|≈|\\approx(?![a-z])")
_VARIABLE = re.compile(r"\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*")


def extract_answer(response: str, reference: str) -> str | None:
    """The final answer of a response as text, None without one. reference: decides if the last number may count."""
    numeric = read_number(reference) is not None
    if ANSWER_MARK in response:
        below = response.rpartition(ANSWER_MARK)[2]
        line = below.strip().partition("\n")[0].strip()
        boxed = last_boxed(below)
        if boxed is not None:
            return boxed
        if line and not numeric:
            return line
        if any(map(str.isdigit, line)):
            return _number_of_line(line)
        if line:
            return _last_number(below) or line
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    return _last_number(response) if numeric else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} that is complete and not empty, braces balanced."""
    boxes = list(_BOX.finditer(text))[-_MOST_BOXES:]
    for box in reversed(boxes):
        depth = 0
        for position in range(box.end(), len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                content = text[box.end() + 1 : position].strip()
                if content:
                    return content
                break
    if boxes:
        return None
    bare = list(_BARE_BOX.finditer(text))
    return (bare[-1][1] or bare[-1][2]) if bare else None


def _number_of_line(line: str) -> str:
    """The line, without a remark around its number: `46, because ...`, `46 (12+34)`, `The answer is 46`."""
    token = _TOKEN.match(line)
    if token and _REMARK.match(line, token.end()):
        return token[0]
    return (_last_number(line) if _PHRASE.search(line) else None) or line


def _last_number(text: str) -> str | None:
    """The number after the last "answer is", else the last one; the formula around it where it stands in one."""
    text = text[-_SEARCHED_CHARACTERS:]
    for phrase in reversed(list(_PHRASE.finditer(text))):
        token = _TOKEN.match(text, phrase.end())
        if token and not re.match(r"\s*(?:[+\-*/^=×÷?]|or\b)", text[token.end() :]):
            return _formula_around(text, token)
        break
    tokens = list(_TOKEN.finditer(text))
    return _formula_around(text, tokens[-1]) if tokens else None


def _formula_around(text: str, token: re.Match[str]) -> str:
    """What stands between the math delimiters around a number; the number itself where there are none."""
    before = text[max(0, token.start() - _FORMULA_CHARACTERS) : token.start()]
    after = text[token.end() : token.end() + _FORMULA_CHARACTERS]
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        left, right = before.rpartition(opening), after.partition(closing)
        if not left[1] or not right[1] or (opening != "$" and closing in left[2]):
            continue
        formula = left[2] + token[0] + right[0]
        if opening == "$" and ("\n" in formula or _PROSE.search(formula)):
            continue  # $5 and then $7: amounts, not a formula
        return formula
    return token[0]


def parse_number(text: str) -> Fraction | None:
    """An integer, decimal or fraction with common decoration ($1,234.50, 50%, 18 dollars); None for anything else."""
    number = read_number(text)
    return None if number is None else number.value


def is_correct(response: str, reference: str) -> bool:
    """Whether the response's final answer equals the reference."""
    reference = last_boxed(reference) or reference.rpartition(ANSWER_MARK)[2].strip()
    answer = extract_answer(response, reference)
    if answer is None:
        # No mark, not a number: math-verify searches the response for expressions by itself.
        return _equal_expressions(response, reference)
    return equal_answers(answer, reference)


def equal_answers(answer: str, reference: str) -> bool:
    """Whether two final answers mean the same."""
    expected = read_number(reference)
    if expected is None:
        return _normalised(answer) == _normalised(reference) or _equal_expressions(f"\\boxed{{{answer}}}", reference)
    stated = _stated_value(answer)
    if stated is None:
        return False
    value = read_number(stated)
    if value is not None:
        return same_number(value, expected)
    # The task left undone ("12+34" for 46) is no answer, though math-verify would work it out; nor are several.
    if _ARITHMETIC.fullmatch(stated) or _SEVERAL.search(stated):
        return False
    return _equal_expressions(f"\\boxed{{{stated}}}", reference)


def _stated_value(answer: str) -> str | None:
    """The side of an equation that says the value; the answer itself where it is none; None where it says no one value."""
    if len(answer) > _COMPARED_CHARACTERS or _INEQUALITY.search(answer):
        return None
    first, *others = _EQUALS.split(answer)
    if not others:
        return answer
    *middle, last = others
    if any(_SEVERAL.search(part) for part in middle):
        return None  # x = 5, y = 6
    if not middle and _VARIABLE.fullmatch(last) and read_number(first) is not None:
        return first  # 5 = x
    return last


def _normalised(text: str) -> str:
    plain = re.sub(r"\s+", "", plain_text(text[:_COMPARED_CHARACTERS]).strip("$")).lower()
    return plain[1:-1] if re.fullmatch(r"\([a-z]\)", plain) else plain  # (B), a choice


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
    if not _math_verify_available():
        return False
    # its parser is recursive, and its time limit cannot interrupt every step of it
    response = response[-_SEARCHED_CHARACTERS:]
    if _nesting(response) > _COMPARED_NESTING:
        return False
    expected = _parsed(f"\\boxed{{{reference}}}")
    if not expected:
        return False
    import math_verify

    return bool(math_verify.verify(expected, _parsed(response), timeout_seconds=_timeout_s()))


def _nesting(text: str) -> int:
    depth = most = 0
    for character in text:
        if character in "({[":
            depth += 1
            most = max(most, depth)
        elif character in ")}]":
            depth = max(0, depth - 1)
    return most


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback per expression it cannot read
    return math_verify.parse(text, parsing_timeout=_timeout_s())


def _timeout_s() -> int | None:
    """math-verify keeps its time limits with signals, which only a main thread receives; elsewhere it has none."""
    return _PARSE_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
