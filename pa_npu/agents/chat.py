"""Chat requests as text, and the policy's answers as messages: the model's template one way, its tool parser the other.

The parsers of tool calls (agent.tool_parser):

hermes      <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>, also Qwen's; a call that
            is no such JSON stays text
template    what the tokenizer's files say (`parse_response` of transformers), where they say it
any other   a tool parser of vLLM, by its name there (llama3_json, mistral, ...), where vLLM is
            installed
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.agents.openai_format import Refused
from pa_npu.config.schema import Config
from pa_npu.data.messages import BadMessage, Message, left_out, template_message
from pa_npu.data.rows import is_text
from pa_npu.data.template import TemplateFailed, chosen_template, rendered
from pa_npu.data.text_encoder import TextEncoder
from pa_npu.engines.protocol import Generation
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import ConfigError

_DEVELOPER = "developer"  # OpenAI's newer name of the role `system`
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """The policy's answer to the client. text: without special tokens and stop texts. shown: as
    SessionTree.add has it.
    """

    text: str
    message: dict[str, Any]
    shown: tuple[str, ...]


class Chat:
    """A model's chat format. tokenizer: of transformers."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self._template = chosen_template(tokenizer, config.data)
        self._knows_developer = isinstance(self._template, str) and _DEVELOPER in self._template
        self._options = config.data.template_options
        self._parse: Parser = make_parser(config.agent.tool_parser, tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, generate: bool = True
    ) -> str:
        """The text that the template makes of messages. generate: up to where the policy's answer
        begins. Raises Refused.
        """
        if self._template is None:
            raise Refused(
                "this model has no chat template; use /v1/completions", code="no_chat_template"
            )
        read = [self._readable(message) for message in messages]

        def render(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
            return rendered(
                self.tokenizer,
                self._template,
                messages,
                tools=list(tools) or None,
                add_generation_prompt=generate,
                **self._options,
            )

        try:
            try:
                text = render(read, tools)
            except TemplateFailed:
                as_texts = _with_odd_calls_as_text(read)
                if as_texts == read:
                    raise
                read = as_texts
                text = render(read, tools)
            lost = left_out(render, text, read, ())
        except TemplateFailed as failed:
            raise Refused(f"the chat template {failed}", param="messages") from None
        if lost is not None:
            raise Refused(f"messages: the chat template leaves out {lost}", param="messages")
        return text

    def _readable(self, message: Mapping[str, Any]) -> Message:
        """A message as templates read it. Raises Refused."""
        try:
            read = template_message(message)
        except BadMessage as bad:
            raise Refused(f"messages: {bad}", param="messages") from None
        if read["role"] == _DEVELOPER and not self._knows_developer:
            read["role"] = "system"
        return read

    def encode(self, text: str, *, begins: bool, templated: bool) -> list[int]:
        """Token ids. begins: it is the first text of a branch.

        A template brings its own special tokens, plain text gets them.
        """
        _check_text(text)
        found: list[int] = self.tokenizer(text, add_special_tokens=begins and not templated)[
            "input_ids"
        ]
        return found

    async def encode_aside(
        self, text: str, *, begins: bool, templated: bool, max_tokens: int
    ) -> list[int] | None:
        """The same without holding up the event loop; None for a text that has more than max_tokens
        in any case.
        """
        _check_text(text)
        return await self._encoder.encode(
            text, max_tokens=max_tokens, special=begins and not templated
        )

    def text_of(self, written: Generation, stop: Sequence[str]) -> tuple[str, str]:
        """The whole text of an answer, special tokens included, and what the client gets: without
        these and without stop texts.
        """
        tokens = written.tokens.tolist()
        raw = self._decode(tokens, special=True)
        text = self._decode(tokens, special=False)
        ends = [text.index(one) for one in stop if one in text]
        return raw, text[: min(ends)] if ends else text

    def answer(
        self,
        written: Generation,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        text: str,
        stop: Sequence[str],
        call_ids: str,
    ) -> Answer:
        """The message of an answer to `messages`, which were rendered as `text`. call_ids: the
        beginning of its calls' ids.
        """
        raw, content = self.text_of(written, stop)
        ending = self._ending(written)
        parsed = self._parse(raw.removesuffix(ending), tools, text) if tools else Parsed(content)
        if not parsed.calls:
            return Answer(content, {"role": "assistant", "content": content}, (raw,))
        calls = [
            {
                "id": f"{call_ids}{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
        message = {"role": "assistant", "content": parsed.content or None, "tool_calls": calls}
        return Answer(
            content,
            message,
            (raw, *self._as_rendered(parsed, message, messages, tools, text, ending)),
        )

    def _as_rendered(
        self,
        parsed: Parsed,
        message: dict[str, Any],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        text: str,
        ending: str,
    ) -> tuple[str, ...]:
        """The template's own form of a message with calls, where it says the same: JSON may be
        written in several ways.
        """
        try:
            whole = self.render([*messages, message], tools, generate=False)
        except Refused:
            return ()
        if not ending or not whole.startswith(text) or ending not in whole[len(text) :]:
            return ()
        shown = whole[len(text) : whole.rindex(ending)]
        return (shown + ending,) if self._parse(shown, tools, text).says_the_same(parsed) else ()

    def _ending(self, written: Generation) -> str:
        """The text of the special token that ended an answer; empty where none did."""
        last = int(written.tokens[-1])
        return (
            self._decode([last], special=True) if written.finished and last in self._special else ""
        )

    def _decode(self, tokens: Sequence[int], *, special: bool) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, **options))


def _check_text(text: str) -> None:
    if not is_text(text):
        raise Refused(
            "a text has half of a surrogate pair (\\uD800 to \\uDFFF), which no token stands for"
        )


def _with_odd_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with those calls in their content whose arguments are no object.

    A parser may have answered such a call, and a template that goes through its arguments fails.
    """
    plain = []
    for message in messages:
        calls = message.get("tool_calls", ())
        odd = [
            call["function"]
            for call in calls
            if not isinstance(call["function"]["arguments"], Mapping)
        ]
        if odd:
            said = [message["content"], *(f"{call['name']}({call['arguments']})" for call in odd)]
            kept = [call for call in calls if isinstance(call["function"]["arguments"], Mapping)]
            message = {**message, "content": "\n".join(filter(None, said)), "tool_calls": kept}
        plain.append(message)
    return plain


@dataclass(frozen=True)
class Call:
    """name: of a function. arguments: JSON, an object."""

    name: str
    arguments: str

    @property
    def canonical(self) -> tuple[str, str]:
        """Equal for calls that differ in the form of their JSON only."""
        try:
            return self.name, json.dumps(json.loads(self.arguments or "{}"), sort_keys=True)
        except (ValueError, RecursionError):
            return self.name, self.arguments


@dataclass(frozen=True)
class Parsed:
    """A model's answer: its text without calls, and its calls."""

    content: str
    calls: tuple[Call, ...] = ()

    def says_the_same(self, other: Parsed) -> bool:
        """Whether both differ in form only: in the spaces around their text, and in how their
        calls' JSON is written.
        """
        own, others = ([call.canonical for call in one.calls] for one in (self, other))
        return self.content.strip() == other.content.strip() and own == others


Parser = Callable[[str, Sequence[dict[str, Any]], str], Parsed]
"""From an answer's text, special tokens included but for the last, the request's tools, and its
text.
"""


def hermes(text: str, tools: Sequence[dict[str, Any]] = (), prompt: str = "") -> Parsed:
    """Calls between <tool_call> and </tool_call>, each a JSON object with `name` and `arguments`."""
    calls = []
    for found in _HERMES.finditer(text):
        try:
            call = json.loads(found[1])
            name, arguments = call["name"], call.get("arguments", {})
            written = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Parsed(text)
        if (
            not isinstance(name, str)
            or not isinstance(arguments, dict)
            or not is_text([name, written])
        ):
            return Parsed(text)
        calls.append(Call(name, written))
    return Parsed(text[: text.index("<tool_call>")], tuple(calls)) if calls else Parsed(text)


def make_parser(name: str, tokenizer: Any) -> Parser:
    """The parser of agent.tool_parser. Raises ConfigError where there is none of this name."""
    if name == "auto":
        name = "template" if _response_template(tokenizer) else "hermes"
    if name == "hermes":
        return hermes
    if name == "template":
        if not _response_template(tokenizer):
            raise ConfigError(
                "agent.tool_parser: template, but the model's tokenizer does not say how its "
                "answers are read; set hermes, or the name of a tool parser of vLLM"
            )
        return _by_template(tokenizer)
    make = engine_kind("vllm").tool_parser
    assert make is not None
    extract = make(name, tokenizer)

    def parse(text: str, tools: Sequence[dict[str, Any]], prompt: str) -> Parsed:
        content, calls = extract(text, tools)
        return Parsed(content or "", tuple(Call(*call) for call in calls))

    return parse


def _response_template(tokenizer: Any) -> Any:
    return getattr(tokenizer, "response_template", None) or getattr(
        tokenizer, "response_schema", None
    )


def _by_template(tokenizer: Any) -> Parser:
    known = inspect.signature(tokenizer.parse_response).parameters  # later versions want more

    def parse(text: str, tools: Sequence[dict[str, Any]], prompt: str) -> Parsed:
        more = {
            name: value
            for name, value in (("prefix", prompt), ("tools", list(tools)))
            if name in known
        }
        try:
            message = tokenizer.parse_response(text, **more)
            calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
            found = [Call(str(call["name"]), _json(call.get("arguments", {}))) for call in calls]
        except Exception:  # the template is the model's, and what a policy writes is anything
            return Parsed(text)
        return Parsed(str(message.get("content") or ""), tuple(found)) if found else Parsed(text)

    return parse


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
