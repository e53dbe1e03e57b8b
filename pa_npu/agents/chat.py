"""Renders chat requests as text, and parses the policy's answers into messages with tool calls.

Requests are rendered by the model's chat template. Answers are read by a parser, which
agent.tool_parser names:

hermes      <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>, Qwen's format too;
            a call that is not such JSON stays text
template    the tokenizer's own rule (`parse_response` of transformers), if its files have one
any other   vLLM's tool parser of that name (llama3_json, mistral, ...); vLLM must be installed

A model that reads images gets those in messages where its template puts a placeholder for each. A
placeholder that is text, because the policy wrote it, stays text.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.agents.openai_format import AgentRequestRefused
from pa_npu.config.schema import Config
from pa_npu.data.image_rows import ImageInput
from pa_npu.data.messages import BadMessage, Message, is_image_part, left_out, template_message
from pa_npu.data.rows import is_text
from pa_npu.data.template import TemplateFailed, chosen_template, rendered
from pa_npu.data.text_encoder import TextEncoder
from pa_npu.engines.protocol import Generation
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import ConfigError
from pa_npu.vision.placeholders import Span, expanded_at

_DEVELOPER = "developer"  # OpenAI's newer name of the role `system`
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ChatAnswer:
    """The policy's answer as a client gets it.

    text: the answer without special tokens and stop texts.
    message: the assistant's message of a chat; empty for a plain completion.
    shown: texts that stand for this answer in later requests (TurnNode.shown).
    """

    text: str
    message: dict[str, Any]
    shown: tuple[str, ...]


@dataclass(frozen=True)
class RenderedChat:
    """Messages as the template renders them.

    images: what the messages hold as images, in order. places: where in the text the placeholder of
    each begins.
    """

    text: str
    images: tuple[Any, ...] = ()
    places: tuple[int, ...] = ()


class Chat:
    """A model's chat format: template, tokenizer and tool parser.

    tokenizer: a tokenizer of transformers. images: how the model reads images, or why it does not.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.images = ImageInput.from_config(config)
        self._placeholder = ""
        if isinstance(self.images, ImageInput):
            self._placeholder = str(tokenizer.convert_ids_to_tokens(self.images.model.image_token))
        # stands in texts for a placeholder that is none, while they are rendered
        self._set_aside_mark = f"\ue000{secrets.token_hex(8)}\ue001"
        self._encoder = TextEncoder(tokenizer)
        self._template = chosen_template(tokenizer, config.data)
        self._knows_developer = isinstance(self._template, str) and _DEVELOPER in self._template
        self._options = config.data.template_options
        self._parse: Parser = make_parser(config.agent.tool_parser, tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, generate: bool = True
    ) -> str:
        """Returns the text of `rendered`."""
        return self.rendered(messages, tools, generate=generate).text

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, generate: bool = True
    ) -> RenderedChat:
        """Returns the messages as the template renders them.

        generate: appends the prompt behind which the policy writes its answer.
        Raises RequestRefused if there is no template, or if it fails or leaves content out.
        """
        if self._template is None:
            raise AgentRequestRefused(
                "this model has no chat template; use /v1/completions", code="no_chat_template"
            )
        images: list[Any] = []
        normalised = [self._normalise(message, images) for message in messages]
        tools = self._set_aside(tools, "tool")

        def apply_template(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
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
                text = apply_template(normalised, tools)
            except TemplateFailed:
                readable = _with_malformed_calls_as_text(normalised)
                if readable == normalised:
                    raise
                normalised = readable
                text = apply_template(normalised, tools)
            lost = left_out(apply_template, text, normalised, ())
        except TemplateFailed as failed:
            raise AgentRequestRefused(f"the chat template {failed}", param="messages") from None
        if lost is not None:
            raise AgentRequestRefused(
                f"messages: the chat template leaves out {lost}", param="messages"
            )
        return self._with_places(text, images)

    def _normalise(self, message: Mapping[str, Any], images: list[Any]) -> Message:
        """Returns a message in the form that templates read. Raises RequestRefused.

        images: gets those of the message.
        """
        reads_images = isinstance(self.images, ImageInput)
        if not reads_images and has_images(message):
            raise AgentRequestRefused(
                f"messages: an image, but {self.images}; send text alone", param="messages"
            )
        try:
            normalised = template_message(
                message, images if reads_images else None, marks_images=False
            )
        except BadMessage as bad:
            raise AgentRequestRefused(f"messages: {bad}", param="messages") from None
        if normalised["role"] == _DEVELOPER and not self._knows_developer:
            normalised["role"] = "system"
        kept: Message = self._set_aside(normalised, normalised["role"])
        return kept

    def _set_aside(self, value: Any, role: str) -> Any:
        """Returns a JSON value whose texts have a mark in place of the placeholder of an image.

        Raises RequestRefused for such a text that the policy cannot have written.
        """
        if not self._placeholder:
            return value
        try:
            return self._marked(value, role)
        except RecursionError:
            raise AgentRequestRefused(
                "messages: one is nested too deeply", param="messages"
            ) from None

    def _marked(self, value: Any, role: str) -> Any:
        if isinstance(value, str):
            if self._placeholder in value and role != "assistant":
                raise AgentRequestRefused(
                    f"messages: a text has {self._placeholder}, which stands for an image; send "
                    "the image, or leave it out",
                    param="messages",
                )
            return value.replace(self._placeholder, self._set_aside_mark)
        if isinstance(value, Mapping):
            return {name: self._marked(item, role) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, role) for item in value]
        return value

    def _with_places(self, text: str, images: Sequence[Any]) -> RenderedChat:
        """Returns a rendered text with the places of its images. Raises RequestRefused."""
        if not self._placeholder:
            return RenderedChat(text)
        mark = self._set_aside_mark
        whole = ""
        places = []
        for number, piece in enumerate(text.split(self._placeholder)):
            if number:
                places.append(len(whole))
                whole += self._placeholder
            whole += piece.replace(mark, self._placeholder)
        if len(places) != len(images):
            raise AgentRequestRefused(
                f"messages: the chat template shows {len(places)} of {len(images)} images",
                param="messages",
            )
        return RenderedChat(whole, tuple(images), tuple(places))

    def expanded(
        self, text: str, tokens: Sequence[int], places: Sequence[int], lengths: Sequence[int]
    ) -> tuple[list[int], list[Span]]:
        """Returns a text's tokens with as many placeholders as each image has, and where these are.

        places: of the images' placeholders in the text. lengths: of each image.
        """
        assert isinstance(self.images, ImageInput), "it has placed images"
        in_text = [found.start() for found in re.finditer(re.escape(self._placeholder), text)]
        image_token = self.images.model.image_token
        in_tokens = [place for place, token in enumerate(tokens) if token == image_token]
        if len(in_tokens) != len(in_text):
            raise AgentRequestRefused(
                f"messages: the tokenizer makes {len(in_tokens)} placeholders of {len(in_text)}"
            )
        chosen = [in_tokens[in_text.index(place)] for place in places]
        return expanded_at(tokens, chosen, lengths)

    def has_placeholder(self, tokens: Sequence[int]) -> bool:
        """Returns whether a token among these stands for an image."""
        return isinstance(self.images, ImageInput) and self.images.model.image_token in tokens

    def encode(self, text: str, *, begins: bool, templated: bool) -> list[int]:
        """Returns the token ids of a text.

        begins: the text is the first of a branch. Plain text then gets the special tokens of a
        beginning; a template writes its own.
        Raises RequestRefused if the text is not valid Unicode.
        """
        _check_text(text)
        encoded = self.tokenizer(text, add_special_tokens=begins and not templated)
        tokens: list[int] = encoded["input_ids"]
        return tokens

    async def encode_in_background(
        self, text: str, *, begins: bool, templated: bool, max_tokens: int
    ) -> list[int] | None:
        """Does the same as `encode` without blocking the event loop.

        Returns None if the text certainly has more than max_tokens.
        """
        _check_text(text)
        return await self._encoder.encode(
            text, max_tokens=max_tokens, special=begins and not templated
        )

    def decode_answer(self, written: Generation, stop: Sequence[str]) -> tuple[str, str]:
        """Returns (raw, text) of an answer.

        `raw` includes special tokens. `text` is for the client: it has no special tokens, and ends
        before the first stop text.
        """
        tokens = written.tokens.tolist()
        raw = self._decode(tokens, special=True)
        text = self._decode(tokens, special=False)
        end = len(text)
        for stop_text in stop:
            if stop_text in text:
                end = min(end, text.index(stop_text))
        return raw, text[:end]

    def answer(
        self,
        written: Generation,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        text: str,
        stop: Sequence[str],
        call_ids: str,
    ) -> ChatAnswer:
        """Makes the message of an answer.

        Args:
            messages: the request's messages, which were rendered as `text`.
            call_ids: prefix of the ids of the answer's tool calls.
        """
        raw, content = self.decode_answer(written, stop)
        ending = self._final_special_token(written)
        parsed = ParsedAnswer(content)
        if tools:
            parsed = self._parse(raw.removesuffix(ending), tools, text)
        if not parsed.calls:
            return ChatAnswer(content, {"role": "assistant", "content": content}, (raw,))

        calls = []
        for number, call in enumerate(parsed.calls):
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": f"{call_ids}{number}", "type": "function", "function": function})
        message = {"role": "assistant", "content": parsed.content or None, "tool_calls": calls}
        rendered_form = self._rendered_form(parsed, message, messages, tools, text, ending)
        return ChatAnswer(content, message, (raw, *rendered_form))

    def _rendered_form(
        self,
        parsed: ParsedAnswer,
        message: dict[str, Any],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        text: str,
        ending: str,
    ) -> tuple[str, ...]:
        """Returns the template's own rendering of a message with calls; empty if it differs.

        The policy may write a call's JSON in another form than the template does. A later request
        then contains the template's form.
        """
        try:
            whole = self.render([*messages, message], tools, generate=False)
        except AgentRequestRefused:
            return ()
        if not ending or not whole.startswith(text) or ending not in whole[len(text) :]:
            return ()
        shown = whole[len(text) : whole.rindex(ending)]
        if not self._parse(shown, tools, text).is_equivalent_to(parsed):
            return ()
        return (shown + ending,)

    def _final_special_token(self, written: Generation) -> str:
        """Returns the text of the special token that ended an answer; empty if none did."""
        last = int(written.tokens[-1])
        if not written.finished or last not in self._special:
            return ""
        return self._decode([last], special=True)

    def _decode(self, tokens: Sequence[int], *, special: bool) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, **options))


def has_images(message: Mapping[str, Any]) -> bool:
    """Returns whether a part of a message's content is an image."""
    content = message.get("content")
    return isinstance(content, (list, tuple)) and any(map(is_image_part, content))


def _check_text(text: str) -> None:
    if not is_text(text):
        raise AgentRequestRefused(
            "a text has half of a surrogate pair (\\uD800 to \\uDFFF), which no token stands for"
        )


def _with_malformed_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Moves calls whose arguments are not an object into their message's content.

    A parser may have returned such a call, and a template that iterates over its arguments fails.
    """
    readable = []
    for message in messages:
        texts = []
        kept = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(function["arguments"], Mapping):
                kept.append(call)
            else:
                texts.append(f"{function['name']}({function['arguments']})")
        if texts:
            content = message["content"]
            if isinstance(content, str):
                content = "\n".join(filter(None, [content, *texts]))
            else:
                content = [*content, {"type": "text", "text": "\n".join(texts)}]
            message = {**message, "content": content, "tool_calls": kept}
        readable.append(message)
    return readable


@dataclass(frozen=True)
class ToolCall:
    """A call of the function `name`. arguments: a JSON object, as text."""

    name: str
    arguments: str

    @property
    def canonical(self) -> tuple[str, str]:
        """A key that is equal for calls that differ only in the form of their JSON."""
        try:
            return self.name, json.dumps(json.loads(self.arguments or "{}"), sort_keys=True)
        except (ValueError, RecursionError):
            return self.name, self.arguments


@dataclass(frozen=True)
class ParsedAnswer:
    """A model's answer: its text without calls, and its tool calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()

    def is_equivalent_to(self, answer: ParsedAnswer) -> bool:
        """Returns True if the two differ only in outer white space and in the form of JSON."""
        if self.content.strip() != answer.content.strip():
            return False
        return [call.canonical for call in self.calls] == [call.canonical for call in answer.calls]


Parser = Callable[[str, Sequence[dict[str, Any]], str], ParsedAnswer]
"""Parses (answer, tools, prompt).

The answer includes special tokens except the last. Tools and prompt are the request's.
"""


def parse_hermes(text: str, tools: Sequence[dict[str, Any]] = (), prompt: str = "") -> ParsedAnswer:
    """Reads calls between <tool_call> and </tool_call>: JSON objects with `name`, `arguments`."""
    calls = []
    for match in _HERMES.finditer(text):
        try:
            call = json.loads(match[1].strip())
            name = call["name"]
            arguments = call.get("arguments", {})
            written = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return ParsedAnswer(text)
        if (
            not isinstance(name, str)
            or not isinstance(arguments, dict)
            or not is_text([name, written])
        ):
            return ParsedAnswer(text)
        calls.append(ToolCall(name, written))
    if not calls:
        return ParsedAnswer(text)
    return ParsedAnswer(text[: text.index("<tool_call>")], tuple(calls))


def make_parser(name: str, tokenizer: Any) -> Parser:
    """Makes the parser that agent.tool_parser names. Raises ConfigError for an unknown name."""
    if name == "auto":
        name = "template" if _response_template(tokenizer) else "hermes"
    if name == "hermes":
        return parse_hermes
    if name == "template":
        if not _response_template(tokenizer):
            raise ConfigError(
                "agent.tool_parser: template, but the model's tokenizer has no response template; "
                "set hermes, or the name of a tool parser of vLLM"
            )
        return _template_parser(tokenizer)
    make_vllm_parser = engine_kind("vllm").tool_parser
    assert make_vllm_parser is not None
    extract = make_vllm_parser(name, tokenizer)

    def parse(text: str, tools: Sequence[dict[str, Any]], prompt: str) -> ParsedAnswer:
        content, calls = extract(text, tools)
        return ParsedAnswer(content or "", tuple(ToolCall(*call) for call in calls))

    return parse


def _response_template(tokenizer: Any) -> Any:
    return getattr(tokenizer, "response_template", None) or getattr(
        tokenizer, "response_schema", None
    )


def _template_parser(tokenizer: Any) -> Parser:
    # later versions of transformers have parameters that earlier ones lack
    parameters = inspect.signature(tokenizer.parse_response).parameters

    def parse(text: str, tools: Sequence[dict[str, Any]], prompt: str) -> ParsedAnswer:
        options: dict[str, Any] = {}
        if "prefix" in parameters:
            options["prefix"] = prompt
        if "tools" in parameters:
            options["tools"] = list(tools)
        try:
            message = tokenizer.parse_response(text, **options)
            calls = [_tool_call(call) for call in message.get("tool_calls") or ()]
        except Exception:  # the template is the model's, and a policy may write anything
            return ParsedAnswer(text)
        if not calls:
            return ParsedAnswer(text)
        return ParsedAnswer(str(message.get("content") or ""), tuple(calls))

    return parse


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(function["name"]), arguments)
