"""Reads requests in OpenAI's format and writes answers in it, whole or as a stream of events.

Requests of a session are sampled with the run's settings. A value of temperature, top_p, penalties,
logit_bias, seed, forced formats or several choices that would change this is refused, unless
agent.serve_as_sampled names the field: then it has no effect, and is counted. Fields that change
nothing are accepted.

Requests outside of a session (`free`) are not trained and may choose temperature, top_p, seed and
n. A stream begins once the whole answer is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from aiohttp import web

from pa_npu.config.sections.rollout import SampledField
from pa_npu.engines.protocol import Generation

if TYPE_CHECKING:
    from pa_npu.agents.chat import Chat, ChatAnswer

MODEL = "policy"
# The fields that agent.serve_as_sampled may name.
AS_SAMPLED = frozenset(get_args(SampledField))

# Fields that are accepted without effect.
_IGNORED = frozenset(
    {
        "model",
        "user",
        "metadata",
        "client_metadata",
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
# The values that a request may give to fields which the run decides.
_FIXED: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "n": (1, None),
    "best_of": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "seed": (None,),
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
_NUMBERS = frozenset({"temperature", "top_p", "top_k", "seed"})
_MAX_STOPS = 16
_MAX_TOP_LOGPROBS = 20
_MAX_CHOICES = 128
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error"}


class AgentRequestRefused(Exception):
    """A request that is not answered, with the error that OpenAI's clients expect.

    status: of HTTP. code and param: the fields by which clients tell errors apart.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def response(self) -> web.Response:
        headers: dict[str, str] = {}
        kind = "server_error"
        if self.status < 500:
            headers["x-should-retry"] = "false"
            kind = _ERROR_TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return web.Response(
            status=self.status,
            body=json.dumps({"error": error}).encode(),
            content_type="application/json",
            headers=headers,
        )


@dataclass(frozen=True)
class SamplingRules:
    """How a run samples, which its sessions' requests cannot change.

    temperature: the only one that a request may name.
    as_sampled: fields that are accepted with any value and have no effect (agent.serve_as_sampled).
    template_options: of the chat template (data.template_options).
    """

    temperature: float = 1.0
    as_sampled: frozenset[str] = frozenset()
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentRequest:
    """A checked request.

    max_tokens: None leaves it to the run.
    usage: the client wants token counts at a stream's end.
    logprobs: the client wants log-probs. top_logprobs: and a list of the likeliest tokens.
    token_ids: the client wants the ids of what was shown and written.
    as_sampled: the fields that asked for something else than the run samples.
    echo: the answer begins with the prompt, with the log-probs of its tokens if these are wanted.
    num_logprobs: at each of its places, so many of the likeliest tokens.
    """

    body: Mapping[str, Any]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    token_ids: bool = False
    as_sampled: tuple[str, ...] = ()
    n: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    seed: int | None = None
    echo: bool = False
    num_logprobs: int = 0

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        messages = self.body.get("messages")
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(message, Mapping) for message in messages)
        ):
            raise AgentRequestRefused("messages: give a list of messages", param="messages")
        return messages

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        tools = self.body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise AgentRequestRefused("tools: must be a list of objects", param="tools")
        return [] if self.body.get("tool_choice") == "none" else tools

    @property
    def prompt(self) -> str | list[int]:
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return prompt
        if (
            isinstance(prompt, list)
            and prompt
            and all(type(token) is int and token >= 0 for token in prompt)
        ):
            return prompt
        raise AgentRequestRefused("prompt: give one text or one list of token ids", param="prompt")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of a request outside of a session, which may be several."""
        prompt = self.body.get("prompt")
        if not isinstance(prompt, list) or not any(
            isinstance(item, (str, list)) for item in prompt
        ):
            return [self.prompt]
        if len(prompt) > _MAX_CHOICES:
            raise AgentRequestRefused(f"prompt: more than {_MAX_CHOICES} at once", param="prompt")
        return [replace(self, body={"prompt": item}).prompt for item in prompt]


def read_request(
    body: Any, *, rules: SamplingRules, endpoint_fields: Sequence[str], free: bool = False
) -> AgentRequest:
    """Reads and checks the request in a body. Raises RequestRefused.

    Args:
        endpoint_fields: names of the fields that this endpoint reads besides the common ones.
        free: the request is outside of a session (see the module's docstring).
    """
    if not isinstance(body, Mapping):
        raise AgentRequestRefused("the body must be a JSON object")
    chosen = {"temperature", "top_p", "seed", "n", "echo"} if free else set()
    known = {
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stream",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
        *endpoint_fields,
    }
    fixed = {
        **_FIXED,
        "temperature": (rules.temperature, None),
        "chat_template_kwargs": (rules.template_options, {}, None),
    }
    as_sampled = []
    for name, value in body.items():
        if name in known or name in _IGNORED or name in chosen:
            continue
        if name not in fixed:
            if value is None:
                continue
            raise AgentRequestRefused(
                f"{name}: is not known here; leave it out", code="unsupported_parameter", param=name
            )
        if value in fixed[name]:
            continue
        if name not in rules.as_sampled:
            raise _would_change(name, value, rules)
        if name in _NUMBERS and not _is_number(value):
            raise AgentRequestRefused(f"{name}: {value!r:.40} is no number", param=name)
        as_sampled.append(name)
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    echoes = free and body.get("echo") is True
    least = 0 if echoes else 1  # an echoed prompt may be all that is wanted
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < least):
        raise AgentRequestRefused(
            f"max_tokens: {max_tokens!r:.20} must be a whole number above 0", param="max_tokens"
        )
    options = body.get("stream_options") or {}
    request = AgentRequest(
        body=body,
        max_tokens=max_tokens,
        stop=_stop_texts(body),
        stream=body.get("stream") is True,
        usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        logprobs=body.get("logprobs") not in (None, False),
        top_logprobs=_wants_top_logprobs(body),
        token_ids=body.get("return_token_ids") is True,
        as_sampled=tuple(as_sampled),
    )
    if echoes:
        if request.stream:
            raise AgentRequestRefused("echo: is not streamed; leave out stream", param="echo")
        wants = body.get("logprobs")
        request = replace(
            request,
            echo=True,
            logprobs=wants is not None and wants is not False,  # 0 wants those of the tokens alone
            num_logprobs=_wanted_logprobs(body),
        )
    return _with_free_choices(request) if free else request


def _would_change(name: str, value: Any, rules: SamplingRules) -> AgentRequestRefused:
    """Returns the refusal of a value that would change what is sampled."""
    line = f"{name}: {value!r:.60} would change what is sampled, which the run decides"
    if name == "temperature":
        line += f" (rollout.temperature = {rules.temperature:g})"
    remedy = "leave it out"
    if name in AS_SAMPLED:
        remedy += f", or let agent.serve_as_sampled name {name}, which then has no effect"
    return AgentRequestRefused(f"{line}; {remedy}", code="unsupported_parameter", param=name)


def _wants_top_logprobs(body: Mapping[str, Any]) -> bool:
    number = body.get("top_logprobs")
    if number is None or number is False or number == 0:
        return False
    if type(number) is not int or not 0 < number <= _MAX_TOP_LOGPROBS:
        raise AgentRequestRefused(
            f"top_logprobs: {number!r:.20} is none of 0 to {_MAX_TOP_LOGPROBS}",
            param="top_logprobs",
        )
    if not body.get("logprobs"):
        raise AgentRequestRefused(
            "top_logprobs: goes with logprobs; set both", param="top_logprobs"
        )
    return True


def _wanted_logprobs(body: Mapping[str, Any]) -> int:
    number = body.get("logprobs") or 0
    if type(number) is bool or not isinstance(number, int) or not 0 <= number <= _MAX_TOP_LOGPROBS:
        raise AgentRequestRefused(
            f"logprobs: {number!r:.20} is none of 0 to {_MAX_TOP_LOGPROBS}", param="logprobs"
        )
    return number


def _stop_texts(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or ()
    if isinstance(stop, str):
        stop = (stop,)
    if (
        not isinstance(stop, (list, tuple))
        or len(stop) > _MAX_STOPS
        or not all(isinstance(text, str) and text for text in stop)
    ):
        raise AgentRequestRefused(f"stop: give up to {_MAX_STOPS} texts", param="stop")
    return tuple(stop)


def _with_free_choices(request: AgentRequest) -> AgentRequest:
    """Adds the sampling that a request outside of a session chooses. Raises RequestRefused."""
    n = request.body.get("n")
    if n is not None and not (type(n) is int and 1 <= n <= _MAX_CHOICES):
        raise _out_of_bounds("n", n)
    seed = request.body.get("seed")
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**31):
        raise _out_of_bounds("seed", seed)
    temperature = request.body.get("temperature")
    if temperature is not None and not (_is_number(temperature) and 0 <= temperature <= 100):
        raise _out_of_bounds("temperature", temperature)
    top_p = request.body.get("top_p")
    if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
        raise _out_of_bounds("top_p", top_p)
    return replace(request, n=n or 1, seed=seed, temperature=temperature, top_p=top_p or 1.0)


def _out_of_bounds(name: str, value: Any) -> AgentRequestRefused:
    return AgentRequestRefused(f"{name}: {value!r:.20} is out of bounds", param=name)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def model(version: int | None) -> dict[str, Any]:
    """Returns the entry of the only model. version: of its weights, None if it is not known."""
    return {
        "id": MODEL,
        "object": "model",
        "created": 0,
        "owned_by": "pa_npu",
        "weight_version": version,
    }


def named_model(name: str, version: int | None) -> dict[str, Any]:
    """Returns the entry of the model of this name. Raises RequestRefused if there is none."""
    if name != MODEL:
        raise AgentRequestRefused(
            f"model: {name!r:.60} is not here; there is {MODEL}", status=404, param="model"
        )
    return model(version)


def models(version: int | None) -> dict[str, Any]:
    """Returns the list of models."""
    return {"object": "list", "data": [model(version)]}


def whole_answer(
    chat: Chat,
    completion_id: str,
    written: Sequence[tuple[ChatAnswer, Generation]],
    prompt: Sequence[int],
    request: AgentRequest,
) -> dict[str, Any]:
    """Makes a whole answer, with the weight version that wrote it.

    It is a text_completion if completion_id begins with `cmpl`, else a chat.completion. `written`
    has one pair per choice. prompt: the token ids that the policy was shown.
    """
    is_chat = not completion_id.startswith("cmpl")
    choices = []
    for index, (answer, generation) in enumerate(written):
        choice: dict[str, Any] = {"index": index, "logprobs": None}
        if is_chat:
            choice["message"] = answer.message
        else:
            choice["text"] = answer.text
        if answer.message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        else:
            choice["finish_reason"] = "stop" if generation.finished else "length"
        if request.logprobs and len(generation.logprobs):
            choice["logprobs"] = _logprobs(chat, generation, request, is_chat)
        if request.token_ids:
            choice["token_ids"] = generation.tokens.tolist()
        choices.append(choice)

    num_written = sum(len(generation.tokens) for _, generation in written)
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_written,
        "total_tokens": len(prompt) + num_written,
    }
    whole: dict[str, Any] = {
        "id": completion_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": MODEL,
        "weight_version": max((generation.version or 0 for _, generation in written), default=0),
        "choices": choices,
        "usage": usage,
    }
    if request.token_ids:
        whole["prompt_token_ids"] = [int(token) for token in prompt]
    return whole


def events(answer: dict[str, Any], usage: bool) -> Iterator[bytes]:
    """Yields an answer as server-sent events. usage: the client wants token counts at the end."""
    is_chat = answer["object"] == "chat.completion"
    head = {name: answer[name] for name in ("id", "created", "model", "weight_version")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    first = {}
    if "prompt_token_ids" in answer:
        first["prompt_token_ids"] = answer["prompt_token_ids"]
    for choice in answer["choices"]:
        for chunk in _chat_chunks(choice) if is_chat else _text_chunks(choice):
            yield _event({**head, **first, "choices": [chunk]})
            first = {}
    if usage:
        yield _event({**head, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def _chat_chunks(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the chunks of a chat's choice: the role, the content, and the finish reason."""
    delta = {name: value for name, value in choice["message"].items() if name != "role"}
    calls = delta.pop("tool_calls", ())
    if calls:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    common = {"index": choice["index"], "finish_reason": None, "logprobs": None}
    return [
        {**common, "delta": {"role": "assistant", "content": ""}},
        {**common, **_of_tokens(choice), "delta": delta},
        {**common, "delta": {}, "finish_reason": choice["finish_reason"]},
    ]


def _text_chunks(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the chunks of a text completion's choice: the text, and the finish reason."""
    common = {"index": choice["index"], "finish_reason": None, "logprobs": None}
    return [
        {**common, **_of_tokens(choice), "text": choice["text"]},
        {**common, "text": "", "finish_reason": choice["finish_reason"]},
    ]


def _of_tokens(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a choice says of its tokens: log-probs, and ids where they are asked for."""
    return {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _logprobs(
    chat: Chat, written: Generation, request: AgentRequest, is_chat: bool
) -> dict[str, Any]:
    """Returns the log-probs of the written tokens in the form of chats or of completions."""
    content = chat_logprobs(chat, written, request)
    if is_chat:
        return {"content": content, "refusal": None}
    return {
        "tokens": [token["token"] for token in content],
        "token_logprobs": [token["logprob"] for token in content],
        "top_logprobs": None,
    }


def chat_logprobs(chat: Chat, written: Generation, request: AgentRequest) -> list[dict[str, Any]]:
    """Returns the written tokens with their log-probs.

    Where the request asks for the likeliest tokens too, there is the written one: an engine reports
    no other, and OpenAI's format allows fewer tokens than a client asks for.
    """
    content = []
    for number, logprob in zip(written.tokens.tolist(), written.logprobs.tolist(), strict=True):
        text = str(chat.tokenizer.decode([number]))
        token = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**token, "top_logprobs": [token] if request.top_logprobs else []})
    return content
