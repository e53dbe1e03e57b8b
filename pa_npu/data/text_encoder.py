"""Texts of any length become tokens in an event loop: long ones in a thread, and none that cannot fit."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

LONG_CHARACTERS = 1 << 14  # tokenising a character takes some microseconds
_LONGEST_TOKEN = 64  # characters, at least
_NORMALISED = 4  # a tokenizer may drop characters, such as repeated spaces


class TextEncoder:
    """Encodes what others have written. tokenizer: of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._for_thread: Any = None  # tokenizers may not be used by two threads at a time
        self._turn = asyncio.Lock()

    async def encode(
        self, text: str, *, max_tokens: int, special: bool = False
    ) -> list[int] | None:
        """Returns the tokens of a text; None for one so long that it has more than max_tokens in
        any case.

        special: with the tokens that the tokenizer puts around a text.
        """
        if len(text) > _NORMALISED * _LONGEST_TOKEN * max_tokens:
            return None
        if len(text) <= LONG_CHARACTERS:
            return _tokens(self._tokenizer, text, special)
        async with self._turn:
            if self._for_thread is None:
                self._for_thread = copy.deepcopy(self._tokenizer)
            return await asyncio.to_thread(_tokens, self._for_thread, text, special)


def _tokens(tokenizer: Any, text: str, special: bool) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return tokens
