"""Numbers in words, as in "twenty-one", "three hundred and five": digits in their place."""

from __future__ import annotations

import re

_SMALL, _TENS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
        "nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    )
)
_VALUES = {word: value for value, word in enumerate(_SMALL)} | {word: 20 + 10 * n for n, word in enumerate(_TENS)}
_BELOW_HUNDRED = rf"(?:(?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(_SMALL[1:10])}))?|{'|'.join(_SMALL)})(?![A-Za-z])"
_BELOW_THOUSAND = rf"{_BELOW_HUNDRED}(?: hundred(?:(?: and)? {_BELOW_HUNDRED})?)?"
# "one of them" is no number, "two-thirds" not that of its first word
_NUMBER = re.compile(
    rf"((?:minus |negative )?)({_BELOW_THOUSAND}(?: thousand(?:(?:,| and)? {_BELOW_THOUSAND})?)?)(?!-| (?:of|that|who|which)\b)",
    re.IGNORECASE,
)


def with_digits(text: str) -> str:
    """The text with the number that it begins with, if that is in words, in digits."""
    return _NUMBER.sub(lambda found: f"{found[1]}{_value(found[2])}", text, count=1) if _NUMBER.match(text) else text


def is_in_words(text: str) -> bool:
    """Whether the text is such a number and nothing else."""
    return _NUMBER.fullmatch(text) is not None


def _value(words: str) -> int:
    total = group = 0
    for word in re.findall("[a-z]+", words.lower()):
        if word == "thousand":
            total, group = 1000 * group, 0
        elif word == "hundred":
            group *= 100
        else:
            group += _VALUES.get(word, 0)  # none of "and"
    return total + group
