"""Units of measurement: what each measures and its size, so that 5 cm is not 5 m.

60 minutes are an hour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class MeasureUnit:
    """A unit of measurement.

    measures: base quantities with their powers, such as (("length", 1), ("time", -1)).
    scale: size in the base units of these.
    """

    measures: tuple[tuple[str, int], ...]
    scale: Fraction


_NAMES = {  # by quantity: size in its base unit, and names
    "length": (
        ("0.001", "mm millimeter millimeters millimetre millimetres 毫米"),
        ("0.01", "cm centimeter centimeters centimetre centimetres 厘米"),
        ("0.1", "dm decimeter decimeters decimetre decimetres 分米"),
        ("1", "m meter meters metre metres 米"),
        ("1000", "km kilometer kilometers kilometre kilometres 千米 公里"),
        ("0.0254", "inch inches"),
        ("0.3048", "ft foot feet"),
        ("0.9144", "yd yard yards"),
        ("1609.344", "mi mile miles"),
    ),
    "mass": (
        ("0.000001", "mg milligram milligrams 毫克"),
        ("0.001", "g gram grams 克"),
        ("1", "kg kilogram kilograms kilo kilos 千克 公斤"),
        ("0.028349523125", "oz ounce ounces"),
        ("0.45359237", "lb lbs"),
    ),
    "time": (
        ("0.001", "ms millisecond milliseconds 毫秒"),
        ("1", "s sec secs second seconds 秒"),
        ("60", "min mins minute minutes 分钟"),
        ("3600", "h hr hrs hour hours 小时"),
        ("86400", "day days 天"),
        ("604800", "week weeks 周"),
    ),
    "months": (
        ("1", "month months"),
        ("12", "year years"),
        ("120", "decade decades"),
        ("1200", "century centuries"),
    ),
    "dollars": (("1", "dollar dollars USD usd"), ("0.01", "cent cents")),
    "euros": (("1", "euro euros EUR"),),
    "sterling": (("1", "GBP"),),
    "rupees": (("1", "rupee rupees INR Rs"),),
}
_VOLUMES = (  # in cubic meters
    ("0.000001", "mL ml milliliter milliliters millilitre millilitres 毫升"),
    ("0.00001", "cL cl centiliter centiliters"),
    ("0.001", "L l liter liters litre litres 升"),
    ("0.003785411784", "gallon gallons"),
    ("0.000946352946", "quart quarts"),
    ("0.000473176473", "pint pints"),
)


def _units() -> dict[str, MeasureUnit]:
    """Returns all units by name."""
    units: dict[str, MeasureUnit] = {}
    for quantity, sizes in _NAMES.items():
        for scale, names in sizes:
            unit = MeasureUnit(measures=((quantity, 1),), scale=Fraction(scale))
            units |= dict.fromkeys(names.split(), unit)
    for scale, names in _VOLUMES:
        unit = MeasureUnit(measures=(("length", 3),), scale=Fraction(scale))
        units |= dict.fromkeys(names.split(), unit)
    return units


_UNITS = _units()
_SYMBOLS = {"$": "dollar", "€": "euro", "£": "GBP", "₹": "rupee"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SYMBOL = re.compile(r"\\\$|[€£₹]|(?<![A-Za-z])(?:USD|EUR|GBP|INR|Rs)(?![A-Za-z])")
_DOLLAR = re.compile(r"^[\s*_(+-]*\$\s?[-+]?\.?\d[^$]*$")  # a dollar sign that opens no formula


def unit_of(words: list[str], per: str | None = None, power: int = 1) -> MeasureUnit | None:
    """Returns the unit that words name; None for an unknown one such as `apples`.

    Args:
        words: "km", "square meters", "miles per hour".
        per: the name behind a slash, such as the h of `km/h`.
        power: an exponent behind all of it, which belongs to the last name.
    """
    if words in (["mph"], ["kph"], ["kmh"]):
        words = ["mi"] if words == ["mph"] else ["km"]
        per = "h"
    if "per" in words:
        place = words.index("per")
        if per is not None or place != len(words) - 2:
            return None
        per = words[-1]
        words = words[:place]
    above_power = 1 if per else power
    if len(words) == 2 and words[0] in _POWERS and power == 1:
        above_power = _POWERS[words[0]]
        words = words[1:]
    if len(words) != 1:
        return None
    above = _named(words[0])
    if above is None:
        return None
    unit = _raised(above, above_power)
    if per is None:
        return unit
    below = _named(per)
    if below is None:
        return None
    below = _raised(below, power)
    inverse = tuple((quantity, -exponent) for quantity, exponent in below.measures)
    return MeasureUnit(unit.measures + inverse, unit.scale / below.scale)


def currency_of(text: str) -> MeasureUnit | None:
    """Returns the currency whose sign or code is in a text: `$5`, `USD 5`.

    Dollar signs around a formula do not count.
    """
    symbol = _SYMBOL.search(text)
    if symbol is None:
        return _UNITS["dollar"] if _DOLLAR.match(text) else None
    name = symbol[0].lstrip("\\")
    return _UNITS[_SYMBOLS.get(name, name)]


def _named(name: str) -> MeasureUnit | None:
    return _UNITS.get(name) or _UNITS.get(name.lower())


def _raised(unit: MeasureUnit, power: int) -> MeasureUnit:
    return MeasureUnit(
        tuple((quantity, exponent * power) for quantity, exponent in unit.measures),
        unit.scale**power,
    )
