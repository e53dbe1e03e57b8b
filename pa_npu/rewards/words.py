"""Answers in words, compared: names, yes and no, choices, dates. No word is a product of variables, so that anagrams differ."""

from __future__ import annotations

import re
import unicodedata
from datetime import date

from pa_npu.rewards.numbers import plain_text

_MAX_CHARACTERS = 2000
_COMMAND = re.compile(r"\\(?:begin|end)\{[A-Za-z]+\*?\}|\\[A-Za-z]+")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_WRITTEN_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|textrm)\s*\{([^{}]*)\}")
_OF_FORMULAS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi mod gcd lcm min max det or and if for "
    "where infinity inf cm mm km kg deg dx dy dt re im ker dim tr rank sup lim arg".split()
)
_VARIABLES = frozenset("abcdkmnpqrxyz")
_FULL_WIDTH = {0xFF01 + offset: 0x21 + offset for offset in range(94)} | {0x3000: " ", 0x3001: ","}
_AROUND = " \t\n\r.,;:!?*_`$\"'\u201c\u201d\u2018\u2019\u300c\u300d\u300e\u300f\u300a\u300b\u3002\uff61\u00ab\u00bb#"
_ENDINGS = re.compile(r"(?:です|である|となります|になります|입니다|이다)$")
_ARTICLE = re.compile(r"(?:the|an?)\s+(?=\w{2})")
_REASON = re.compile(
    r"\s*(?:[,.;:!。，；]|\s[-\u2013\u2014])?\s+(?:because|since|as|for|which|so|due to|where|weil|da|car|parce que|porque|"
    r"perché|потому что|так как)\b|\s*[，,。]?\s*(?:因为|由于|なぜなら)"
)
_VERDICT = re.compile(r"(yes|no|true|false)\b(?=\s*[,.;:!\u2013\u2014-])")
_VERDICTS = frozenset({"yes", "no", "true", "false"})
_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "january jan januar janvier enero janeiro gennaio января",
            "february feb februar février febrero fevereiro febbraio февраля",
            "march mar märz mars marzo março марта",
            "april apr avril abril aprile апреля",
            "may mai mayo maio maggio мая",
            "june jun juni juin junio junho giugno июня",
            "july jul juli juillet julio julho luglio июля",
            "august aug août agosto августа",
            "september sep sept septembre septiembre setembro settembre сентября",
            "october oct oktober octobre octubre outubro ottobre октября",
            "november nov novembre noviembre novembro ноября",
            "december dec dezember décembre diciembre dezembro dicembre декабря",
        ),
        start=1,
    )
    for name in names.split()
}
_WEEKDAY = re.compile(r"^(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+")
_DATES = (
    re.compile(r"(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"),
    re.compile(r"(?P<year>\d{4})/(?P<month>\d{1,2})/(?P<day>\d{1,2})"),
    re.compile(r"(?P<year>\d{4})\s*年\s*(?P<month>\d{1,2})\s*月\s*(?P<day>\d{1,2})\s*[日号]"),
    re.compile(r"(?P<day>\d{1,2})\.\s?(?P<month>\d{1,2})\.\s?(?P<year>\d{4})"),
    re.compile(r"(?P<name>[^\W\d_]+)\.?\s+(?P<day>\d{1,2})(?:st|nd|rd|th)?,?\s+(?P<year>\d{3,4})"),
    re.compile(
        r"(?:the\s+)?(?P<day>\d{1,2})(?:st|nd|rd|th|er)?\.?\s+(?:(?:of|de)\s+)?(?P<name>[^\W\d_]+)\.?,?\s+"
        r"(?:de\s+)?(?P<year>\d{3,4})"
    ),
)


def is_text(reference: str) -> bool:
    r"""Returns True for an answer in words or a date, False for a formula: `Paris`, 北京, `\text{even}`, not `ab`, `\sin x`."""
    plain = plain_text(reference[:_MAX_CHARACTERS])
    if _date(plain) is not None:
        return True
    words = _LETTERS.findall(_COMMAND.sub(" ", plain))
    return any(_is_word(word) for word in words)


def _is_word(word: str) -> bool:
    if not word.isascii():
        return not all("GREEK" in unicodedata.name(letter, "") for letter in word)
    return word.lower() not in _OF_FORMULAS and not _VARIABLES.issuperset(word.lower())


def equal_words(answer: str, reference: str) -> bool:
    """Returns whether an answer says what a reference in words says.

    Case, spaces, Markdown, quotes, a leading article and punctuation around it do not count; a reason behind the answer does not
    either ("Paris, because ..."), and dates are compared by their day. Another place, person or thing behind it does.
    """
    first, second = normalised(answer), normalised(reference)
    if not second:
        return False
    if first == second:
        return True
    days = _date(first), _date(second)
    if all(days):
        return days[0] == days[1]
    if _squeezed(first) == _squeezed(second):
        return True
    reason = _REASON.search(first)
    if reason and _squeezed(first[: reason.start()]) == _squeezed(second):
        return True
    verdict = _VERDICT.match(first)
    return second in _VERDICTS and verdict is not None and verdict[1] == second


def normalised(text: str) -> str:
    """Returns a text without what says nothing: case, Markdown, quotes, punctuation around it, runs of space."""
    text = _WRITTEN_TEXT.sub(r" \1 ", text[:_MAX_CHARACTERS])
    text = plain_text(unicodedata.normalize("NFC", text.translate(_FULL_WIDTH)))
    text = re.sub(r"\*\*|__|[`\u200b\ufeff]", "", text).strip(_AROUND)
    text = " ".join(text.replace("\u2019", "'").casefold().split())
    return _ENDINGS.sub("", text).strip(_AROUND)


def _squeezed(text: str) -> str:
    """Returns a normalised text without its article and spaces."""
    return re.sub(r"\s+", "", _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text).strip(_AROUND)


def _date(text: str) -> date | None:
    """Returns the day that all of a text is, where it can be only one: 04/07/1776 can be two."""
    text = _WEEKDAY.sub("", " ".join(text.casefold().split()))
    for pattern in _DATES:
        found = pattern.fullmatch(text)
        if found is None:
            continue
        parts = found.groupdict()
        month = _MONTHS.get(parts["name"]) if "name" in parts else int(parts["month"])
        if month is None:
            continue
        try:
            return date(int(parts["year"]), month, int(parts["day"]))
        except ValueError:
            return None
    return None
