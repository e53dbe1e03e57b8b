r"""Numbers as people and models write them: `$1,234.50`, `50%`, `-(5)`, `\frac{3}{4}`, `1.5 \times 10^3`, `3½`, `18 dollars`, six.

Values are exact fractions. Text that may mean something else is no number: `5x`, `5 or 6`,
`(1,234)`, `2*3`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from pa_npu.rewards.units import Unit, currency_of, unit_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOST_CHARACTERS = 1000  # longer text is no number; bounds the time of the expressions below
_MOST_STEPS = 60  # of reading one number: brackets around each other, signs, fractions in fractions
_MOST_POWER_BITS = 4000
_ROUNDED_DECIMALS = 6  # of a decimal that may stand for a number without an end, as in math-verify

# Digits and exponents are bounded, so that "1e999999999" costs nothing.
DIGITS = (
    r"(?:[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|[1-9]\d{0,2}(?: \d{3})+(?![\d,])|\d{1,300})(?:\.\d{1,300})?(?:[eE][-+]?\d{1,2}(?!\d))?"
    r"|\.\d{1,300}(?:[eE][-+]?\d{1,2}(?!\d))?"
)
TEXT = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|boldsymbol|bm|emph|underline|operatorname)\s*"
_CURRENCY = re.compile(r"\\?[$€£¥₹]|(?<![A-Za-z])(?:USD|EUR|GBP|INR|Rs\.?)(?![A-Za-z])")
_MINUS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-") | {"\u2044": "/"}
)
_VULGAR = re.compile(r"[¼-¾⅐-⅞]")
_TEXT = re.compile(TEXT + r"\{([^{}]*)\}")
_NO_MEANING = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\(?:displaystyle|textstyle|limits)(?![a-z])|\\!|\\[()\[\]]"
)
_GROUP_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SPACE = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~|\s")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_NUMERAL = re.compile(
    r"(?:[^\w\\%°]|[\d_]|\\(?:frac|overline|times|cdot)(?![a-z])|(?<=\d)[eE](?=[-+]?\d)|[x×](?=\s*10\s*\^))*"
)
_DEGREE = re.compile(r"\s*\^\s*\{?\s*(?:\\circ|\\degree|°)\s*\}?$|\s*(?:°|\\degree|\\circ)$")
_PERCENT = re.compile(
    r"\\?%|(?:percent|per cent|prozent|pour cent|por ciento|por cento|percento|per "
    r"cento|процент(?:а|ов)?|パーセント|퍼센트)\.?",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r"(?P<words>[^\W\d_](?:[^\W\d_]|[. ])*?)\s*(?:/ "
    r"?(?P<per>[^\W\d_]+))?(?:\s*\^\s*\{?\s*(?P<power>[23])\s*\}?|(?P<raised>[²³]))?"
)
_EAST_ASIAN_SCALES = {
    "百": 10**2,
    "千": 10**3,
    "万": 10**4,
    "萬": 10**4,
    "亿": 10**8,
    "億": 10**8,
    "만": 10**4,
    "억": 10**8,
}
_EAST_ASIAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,6}")
_NO_EAST_ASIAN_UNIT = re.compile(
    r"[百千万萬亿億만억半分之以上下内外多余左右或和与至到约近负多少不倍成折]|以上|以下|割"
)
_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
} | {
    name: scale
    for scale, names in (
        (10**3, "tausend mille mil тысяча тысячи тысяч"),
        (10**6, "millionen millones milhões milioni миллион миллиона миллионов"),
        (10**9, "milliarde milliarden milliard milliardo миллиард миллиарда миллиардов"),
    )
    for name in names.split()
}
_NO_UNITS = _words(
    "and or to plus minus times over half quarter third pi tau phi sqrt root log ln sin cos tan "
    "exp mod base choose infinity inf nan squared cubed not than more less least most factorial "
    "percent halves quarters thirds fourths fifths sixths sevenths eighths ninths tenths "
    "hundredths thousandths oder und mal durch hundert halb ou et fois milliers cent o y e millón "
    "miles por entre um mila или и не раз раза половиной più menos mais більше або º ª"
)
_ONE_LETTER_UNITS = frozenset("mgshlL")
_ATTACHED_UNITS = _words(
    "mm cm dm km mg kg ml mL cl kW kWh ms min mins hr hrs hour hours day days week weeks year "
    "years inch inches ft yd mi mph kph lb lbs oz usd USD cents dollars euros st nd rd th"
)


_BASED = re.compile(
    r"0*([\dA-Fa-f]{1,300})\)?\s*_\s*\{?\s*\(?\s*(?:base\s*)?(\d{1,2}|[a-z]{3,7})\s*\)?\s*\}?"
)
_BASE_TEN = re.compile(r"(?<=[\d)])\s*_\s*\{\s*(?:10|ten)\s*\}$")
_MODULUS = re.compile(
    r"\s*(?:\(\s*\\?b?mod\s*(\d{1,100})\s*\)|\\?[pb]?mod\s*\{?\s*(\d{1,100})\s*\}?)$"
)


@dataclass(frozen=True)
class Number:
    """value: as written, so that 50% is 50. percent: whether a percent sign followed. decimals:
    digits after the point.

    decimals is None unless the number was written with a decimal point. unit: of measurement, where
    it is a known one.
    """

    value: Fraction
    percent: bool = False
    decimals: int | None = None
    unit: Unit | None = None

    @property
    def readings(self) -> tuple[Number, ...]:
        """The number, and of a percentage also its hundredth."""
        decimals = None if self.decimals is None else self.decimals + 2
        return (self, Number(self.value / 100, decimals=decimals)) if self.percent else (self,)

    def rounds(self, other: Number) -> bool:
        """Whether this is a decimal of six or more digits after the point, and `other` rounded,
        which no decimal can be.
        """
        if self.decimals is None or self.decimals < _ROUNDED_DECIMALS or not self.value:
            return False
        denominator = other.value.denominator
        ends = 10 ** denominator.bit_length() % denominator == 0  # no prime factor but 2 and 5
        return not ends and abs(self.value - other.value) * 2 <= Fraction(1, 10**self.decimals)


def same_number(first: Number, second: Number) -> bool:
    """Whether two numbers are equal: exactly, or one is the other rounded (0.333333 is 1/3; 0.3333
    and 0.333334 are not).

    A number without a unit equals one with it; 5 cm are neither 5 m nor 5 kg, and 60 minutes are 1
    hour.
    """
    if first.unit and second.unit and first.unit != second.unit:
        if first.unit.measures != second.unit.measures:
            return False
        return first.value * first.unit.scale == second.value * second.unit.scale
    if first.percent and second.percent:
        return first.value == second.value
    pairs = [(a, b) for a in first.readings for b in second.readings]
    return any(a.value == b.value or a.rounds(b) or b.rounds(a) for a, b in pairs)


def plain_text(text: str) -> str:
    r"""Remove what changes no value: Markdown, thin spaces, \left, \text{...}; leave one kind of
    minus and of fraction.
    """
    text = text.translate(_MINUS).replace("{,}", ",")
    text = _VULGAR.sub(
        lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("\u2044", "/"), text
    )
    text = _GROUP_SPACE.sub("", _NO_MEANING.sub("", text))
    text = _TEXT.sub(r" \1 ", _SPACE.sub(" ", text))
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = text.strip("*_` ").strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip("*_` ")
    return text


def in_base(text: str) -> tuple[str, int] | None:
    """Digits and base of what the whole text is, `101_2`; None for anything else, also in base ten."""
    based = _BASED.fullmatch(plain_text(text[:_MOST_CHARACTERS]).strip("$ ("))
    found = based and read_number(based[2])
    if (
        not based
        or not found
        or found.value == 10
        or max(int(digit, 16) for digit in based[1]) >= found.value
    ):
        return None
    return based[1].upper(), int(found.value)


def read_number(text: str) -> Number | None:
    """The number that the whole text is, with decoration and unit; None for anything else."""
    if len(text) > _MOST_CHARACTERS:
        return None
    plain = plain_text(text)
    currency = currency_of(plain)
    text = _DEGREE.sub("", _BASE_TEN.sub("", _CURRENCY.sub("", plain).strip()))
    if modulus := _MODULUS.search(text):  # of a residue, whether it is a congruence or what remains
        residue = read_number(text[: modulus.start()])
        return residue if residue and 0 <= residue.value < int(modulus[1] or modulus[2]) else None
    text = with_digits(text)
    negative = re.match(r"(?:minus|negative)\s+(?=[^-+\s])", text)
    numeral = _NUMERAL.match(text, negative.end() if negative else 0)
    assert numeral is not None
    value = _value(numeral[0])
    if value is None:
        return None
    written = re.fullmatch(r"[-+({\s]*[\d, ]*\.(\d+)[)}\s]*", numeral[0])
    number = Number(
        -value if negative else value, decimals=len(written[1]) if written else None, unit=currency
    )
    rest = text[numeral.end() :]
    return _with_unit(number, f" {rest}" if numeral[0].endswith(" ") else rest)


# A numeral is read by rewriting: what has a value becomes <numerator/denominator>, which takes in
# what stands around it.
_V = r"\s*<(-?\d+/\d+)>\s*"
_LITERAL = re.compile(
    r"(?P<whole>\d{0,100})\.(?P<fixed>\d{0,100})\\overline\s*\{(?P<repeated>\d{1,100})\}"
    r"|(?P<units>\d{1,300})(?:\s*\\frac\{(?P<up>\d{1,300})\}\{(?P<low>\d{1,300})\}"
    r"|\s+(?P<upper>\d{1,300})\s*/\s*(?P<lower>\d{1,300})(?![\d.,]))"
    rf"|(?P<digits>{DIGITS})"
)
_TIMES_TEN = re.compile(rf"{_V}(?:\\times|\\cdot|[*x×·])\s*<10/1>\s*\^{_V}(?!\^)")
_FIRST = r"(?:^|(?<=[({^/]))\s*"
_STEPS: tuple[tuple[re.Pattern[str], Callable[..., Fraction | None]], ...] = (
    (re.compile(rf"[({{]{_V}[)}}]"), lambda a: a),
    (re.compile(rf"\\frac{_V}{_V}"), lambda a, b: a / b if b else None),
    (_TIMES_TEN, lambda a, b: None if (power := _power(Fraction(10), b)) is None else a * power),
    (re.compile(rf"{_V}\^{_V}(?!\^)"), lambda a, b: _power(a, b)),
    (re.compile(rf"{_V}/{_V}(?!\^)"), lambda a, b: a / b if b else None),
    (re.compile(rf"{_FIRST}\+{_V}(?!\^)"), lambda a: a),
    (re.compile(rf"{_FIRST}-{_V}(?!\^)"), lambda a: -a),
)
# a comma in brackets may be that of a pair
_NO_NUMERAL = re.compile(r"[<>]|\([^()]*,[^()]*\)|-\s*-")


def _value(numeral: str) -> Fraction | None:
    if _NO_NUMERAL.search(numeral):
        return None
    text = _LITERAL.sub(_literal, numeral)
    for _ in range(_MOST_STEPS):
        if whole := re.fullmatch(_V, text):
            return Fraction(whole[1])
        found = next(((m, step) for pattern, step in _STEPS if (m := pattern.search(text))), None)
        value = found and found[1](*map(Fraction, found[0].groups()))
        if found is None or value is None:
            return None
        text = f"{text[: found[0].start()]}<{value.numerator}/{value.denominator}>{text[found[0].end() :]}"
    return None


def _literal(found: re.Match[str]) -> str:
    if found["digits"]:
        value = Fraction(re.sub("[, ]", "", found["digits"]))
    elif repeated := found["repeated"]:  # 0.1\overline{6} = (16 - 1) / 90
        shift = 10 ** len(found["fixed"])
        value = Fraction(int(found["whole"] or 0)) + Fraction(int(found["fixed"] or 0), shift)
        value += Fraction(int(repeated), shift * (10 ** len(repeated) - 1))
    else:
        upper, lower = int(found["up"] or found["upper"]), int(found["low"] or found["lower"])
        if not 0 < upper < lower:
            return found[0]
        value = int(found["units"]) + Fraction(upper, lower)
    return f"<{value.numerator}/{value.denominator}>"


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (
        exponent.denominator != 1
        or bits * abs(exponent) > _MOST_POWER_BITS
        or (base == 0 and exponent <= 0)
    ):
        return None
    return base ** int(exponent)


def _with_unit(number: Number, rest: str) -> Number | None:
    attached = not rest[:1].isspace()
    rest = rest.strip()
    if not rest:
        return number
    if _PERCENT.fullmatch(rest):
        return Number(number.value, percent=True, decimals=number.decimals)
    if re.fullmatch(r"and (?:a|one)[ -]half", rest) and number.decimals is None:
        return replace(
            number, value=number.value + Fraction(1, 2) * (-1 if number.value < 0 else 1)
        )
    if rest[0] in _EAST_ASIAN_SCALES:
        scaled = replace(number, value=number.value * _EAST_ASIAN_SCALES[rest[0]], decimals=None)
        return _with_unit(scaled, rest[1:])
    if _EAST_ASIAN.fullmatch(rest):
        if _NO_EAST_ASIAN_UNIT.search(rest) and unit_of([rest]) is None:
            return None
        return replace(number, unit=unit_of([rest]) or number.unit)
    scale, _, unit = rest.partition(" ")
    if scale.lower().rstrip("s.") in _SCALES:
        scaled = replace(
            number, value=number.value * _SCALES[scale.lower().rstrip("s.")], decimals=None
        )
        return _with_unit(scaled, f" {unit}") if unit.strip() else scaled
    match = _UNIT.fullmatch(rest)
    if match is None:
        return None
    words = match["words"].replace(".", " ").split()
    if not all(word.isalpha() for word in words) or (attached and words[0] not in _ATTACHED_UNITS):
        return None
    for word in words:
        if (
            word.lower() in _NO_UNITS
            or word.lower() in _SCALES
            or (len(word) == 1 and word not in _ONE_LETTER_UNITS)
        ):
            return None
    power = int(match["power"] or {"²": 2, "³": 3}.get(match["raised"], 1))
    return replace(number, unit=unit_of(words, match["per"], power) or number.unit)


# Numbers in words, as in "twenty-one", "three hundred and five".
_SMALL, _TENS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    )
)
_WORD_VALUES = {word: value for value, word in enumerate(_SMALL)} | {
    word: 20 + 10 * n for n, word in enumerate(_TENS)
}
_BELOW_HUNDRED = (
    rf"(?:(?:{'|'.join(_TENS)})(?:[- "
    rf"](?:{'|'.join(_SMALL[1:10])}))?|{'|'.join(_SMALL)})(?![A-Za-z])"
)
_BELOW_THOUSAND = rf"{_BELOW_HUNDRED}(?: hundred(?:(?: and)? {_BELOW_HUNDRED})?)?"
# "one of them" is no number, "two-thirds" not that of its first word
_IN_WORDS = re.compile(
    rf"((?:minus |negative )?)({_BELOW_THOUSAND}(?: thousand(?:(?:,| and)? "
    rf"{_BELOW_THOUSAND})?)?)(?!-| (?:of|that|who|which)\b)",
    re.IGNORECASE,
)


def with_digits(text: str) -> str:
    """The text with the number that it begins with, if that is in words, in digits."""
    return (
        _IN_WORDS.sub(lambda found: f"{found[1]}{_value_of_words(found[2])}", text, count=1)
        if _IN_WORDS.match(text)
        else text
    )


def is_in_words(text: str) -> bool:
    """Whether the text is such a number and nothing else."""
    return _IN_WORDS.fullmatch(text) is not None


def _value_of_words(words: str) -> int:
    total = group = 0
    for word in re.findall("[a-z]+", words.lower()):
        if word == "thousand":
            total, group = 1000 * group, 0
        elif word == "hundred":
            group *= 100
        else:
            group += _WORD_VALUES.get(word, 0)  # none of "and"
    return total + group
