r"""Finds the final answer of a response, and decides whether it equals the reference.

Only the text behind a thought counts (thoughts.py), and only the content of the last
`<answer>...</answer>`, or of `{"answer": ...}` at the end, where there is one. The first rule that applies gives the answer:

1. The text behind the last `####` (GSM8K): the last box there, else the expression in the rest of
   the line. A heading (`#### Step 2: Sum`) is skipped: the answer is looked for below it.
2. The content of the last `\boxed{...}` or `\fbox{...}` that is closed and not empty.
3. The expression behind the last "answer is" or "answer:", in one of the languages of phrases.py;
   else the last expression in that sentence; else the last one in the response. An expression is
   the whole formula around a number: no part of `2\sqrt{3}`, `minus 7` or `3 1/2` is an answer.
   A number that the words around it change ("not 5", "at least 5", "half of 10", "5 or more",
   "5th") is not an answer. Where there is no digit, a number in words counts: behind "answer is",
   or if it is the only one of the last sentence.
4. If the reference is in words: the words behind "answer is", all of an <answer>, or the last line.
   If these are a sentence: what it states, "Ottawa" of "The capital is Ottawa" (statements.py).
5. If the reference is a formula: also what math-verify finds in the response.

boxes.py finds the boxes, and answer_expressions.py the expressions. equal_answers.py compares the
answer with the reference. decimal_commas.py lets numbers have a
decimal comma in the languages that write one.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from pa_npu.data.records import ANSWER_MARK, LETTERS
from pa_npu.rewards.answer_expressions import (
    DENIED,
    EXPRESSION,
    VALUE,
    expression_at,
    last_expression,
)
from pa_npu.rewards.boxes import last_boxed, several_boxes
from pa_npu.rewards.comparer import equal_expressions
from pa_npu.rewards.decimal_commas import with_points, without_thousands_points
from pa_npu.rewards.equal_answers import (
    CHOICE,
    SEVERAL,
    equal_answers,
    with_base,
)
from pa_npu.rewards.numbers import (
    in_base,
    is_in_words,
    plain_text,
    read_number,
    with_only_number_in_digits,
)
from pa_npu.rewards.phrases import (
    SENTENCE_END,
    behind_number,
    first_sentences,
    is_heading,
    last_phrase,
)
from pa_npu.rewards.statements import states, without_contrast
from pa_npu.rewards.thoughts import without_thought
from pa_npu.rewards.words import equal_words, is_text

_SEARCHED_CHARACTERS = 10_000  # at the end of a response, for an answer without a mark

_TAGGED = re.compile(
    r"<(?:final_)?answer>((?:(?!<(?:final_)?answer>).)*?)</(?:final_)?answer>",
    re.DOTALL | re.IGNORECASE,
)
_OPEN_TAG = re.compile(r"<(?:final_)?answer>\s*([^\n<>]{1,200})\s*\Z", re.IGNORECASE)
_JSON_AT_END = re.compile(r"(\{\s*\"[^{}]{1,2000}\})\s*(?:`{3,}\s*)?\Z")
_JSON_KEYS = frozenset({"answer", "final_answer", "final answer"})
_ANSWER_MARK = re.compile(rf"{ANSWER_MARK}#*")
_CLOSED_HEADING = re.compile(r"(?<=\S)[ \t]+#+[ \t]*$", re.MULTILINE)  # #### 46 ####
_MAX_MARKS = 20  # of #### that are looked at
_HEADING = re.compile(r"^[ \t]*#{1,6}[ \t]*(\S.*)$", re.MULTILINE)
_ASIDE = re.compile(r"(?<=\S)\s+\((?=[^()]{0,200}[A-Za-z]{3})[^()]{1,200}\)(?=[.!*\s]*$)")
_MARKED_LETTER = re.compile(
    r"(?:####|\b(?:answer|choice|option)\b(?:\s+is)?\s*:?)[\s*_:]*\(?([A-Za-z])(?![A-Za-z0-9'])(?!\s+[a-z])",
    re.IGNORECASE,
)
_LETTER_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_BOXED_LETTER = re.compile(r"\s*\(?([A-Za-z])(?![A-Za-z0-9])")
_PHRASED_LETTER = re.compile(r"[\s*_$(（]*([A-Z])(?![A-Za-z0-9'\u2019])(?!\s+[a-z])")
_LETTER_ALONE = re.compile(r"^[\s*_$(\[]*([A-Z])[\s*_$)\].:]*$")


def final_text(response: str, prompt: str = "") -> str:
    """Returns the part of a response that counts: no thought, and only the inside of an <answer>.

    `prompt`: as the model read it; it may have opened the thought.
    """
    text = without_thought(prompt, response)
    tagged = _tagged(text)
    return text if tagged is None else tagged


def _tagged(text: str) -> str | None:
    """Returns the content of the last <answer>, or the `answer` of a JSON object at the end.

    Returns None if there is neither. An <answer> that a stop string left open counts if the line
    ends the response.
    """
    end = text[-_SEARCHED_CHARACTERS:]
    closed = _TAGGED.findall(end)
    if closed:
        return str(closed[-1])
    opened = _OPEN_TAG.search(end)
    if opened:
        return opened[1]
    return _json_answer(end)


def _json_answer(text: str) -> str | None:
    """Returns the answer in a text that ends with an object such as `{"answer": 8}`, else None."""
    match = _JSON_AT_END.search(text)
    if match is None:
        return None
    try:
        value = json.loads(match[1])
    except (ValueError, RecursionError):
        return None
    answers = [value[key] for key in value if key.lower() in _JSON_KEYS]
    if len(answers) != 1 or not isinstance(answers[0], (str, int, float)):
        return None
    return json.dumps(answers[0]) if isinstance(answers[0], bool) else str(answers[0])


def extract_answer(response: str, reference: str, prompt: str = "") -> str | None:
    """Returns the final answer of a response as text, or None if it has none.

    `reference` decides whether any number may count, or words. `prompt`: as the model read it.
    """
    text = without_thought(prompt, response)
    tagged = _tagged(text)
    text = with_base(text if tagged is None else tagged)
    kind = _kind(reference)
    marked = _marked(text, kind, reference)
    if marked is not None:
        return marked
    if _is_several(reference):
        boxed = several_boxes(text)
    else:
        boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if kind != "words":
        stated = _stated(_without_headings(text), kind == "number", reference)
        is_all = tagged is not None or "\n" not in text.strip()
        if stated is None and kind == "formula" and is_all:
            return text.strip() or None
        return stated

    phrase = last_phrase(text[-_SEARCHED_CHARACTERS:])
    if phrase is None and tagged is not None:
        return text.strip() or None
    return _in_words(text, reference)


def _without_headings(text: str) -> str:
    """Returns the text without Markdown headings such as `### Step 2: Sum`.

    The number of a heading is not an answer.
    """
    end = text[-_SEARCHED_CHARACTERS:]
    if "#" not in end:
        return text

    def without_heading(line: re.Match[str]) -> str:
        return "" if is_heading(plain_text(line[1])) else line[0]

    return _HEADING.sub(without_heading, end)


def _kind(reference: str) -> Literal["number", "words", "formula"]:
    """Returns the kind of answer that a reference asks for."""
    if read_number(reference) is not None:
        return "number"
    return "words" if is_text(reference) else "formula"


def _marked(text: str, kind: str, reference: str) -> str | None:
    """Returns the answer behind or below the last ####; None if there is none."""
    text = _CLOSED_HEADING.sub("", text)
    marks = list(_ANSWER_MARK.finditer(text))[-_MAX_MARKS:]
    for mark in reversed(marks):
        behind = text[mark.end() :]
        if not behind.strip(" \t\n#*"):
            continue
        boxed = last_boxed(behind)
        if boxed is not None:
            return boxed
        line, _, below = behind.strip().partition("\n")
        if not _is_heading(line, below, kind):
            return _of_line(line.strip(), kind, reference)
        if below.strip():
            if kind == "words":
                return _in_words(below, reference)
            return _stated(below, kind == "number", reference)
        if rest := behind_number(plain_text(line)):
            return _of_line(rest, kind, reference)
        if kind == "number" and is_in_words(plain_text(line)):
            return line.strip()
    return None


def _is_heading(line: str, below: str, kind: str) -> bool:
    """Returns whether the line behind #### is a heading, not the answer.

    `below`: the lines that follow it.
    """
    plain = plain_text(line)
    phrase = last_phrase(line)
    if phrase is not None and line[phrase[1] :].strip(" *_:"):
        return False
    if is_heading(plain):
        return True
    if kind == "number" and not VALUE.search(plain):
        return True
    if kind == "number" and EXPRESSION.match(plain):
        return False
    phrase = last_phrase(below[-_SEARCHED_CHARACTERS:])
    return phrase is not None and bool(below[-_SEARCHED_CHARACTERS:][phrase[1] :].strip())


def _in_words(text: str, reference: str) -> str | None:
    """Returns the words behind the last "answer is", or those of the last line.

    Returns None if there are no words, or if the sentence denies the answer.
    """
    text = text[-_SEARCHED_CHARACTERS:]
    phrase = last_phrase(text)
    if phrase is None:
        lines = [line for line in text.splitlines() if line.strip(" *_`#$")]
        return lines[-1].strip() if lines else None
    begin, end = phrase
    if DENIED.search(text[max(0, begin - 200) : end]):
        return None
    line = next((line for line in text[end:].splitlines() if line.strip(" *_`#$:")), "")
    return first_sentences(line, like=reference) or None


def _is_several(reference: str) -> bool:
    """Returns whether a reference lists several values, `2, -3`."""
    return (
        bool(SEVERAL.search(reference))
        and read_number(reference) is None
        and not is_text(reference)
    )


def chosen_letter(response: str, letters: str, prompt: str = "") -> str | None:
    r"""Returns the letter that a response to a multiple choice ends with, or None if there is none.

    It is the last \boxed{C}; else the last #### C, "answer is (C)" or "Answer: C"; else a last line
    that is nothing but the letter. Letters in running text are not answers, such as the A in
    "A good start".
    """
    text = final_text(response, prompt)[-_SEARCHED_CHARACTERS:]
    boxed = last_boxed(text)
    if boxed is not None:
        letter_match = _BOXED_LETTER.match(_LETTER_DECORATION.sub(r"\1", boxed))
        if letter_match is None:
            return None
        letter = letter_match[1].upper()
        return letter if letter in letters else None

    marked = [match[1].upper() for match in _MARKED_LETTER.finditer(text)]
    marked = [letter for letter in marked if letter in letters]
    if marked:
        return marked[-1]

    phrase = last_phrase(text)  # in another language
    behind = _PHRASED_LETTER.match(text, phrase[1]) if phrase else None
    if behind is not None and behind[1] in letters:
        return behind[1]

    lines = [line for line in text.splitlines() if line.strip()]
    alone = _LETTER_ALONE.match(lines[-1]) if lines else None
    return alone[1] if alone and alone[1] in letters else None


def _of_line(line: str, kind: str, reference: str) -> str:
    """Returns the answer in a line that is marked as the answer.

    Examples: `46, because ...`, `46 (12+34)`, `The answer is 46`, `Answer: Paris`.
    """
    phrase = last_phrase(line)
    if kind == "words":
        return line if phrase is None else (_in_words(line, reference) or line)
    if kind == "formula":
        return line if phrase is None else (_stated(line, False, reference) or line)
    if phrase is None and (first := expression_at(line, 0)):
        return first
    return _stated(line, True, reference) or line


def _stated(text: str, numeric: bool, reference: str) -> str | None:
    """Returns the expression behind the last "answer is".

    Where there is none, returns the last one in that sentence, else in the text.
    """
    text = text[-_SEARCHED_CHARACTERS:]
    phrase = last_phrase(text)
    if phrase is not None:
        _, behind = phrase
        if (expression := expression_at(text, behind)) is not None:
            return expression
        end = SENTENCE_END.search(text, behind)
        sentence = text[behind : end.start() if end else len(text)]
        if VALUE.search(sentence):
            return last_expression(text[: behind + len(sentence)])
        if not numeric:
            return first_sentences(text[behind:], like=reference) or None
        if read_number(sentence) is not None:  # in words
            return sentence.strip() or None
    if numeric and not VALUE.search(text):
        parts = reversed(SENTENCE_END.split(text))
        last = next((part for part in parts if part.strip(" *.!")), "")
        words = re.split(r"\b(?:is|are|equals)\s", last)[-1].strip(" *.!")
        if is_in_words(words) or read_number(words) is not None:
            return words
        in_digits = with_only_number_in_digits(last) if phrase is None else None
        return None if in_digits is None else last_expression(in_digits)
    aside = _ASIDE.search(text)
    stands_alone = aside and VALUE.search(text[: aside.start()].rpartition("\n")[2])
    if aside and stands_alone:
        text = text[: aside.start()]
    return last_expression(text)


def is_correct(response: str, reference: str, prompt: str = "") -> bool:
    """Returns whether the response's final answer equals the reference.

    `prompt`: as the model read it; it may have opened a thought.
    """
    reference = last_boxed(reference) or reference.rpartition(ANSWER_MARK)[2].strip()
    response = without_thousands_points(response, reference, prompt)
    if _is_correct(response, reference, prompt):
        return True
    rewritten = with_points(response, reference, prompt)
    if rewritten is None:
        return False
    response_with_points, reference_with_points = rewritten
    return _is_correct(response_with_points, reference_with_points, prompt)


def _is_correct(response: str, reference: str, prompt: str) -> bool:
    """Does what is_correct does for one reading: a comma separates thousands or values.

    `reference` has no box and no mark.
    """
    answer = extract_answer(response, reference, prompt)
    if answer is not None and equal_answers(answer, reference):
        return True
    kind = _kind(reference)
    if kind == "number" or in_base(with_base(reference)):
        return False
    if kind == "words":
        return answer is not None and _is_stated(answer, response, reference, prompt)
    text = final_text(response, prompt)
    if CHOICE.fullmatch(reference):
        return chosen_letter(text, LETTERS) == reference.strip("() ")
    if last_boxed(response) is not None:
        return False
    # No mark and a formula: math-verify searches the response for expressions by itself.
    return equal_expressions(text[-_SEARCHED_CHARACTERS:], reference)


def _is_stated(answer: str, response: str, reference: str, prompt: str) -> bool:
    """Returns whether an answer in words states the reference in a sentence.

    `answer`: what extract_answer found. What surrounds it decides only if it is no marked answer.
    """
    text = final_text(response, prompt)[-_SEARCHED_CHARACTERS:]
    is_unmarked = _marked(text, "words", reference) is None and last_boxed(text) is None
    if is_unmarked and last_phrase(text) is None:
        answer = text
    elif equal_words(without_contrast(answer), reference):
        return True
    return states(answer, prompt=prompt, reference=reference, means=equal_words)
