"""Decides whether two final answers mean the same.

Numbers are compared exactly (numbers.py). The right side of an equation counts. A relation, several
answers, and arithmetic that is left to do (`12+34` for 46) equal no number. Words and dates are
compared as such (words.py). Anything else is compared as text, then by math-verify
(https://github.com/huggingface/Math-Verify) in a process of its own (comparer.py).
"""

from __future__ import annotations

import re

from pa_npu.rewards.comparer import equal_expressions
from pa_npu.rewards.numbers import in_base, plain_text, read_number, same_number, with_digits
from pa_npu.rewards.phrases import last_phrase
from pa_npu.rewards.words import equal_words, is_text

_COMPARED_CHARACTERS = 2000  # of an answer or reference that math-verify gets
_LABEL = re.compile(r"\(?([A-Z])\)\s*(?=\S)")  # (B) 5: a choice with its value
BOUND = r"at (?:the )?(?:very )?(?:least|most)"
SEVERAL_ELSEWHERE = (  # "or" and "and" of other languages, between several answers
    r"\b(?:oder|ou|o|или|або|lub|of|eller|veya|und|et|en|och|og|ve|dan|và|oraz|и)\b|或者?|または|혹은|[和与跟、と및와과]"
)
OTHER_AFTER = re.compile(
    r"[\s*$]*(?:(?:more|less|fewer|greater) than\b|or (?:more|less|fewer|greater|higher|lower|above|below|over|under)\b"
    rf"|and (?:above|below|up)\b|{BOUND}\b|(?:halves|thirds|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths)\b"
    r"|(?:is|was)(?:n't| (?:not|wrong|incorrect|false|unlikely|impossible|invalid)\b| too (?:large|small|big|high|low|many|few)\b)"
    rf"|(?:{SEVERAL_ELSEWHERE})[\s*$]*[-\d]|以上|以下|以内|左右|oder (?:mehr|weniger)|ou (?:plus|moins)|o (?:más|menos)"
    r"|или (?:более|менее|больше|меньше)"
    r"|can(?:not|'t| not) be\b|do(?:es)?(?:n't| not) (?:work|fit|hold|satisfy)\b)",
    re.IGNORECASE,
)
_ARITHMETIC = re.compile(
    r"(?:[\d\s.,+\-*/^(){}$×·÷]|\\(?:times|cdot|div)(?![a-z])|(?:plus|minus|times|divided "
    r"by|over)(?![a-z]))*"
)
_INEQUALITY = re.compile(
    r"[<>≤≥≠∈]|!=|\\(?:not|neq?|geq?|leq?|gt|lt|in|geqslant|leqslant|pm|mp)(?![a-z])|:=|±",
    re.IGNORECASE,
)
SEVERAL = re.compile(
    # 3 e 7, in Italian
    r",(?!\d{3}(?!\d))|;|\\\\|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|(?<=\d) (?:e|y|i|o|u) (?=[-\d])"
)
_EQUALS = re.compile(r"=|≈|≡|\\(?:approx|equiv)(?![a-z])")
_BASE_WORD = re.compile(
    r"(?<=[\dA-F])[\s$]*(?:(?:in |\()?base[ -]?\$?"
    r"(?P<base>\d{1,2}|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\b\)?|in (?P<name>binary|octal|hexadecimal)\b)"
)
_BASES = {"binary": "2", "octal": "8", "hexadecimal": "16"}
_VARIABLE = re.compile(r"\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*")
CHOICE = re.compile(r"\(?[A-J]\)?")


def equal_answers(answer: str, reference: str) -> bool:
    """Returns whether two final answers mean the same."""
    phrase = last_phrase(plain_text(answer[:_COMPARED_CHARACTERS]))
    if phrase is not None and (stated_answer := plain_text(answer)[phrase[1] :].strip()):
        answer = stated_answer
    label = _LABEL.match(plain_text(answer[:_COMPARED_CHARACTERS]))
    if label and not _LABEL.match(plain_text(reference)):
        if _normalised(reference) == label[1].lower():
            return True
        if CHOICE.fullmatch(reference):
            return False
        answer = plain_text(answer)[label.end() :]
    answer_base, reference_base = _in_base(answer), _in_base(reference)
    if answer_base or reference_base:
        return answer_base == reference_base
    expected = read_number(reference)
    if expected is None:
        return _equal_to_no_number(answer, reference)
    stated = _stated_value(answer)
    if stated is None:
        return False
    value = read_number(stated)
    if value is not None:
        return same_number(value, expected)
    # Arithmetic that is left to do ("12+34" for 46) is no answer, though math-verify would work it
    # out; nor are several answers.
    if (
        _ARITHMETIC.fullmatch(stated)
        or SEVERAL.search(stated)
        or OTHER_AFTER.search(plain_text(stated))
    ):
        return False
    return equal_expressions(f"\\boxed{{{stated}}}", reference)


def _in_base(text: str) -> tuple[str, int] | None:
    """Returns digits and base of the last side of an equation, if it has a base."""
    return in_base(with_base(plain_text(_EQUALS.split(text)[-1])))


def _equal_to_no_number(answer: str, reference: str) -> bool:
    """Returns whether an answer equals a reference in words or a formula."""
    if _normalised(answer) == _normalised(reference):
        return True
    if is_text(reference):
        return equal_words(answer, reference)
    if CHOICE.fullmatch(reference):
        return equal_words(answer.strip("() "), reference.strip("() "))
    brackets = _bracket(answer)
    reference_brackets = _bracket(reference)
    if brackets and reference_brackets and brackets != reference_brackets:
        return False  # {1, 2} is no pair
    return equal_expressions(f"\\boxed{{{answer}}}", reference)


def _bracket(text: str) -> str:
    """Returns the kind of a list of values by its brackets.

    It is "set" for braces, "tuple" for parentheses, and empty for anything else.
    """
    plain = plain_text(text).strip("$ ")
    if plain.startswith("\\{") and plain.endswith("\\}"):
        return "set"
    return "tuple" if re.fullmatch(r"\([^()\[\]]*,[^()\[\]]*\)", plain) else ""


def _stated_value(answer: str) -> str | None:
    """Returns the side of an equation that states the value.

    Returns the answer itself if it is no equation, and None if it does not state a single value.
    """
    if len(answer) > _COMPARED_CHARACTERS or _INEQUALITY.search(answer):
        return None
    first, *others = _EQUALS.split(answer)
    if not others:
        return answer
    *middle, last = others
    if any(SEVERAL.search(part) for part in middle):
        return None  # x = 5, y = 6
    if not middle and _VARIABLE.fullmatch(last) and read_number(first) is not None:
        return first  # 5 = x
    return last


def _normalised(text: str) -> str:
    """Returns a formula without spaces and case; a choice such as (B) without its brackets."""
    plain = re.sub(r"\s+", "", plain_text(text[:_COMPARED_CHARACTERS]).strip("$")).lower()
    return plain[1:-1] if re.fullmatch(r"\([a-z]\)", plain) else plain


def with_base(text: str) -> str:
    """Returns the text with `101 in base 2` written as `101_{2}`."""

    def subscript(match: re.Match[str]) -> str:
        base = match["base"] or _BASES[match["name"]]
        return f"_{{{with_digits(base)}}}"

    return _BASE_WORD.sub(subscript, text)
