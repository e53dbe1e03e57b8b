"""OpenAI's format of the chat and completions endpoints: requests as they are read, and answers, whole or as a stream of events.

A session's policy samples as the run does: temperature, top_p, penalties, logit_bias, seed, forced
formats and several choices are refused unless they say what is the case anyway. Fields that change
nothing are accepted. A request outside of a session (`free`) is trained nowhere and may choose
temperature, top_p, seed and n. A stream begins when all of its answer is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pa_npu.engines.protocol import Generation

if TYPE_CHECKING:
    from pa_npu.agents.chat import Answer, Chat

MODEL = "policy"

# Accepted without effect.
_IDLE = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "stream_options",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_salt",
        "verbosity",
        "skip_special_tokens",
    }
)
# What a request may say though it is not its choice.
_FIXED: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "n": (1, None),
    "best_of": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "seed": (None,),
    "top_logprobs": (0, None),
    "response_format": ({"type": "text"}, None),
    "tool_choice": ("auto", "none", None),
    "suffix": (None, ""),
    "echo": (False, None),
    "top_k": (-1, 0, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "reasoning_effort": ("medium", None),  # OpenAI's own default
    "modalities": (["text"], None),
    "min_tokens": (0, None),
    "ignore_eos": (False, None),
}
_MOST_STOPS, _MOST_CHOICES = 16, 128


class Refused(Exception):
    """A request that is not answered, in the form in which OpenAI's clients read errors.

    The HTTP status, a line, and what clients branch on (code, param).
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def response(self) -> web.Response:
        kind = {401: "authentication_error", 404: "not_found_error"}.get(
            self.status, "invalid_request_error"
        )
        error = {
            "message": str(self),
            "type": kind if self.status < 500 else "server_error",
            "param": self.param,
            "code": self.code,
        }
        headers = {"x-should-retry": "false"} if self.status < 500 else {}
        return web.Response(
            status=self.status,
            body=json.dumps({"error": error}).encode(),
            content_type="application/json",
            headers=headers,
        )


@dataclass(frozen=True)
class Asked:
    """A checked request. max_tokens: None leaves it to the run. logprobs: the client wants them.
    usage: at a stream's end.
    """

    body: Mapping[str, Any]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    logprobs: bool
    n: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    seed: int | None = None

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        found = self.body.get("messages")
        if (
            not isinstance(found, list)
            or not found
            or not all(isinstance(message, Mapping) for message in found)
        ):
            raise Refused("messages: give a list of messages", param="messages")
        return found

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        found = self.body.get("tools") or []
        if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
            raise Refused("tools: must be a list of objects", param="tools")
        return [] if self.body.get("tool_choice") == "none" else found

    @property
    def prompt(self) -> str | list[int]:
        found = self.body.get("prompt")
        if isinstance(found, list) and len(found) == 1 and isinstance(found[0], (str, list)):
            found = found[0]
        if isinstance(found, str) and found:
            return found
        if (
            isinstance(found, list)
            and found
            and all(type(token) is int and token >= 0 for token in found)
        ):
            return found
        raise Refused("prompt: give one text or one list of token ids", param="prompt")


def read_request(
    body: Any, *, temperature: float, endpoint_fields: Sequence[str], free: bool = False
) -> Asked:
    """The request in a body. temperature: the run's. free: as above. Raises Refused."""
    if not isinstance(body, Mapping):
        raise Refused("the body must be a JSON object")
    chosen = {"temperature", "top_p", "seed", "n"} if free else set()
    known = {
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stream",
        "logprobs",
        "temperature",
        *endpoint_fields,
    }
    for name, value in body.items():
        if name in known or name in _IDLE or name in chosen:
            continue
        if name not in _FIXED:
            if value is None:
                continue
            raise Refused(
                f"{name}: is not known here; leave it out", code="unsupported_parameter", param=name
            )
        if value not in _FIXED[name]:
            raise Refused(
                f"{name}: {value!r:.60} would change what is sampled, which the run decides; leave "
                "it out",
                code="unsupported_parameter",
                param=name,
            )
    wanted = body.get("temperature")
    if not free and wanted is not None and wanted != temperature:
        raise Refused(
            f"temperature: {wanted!r:.20} differs from the run's rollout.temperature = "
            f"{temperature:g}; leave it out",
            code="unsupported_parameter",
            param="temperature",
        )
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise Refused(
            f"max_tokens: {most!r:.20} must be a whole number above 0", param="max_tokens"
        )
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if (
        not isinstance(stop, (list, tuple))
        or len(stop) > _MOST_STOPS
        or not all(isinstance(s, str) and s for s in stop)
    ):
        raise Refused(f"stop: give up to {_MOST_STOPS} texts", param="stop")
    options = body.get("stream_options") or {}
    asked = Asked(
        body=body,
        max_tokens=most,
        stop=tuple(stop),
        stream=body.get("stream") is True,
        usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        logprobs=body.get("logprobs") not in (None, False),
    )
    return _freely(asked, body) if free else asked


def _freely(asked: Asked, body: Mapping[str, Any]) -> Asked:
    n, seed, temperature, top_p = (body.get(name) for name in ("n", "seed", "temperature", "top_p"))
    for name, value, right in (
        ("n", n, n is None or (type(n) is int and 1 <= n <= _MOST_CHOICES)),
        ("seed", seed, seed is None or (type(seed) is int and 0 <= seed < 2**31)),
        (
            "temperature",
            temperature,
            temperature is None or (_is_number(temperature) and 0 <= temperature <= 100),
        ),
        ("top_p", top_p, top_p is None or (_is_number(top_p) and 0 < top_p <= 1)),
    ):
        if not right:
            raise Refused(f"{name}: {value!r:.20} is out of bounds", param=name)
    return Asked(
        **{
            **vars(asked),
            "n": n or 1,
            "seed": seed,
            "temperature": temperature,
            "top_p": top_p or 1.0,
        }
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def model(version: int | None) -> dict[str, Any]:
    """The one model, and the version of its weights where that is known."""
    return {
        "id": MODEL,
        "object": "model",
        "created": 0,
        "owned_by": "pa_npu",
        "weight_version": version,
    }


def named_model(name: str, version: int | None) -> dict[str, Any]:
    """The model of this name. Raises Refused where there is none."""
    if name != MODEL:
        raise Refused(
            f"model: {name!r:.60} is not here; there is {MODEL}", status=404, param="model"
        )
    return model(version)


def models(version: int | None) -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": [model(version)]}


def whole_answer(
    chat: Chat,
    completion_id: str,
    written: Sequence[tuple[Answer, Generation]],
    prompt_tokens: int,
    asked: Asked,
) -> dict[str, Any]:
    """A chat.completion, or a text_completion for an id that begins with `cmpl`, with the version
    of the weights that wrote it.
    """
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
    head = {
        "id": completion_id,
        "object": kind,
        "created": 0,
        "model": MODEL,
        "weight_version": version,
    }
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
            calls = [
                {"index": number, **call}
                for number, call in enumerate(message.pop("tool_calls", ()))
            ]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            parts = [
                {**place, "delta": {"role": "assistant", "content": ""}},
                {**said, "delta": delta},
            ]
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
