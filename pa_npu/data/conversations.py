"""Renders a conversation as text, and says which characters of it the assistant wrote.

Two ways tell these, and the first that applies is taken for all rows of a dataset:

    marks    the chat template says it itself, by {% generation %} around what the assistant writes
    compare  each message of the assistant is found by rendering the conversation again:
             1. up to the message, with the beginning of an answer, and up to its end: where both
                are beginnings of the whole text, what lies between them is the message
             2. else with another content in its place: what differs is the message, and an end
                token that follows at once belongs to it
             A template without an end token of its own, as GLM's, ends a message by the next
             one's role: that token belongs to the message where a response stops at it, and behind
             the last message an end token is put, so that the model learns to stop

The second way fails where a template writes the rest of a conversation differently with another
message in it. That is found on the row, and refused in one line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pa_npu.config.plain_file import reason
from pa_npu.config.sections.inputs import DataConfig
from pa_npu.data.messages import Message, left_out
from pa_npu.data.prompts import knows_reasoning, with_reasoning
from pa_npu.data.row_layouts import Conversation, PlainText, RowContent
from pa_npu.data.stop_tokens import special_texts, stop_texts
from pa_npu.data.template import (
    TemplateFailed,
    check_options,
    chosen_template,
    rendered,
    rendered_with_mask,
)
from pa_npu.errors import DataError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What no row has, to be found in a rendering.
_PROBE = "kx7q probe of a message v93m"
MARKS = "by the template's generation marks"
COMPARED = "by comparing renderings of the template"
AS_THEY_ARE = "texts without a template"


@dataclass(frozen=True)
class Written:
    """Characters [start, end) of a text that are trained, with their weight."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class TrainedText:
    """A row's text, and what of it is trained.

    special: whether the tokenizer puts its special tokens around it, which a template brings along.
    why_nothing: for a message, if nothing is trained.
    """

    location: str
    text: str
    written: tuple[Written, ...]
    special: bool
    why_nothing: str


class Renderer:
    """Makes texts of a dataset's rows. tokenizer: a fast one of transformers.

    rule: how trained tokens were told from others in the rows so far.
    """

    def __init__(self, tokenizer: Any, options: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._template = chosen_template(tokenizer, options)
        check_options(self._template, options)
        text = self._template if isinstance(self._template, str) else ""
        self._has_marks = bool(_GENERATION.search(text))
        self._end_token = str(getattr(tokenizer, "eos_token", None) or "")
        self._stops = stop_texts(tokenizer)
        self._specials = special_texts(tokenizer)
        self._rules: list[str] = []
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                "model.path: its tokenizer says nothing of which characters a token was made of, "
                "by which trained tokens are found; give the model a tokenizer.json (a fast "
                "tokenizer of transformers)"
            )

    @property
    def rule(self) -> str:
        return ", ".join(self._rules)

    def text_of(self, row: RowContent) -> TrainedText:
        """Returns the row's text. Raises DataError where it cannot be rendered, or nothing says
        what of it the assistant wrote.
        """
        if isinstance(row, PlainText):
            return self._plain(row)
        conversation = self._composed(row)
        if self._template is None:
            return self._plain(self._joined(conversation))
        try:
            return self._by_template(conversation)
        except TemplateFailed as failed:
            roles = ", ".join(message["role"] for message in conversation.messages)
            raise DataError(
                f"{row.location}: the chat template {failed}, with the roles {roles}; correct the "
                "row, or chat_template of model.path"
            ) from None

    def encode(self, texts: Sequence[TrainedText]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Returns tokens of each text, and the characters [start, end) that each was made of."""
        encoded: list[tuple[list[int], list[tuple[int, int]]]] = [([], [])] * len(texts)
        for special in (False, True):
            numbers = [number for number, text in enumerate(texts) if text.special is special]
            if not numbers:
                continue
            try:
                batch = self._tokenizer(
                    [texts[number].text for number in numbers],
                    add_special_tokens=special,
                    return_offsets_mapping=True,
                )
            except Exception as error:  # what a damaged tokenizer raises is anything
                raise DataError(
                    f"model.path: its tokenizer cannot encode a row ({type(error).__name__}: "
                    f"{reason(error)}); restore the tokenizer's files from the model's source"
                ) from None
            for place, number in enumerate(numbers):
                encoded[number] = batch["input_ids"][place], batch["offset_mapping"][place]
        return encoded

    def _use(self, rule: str) -> None:
        if rule not in self._rules:
            self._rules.append(rule)

    # without a template

    def _plain(self, row: PlainText) -> TrainedText:
        """Returns the text as it is, with the end token behind it."""
        self._use(AS_THEY_ARE)
        text = row.text if row.text.endswith(self._end_token) else row.text + self._end_token
        whole = row.before + text
        written = (Written(len(row.before), len(whole), row.weight),) if row.weight else ()
        why = "its weight is 0" if not row.weight else "the text is empty"
        return TrainedText(row.location, whole, written, special=True, why_nothing=why)

    def _joined(self, row: Conversation) -> PlainText:
        """Returns a question and its answer, one behind the other as in a run with engines."""
        trained = [number for number, weight in enumerate(row.weights) if weight]
        last = len(row.messages) - 1
        if trained not in ([last], []):
            raise DataError(
                f"{row.location}: a conversation of several answers needs a chat template, and "
                "there is none; name one with data.chat_template, or give prompt and completion"
            )
        before = "\n".join(message["content"] for message in row.messages[:-1])
        return PlainText(row.location, before, row.messages[-1]["content"], row.weights[-1])

    # with a template

    def _composed(self, row: Conversation) -> Conversation:
        """Returns the row with data.system_prompt and data.instruction."""
        messages = [dict(message) for message in row.messages]
        weights = list(row.weights)
        if self._options.instruction:
            asked = [message for message in messages if message["role"] == "user"]
            if len(asked) != 1:
                raise DataError(
                    f"{row.location}: {len(asked)} messages of role user, one of which "
                    "data.instruction would have to follow; remove the key, and write it into the "
                    "rows"
                )
            asked[0]["content"] += "\n" + self._options.instruction
        if self._options.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._options.system_prompt})
            weights.insert(0, 0.0)
        if not knows_reasoning(self._template):
            messages = [with_reasoning(message) for message in messages]
        return replace(row, messages=tuple(messages), weights=tuple(weights))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        answer_begins: bool = False,
    ) -> str:
        options = dict(self._options.template_options)
        if tools:
            options["tools"] = list(tools)
        return rendered(
            self._tokenizer,
            self._template,
            messages,
            add_generation_prompt=answer_begins,
            **options,
        )

    def _by_template(self, row: Conversation) -> TrainedText:
        text = self._render(row.messages, row.tools)
        if lost := left_out(self._render, text, row.messages, row.tools):
            raise DataError(
                f"{row.location}: the chat template leaves out {lost}; correct the row, or name a "
                "template that renders it with data.chat_template"
            )
        if self._has_marks:
            self._use(MARKS)
            written = self._marked(row, text)
            why = "the template's generation marks are around nothing that has a weight"
        else:
            self._use(COMPARED)
            text, written = self._ended(row, text, self._compared(row, text))
            why = "every message of the assistant has the weight 0, or is empty"
        return TrainedText(row.location, text, written, special=False, why_nothing=why)

    def _marked(self, row: Conversation, text: str) -> tuple[Written, ...]:
        """Returns the characters between the template's marks, with the weights of the messages."""
        options = dict(self._options.template_options)
        if row.tools:
            options["tools"] = list(row.tools)
        tokens, mask = rendered_with_mask(self._tokenizer, self._template, row.messages, **options)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoding["offset_mapping"]
        if list(encoding["input_ids"]) != list(tokens):
            raise DataError(
                f"{row.location}: the chat template renders the row differently a second time; "
                "correct chat_template of model.path"
            )
        spans: list[tuple[int, int]] = []
        for number, is_marked in enumerate(mask):
            if not is_marked:
                continue
            start, end = offsets[number]
            if number and mask[number - 1]:
                start = spans.pop()[0]
            spans.append((start, end))
        weights = [
            weight
            for message, weight in zip(row.messages, row.weights, strict=True)
            if message["role"] == "assistant"
        ]
        if len(set(weights)) == 1:
            weights = weights[:1] * len(spans)
        if len(weights) != len(spans):
            raise DataError(
                f"{row.location}: {len(weights)} messages of the assistant with different weights, "
                f"but the template's generation marks are around {len(spans)} stretches of "
                "tokens, so that nothing says which has which; give all messages one weight, or "
                "correct the template"
            )
        return tuple(
            Written(start, end, weight)
            for (start, end), weight in zip(spans, weights, strict=True)
            if weight
        )

    def _compared(self, row: Conversation, text: str) -> tuple[Written, ...]:
        written = []
        for number, weight in enumerate(row.weights):
            if not weight:
                continue
            span = self._between_beginnings(row, text, number)
            if span is None:
                span = self._that_differs(row, text, number)
            if span is None:
                raise DataError(
                    f"{row.location}: nothing says which tokens of message {number} the assistant "
                    "wrote: the chat template has no {% generation %} marks, and renders the rest "
                    "of the conversation differently with another message in its place; name a "
                    "template with marks with data.chat_template"
                )
            if span[1] > span[0]:
                written.append(Written(*span, weight))
        return tuple(written)

    def _ended(
        self, row: Conversation, text: str, written: tuple[Written, ...]
    ) -> tuple[str, tuple[Written, ...]]:
        """Returns the text and its trained stretches, each with what ends a response behind it."""
        ended = []
        for stretch in written:
            following = text[stretch.end :].lstrip()
            stop = next((stop for stop in self._stops if following.startswith(stop)), "")
            if stop and not text[: stretch.end].endswith(self._specials):
                end = len(text) - len(following) + len(stop)
                stretch = replace(stretch, end=end)
            ended.append(stretch)
        is_last = bool(ended) and row.messages[-1]["role"] == "assistant" and row.weights[-1] > 0
        if not is_last or not self._end_token:
            return text, tuple(ended)
        last = ended[-1]
        if last.end < len(text.rstrip()) or text[: last.end].endswith(self._specials):
            return text, tuple(ended)
        text = text[: last.end] + self._end_token
        return text, (*ended[:-1], replace(last, end=len(text)))

    def _between_beginnings(
        self, row: Conversation, text: str, number: int
    ) -> tuple[int, int] | None:
        """Bounds of a message between the text up to it and the text up to its end."""
        try:
            before = self._render(row.messages[:number], row.tools, answer_begins=True)
            after = self._render(row.messages[: number + 1], row.tools)
        except TemplateFailed:
            return None  # one that refuses a conversation without its end
        if not after.startswith(before) or not text.startswith(after):
            return None
        answer = after[len(before) :].rstrip()
        # what a template puts behind the end of the whole conversation, nobody has to write
        head, end_token, _ = answer.partition(self._end_token or "\0")
        return len(before), len(before) + len(head) + len(end_token)

    def _that_differs(self, row: Conversation, text: str, number: int) -> tuple[int, int] | None:
        """Bounds of what another content in the place of the message changes."""
        probe_message = {"role": "assistant", "content": _PROBE}
        messages = [*row.messages[:number], probe_message, *row.messages[number + 1 :]]
        try:
            probed = self._render(messages, row.tools)
        except TemplateFailed:
            return None
        start, separator, behind = probed.partition(_PROBE)
        if not separator or _PROBE in behind:
            return None
        if not text.startswith(start) or not text.endswith(behind):
            return None
        end = len(text) - len(behind)
        if end < len(start):
            return None
        following = text[end:].lstrip()
        if self._end_token and following.startswith(self._end_token):
            end = len(text) - len(following) + len(self._end_token)
        return len(start), end
