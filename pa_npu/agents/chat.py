"""Chat requests as text, and the policy's answers as messages: the model's template one way, its tool parser the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.agents.requests import Refused
from pa_npu.agents.tool_calls import Parsed, Parser, make_parser
from pa_npu.config.schema import Config
from pa_npu.data.template import TemplateFailed, chosen_template, rendered
from pa_npu.engines.protocol import Generation


@dataclass(frozen=True)
class Answer:
    """The policy's answer to the client. text: without special tokens and stop texts. shown: as SessionTree.add has it."""

    text: str
    message: dict[str, Any]
    shown: tuple[str, ...]


class Chat:
    """A model's chat format. tokenizer: of transformers."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._template = chosen_template(tokenizer, config.data)
        self._options = config.data.template_options
        self._parse: Parser = make_parser(config.agent.tool_parser, tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, generate: bool = True) -> str:
        """The text that the template makes of messages. generate: up to where the policy's answer begins. Raises Refused."""
        if self._template is None:
            raise Refused("this model has no chat template; use /v1/completions", code="no_chat_template")
        try:
            return rendered(
                self.tokenizer,
                self._template,
                [_for_template(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=generate,
                **self._options,
            )
        except TemplateFailed as failed:
            raise Refused(f"the chat template {failed}", param="messages") from None

    def encode(self, text: str, *, begins: bool, templated: bool) -> list[int]:
        """Token ids. begins: it is the first text of a branch. A template brings its own special tokens, plain text gets them."""
        found: list[int] = self.tokenizer(text, add_special_tokens=begins and not templated)["input_ids"]
        return found

    def text_of(self, written: Generation, stop: Sequence[str]) -> tuple[str, str]:
        """The whole text of an answer, special tokens included, and what the client gets: without these and without stop texts."""
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
        """The message of an answer to `messages`, which were rendered as `text`. call_ids: the beginning of its calls' ids."""
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
        return Answer(content, message, (raw, *self._as_rendered(parsed, message, messages, tools, text, ending)))

    def _as_rendered(
        self,
        parsed: Parsed,
        message: dict[str, Any],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        text: str,
        ending: str,
    ) -> tuple[str, ...]:
        """The template's own form of a message with calls, where it says the same: JSON may be written in several ways."""
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
        return self._decode([last], special=True) if written.finished and last in self._special else ""

    def _decode(self, tokens: Sequence[int], *, special: bool) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, **options))


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content as a text, and calls' arguments as objects."""
    found = {name: value for name, value in message.items() if value is not None}
    content = found.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise Refused("messages: only parts of type text can be read by this model", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(found.get("role"), str):
        raise Refused("messages: each needs a role and a content, both texts", param="messages")
    found["content"] = content
    if calls := found.get("tool_calls"):
        try:
            found["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
        except (TypeError, KeyError, ValueError):
            raise Refused("messages: tool_calls must be as they were answered", param="messages") from None
    return found


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
