"""Answers in OpenAI's format, whole or as a stream of events: what the policy wrote is there before the first event goes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pa_npu.agents.chat import Answer, Chat
from pa_npu.agents.requests import Asked
from pa_npu.engines.protocol import Generation

MODEL = "policy"

Written = Sequence[tuple[Answer, Generation]]


def models(version: int | None) -> dict[str, Any]:
    """The one model, and the version of its weights where that is known."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "pa_npu", "weight_version": version}
    return {"object": "list", "data": [model]}


def whole_answer(chat: Chat, completion_id: str, written: Written, prompt_tokens: int, asked: Asked) -> dict[str, Any]:
    """A chat.completion, or a text_completion for an id that begins with `cmpl`, with the version of the weights that wrote it."""
    is_chat = not completion_id.startswith("cmpl")
    choices = []
    for index, (answer, generation) in enumerate(written):
        choice: dict[str, Any] = {"index": index, "logprobs": None}
        choice |= {"message": answer.message} if is_chat else {"text": answer.text}
        ended = "stop" if generation.finished else "length"
        choice["finish_reason"] = "tool_calls" if answer.message.get("tool_calls") else ended
        if asked.logprobs and len(generation.logprobs):
            choice["logprobs"] = _logprobs(chat, generation, is_chat)
        choices.append(choice)
    num_written = sum(len(generation.tokens) for _, generation in written)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_written,
        "total_tokens": prompt_tokens + num_written,
    }
    kind = "chat.completion" if is_chat else "text_completion"
    version = max((generation.version or 0 for _, generation in written), default=0)
    head = {"id": completion_id, "object": kind, "created": 0, "model": MODEL, "weight_version": version}
    return {**head, "choices": choices, "usage": usage}


def events(answer: dict[str, Any], usage: bool) -> Iterator[bytes]:
    """Server-sent events that say the same as an answer. usage: the client wants it at the end."""
    is_chat = answer["object"] == "chat.completion"
    head = {name: answer[name] for name in ("id", "created", "model", "weight_version")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    for choice in answer["choices"]:
        place = {"index": choice["index"], "finish_reason": None, "logprobs": None}
        said = {**place, "logprobs": choice["logprobs"]}
        if is_chat:
            message = {name: value for name, value in choice["message"].items() if name != "role"}
            calls = [{"index": number, **call} for number, call in enumerate(message.pop("tool_calls", ()))]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            parts = [{**place, "delta": {"role": "assistant", "content": ""}}, {**said, "delta": delta}]
        else:
            parts = [{**said, "text": choice["text"]}]
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        for part in [*parts, {**place, **last, "finish_reason": choice["finish_reason"]}]:
            yield _event({**head, "choices": [part]})
    if usage:
        yield _event({**head, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _logprobs(chat: Chat, written: Generation, is_chat: bool) -> dict[str, Any]:
    texts = [str(chat.tokenizer.decode([token])) for token in written.tokens.tolist()]
    values = written.logprobs.tolist()
    if not is_chat:
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, values, strict=True)
    ]
    return {"content": content, "refusal": None}
