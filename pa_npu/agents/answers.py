"""Answers in OpenAI's format, whole or as a stream of events: what the policy wrote is there before the first event goes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pa_npu.agents.requests import Asked
from pa_npu.agents.session import Session, Turn
from pa_npu.engines.protocol import Generation

MODEL = "policy"
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "pa_npu"}]}


def chat_answer(session: Session, turn: Turn, asked: Asked) -> dict[str, Any]:
    """A chat.completion. Its `weight_version` is that of the newest weights that wrote it."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": turn.answer.message,
        "finish_reason": _reason(turn),
        "logprobs": None,
    }
    if asked.logprobs and len(turn.written.logprobs):
        choice["logprobs"] = {"content": _chat_logprobs(session, turn.written), "refusal": None}
    return _answer("chat.completion", f"chatcmpl-{session.id}-{turn.node.number}", choice, turn, asked)


def completion_answer(session: Session, turn: Turn, asked: Asked) -> dict[str, Any]:
    """A text_completion."""
    choice: dict[str, Any] = {"index": 0, "text": turn.answer.text, "finish_reason": _reason(turn), "logprobs": None}
    if asked.logprobs and len(turn.written.logprobs):
        tokens = [session.chat.tokenizer.decode([token]) for token in turn.written.tokens.tolist()]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": turn.written.logprobs.tolist(), "top_logprobs": None}
    return _answer("text_completion", f"cmpl-{session.id}-{turn.node.number}", choice, turn, asked)


def events(answer: dict[str, Any]) -> Iterator[bytes]:
    """Server-sent events that say the same as an answer."""
    (choice,) = answer["choices"]
    head = {name: answer[name] for name in ("id", "created", "model", "weight_version")}
    is_chat = answer["object"] == "chat.completion"
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    last = {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": None}
    if is_chat:
        message = dict(choice["message"])
        for number, call in enumerate(message.get("tool_calls", ())):
            call = message["tool_calls"][number] = {"index": number, **call}
        parts = [
            {"role": "assistant", "content": ""},
            {name: value for name, value in message.items() if name != "role"},
        ]
        choices = [{"index": 0, "delta": part, "finish_reason": None, "logprobs": None} for part in parts]
        choices[1]["logprobs"] = choice["logprobs"]
        last["delta"] = {}
    else:
        choices = [{"index": 0, "text": choice["text"], "finish_reason": None, "logprobs": choice["logprobs"]}]
        last["text"] = ""
    for one in [*choices, last]:
        yield _event({**head, "choices": [one]})
    if answer["with_usage"]:
        yield _event({**head, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _answer(kind: str, completion_id: str, choice: dict[str, Any], turn: Turn, asked: Asked) -> dict[str, Any]:
    written = len(turn.written.tokens)
    usage = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": turn.prompt_tokens + written,
    }
    answer = {"id": completion_id, "object": kind, "created": 0, "model": MODEL, "choices": [choice], "usage": usage}
    answer["weight_version"] = turn.written.version
    return {**answer, "with_usage": asked.usage} if asked.stream else answer


def _reason(turn: Turn) -> str:
    if turn.answer.message.get("tool_calls"):
        return "tool_calls"
    return "stop" if turn.written.finished else "length"


def _chat_logprobs(session: Session, written: Generation) -> Sequence[dict[str, Any]]:
    found = []
    for token, logprob in zip(written.tokens.tolist(), written.logprobs.tolist(), strict=True):
        text = session.chat.tokenizer.decode([token])
        found.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return found
