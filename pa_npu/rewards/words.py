"""Compares answers in words: names, yes and no, choices, dates.

A word is no product of variables, so that anagrams differ.
"""

from __future__ import annotations

import re
import unicodedata
from datetime import date

from pa_npu.rewards.numbers import plain_text

_MAX_CHARACTERS = 2000
_COMMAND = re.compile(r"\\(?:begin|end)\{[A-Za-z]+\*?\}|\\[A-Za-z]+")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_WRITTEN_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|textrm)\s*\{([^{}]*)\}")
_OF_FORMULAS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi mod gcd lcm "
    "min max det or and if for where infinity inf cm mm km kg deg dx dy dt re im ker dim tr rank "
    "sup lim arg"
)
_ELEMENTS_TEXT = (
    "He Li Be Ne Na Mg Al Si Cl Ar Ca Sc Ti Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Zr Nb "
    "Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf "
    "Ta Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa Np Pu Am Cm"
)
_ELEMENTS = frozenset(_ELEMENTS_TEXT.split())
_VOWEL = re.compile(r"[aeiou]", re.IGNORECASE)
_OPERATOR = re.compile(r"[=^_+*/<>{}\d]")
_LONGEST_PRODUCT = 3  # letters beside each other in a formula
_VARIABLES = frozenset("abcdkmnpqrxyz")
_SUBSCRIPTS = {0x2080 + digit: str(digit) for digit in range(10)}  # H₂O
_FULL_WIDTH: dict[int, int | str] = {0xFF01 + offset: 0x21 + offset for offset in range(94)}
_FULL_WIDTH |= {0x3000: " ", 0x3001: ",", **_SUBSCRIPTS}
_AROUND = (
    " \t\n\r.,;:!?*_`$\"'\u201c\u201d\u2018\u2019\u300c\u300d\u300e\u300f\u300a\u300b\u3002\uff61"
    "\u00ab\u00bb#>\u2192\u21d2"
)
_TAG = re.compile(r"</?(?:b|i|em|strong|u|p|span|code)>")
_BRACKETS = re.compile(r"\(([^()]*)\)|\[([^\[\]]*)\]")
_ENDINGS = re.compile(
    r"(?:です|である|となります|になります|입니다|이다)$|(?<=[是对對错錯确確误誤])的$"
)
_ITEMS = re.compile(r"\s*(?:[,;、]\s*(?:and\s+)?|\s(?:and|&|und|et|y|e)\s)\s*")
_ARTICLE = re.compile(r"(?:the|an?)\s+(?=\w{2})")
_OTHER_ARTICLE = re.compile(r"(?:der|die|das|le|les|il)\s+(?=\w{2})")
_REASON = re.compile(
    r"\s*(?:[,.;:!。，；]|\s[-\u2013\u2014])?\s+(?:because|since|as|for|which|so|due to|where|weil|da|car|parce que|porque|"
    r"perché|потому что|так как)\b|\s*[，,。]?\s*(?:因为|由于|なぜなら)"
)
_DENYING_REASON = re.compile(
    r"\W*which (?:is|was|seems|would|can|could|does|did)(?:n't|not| not)\b"
    r"|\W*which (?:is|was|seems|would be)(?: \w+ly)? "
    r"(?:wrong|incorrect|false|untrue|mistaken|impossible|doubtful|unlikely|absurd|an? (?:error|mistake|myth|lie))\b"
    r"|\W*as [\w ]{0,40}\b(?:wrongly|mistakenly|falsely|incorrectly|erroneously)\b"
)
_VERDICTS_TEXT = "yes no true false ja nein oui non sí si sì sim não nee tak nie да нет 是 否 对 はい いいえ 네 예 아니요"
_VERDICTS = frozenset(_VERDICTS_TEXT.split())
_VERDICT = re.compile(
    rf"({'|'.join(sorted(_VERDICTS))})(?:(?<=是)的)?(?!\w)(?=\s*[,.;:!。、\u2013\u2014-])"
)
_MONTH_NAMES = (
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
)
_MONTHS: dict[str, int] = {}
for _number, _names in enumerate(_MONTH_NAMES, start=1):
    _MONTHS |= dict.fromkeys(_names.split(), _number)
_COMPOUND = re.compile(r"(?=\D*\d)(?:[A-Z][a-z]?\d{0,3}){2,}")  # H2O is no product
_EAST_ASIAN_CHARACTER = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_TIME = re.compile(
    r"(?<![\d:])(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}))?(?!\d|:\d)(?:\s*(?P<half>[ap]\.?m)\b\.?)?",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"\b(?:not|never|or|nicht|pas|oder|ou)\b|n't|不是|或")
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
    r"""Returns whether an answer is in words or a date, not a formula.

    `Paris`, 北京 and `\text{even}` are; `ab` and `\sin x` are not.
    """
    plain = plain_text(reference[:_MAX_CHARACTERS])
    if _date(plain) is not None or _TIME.fullmatch(plain) or _COMPOUND.fullmatch(plain):
        return True
    if _EAST_ASIAN_CHARACTER.fullmatch(plain) or plain in _ELEMENTS:
        return True
    plain = _COMMAND.sub(" ", plain)
    is_formula = _OPERATOR.search(plain) is not None
    return any(_is_word(word, is_formula) for word in _LETTERS.findall(plain))


def _is_word(word: str, is_formula: bool) -> bool:
    """Returns whether letters are a word, not a product.

    `Paris` is a word, and `tea` where no formula is around it; `xe` of `xe^x`, `ab` and `nRT` are
    not.
    """
    if not word.isascii():
        return not all("GREEK" in unicodedata.name(letter, "") for letter in word)
    if word.isupper() and len(word) >= _LONGEST_PRODUCT and not is_formula:
        return True  # DNA
    if not _VOWEL.search(word) or (is_formula and len(word) <= _LONGEST_PRODUCT):
        return False
    lower = word.lower()
    return lower not in _OF_FORMULAS.split() and not _VARIABLES.issuperset(lower)


def equal_words(answer: str, reference: str) -> bool:
    """Returns whether an answer means the same as a reference in words.

    Case, spaces, Markdown, quotes, a leading article and punctuation around it do not count. Nor
    does a reason behind the answer ("Paris, because ..."), but another place, person or thing does.
    Dates are compared by their day, and lists ("red, blue" and "red and blue") item by item in
    their order.
    """
    first = normalised(answer)
    second = normalised(reference)
    if not second:
        return False
    if first == second:
        return True
    day = _date(second)
    if day is not None:
        return _dates_in(first) == [day]
    if time := _TIME.fullmatch(second):
        times = list(_TIME.finditer(first))
        return len(times) == 1 and not _DENIAL.search(first) and _same_time(times[0], time)
    if _squeezed(first) == _squeezed(second):
        return True
    article = _OTHER_ARTICLE.match(first)
    if article and _squeezed(first[article.end() :]) == _squeezed(second):
        return True
    items = _ITEMS.split(second)
    if len(items) > 1 and all(items):
        return list(map(_squeezed, _ITEMS.split(first))) == list(map(_squeezed, items))
    reason = _REASON.search(first)
    if reason and _DENYING_REASON.match(first, reason.start()):
        return False
    if reason and _squeezed(first[: reason.start()]) == _squeezed(second):
        return True
    verdict = _VERDICT.match(first)
    return second in _VERDICTS and verdict is not None and verdict[1] == second


def _dates_in(text: str) -> list[date]:
    """Returns the days that a normalised text names; none if it denies something."""
    if (whole := _date(text)) is not None:
        return [whole]
    days = []
    for pattern in _DATES:
        for match in pattern.finditer(text):
            if (day := _date(match[0])) is not None and day not in days:
                days.append(day)
    return [] if _DENIAL.search(text) else days


def _same_time(first: re.Match[str], second: re.Match[str]) -> bool:
    """Returns whether two times of day are equal.

    One without am and pm may be either, unless both are without.
    """
    if first["minute"] != second["minute"]:
        return False
    if (first["second"] or "00") != (second["second"] or "00"):
        return False
    if not first["half"] and not second["half"]:
        return int(first["hour"]) == int(second["hour"])
    return bool(_hours(first) & _hours(second))


def _hours(time: re.Match[str]) -> set[int]:
    """Returns the hours of the day that a time may mean."""
    hour = int(time["hour"])
    if time["half"]:
        afternoon = 12 if time["half"].lower().startswith("p") else 0
        return {hour % 12 + afternoon}
    return {hour, (hour + 12) % 24} if 1 <= hour <= 12 else {hour}


def normalised(text: str) -> str:
    """Returns a text without what has no meaning.

    That is case, Markdown, quotes, punctuation around the text, and runs of space.
    """
    text = _WRITTEN_TEXT.sub(r" \1 ", text[:_MAX_CHARACTERS])
    text = plain_text(unicodedata.normalize("NFC", text.translate(_FULL_WIDTH)))
    text = _TAG.sub("", text)
    text = re.sub(r"\*\*|__|[`\u200b\ufeff]|^=>", "", text).strip(_AROUND)
    if (bracketed := _BRACKETS.fullmatch(text)) is not None:
        text = (bracketed[1] or bracketed[2] or "").strip(_AROUND)
    text = " ".join(text.replace("\u2019", "'").casefold().split())
    return _ENDINGS.sub("", text).strip(_AROUND)


def _squeezed(text: str) -> str:
    """Returns a normalised text without its article and spaces."""
    if _ARTICLE.match(text):
        text = _ARTICLE.sub("", text, count=1)
    return re.sub(r"\s+", "", text).strip(_AROUND)


def _date(text: str) -> date | None:
    """Returns the day that the whole text names; None if it could be two days, as 04/07/1776."""
    text = _WEEKDAY.sub("", " ".join(text.casefold().split()))
    for pattern in _DATES:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        parts = match.groupdict()
        month = _MONTHS.get(parts["name"]) if "name" in parts else int(parts["month"])
        if month is None:
            continue
        try:
            return date(int(parts["year"]), month, int(parts["day"]))
        except ValueError:
            return None
    return None
