r"""Rewrites numbers with a decimal comma with a point, in languages that write so.

`3,5`, `1.234,56` and `1 234,5` are such numbers. The reference decides: nothing is rewritten unless
it is a number. `3{,}5` and `1.234,56` have one reading in every language. All other forms need a
text in a language that writes commas, which is known by frequent words. Three digits behind a comma
are thousands (`3,500` is 3500) unless the reference has the same digits behind a point. `(3,5)`,
`x_{1,2}` and "the solutions are 3,5" are lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pa_npu.rewards.numbers import read_number


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MAX_CHARACTERS = 10_000  # at the end of a response, and of a prompt
_POINTS_AND_COMMAS = re.compile(r"\d(?:[.,]|\{,\})\d")
_BRACED_COMMA = re.compile(r"(?<![\d.,}])(\d{1,300})\{,\}(\d{1,300})(?![\d.,{])")
_BOTH = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:\.\d{3})+),(\d{1,300})(?![.,]?\d)")
_SEVERAL_POINTS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3}){2,}(?![.,]?\d)")
_ONE_POINT = re.compile(r"(?<![\d.,])([1-9]\d{0,2})\.(\d{3})(?![.,]?\d)")
_POINT_OF_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})\.(\d{2}0)(?![.,]?\d)")
_COMMA = re.compile(
    r"(?<![\d.,])(\d{1,3}(?:[ \u00a0\u202f]\d{3})+|\d{1,300}),(\d{1,300})(?![.,]?\d)"
)
_THOUSANDS = re.compile(r"[1-9]\d{0,2}")
_DIGITS_OF_GROUP = 3

# Frequent words of these languages that are neither English nor the names of variables and
# functions, and those of English alone.
_WORDS_WITH_COMMA = _words(
    "der das und ist sind ein eine einen wie beträgt antwort lösung ergebnis wir für les est et "
    "une des du donc réponse nous avec résultat el los las es una del por respuesta que entonces "
    "resultado tenemos é uma não resposta então dos il è che risposta quindi abbiamo della gli het "
    "een antwoord dus wij oplossing och är svaret svar så blir og er jest odpowiedź się wynosi "
    "więc wynik je odpověď výsledek tedy válasz eredmény tehát vastaus tulos siis răspuns "
    "răspunsul este rezultatul cevap yanıt bir sonuç là đáp án số kết quả và adalah jawaban "
    "jawabannya jadi hasilnya"
)
_ENGLISH_WORDS = _words(
    "the is of and we answer are that for this final which then therefore thus have has hence by "
    "it with value equals from result solution equation if be find what how there their you your "
    "number total"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_CYRILLIC_OR_GREEK = re.compile(r"[\u0370-\u03ff\u0400-\u04ff]{3,}")
_WORD = re.compile(r"[^\W\d_]+")
_LISTED = re.compile(
    r"\b(?:lösungen|werte|zahlen|nullstellen|wurzeln|solutions|valeurs|racines|nombres|soluciones|raíces|valores|números|soluções|"
    r"raízes|soluzioni|radici|valori|numeri|oplossingen|waarden|getallen|lösningar|rötter|løsninger|rødder|rozwiązania|wartości|"
    r"liczby|pierwiastki|решения|корни|значения|числа|розв'язки|kökler|çözümler)\b[^.!?\n]*$",
    re.IGNORECASE,
)
_SENTENCE_CHARACTERS = 80
_OPENING = re.compile(r"(?:[(\[]|\\\{|_\{|(?<![A-Za-z}^])\{)\s*[-+]?\s*$")
_CLOSING = re.compile(r"\s*(?:[)\]}]|\\\})")


def without_thousands_points(response: str, reference: str, prompt: str) -> str:
    """Returns the response with `1.500` written as `1500` in a language that writes so.

    There it is no 1.5. Numbers that do not end in zero may be decimals of English all the same, and
    `1.500` is one if the reference is written so.
    """
    end = response[-_MAX_CHARACTERS:]
    if not _POINT_OF_THOUSANDS.search(end):
        return response
    if not _writes_commas((end, prompt[-_MAX_CHARACTERS:])):
        return response

    def joined(number: re.Match[str]) -> str:
        return number[0] if number[0] in reference else number[1] + number[2]

    return response[:-_MAX_CHARACTERS] + _POINT_OF_THOUSANDS.sub(joined, end)


def with_points(response: str, reference: str, prompt: str) -> tuple[str, str] | None:
    """Returns response and reference with points for decimal commas.

    Returns None if nothing changes or the reference is not a number. `prompt`: as the model read
    it; its language counts if the response has no words.
    """
    end = response[-_MAX_CHARACTERS:]
    if not _POINTS_AND_COMMAS.search(end) and not _POINTS_AND_COMMAS.search(reference):
        return None
    is_comma_language = _writes_commas((end, prompt[-_MAX_CHARACTERS:]))
    rewritten_reference = _rewritten(reference, is_comma_language, reference)
    if read_number(rewritten_reference) is None:
        return None
    begin = response[:-_MAX_CHARACTERS]
    rewritten = begin + _rewritten(end, is_comma_language, rewritten_reference)
    if (rewritten, rewritten_reference) == (response, reference):
        return None
    return rewritten, rewritten_reference


def _rewritten(text: str, is_comma_language: bool, reference: str) -> str:
    """Returns the text with a point for each decimal comma and without points between thousands."""
    text = _BRACED_COMMA.sub(_of_braces, text)
    text = _BOTH.sub(lambda number: f"{number[1].replace('.', '')}.{number[2]}", text)
    if not is_comma_language:
        return text
    text = _SEVERAL_POINTS.sub(lambda number: number[0].replace(".", ""), text)
    if _has_digits_of(reference, text):
        text = _ONE_POINT.sub(r"\1\2", text)

    def with_point(number: re.Match[str]) -> str:
        whole = re.sub(r"\s", "", number[1])
        decimal = f"{whole}.{number[2]}"
        is_of_thousands = _is_group(number[1], number[2]) and decimal != reference.strip("$ ")
        if is_of_thousands or _is_list(text, number):
            return number[0]
        return decimal

    return _COMMA.sub(with_point, text)


def _of_braces(number: re.Match[str]) -> str:
    """Returns `3{,}5` with a point, and `1{,}234`, a group of thousands, unchanged."""
    return number[0] if _is_group(number[1], number[2]) else f"{number[1]}.{number[2]}"


def _is_group(whole: str, fraction: str) -> bool:
    """Returns whether the digits around a comma can be thousands and their rest.

    `3,500` can; `0,125` and `3,50` cannot.
    """
    return len(fraction) == _DIGITS_OF_GROUP and _THOUSANDS.fullmatch(whole) is not None


def _has_digits_of(reference: str, text: str) -> bool:
    """Returns whether the text has the reference, a whole number, as thousands with one point."""
    number = read_number(reference)
    if number is None or number.value.denominator != 1:
        return False
    wanted = abs(number.value)
    return any(int(match[1] + match[2]) == wanted for match in _ONE_POINT.finditer(text))


def _is_list(text: str, number: re.Match[str]) -> bool:
    """Returns whether two numbers with a comma between them are two values.

    They are in brackets, in a subscript, or behind a word such as "solutions".
    """
    before = text[max(0, number.start() - _SENTENCE_CHARACTERS) : number.start()]
    if _OPENING.search(before) and _CLOSING.match(text, number.end()):
        return True
    return _LISTED.search(before) is not None


def _writes_commas(texts: Iterable[str]) -> bool:
    """Returns whether the first text in a known language is in one that writes decimal commas."""
    for text in texts:
        words = [word.lower() for word in _WORD.findall(_COMMAND.sub(" ", text))]
        with_comma = sum(word in _WORDS_WITH_COMMA for word in words)
        with_comma += len(_CYRILLIC_OR_GREEK.findall(text))
        english = sum(word in _ENGLISH_WORDS for word in words)
        if with_comma or english:
            return with_comma > english
    return False
