"""Finds the expression in a text that may be its answer.

An expression is the whole formula around a number: no part of `2\\sqrt{3}`, `minus 7` or `3 1/2` is
an answer. A number that the words around it change ("not 5", "at least 5", "half of 10", "5 or
more", "5th") is not an answer either.
"""

from __future__ import annotations

import re

from pa_npu.rewards.equal_answers import BOUND, OTHER_AFTER, SEVERAL_ELSEWHERE
from pa_npu.rewards.numbers import DIGITS, TEXT, read_number

_WORDS = (
    "plus|minus|negative|times|divided by|over|squared|cubed|factorial|mod|percent|per "
    "cent|dozen|hundred|thousand|million|"
    "billion|trillion|tausend|millionen|milliarden?|mille|millions|milliards?|mil|millones|milhões|milioni|тысяч[аи]?|"
    "миллион(?:а|ов)?|миллиард(?:а|ов)?|and a half|and one "
    "half|pi|sqrt|log|ln|sin|cos|tan|exp|infinity"
)
_ATOM = (
    rf"\{{,\}}|{TEXT}\{{[^{{}}]{{0,100}}\}}|\\[dtc]?frac\d{{2}}|\\sqrt\d|\\[A-Za-z]+|\\[^\sA-Za-z]"
    rf"|(?<![A-Za-z])(?:{DIGITS})[A-Za-z]*|[½¼-¾⅐-⅞²³]"
    rf"|(?<![A-Za-z])(?:{_WORDS}|USD|EUR|GBP|INR|Rs\.?)(?![A-Za-z])"
    r"|(?<![A-Za-z])(?![aAI]\s+[^-+*/=^<>])[A-Za-z](?![A-Za-z0-9'\u2019])"
    r"|[-+*/^_=<>()\[\]{}|!%'$€£¥₹°√π∞±×·÷≤≥≠≈~\u2212\u2013\u2044]"
    r"|(?<=\d)[百千万萬亿億만억]|(?<=\d):(?=\d)|(?<=\d ):(?= \d)|(?:mm|cm|dm|km|in|ft|yd|mi)\s?\^\s?\{?[23]\}?"
)
EXPRESSION = re.compile(
    rf"(?:{_ATOM})(?:(?:[ \t]|[,;](?=[ \d\\])|(?:and|or)(?![A-Za-z]))*(?:{_ATOM}))*"
)
VALUE = re.compile(r"[\d½¼-¾⅐-⅞]")
_OTHER_BEFORE = re.compile(
    r"(?:\b(?:not|never|nor|cannot be|than|half|twice|double|triple|out of|\d of)|n't|(?:root|square|cube|log|logarithm|power"
    r"|factorial|reciprocal|opposite|inverse|half|third|quarter|percent|%|\w+th|sine|cosine|tangent) of"
    rf"|\b(?:{BOUND}|under|over|above|below|beyond|exceed(?:s|ed|ing)?|up to|within|as (?:many|much|few|little) as)"
    r"|\b(?:no longer|anything but|far from|instead of|except(?: for)?|without|neither)"
    r"|(?:not|n't|never) (?:be|equal|equal to|exactly))(?: the| a| an)?[\s*$]*$"
    r"|(?:不是|并非|不等于|以外|分之|ではなく|아니라|(?:至少|至多|最多|大于|小于|超过|不到|不足)(?:是|为|等于)?"
    r"|\b(?:nicht|kein|mindestens|höchstens|weniger als|mehr als|über|unter|keineswegs|pas|au moins|au plus|plus de|moins de"
    r"|no es|al menos|como (?:mucho|máximo|mínimo)|más de|menos de|não é|pelo menos|no máximo|mais de|non è|almeno|più di|meno di"
    r"|не|не менее|не более|более|менее|больше|меньше|минимум|максимум)"
    rf"|\d[\s*$]*(?:{SEVERAL_ELSEWHERE}))[\s*$]*$",
    re.IGNORECASE,
)
DENIED = re.compile(
    r"(?:(?:\bnot|n't|\bnever) (?:think|thought|believed?|sa(?:y|id)|claim(?:ed)?|mean|expect|true|certain|the case)"
    r"|(?<!\bno )(?<!\bwithout )\bdoubt|\b(?:false|unlikely|impossible|(?:wrong|incorrect) to (?:say|claim|think)"
    r"|(?:wrong|incorrect|mistaken)(?= (?:answer|result|value|total|sum|number)\b)))"
    r"(?: that| if| whether)?(?: (?:the|for|its?|this|that|my|our|final|correct|answer|result|value|total|sum|number|is|was|to"
    r"|would|could|be|equals?))*[\s*$]*$",
    re.IGNORECASE,
)
_UNIT_BEHIND = re.compile(
    r"[\s$*]*((?:(?:square|cubic|sq|cu)\.? )?[A-Za-z]+(?: per [A-Za-z]+| ?/ "
    r"?[A-Za-z]+)?(?:\^[23]|[²³])?)"
)
_LONGEST_UNIT = 40
_PERCENT_OF = re.compile(r"[^%\n]{0,40}(?:\\?%|percent)[\s*$]*of[\s$]+\d", re.IGNORECASE)
_LONGEST_OF = 12
_ORDINAL = re.compile(r"\d(?:st|nd|rd|th)$")
# the 5th floor says which
_NOUN = re.compile(r"\s+(?!(?:of|in|and|or|from|to|at|on|by)\b)[A-Za-z]")
_OPERATOR = re.compile(r"[/^×·÷]|(?:times|divided by|over|mod)(?![a-z])")
_REMARK = re.compile(r"(?<=[\w%}$])\s+\((?!\s*[-+]?\d+\s*\)\s*[=^*/])")
_NEXT_STATEMENT = re.compile(r"(?:,|;|\band\b)\s+(?=[\d\s.,+\-*/()$×·÷]+=[^=]+$)")


def expression_at(text: str, position: int) -> str | None:
    """Returns the expression that begins at `position`, or None if there is none."""
    match = EXPRESSION.match(text, position)
    if not match or not VALUE.search(match[0]) or _is_other(text, match):
        return None
    return _with_unit(_trimmed(match[0]), match[0], text[match.end() : match.end() + _LONGEST_UNIT])


def _with_unit(trimmed: str | None, expression: str, behind: str) -> str | None:
    """Returns the trimmed expression with the unit of measurement behind it: `120 minutes`."""
    unit = _UNIT_BEHIND.match(behind)
    if trimmed is None or unit is None or not expression.rstrip(" $").endswith(trimmed.strip("$")):
        return trimmed
    measured = f"{trimmed.strip('$')} {unit[1]}"
    number = read_number(measured)
    return measured if number is not None and number.unit is not None else trimmed


def _is_other(text: str, expression: re.Match[str]) -> bool:
    """Returns whether an expression is not the answer, by the words around it or its own form."""
    if _ORDINAL.search(expression[0]) and not _NOUN.match(text, expression.end()):
        return True
    behind = text[expression.start() : expression.end() + _LONGEST_OF]
    if _PERCENT_OF.match(behind):  # 50% of 8
        return True
    if _OPERATOR.match(expression[0]):  # the rest of an expression in words
        return True
    before = text[max(0, expression.start() - 200) : expression.start()]
    return bool(OTHER_AFTER.match(text, expression.end()) or DENIED.search(before))


def last_expression(text: str) -> str | None:
    """Returns the last expression with a number.

    Returns None where the words around it say that it is not the answer.
    """
    match = None
    for candidate in EXPRESSION.finditer(text):
        if VALUE.search(candidate[0]):
            match = candidate
    if match is None or _is_other(text, match):
        return None
    before = text[: match.start()]
    expression = match[0]
    if re.match(r"[-*+\u2013]\s", expression) and not before.rpartition("\n")[2].strip():
        expression = expression[1:]  # a list's bullet
    elif re.match(r"\+|[-*]\s", expression):
        return None  # the rest of an expression in words
    elif _OTHER_BEFORE.search(before[-60:]):
        # Of "6, not 5" the 6 counts.
        parts = re.split(r",? (?:and |but )?(?:not|rather than|instead of)[\s*$]*$", before[-200:])
        if len(parts) > 1 and EXPRESSION.search(parts[0][-1:]):
            return last_expression(parts[0])
        return None
    return _with_unit(
        _trimmed(expression), expression, text[match.end() : match.end() + _LONGEST_UNIT]
    )


def _trimmed(expression: str) -> str | None:
    """Returns an expression without unmatched brackets, remarks and earlier equations.

    Unmatched brackets belong to the text around the expression. A remark stands in brackets behind
    it. Of several equations only the last one is kept.
    """
    start = 0
    open_at: list[int] = []
    for position, character in enumerate(expression):
        if character in "([{":
            open_at.append(position)
        elif character in ")]}":
            if open_at:
                open_at.pop()
            else:
                start = position + 1
    end = len(expression)
    if open_at:
        if VALUE.search(expression, start, open_at[0]):
            end = open_at[0]
        else:
            start = open_at[-1] + 1
    expression = expression[start:end]
    if remark := _REMARK.search(expression):
        expression = expression[: remark.start()]
    expression = _NEXT_STATEMENT.split(expression)[-1]
    # A "!" at the end is no factorial but the end of a sentence.
    return expression.strip(" \t,;*~").rstrip("-!") or None
