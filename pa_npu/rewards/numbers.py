r"""Reads numbers as models write them: `$1,234.50`, `50%`, `\frac{3}{4}`, `3½`, `18 dollars`, six.

Values are exact fractions. Text that may mean something else is no number: `5x`, `5 or 6`,
`(1,234)`, `2*3`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from pa_npu.rewards.units import MeasureUnit, currency_of, unit_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MAX_CHARACTERS = 1000  # longer text is no number; bounds the time of the expressions below
_MAX_STEPS = 60  # of reading one number: brackets around each other, signs, fractions in fractions
_MAX_POWER_BITS = 4000
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
}
_SCALES |= dict.fromkeys(_words("tausend mille mil тысяча тысячи тысяч"), 10**3)
_SCALES |= dict.fromkeys(
    _words("millionen millones milhões milioni миллион миллиона миллионов"), 10**6
)
_SCALES |= dict.fromkeys(
    _words("milliarde milliarden milliard milliardo миллиард миллиарда миллиардов"), 10**9
)
_NO_UNITS = _words(
    "and or to point plus minus times over half quarter third pi tau phi sqrt root log ln sin cos tan "
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
    """A number as it was written.

    value: as written, so that 50% is 50.
    percent: whether a percent sign followed.
    decimals: digits behind the decimal point; None if it was written without one.
    unit: of measurement, if it is a known one.
    """

    value: Fraction
    percent: bool = False
    decimals: int | None = None
    unit: MeasureUnit | None = None

    @property
    def readings(self) -> tuple[Number, ...]:
        """The number, and for a percentage also its hundredth."""
        if not self.percent:
            return (self,)
        decimals = None if self.decimals is None else self.decimals + 2
        return (self, Number(self.value / 100, decimals=decimals))

    def rounds(self, exact: Number) -> bool:
        """Returns whether this is `exact` rounded to six or more decimals.

        `exact` must be a number that no decimal equals, such as 1/3.
        """
        if self.decimals is None or self.decimals < _ROUNDED_DECIMALS or not self.value:
            return False
        denominator = exact.value.denominator
        ends = 10 ** denominator.bit_length() % denominator == 0  # no prime factor but 2 and 5
        return not ends and abs(self.value - exact.value) * 2 <= Fraction(1, 10**self.decimals)


def same_number(first: Number, second: Number) -> bool:
    """Returns whether two numbers are equal, or one is the other rounded.

    0.333333 is 1/3; 0.3333 and 0.333334 are not. A number without a unit equals the same one with a
    unit. 5 cm are neither 5 m nor 5 kg, and 60 minutes are 1 hour.
    """
    if first.unit and second.unit and first.unit != second.unit:
        if first.unit.measures != second.unit.measures:
            return False
        return first.value * first.unit.scale == second.value * second.unit.scale
    if first.percent and second.percent:
        return first.value == second.value
    for a in first.readings:
        for b in second.readings:
            if a.value == b.value or a.rounds(b) or b.rounds(a):
                return True
    return False


def plain_text(text: str) -> str:
    r"""Removes what changes no value: Markdown, thin spaces, \left, \text{...}.

    Leaves one kind of minus and one of fraction.
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
    """Returns digits and base of a number such as `101_2`; None for other text and for base ten."""
    based = _BASED.fullmatch(plain_text(text[:_MAX_CHARACTERS]).strip("$ ("))
    if based is None:
        return None
    base = read_number(based[2])
    if not base or base.value == 10:
        return None
    if max(int(digit, 16) for digit in based[1]) >= base.value:
        return None
    return based[1].upper(), int(base.value)


def read_number(text: str) -> Number | None:
    """Returns the number that the whole text is, with decoration and unit; else None."""
    if len(text) > _MAX_CHARACTERS:
        return None
    plain = plain_text(text)
    currency = currency_of(plain)
    text = _DEGREE.sub("", _BASE_TEN.sub("", _CURRENCY.sub("", plain).strip()))
    if modulus := _MODULUS.search(text):  # of a congruence, or of a remainder
        residue = read_number(text[: modulus.start()])
        if residue and 0 <= residue.value < int(modulus[1] or modulus[2]):
            return residue
        return None
    fraction = _fraction_in_words(text)
    if fraction is not None:
        return Number(fraction)
    text = with_digits(text)
    negative = re.match(r"(?:minus|negative)\s+(?=[^-+\s])", text)
    numeral = _NUMERAL.match(text, negative.end() if negative else 0)
    assert numeral is not None
    value = _value(numeral[0])
    if value is None:
        return None
    written = re.fullmatch(r"[-+({\s]*[\d, ]*\.(\d+)[)}\s]*", numeral[0])
    number = Number(
        value=-value if negative else value,
        decimals=len(written[1]) if written else None,
        unit=currency,
    )
    rest = text[numeral.end() :]
    if numeral[0].endswith(" "):
        rest = f" {rest}"
    return _with_unit(number, rest)


# A numeral is read by rewriting: a part with a value becomes <numerator/denominator>, and then joins
# with its neighbours.
_V = r"\s*<(-?\d+/\d+)>\s*"
_LITERAL = re.compile(
    r"(?P<whole>\d{0,100})\.(?P<fixed>\d{0,100})\\overline\s*\{(?P<repeated>\d{1,100})\}"
    r"|(?P<units>\d{1,300})(?:\s*\\frac\{(?P<up>\d{1,300})\}\{(?P<low>\d{1,300})\}"
    r"|\s+(?P<upper>\d{1,300})\s*/\s*(?P<lower>\d{1,300})(?![\d.,]))"
    rf"|(?P<digits>{DIGITS})"
)
_TIMES_TEN = re.compile(rf"{_V}(?:\\times|\\cdot|[*x×·])\s*<10/1>\s*\^{_V}(?!\^)")
_FIRST = r"(?:^|(?<=[({^/]))\s*"


def _unchanged(value: Fraction) -> Fraction:
    return value


def _negated(value: Fraction) -> Fraction:
    return -value


def _quotient(above: Fraction, below: Fraction) -> Fraction | None:
    return above / below if below else None


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Returns a power with a whole exponent; None if there is none, or if it is too long."""
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (
        exponent.denominator != 1
        or bits * abs(exponent) > _MAX_POWER_BITS
        or (base == 0 and exponent <= 0)
    ):
        return None
    return base ** int(exponent)


def _times_power_of_ten(value: Fraction, exponent: Fraction) -> Fraction | None:
    power = _power(Fraction(10), exponent)
    return None if power is None else value * power


_STEPS: tuple[tuple[re.Pattern[str], Callable[..., Fraction | None]], ...] = (
    (re.compile(rf"[({{]{_V}[)}}]"), _unchanged),
    (re.compile(rf"\\frac{_V}{_V}"), _quotient),
    (_TIMES_TEN, _times_power_of_ten),
    (re.compile(rf"{_V}\^{_V}(?!\^)"), _power),
    (re.compile(rf"{_V}/{_V}(?!\^)"), _quotient),
    (re.compile(rf"{_FIRST}\+{_V}(?!\^)"), _unchanged),
    (re.compile(rf"{_FIRST}-{_V}(?!\^)"), _negated),
)
# a comma in brackets may be that of a pair
_NO_NUMERAL = re.compile(r"[<>]|\([^()]*,[^()]*\)|-\s*-")


def _value(numeral: str) -> Fraction | None:
    """Returns the value of a numeral, or None if it has none."""
    if _NO_NUMERAL.search(numeral):
        return None
    text = _LITERAL.sub(_literal, numeral)
    for _ in range(_MAX_STEPS):
        if whole := re.fullmatch(_V, text):
            return Fraction(whole[1])
        rewritten = _rewritten_once(text)
        if rewritten is None:
            return None
        text = rewritten
    return None


def _rewritten_once(text: str) -> str | None:
    """Takes the first of _STEPS that applies; returns None if none does or it has no value."""
    for pattern, value_of in _STEPS:
        if match := pattern.search(text):
            value = value_of(*map(Fraction, match.groups()))
            if value is None:
                return None
            fraction = f"<{value.numerator}/{value.denominator}>"
            return text[: match.start()] + fraction + text[match.end() :]
    return None


def _literal(match: re.Match[str]) -> str:
    """Returns a literal as <numerator/denominator>."""
    if match["digits"]:
        value = Fraction(re.sub("[, ]", "", match["digits"]))
    elif repeated := match["repeated"]:  # 0.1\overline{6} = (16 - 1) / 90
        shift = 10 ** len(match["fixed"])
        value = Fraction(int(match["whole"] or 0)) + Fraction(int(match["fixed"] or 0), shift)
        value += Fraction(int(repeated), shift * (10 ** len(repeated) - 1))
    else:
        upper = int(match["up"] or match["upper"])
        lower = int(match["low"] or match["lower"])
        if not 0 < upper < lower:
            return match[0]
        value = int(match["units"]) + Fraction(upper, lower)
    return f"<{value.numerator}/{value.denominator}>"


def _with_unit(number: Number, rest: str) -> Number | None:
    """Returns a number with the unit or scale in `rest`; None if `rest` is neither."""
    attached = not rest[:1].isspace()
    rest = rest.strip()
    if not rest:
        return number
    if _PERCENT.fullmatch(rest):
        return Number(number.value, percent=True, decimals=number.decimals)
    if re.fullmatch(r"and (?:a|one)[ -]half", rest) and number.decimals is None:
        half = Fraction(-1 if number.value < 0 else 1, 2)
        return replace(number, value=number.value + half)
    if rest[0] in _EAST_ASIAN_SCALES:
        scaled = replace(number, value=number.value * _EAST_ASIAN_SCALES[rest[0]], decimals=None)
        return _with_unit(scaled, rest[1:])
    if _EAST_ASIAN.fullmatch(rest):
        if _NO_EAST_ASIAN_UNIT.search(rest) and unit_of([rest]) is None:
            return None
        return replace(number, unit=unit_of([rest]) or number.unit)
    scale, _, unit = rest.partition(" ")
    scale = scale.lower().rstrip("s.")
    if scale in _SCALES:
        scaled = replace(number, value=number.value * _SCALES[scale], decimals=None)
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
_NAMES_OF_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_NAMES_OF_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = _NAMES_OF_SMALL.split()
_TENS = _NAMES_OF_TENS.split()
_WORD_VALUES = {word: value for value, word in enumerate(_SMALL)}
_WORD_VALUES |= {word: 20 + 10 * n for n, word in enumerate(_TENS)}
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


_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6}
_PARTS |= {"seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10}
_FRACTION_IN_WORDS = re.compile(
    rf"({'|'.join(_SMALL[1:10])})[- ]({'|'.join(_PARTS)})s?", re.IGNORECASE
)


def with_digits(text: str) -> str:
    """Returns the text with the number in words that it begins with, if any, in digits."""
    match = _IN_WORDS.match(text)
    if match is None:
        return text
    return f"{match[1]}{_value_of_words(match[2])}{text[match.end() :]}"


def is_in_words(text: str) -> bool:
    """Returns whether the text is a number in words and nothing else."""
    return _IN_WORDS.fullmatch(text) is not None or _fraction_in_words(text) is not None


_CONTRAST = re.compile(r",? (?:and )?not [\w-]+(?: [\w-]+){0,2}\Z", re.IGNORECASE)  # , not six
_CHOICE_OF = re.compile(
    r"\b(?:of|among|between|than)(?: the| these| those| all)? *\Z", re.IGNORECASE
)
_CONTINUES_NUMBER = (_NO_UNITS - {"more", "less"}) | _words("raised divided fold score")


def with_only_number_in_digits(sentence: str) -> str | None:
    """Returns a sentence with its number in words in digits; None unless it has exactly one.

    "One" is mostly no number ("one of them", "no one"), and in "three to the fourth" and "eight point
    two" the first word is not all of it.
    """
    sentence = _CONTRAST.sub("", sentence)
    numbers = []
    for match in re.finditer(rf"(?<![\w-])(?:{_IN_WORDS.pattern})", sentence, re.IGNORECASE):
        if match[2].lower() != "one":
            numbers.append(match)
    if len(numbers) != 1 or _CHOICE_OF.search(sentence[: numbers[0].start()]):
        return None
    number = numbers[0]
    next_word = re.match(r"[\s,]*([^\W\d_]+)", sentence[number.end() :])
    if next_word is not None and next_word[1].lower() in _CONTINUES_NUMBER:
        return None
    return sentence[: number.start()] + with_digits(number[0]) + sentence[number.end() :]


def _fraction_in_words(text: str) -> Fraction | None:
    """Returns the value of "two-thirds" or "one half"; None for any other text."""
    match = _FRACTION_IN_WORDS.fullmatch(text)
    if match is None:
        return None
    return Fraction(_WORD_VALUES[match[1].lower()], _PARTS[match[2].lower().rstrip("s")])


def _value_of_words(words: str) -> int:
    total = 0
    group = 0
    for word in re.findall("[a-z]+", words.lower()):
        if word == "thousand":
            total = 1000 * group
            group = 0
        elif word == "hundred":
            group *= 100
        else:
            group += _WORD_VALUES.get(word, 0)  # 0 for "and"
    return total + group
