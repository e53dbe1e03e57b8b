r"""Final answers: found in a response, and compared with the reference.

The thinking block is no part of a response (`<think>...</think>`; one that never closes leaves nothing), and of the last
`<answer>...</answer>` the content counts. The answer is, first that applies:

1. behind the last `####` (GSM8K): the last box there, else the expression in the rest of the line. A line without a digit is a
   heading when the reference is a number, and the answer is looked for below it.
2. the content of the last `\boxed{...}` or `\fbox{...}` that is closed and not empty.
3. the expression behind the last "answer is" or "answer:", else the last one in that sentence, else in the response. An
   expression is all of the formula around a number: of `2\sqrt{3}`, `minus 7` and `3 1/2` no part is the answer. A number
   that the words around it turn into another ("not 5", "at least 5", "half of 10", "5 or more", "5th") is none. Without any digit
   a number in words counts, behind "answer is" or as all that a sentence says.
4. for a reference that is no number: also the words behind "answer is", or what math-verify finds in the response.

A number is compared exactly (numbers.py), the right-hand side of an equation counts, and a relation, several answers or the task
left undone (`12+34` for 46) equal no number. Anything else is compared as text, then by math-verify
(https://github.com/huggingface/Math-Verify).
"""

from __future__ import annotations

import contextlib
import logging
import re
from functools import lru_cache
from typing import Any

from pa_npu.data.limits import TimeLimitReached, time_limit
from pa_npu.data.records import ANSWER_MARK
from pa_npu.rewards.numbers import DIGITS, TEXT, in_base, is_in_words, plain_text, read_number, same_number, with_digits

_MOST_BOXES = 4  # how many \boxed from the end are tried, which bounds the time for a response full of open ones
_SEARCHED_CHARACTERS = 10_000  # at the end of a response, for an answer without a mark
_COMPARED_CHARACTERS = 2000  # of an answer or reference that math-verify gets
_COMPARED_S = 1.0  # of one judgement by math-verify

_THOUGHT = re.compile(r"<(/?)think(?:ing)?>")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$.,;]+)|\\boxed(\d+)")
_LABEL = re.compile(r"\(?([A-Z])\)\s*(?=\S)")  # (B) 5: a choice with its value
_PHRASE = re.compile(
    r"answer\s*(?:is\s*:?|:|=|[-\u2013\u2014](?=\s))[\s*_]*(?:(?:about|approximately|exactly|simply|just|equal to)\s+)?",
    re.IGNORECASE,
)
_WORDS = (
    "plus|minus|negative|times|divided by|over|squared|cubed|factorial|mod|percent|per cent|dozen|hundred|thousand|million|"
    "billion|trillion|and a half|and one half|pi|sqrt|log|ln|sin|cos|tan|exp|infinity"
)
_ATOM = (
    rf"\{{,\}}|{TEXT}\{{[^{{}}]{{0,100}}\}}|\\[A-Za-z]+|\\[^\sA-Za-z]|(?<![A-Za-z])(?:{DIGITS})[A-Za-z]*|[½¼-¾⅐-⅞²³]"
    rf"|(?<![A-Za-z])(?:{_WORDS}|USD|EUR|GBP|INR|Rs\.?)(?![A-Za-z])"
    r"|(?<![A-Za-z])(?![aAI]\s+[^-+*/=^<>])[A-Za-z](?![A-Za-z0-9'\u2019])"
    r"|[-+*/^_=<>()\[\]{}|!%'$€£¥₹°√π∞±×·÷≤≥≠≈~\u2212\u2013\u2044]"
    r"|(?<=\d):(?=\d)|(?<=\d ):(?= \d)|(?:mm|cm|dm|km|in|ft|yd|mi)\s?\^\s?\{?[23]\}?"
)
_EXPRESSION = re.compile(rf"(?:{_ATOM})(?:(?:[ \t]|[,;](?=[ \d\\])|(?:and|or)(?![A-Za-z]))*(?:{_ATOM}))*")
_VALUE = re.compile(r"[\d½¼-¾⅐-⅞]")
_BOUND = r"at (?:the )?(?:very )?(?:least|most)"
_OTHER_BEFORE = re.compile(
    r"(?:\b(?:not|never|nor|cannot be|than|half|twice|double|triple|out of|\d of)|n't|(?:root|square|cube|log|logarithm|power"
    r"|factorial|reciprocal|opposite|inverse|half|third|quarter|percent|%|\w+th|sine|cosine|tangent) of"
    rf"|\b(?:{_BOUND}|under|over|above|below|beyond|exceed(?:s|ed|ing)?|up to|within|as (?:many|much|few|little) as)"
    r"|\b(?:no longer|anything but|far from|instead of|except(?: for)?|without|neither)"
    r"|(?:not|n't|never) (?:be|equal|equal to|exactly))(?: the| a| an)?[\s*$]*$",
    re.IGNORECASE,
)
_OTHER_AFTER = re.compile(
    r"[\s*$]*(?:(?:more|less|fewer|greater) than\b|or (?:more|less|fewer|greater|higher|lower|above|below|over|under)\b"
    rf"|and (?:above|below|up)\b|{_BOUND}\b|(?:halves|thirds|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths)\b"
    r"|(?:is|was)(?:n't| (?:not|wrong|incorrect|false|unlikely|impossible|invalid)\b| too (?:large|small|big|high|low|many|few)\b)"
    r"|can(?:not|'t| not) be\b|do(?:es)?(?:n't| not) (?:work|fit|hold|satisfy)\b)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"(?:(?:\bnot|n't|\bnever) (?:think|thought|believed?|sa(?:y|id)|claim(?:ed)?|mean|expect|true|certain|the case)"
    r"|(?<!\bno )(?<!\bwithout )\bdoubt|\b(?:false|unlikely|impossible|(?:wrong|incorrect) to (?:say|claim|think)))"
    r"(?: that| if| whether)?(?: (?:the|for|its?|this|that|my|our|final|correct|answer|result|value|total|sum|number|is|was|to"
    r"|would|could|be|equals?))*[\s*$]*$",
    re.IGNORECASE,
)
_ORDINAL = re.compile(r"\d(?:st|nd|rd|th)$")
_NOUN = re.compile(r"\s+(?!(?:of|in|and|or|from|to|at|on|by)\b)[A-Za-z]")  # the 5th floor says which
_OPERATOR = re.compile(r"[/^×·÷]|(?:times|divided by|over|mod)(?![a-z])")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n|;\s")
_ASIDE = re.compile(r"(?<=\S)\s+\((?=[^()]{0,200}[A-Za-z]{3})[^()]{1,200}\)(?=[.!*\s]*$)")
_REMARK = re.compile(r"(?<=[\w%}$])\s+\((?!\s*[-+]?\d+\s*\)\s*[=^*/])")
_ARITHMETIC = re.compile(
    r"(?:[\d\s.,+\-*/^(){}$×·÷]|\\(?:times|cdot|div)(?![a-z])|(?:plus|minus|times|divided by|over)(?![a-z]))*"
)
_INEQUALITY = re.compile(
    r"[<>≤≥≠∈]|!=|\\(?:not|neq?|geq?|leq?|gt|lt|in|geqslant|leqslant|pm|mp)(?![a-z])|:=|±", re.IGNORECASE
)
_SEVERAL = re.compile(r",(?!\d{3}(?!\d))|;|\\\\|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
_NEXT_STATEMENT = re.compile(r"(?:,|;|\band\b)\s+(?=[\d\s.,+\-*/()$×·÷]+=[^=]+$)")
_EQUALS = re.compile(r"=|≈|≡|\\(?:approx|equiv)(?![a-z])")
_BASE_WORD = re.compile(
    r"(?<=[\dA-F])[\s$]*(?:(?:in |\()?base[ -]?\$?"
    r"(?P<base>\d{1,2}|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\b\)?|in (?P<name>binary|octal|hexadecimal)\b)"
)
_BASES = {"binary": "2", "octal": "8", "hexadecimal": "16"}
_VARIABLE = re.compile(r"\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*")
_MARKED_LETTER = re.compile(
    r"(?:####|\b(?:answer|choice|option)\b(?:\s+is)?\s*:?)[\s*_:]*\(?([A-Za-z])(?![A-Za-z0-9'])(?!\s+[a-z])",
    re.IGNORECASE,
)
_LETTER_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_BOXED_LETTER = re.compile(r"\s*\(?([A-Za-z])(?![A-Za-z0-9])")
_LETTER_ALONE = re.compile(r"^[\s*_$(\[]*([A-Z])[\s*_$)\].:]*$")


def final_text(response: str) -> str:
    """Returns the part of a response that counts: nothing of its thinking block, and only the inside of an <answer>."""
    for tag in list(_THOUGHT.finditer(response))[-1:]:
        response = response[tag.end() :] if tag[1] else ""
    tagged = _TAGGED.findall(response[-_SEARCHED_CHARACTERS:])
    return str(tagged[-1]) if tagged else response


def _with_base(text: str) -> str:
    """The text with `101 in base 2` as `101_{2}`."""
    return _BASE_WORD.sub(lambda found: f"_{{{with_digits(found['base'] or _BASES[found['name']])}}}", text)


def extract_answer(response: str, reference: str) -> str | None:
    """The final answer of a response as text, None without one. reference: decides if any number may count."""
    response = _with_base(final_text(response))
    numeric = read_number(reference) is not None
    if ANSWER_MARK in response:
        below = response.rpartition(ANSWER_MARK)[2]
        line = below.strip().partition("\n")[0].strip()
        boxed = last_boxed(below)
        if boxed is not None:
            return boxed
        if line and not numeric:
            return line
        if _VALUE.search(line):
            return _of_line(line)
        if line:
            return _stated(below, numeric) or line
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    return _stated(response, numeric)


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


def chosen_letter(response: str, letters: str) -> str | None:
    r"""The letter that a response to a multiple choice ends with; None where the response does not commit itself.

    The last \boxed{C}; else the last #### C, "answer is (C)" or "Answer: C"; else a last line that is nothing but the letter.
    Letters in running text are not answers: "A good start" is none.
    """
    text = final_text(response)[-_SEARCHED_CHARACTERS:]
    boxed = last_boxed(text)
    if boxed is not None:
        found = _BOXED_LETTER.match(_LETTER_DECORATION.sub(r"\1", boxed))
        letter = found[1].upper() if found else None
        return letter if letter is not None and letter in letters else None
    marked = [found[1].upper() for found in _MARKED_LETTER.finditer(text) if found[1].upper() in letters]
    if marked:
        return marked[-1]
    lines = [line for line in text.splitlines() if line.strip()]
    alone = _LETTER_ALONE.match(lines[-1]) if lines else None
    return alone[1] if alone and alone[1] in letters else None


def _of_line(line: str) -> str:
    """The answer in a marked line: `46, because ...`, `46 (12+34)`, `The answer is 46`."""
    if not _PHRASE.search(line) and (first := _expression_at(line, 0)):
        return first
    return _stated(line, True) or line


def _stated(text: str, numeric: bool) -> str | None:
    """The expression behind the last "answer is", else the last one in its sentence, else in the text."""
    text = text[-_SEARCHED_CHARACTERS:]
    for phrase in list(_PHRASE.finditer(text))[-1:]:
        if (found := _expression_at(text, phrase.end())) is not None:
            return found
        end = _SENTENCE_END.search(text, phrase.end())
        sentence = text[phrase.end() : end.start() if end else len(text)]
        if _VALUE.search(sentence):
            return _last_expression(text[: phrase.end() + len(sentence)])
        if not numeric or read_number(sentence) is not None:  # in words
            return sentence.strip() or None
    if numeric and not _VALUE.search(text):
        last = next((part for part in reversed(_SENTENCE_END.split(text)) if part.strip(" *.!")), "")
        words = re.split(r"\b(?:is|are|equals)\s", last)[-1].strip(" *.!")
        return words if is_in_words(words) else None
    aside = _ASIDE.search(text)
    stands_alone = aside and _VALUE.search(text[: aside.start()].rpartition("\n")[2])
    return _last_expression(text[: aside.start()] if aside and stands_alone else text)


def _expression_at(text: str, position: int) -> str | None:
    """The expression that begins there."""
    found = _EXPRESSION.match(text, position)
    return None if not found or not _VALUE.search(found[0]) or _is_other(text, found) else _trimmed(found[0])


def _is_other(text: str, found: re.Match[str]) -> bool:
    """Whether the words around an expression, or its own form, say that it is not the answer."""
    if _ORDINAL.search(found[0]) and not _NOUN.match(text, found.end()):
        return True
    if _OPERATOR.match(found[0]):  # the rest of an expression in words
        return True
    before = text[max(0, found.start() - 200) : found.start()]
    return bool(_OTHER_AFTER.match(text, found.end()) or _DENIED.search(before))


def _last_expression(text: str) -> str | None:
    """The last expression with a number; None where the words around it say that it is not the answer."""
    found = next((e for e in reversed(list(_EXPRESSION.finditer(text))) if _VALUE.search(e[0])), None)
    if found is None or _is_other(text, found):
        return None
    before = text[: found.start()]
    expression = found[0]
    if re.match(r"[-*+\u2013]\s", expression) and not before.rpartition("\n")[2].strip():
        expression = expression[1:]  # a list's bullet
    elif re.match(r"\+|[-*]\s", expression):
        return None  # the rest of an expression in words
    elif _OTHER_BEFORE.search(before[-60:]):
        *earlier, _ = re.split(r",? (?:and |but )?(?:not|rather than|instead of)[\s*$]*$", before[-200:]) or [""]
        return _last_expression(earlier[0]) if earlier and _EXPRESSION.search(earlier[0][-1:]) else None  # 6, not 5
    return _trimmed(expression)


def _trimmed(expression: str) -> str | None:
    """Without brackets of something around it, a remark in brackets, and an equation before the last of several."""
    start, open_at = 0, []
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
        if _VALUE.search(expression, start, open_at[0]):
            end = open_at[0]
        else:
            start = open_at[-1] + 1
    expression = expression[start:end]
    if remark := _REMARK.search(expression):
        expression = expression[: remark.start()]
    expression = _NEXT_STATEMENT.split(expression)[-1]
    return expression.strip(" \t,;*~").rstrip("-!") or None  # no factorial: the end of a sentence


def is_correct(response: str, reference: str) -> bool:
    """Whether the response's final answer equals the reference."""
    reference = last_boxed(reference) or reference.rpartition(ANSWER_MARK)[2].strip()
    answer = extract_answer(response, reference)
    if answer is not None and equal_answers(answer, reference):
        return True
    if read_number(reference) is not None or in_base(_with_base(reference)) or last_boxed(response) is not None:
        return False
    # No mark, not a number: math-verify searches the response for expressions by itself.
    return _equal_expressions(final_text(response)[-_SEARCHED_CHARACTERS:], reference)


def equal_answers(answer: str, reference: str) -> bool:
    """Whether two final answers mean the same."""
    label = _LABEL.match(plain_text(answer[:_COMPARED_CHARACTERS]))
    if label and not _LABEL.match(plain_text(reference)):
        if _normalised(reference) == label[1].lower():
            return True
        answer = plain_text(answer)[label.end() :]
    bases = [in_base(_with_base(plain_text(_EQUALS.split(text)[-1]))) for text in (answer, reference)]
    if any(bases):
        return bases[0] == bases[1]
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
    if _ARITHMETIC.fullmatch(stated) or _SEVERAL.search(stated) or _OTHER_AFTER.search(plain_text(stated)):
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


@lru_cache(maxsize=1)
def preload() -> None:
    """Imports math-verify and lets it prepare itself, which takes seconds, before any time limit runs."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback per expression it cannot read
    math_verify.verify(_parsed("\\boxed{x+1}"), _parsed("\\boxed{1+x}"), timeout_seconds=None)


@lru_cache(maxsize=4096)
def _equal_expressions(response: str, reference: str) -> bool:
    """Whether math-verify finds them equal; False for what it cannot read, or not in time."""
    import math_verify

    preload()
    with contextlib.suppress(TimeLimitReached), time_limit(_COMPARED_S):
        expected = _parsed(f"\\boxed{{{reference}}}")
        return bool(expected) and bool(
            math_verify.verify(expected, _parsed(response), timeout_seconds=None, allow_set_relation_comp=True)
        )
    return False


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    import math_verify

    return math_verify.parse(text, parsing_timeout=None)
