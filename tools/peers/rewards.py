"""One reward for every system, cheap and different within a group: the share of vowels among a response's letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def vowel_share(text: str) -> float:
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)


def of_group(group: Any) -> list[float]:
    """As pa_npu calls it, with a RewardInput."""
    return [vowel_share(text) for text in group.responses]


def of_completions(completions: Sequence[Any], **_: Any) -> list[float]:
    """As TRL calls it, with lists of messages."""
    return [
        vowel_share("".join(message.get("content") or "" for message in messages))
        for messages in completions
    ]
