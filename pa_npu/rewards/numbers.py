r"""Numbers as people and models write them: `$1,234.50`, `50%`, `-(5)`, `\frac{3}{4}`, `1.5 \times 10^3`, `18 dollars`.

Values are exact fractions. Text that may mean something else is no number: `5x`, `5 or 6`, `(1,234)`, `2*3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOST_CHARACTERS = 1000  # longer text is no number; bounds the time of the expressions below
_MOST_GROUPS = 20  # of brackets around each other
_MOST_POWER_BITS = 4000
_ROUNDED_DECIMALS = 6  # of a decimal that may stand for a number without an end, as in math-verify

# Digits and exponents are bounded, so that "1e999999999" costs nothing.
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,300})(?:\.\d{1,300})?(?:[eE][-+]?\d{1,2})?|\.\d{1,300}(?:[eE][-+]?\d{1,2})?"
CURRENCY = r"\\?[$€£¥]"
_DECIMAL = re.compile(DIGITS)
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-") | {"\u2044": "/"})
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|boldsymbol|bm|emph|underline|operatorname)\s*\{([^{}]*)\}"
)
_NO_MEANING = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\(?:displaystyle|textstyle|limits)(?![a-z])|\\!|\\[()\[\]]"
)
_GROUP_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SPACE = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~|\s")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_REPEATING = re.compile(r"(\d{0,100})\.(\d{0,100})\\overline\s*\{(\d{1,100})\}")
_TIMES_TEN = re.compile(
    r"\s*(?:\\times|\\cdot|[*x×·])\s*10\s*\^\s*"
    r"(?:\{\s*([-+]?\d{1,3})\s*\}|\(\s*([-+]?\d{1,3})\s*\)|([-+]?\d{1,3}))"
)
_EXPONENT = re.compile(r"\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))")
_INTEGER = re.compile(r"\d{1,300}(?=\s*\^)")
_DEGREE = re.compile(r"\^\s*\{?\s*(?:\\circ|\\degree|°)\s*\}?|°|\\degree")
_PERCENT = re.compile(r"\\?%|(?:percent|per cent)\.?", re.IGNORECASE)
_UNIT = re.compile(r"(?P<words>[A-Za-z][A-Za-z. ]*)(?:/ ?(?P<per>[A-Za-z]+))?(?:\s*\^\s*\{?\s*[23]\s*\}?|[²³])?")
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNITS = _words(
    "and or to plus minus times over half quarter third pi tau phi sqrt root log ln sin cos tan exp mod base choose "
    "infinity inf nan squared cubed not than more less least most factorial"
)
_ONE_LETTER_UNITS = frozenset("mgshlL")
_ATTACHED_UNITS = _words(
    "mm cm dm km mg kg ml mL cl kW kWh ms min mins hr hrs hour hours day days week weeks year years inch inches ft yd mi "
    "mph kph lb lbs oz usd USD cents dollars euros st nd rd th"
)


@dataclass(frozen=True)
class Number:
    """value: as written, so that 50% is 50. percent: whether a percent sign followed. decimals: digits after the point.

    decimals is None unless the number was written with a decimal point.
    """

    value: Fraction
    percent: bool = False
    decimals: int | None = None

    def readings(self, other: Number) -> list[Number]:
        """What this may mean beside `other`: a percentage is 50 and 0.5 for a number that is none."""
        if not self.percent or other.percent:
            return [self]
        decimals = None if self.decimals is None else self.decimals + 2
        return [self, Number(self.value / 100, decimals=decimals)]


def same_number(first: Number, second: Number) -> bool:
    """Whether two numbers are equal, exactly.

    The one exception: a decimal of six or more digits after the point stands for a fraction that no decimal can be, when
    it is that fraction rounded (0.333333 is 1/3; 0.3333 and 0.333334 are not).
    """
    return any(_same(a, b) for a in first.readings(second) for b in second.readings(first))


def _same(first: Number, second: Number) -> bool:
    return first.value == second.value or _rounds(first, second) or _rounds(second, first)


def _rounds(decimal: Number, endless: Number) -> bool:
    if decimal.decimals is None or decimal.decimals < _ROUNDED_DECIMALS or not decimal.value:
        return False
    return not _ends(endless.value) and abs(decimal.value - endless.value) * 2 <= Fraction(1, 10**decimal.decimals)


def _ends(value: Fraction) -> bool:
    """Whether a decimal can be this number: its denominator has no prime factor but 2 and 5."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def read_number(text: str) -> Number | None:
    """The number that the whole text is, with decoration and unit; None for anything else."""
    if len(text) > _MOST_CHARACTERS:
        return None
    plain = plain_text(text)
    found = _signed(plain.strip("$") if plain.endswith("$") and not plain.endswith("\\$") else plain, 0)
    if found is None:
        return None
    number, rest = found
    return _with_unit(number, rest)


def plain_text(text: str) -> str:
    r"""Without what changes no value: Markdown, thin spaces, \left, \text{...}; with one kind of minus and of fraction."""
    text = text.translate(_MINUS).replace("{,}", ",")
    text = _GROUP_SPACE.sub("", _NO_MEANING.sub("", text))
    text = _TEXT.sub(r" \1 ", _SPACE.sub(" ", text))
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = text.strip("*_` ").strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip("*_` ")
    return text


def _signed(text: str, depth: int) -> tuple[Number, str] | None:
    """The number that the text begins with, and what follows it."""
    text = text.lstrip()
    negative, signs = False, 0
    while True:
        if match := re.match(rf"([-+])\s*|(minus|negative)\s+|{CURRENCY}\s*", text):
            if match[1] or match[2]:
                signs += 1
                negative = match[1] != "+"
            text = text[match.end() :]
            if signs > 1:
                return None
        else:
            break
    found = _unsigned(text, depth)
    if found is None:
        return None
    number, rest = found
    return Number(-number.value if negative else number.value, number.percent, number.decimals), rest


def _unsigned(text: str, depth: int) -> tuple[Number, str] | None:
    if text[:1] in ("(", "{"):
        found = _grouped(text, depth)
        if found is not None and text[0] == "(" and _EXPONENT.match(found[1]):
            found = _power(found[0].value, found[1])
    elif match := _FRACTION.match(text):
        found = _quotient(_whole(match[1], depth), _whole(match[2], depth), text[match.end() :])
    elif match := _REPEATING.match(text):
        found = Number(_repeating(match[1], match[2], match[3])), text[match.end() :]
    elif (match := _INTEGER.match(text)) and _EXPONENT.match(text, match.end()):
        found = _power(Fraction(int(match[0])), text[match.end() :])
    elif match := _DECIMAL.match(text):
        found = _decimal(match, text, depth)
    else:
        return None
    if found is None:
        return None
    number, rest = found
    if match := re.match(r"\s*/\s*(?=[\d.({])", rest):
        divisor = _grouped(rest[match.end() :], depth) if rest[match.end()] in "({" else _divisor(rest[match.end() :])
        return _quotient(number, divisor[0], divisor[1]) if divisor else None
    return number, rest


def _decimal(match: re.Match[str], text: str, depth: int) -> tuple[Number, str] | None:
    """A decimal, or what begins with one: scientific notation, a mixed number."""
    rest = text[match.end() :]
    value, mantissa = Fraction(_digits(match[0])), match[0]
    if times := _TIMES_TEN.match(rest):
        exponent = int(times[1] or times[2] or times[3])
        return Number(value * Fraction(10) ** exponent), rest[times.end() :]
    if mantissa.isdigit():
        mixed = re.match(r"\s*(?=\\frac)|\s+(?=\d{1,300}\s*/\s*\d)", rest)
        part = _unsigned(rest[mixed.end() :], depth + 1) if mixed else None
        if part and 0 < part[0].value < 1:
            return Number(value + part[0].value), part[1]
    exponent_free = re.split("[eE]", mantissa)
    decimals = len(mantissa.partition(".")[2]) if len(exponent_free) == 1 and "." in mantissa else None
    return Number(value, decimals=decimals), rest


def _digits(text: str) -> str:
    return text.replace(",", "")


def _divisor(text: str) -> tuple[Number, str] | None:
    match = _DECIMAL.match(text)
    return (Number(Fraction(_digits(match[0]))), text[match.end() :]) if match else None


def _grouped(text: str, depth: int) -> tuple[Number, str] | None:
    """A number in brackets. With a comma, round ones may hold a pair."""
    if depth >= _MOST_GROUPS:
        return None
    closing, level = {"(": ")", "{": "}"}[text[0]], 0
    for position, character in enumerate(text):
        level += (character == text[0]) - (character == closing)
        if level == 0:
            inside = text[1:position]
            number = None if text[0] == "(" and "," in inside else _whole(inside, depth + 1)
            return (number, text[position + 1 :]) if number else None
    return None


def _whole(text: str, depth: int) -> Number | None:
    found = _signed(text, depth)
    return found[0] if found and not found[1].strip() else None


def _quotient(upper: Number | None, lower: Number | None, rest: str) -> tuple[Number, str] | None:
    if upper is None or lower is None or lower.value == 0:
        return None
    return Number(upper.value / lower.value), rest


def _repeating(whole: str, fixed: str, repeated: str) -> Fraction:
    r"""0.1\overline{6} = (16 - 1) / 90."""
    shift = 10 ** len(fixed)
    return Fraction(int(whole or 0)) + (
        Fraction(int(fixed or 0), shift) + Fraction(int(repeated), shift * (10 ** len(repeated) - 1))
    )


def _power(base: Fraction, text: str) -> tuple[Number, str] | None:
    """base to the exponent that the text begins with."""
    match = _EXPONENT.match(text)
    assert match is not None
    exponent = int(match[1] or match[2])
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > _MOST_POWER_BITS or (base == 0 and exponent <= 0):
        return None
    return Number(base**exponent), text[match.end() :]


def _with_unit(number: Number, rest: str) -> Number | None:
    attached = not rest[:1].isspace()
    rest = rest.strip()
    if not rest or re.fullmatch(CURRENCY, rest) or _DEGREE.fullmatch(rest):
        return number
    if _PERCENT.fullmatch(rest):
        return Number(number.value, True, number.decimals)
    if re.fullmatch(r"and (?:a|one)[ -]half", rest) and number.decimals is None:
        return Number(number.value + Fraction(1, 2) * (-1 if number.value < 0 else 1))
    scale, _, unit = rest.partition(" ")
    if scale.lower().rstrip("s.") in _SCALES:
        scaled = Number(number.value * _SCALES[scale.lower().rstrip("s.")])
        return _with_unit(scaled, f" {unit}") if unit.strip() else scaled
    match = _UNIT.fullmatch(rest)
    if match is None:
        return None
    words = match["words"].replace(".", " ").split()
    if attached and words[0] not in _ATTACHED_UNITS:
        return None
    for word in words:
        if word.lower() in _NO_UNITS or word.lower() in _SCALES or (len(word) == 1 and word not in _ONE_LETTER_UNITS):
            return None
    return number
