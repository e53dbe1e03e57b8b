"""The answers of a transformers engine: responses and scores in the forms of vLLM and of OpenAI's API."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from pa_npu.engines.compact_answer import CompactResponse
from pa_npu.engines.echo import echo_logprobs
from pa_npu.engines.transformers.decoding import NO_CHOICES, RunningResponse, ScoredTokens
from pa_npu.engines.transformers.requests import CompletionRequest


class Answers:
    """tokenizer: makes the texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def response(
        self, response: RunningResponse, asked: CompletionRequest, ends: frozenset[int]
    ) -> CompactResponse:
        """Returns what a request gets of a response. ends: the tokens that end one."""
        tokens = response.tokens
        if tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if not asked.include_stop_str_in_output:
            text = _before(text, asked.stops)
        reason = "abort" if response.finish_reason == "cut" else str(response.finish_reason)
        expert_choices = None
        if asked.vllm_xargs.expert_choices:
            file = io.BytesIO()
            np.save(file, np.concatenate(response.expert_choices or [NO_CHOICES]))
            expert_choices = file.getvalue()
        return CompactResponse(
            text=text,
            token_ids=response.tokens,
            finish_reason=reason,
            logprobs=response.logprobs if asked.logprobs is not None else None,
            expert_choices=expert_choices,
        )

    def contains_one_of(self, texts: Sequence[str], tokens: Sequence[int]) -> bool:
        """Returns whether one of the texts is in the text of the tokens."""
        response_text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return any(text in response_text for text in texts)

    def joined(
        self,
        prompt: Sequence[int],
        written: Sequence[dict[str, Any]],
        scored: ScoredTokens | None,
        asked: CompletionRequest,
    ) -> list[dict[str, Any]]:
        """Returns the choices of a prompt, with what is asked for of the prompt itself."""
        choices = list(written)
        if not choices:
            choices = [{"text": "", "token_ids": [], "finish_reason": "length"}]
            if asked.logprobs is not None:
                choices[0]["logprobs"] = {"token_logprobs": []}
        for choice in choices:
            if asked.prompt_logprobs is not None and scored is not None:
                choice["prompt_logprobs"] = self._places(prompt, scored)
            if asked.echo:
                self._echo(choice, prompt, scored)
        return choices

    def _places(
        self, prompt: Sequence[int], scored: ScoredTokens
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Returns the scores as vLLM's prompt_logprobs."""
        places: list[dict[str, dict[str, Any]] | None] = [None]
        for place, token in enumerate(prompt[1:]):
            logprob_by_token = {token: scored.logprobs[place]}
            logprob_by_token |= zip(
                scored.likely[place], scored.likely_logprobs[place], strict=True
            )
            places.append(
                {
                    str(number): {"logprob": logprob, "decoded_token": self._text([number])}
                    for number, logprob in logprob_by_token.items()
                }
            )
        return places

    def _echo(
        self, choice: dict[str, Any], prompt: Sequence[int], scored: ScoredTokens | None
    ) -> None:
        """Puts the prompt, and its log-probs in the form of OpenAI's API, before what was written."""
        choice["text"] = self._text(prompt) + choice["text"]
        tokens = [*prompt, *choice["token_ids"]]
        choice["token_ids"] = tokens
        if scored is None:
            return
        likely = [
            list(zip(numbers, logprobs, strict=True))
            for numbers, logprobs in zip(scored.likely, scored.likely_logprobs, strict=True)
        ]
        logprobs = [*scored.logprobs, *choice["logprobs"]["token_logprobs"]]
        choice["logprobs"] = echo_logprobs(self._text, tokens, logprobs, likely)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens))


def as_choice(response: CompactResponse) -> dict[str, Any]:
    """Returns a response as /v1/completions has it, without its index."""
    choice: dict[str, Any] = {
        "text": response.text,
        "token_ids": response.token_ids,
        "finish_reason": response.finish_reason,
    }
    if response.logprobs is not None:
        choice["logprobs"] = {"token_logprobs": response.logprobs}
    if response.expert_choices is not None:
        choice["routed_experts"] = base64.b64encode(response.expert_choices).decode()
    return choice


def _before(text: str, stops: Sequence[str]) -> str:
    """Returns a text up to the first of the texts that end it."""
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
