"""Echoed prompts: the log-probs of given tokens in the form of OpenAI's /v1/completions.

Programs read them that compare models by the likelihood of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def echo_logprobs(
    decode: Callable[[Sequence[int]], str],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    likely: Sequence[Sequence[tuple[int, float]]],
) -> dict[str, Any]:
    """Returns the `logprobs` of a choice that begins with its prompt.

    Args:
        decode: makes a text of tokens.
        tokens: those of the prompt, and those that were written.
        logprobs: of the tokens from the second one on; the first follows from nothing.
        likely: of the same places, the most likely tokens with their log-probs, the likeliest
            first; for places beyond them the token itself stands alone.
    """
    texts = [decode([token]) for token in tokens]
    top: list[dict[str, float] | None] = [None]
    for place, (text, logprob) in enumerate(zip(texts[1:], logprobs, strict=True)):
        logprob_by_text: dict[str, float] = {}
        for token, of_token in likely[place] if place < len(likely) else ():
            logprob_by_text.setdefault(
                decode([token]), of_token
            )  # of several with one text, the likeliest
        logprob_by_text.setdefault(text, logprob)
        top.append(logprob_by_text)
    offsets = []
    length = 0
    for text in texts:
        offsets.append(length)
        length += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None, *logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }
