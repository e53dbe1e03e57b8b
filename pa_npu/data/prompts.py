"""Prompts: dataset rows rendered with the tokenizer's chat template, tokenised, and checked for length."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.plain_file import reason
from pa_npu.config.sections.inputs import DataConfig, Dataset, TrainingDataset
from pa_npu.config.words import counted
from pa_npu.data.hints import Hint
from pa_npu.data.image_rows import ImageInput
from pa_npu.data.made_rows import MadeRows
from pa_npu.data.messages import Message, left_out, with_image_parts
from pa_npu.data.records import Columns, Record, read_records
from pa_npu.data.template import TemplateFailed, check_options, chosen_template, rendered
from pa_npu.errors import DataError, printable
from pa_npu.vision.family import FAMILIES
from pa_npu.vision.images import ShownImage

# of a dataset: these, and so much more per row
RENDER_ALL_LIMIT_S = 60.0
RENDER_ROW_S = 0.02
ENCODE_CHARACTERS = 4 << 20  # tokenised together
_SHOWN_LINES = 12
_SHOWN_CHARACTERS = 400
# A prompt of so many characters for each token that fits is too long whatever its tokens are. No
# token of a vocabulary has more; normalisation, such as dropping spaces, may take some away.
_SHORTEST_TOKEN_BOUND = 64
_NORMALISED = 4
_REASONING = "reasoning_content"


@dataclass(frozen=True, eq=False)
class Prompt:
    """A question for an engine, with what its answers are compared with.

    prompt_id: row of the dataset, from 0; of several datasets, as if they were one behind the
    other. tokens: int32 [P]. text: the rendered prompt. answer: the final answer, without GSM8K's
    reasoning. row: the dataset row as it was read, with names in place of images. source: what its
    dataset is called. hinted: by teacher, the tokens of the prompt with its hint. images: those
    that placeholders among the tokens stand for. messages: what the template rendered.
    """

    prompt_id: int
    tokens: npt.NDArray[np.int32]
    answer: str
    text: str
    row: dict[str, Any]
    source: str = ""
    hinted: Mapping[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    images: tuple[ShownImage, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def identity(self) -> bytes:
        """Tells this prompt from another one, for the fingerprint of a dataset."""
        tokens = np.asarray(self.tokens, "<i4").tobytes()
        images = b"".join(image.identity for image in self.images)
        return tokens + f"\n{self.prompt_id}\n{self.answer}\n".encode() + images


@dataclass(frozen=True, eq=False)
class PromptSet:
    """The usable prompts of one dataset, in its order. num_read = len(prompts) + num_skipped."""

    path: str
    prompts: tuple[Prompt, ...]
    num_read: int
    num_truncated: int
    num_skipped: int

    @property
    def items(self) -> tuple[Prompt, ...]:
        """Returns the items that a stream gives."""
        return self.prompts

    @property
    def summary(self) -> str:
        """One line for logs and the dry run."""
        lengths = [len(prompt.tokens) for prompt in self.prompts]
        mean = sum(lengths) / len(lengths)
        line = (
            f"{counted(len(lengths), 'prompt')} from {self.path} (read {self.num_read}, truncated "
            f"{self.num_truncated}, skipped {self.num_skipped}), {min(lengths)} to "
            f"{counted(max(lengths), 'token')}, mean {mean:.0f}"
        )
        shown = [image for prompt in self.prompts for image in prompt.images]
        if shown:
            num_tokens = sum(image.length for image in shown)
            line += f"; {counted(len(shown), 'image')} of {num_tokens / len(shown):.0f} tokens"
        return line


def load_prompts(
    dataset: Dataset,
    tokenizer: Any,
    config: DataConfig,
    key: str,
    first_id: int = 0,
    needs_answer: bool = True,
    hints: Sequence[Hint] = (),
    images: ImageInput | str = "no model was given",
) -> PromptSet:
    """Reads, renders and tokenizes a dataset. Raises DataError for unusable data.

    Args:
        tokenizer: a transformers tokenizer.
        key: the configuration key that names the dataset, for messages.
        first_id: prompt_id of its first row.
        needs_answer: as Columns.
        hints: with each of which every prompt is made a second time.
        images: how the model reads images, or why it does not.
    """
    path = dataset.path
    config = dataset_options(dataset, config)
    records = _read(dataset, config, key, needs_answer, images)
    source = dataset.called if isinstance(dataset, TrainingDataset) else ""
    limit = config.max_prompt_tokens
    prompts: list[Prompt] = []
    used: list[Record] = []
    too_long: list[_EncodedPrompt] = []
    shortest = sys.maxsize
    for number, encoded in enumerate(_encoded(records, tokenizer, config, images)):
        record = encoded.record
        text = encoded.text
        tokens = encoded.tokens
        shortest = min(shortest, encoded.num_tokens)
        if encoded.num_tokens > limit:
            too_long.append(encoded)
            if config.overlong_prompt != "truncate":
                continue
            if encoded.images:
                raise DataError(
                    f"{record.location}: the prompt has {encoded.size} tokens, images included, "
                    f"more than data.max_prompt_tokens = {limit}, and images cannot be truncated; "
                    "raise it, lower data.max_image_pixels, or set data.overlong_prompt=skip"
                )
            tokens = tokens[-limit:]
            text = tokenizer.decode(tokens)
        array = np.asarray(tokens, np.int32)
        prompt = Prompt(
            prompt_id=first_id + number,
            tokens=array,
            answer=record.answer,
            text=text,
            row=record.row,
            source=source,
            images=encoded.images,
            messages=tuple(compose_messages(record, config)),
        )
        prompts.append(prompt)
        used.append(record)
    if too_long and config.overlong_prompt == "refuse":
        raise _too_long(too_long, limit)
    if not prompts:
        raise DataError(
            f"{key}: all {len(records)} prompts of {path} are longer than data.max_prompt_tokens = "
            f"{limit} and were skipped; raise data.max_prompt_tokens (shortest: {shortest})"
        )
    for hint in hints:
        prompts = _with_hint(hint, prompts, used, tokenizer, config, images)
    num_skipped = len(records) - len(prompts)
    return PromptSet(path, tuple(prompts), len(records), len(too_long) - num_skipped, num_skipped)


def made_of(dataset: Dataset) -> MadeRows:
    """Returns how the rows of a dataset are made, if tasks make them."""
    return MadeRows(
        max_rows=dataset.max_rows,
        seed=dataset.seed,
        options=dataset.task_options,
    )


def _read(
    dataset: Dataset,
    config: DataConfig,
    key: str,
    needs_answer: bool,
    images: ImageInput | str,
) -> list[Record]:
    """Returns the rows of a dataset with their images. Raises DataError if there are none."""
    is_training = isinstance(dataset, TrainingDataset)
    columns = Columns(
        config.question_column,
        config.answer_column,
        # data.* is about data.train: held-out questions often come from elsewhere
        optional=not is_training and not (dataset.question_column or dataset.answer_column),
        needs_answer=needs_answer,
        images=config.images_column,
    )
    usual = ("train",) if is_training else ("test", "validation")
    rows = read_records(dataset.path, key, columns, dataset.split, usual, made_of(dataset))
    records = []
    for record in islice(rows, dataset.max_rows):
        if isinstance(images, ImageInput):
            record = images.taken(record, dataset.path)
        records.append(record)
    if not records:
        raise DataError(
            f"{key}: {dataset.path} is empty; it needs at least one row with a question and its "
            "answer"
        )
    return records


def _too_long(prompts: Sequence[_EncodedPrompt], limit: int) -> DataError:
    """Returns the refusal of prompts that are longer than `limit` tokens."""
    first = prompts[0]
    longest = max(prompts, key=lambda encoded: encoded.num_tokens)
    others = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
    return DataError(
        f"{first.record.location}: the prompt has {first.size} tokens{others}, more than "
        f"data.max_prompt_tokens = {limit}; raise it (longest: {longest.size}), or set "
        "data.overlong_prompt to truncate or skip"
    )


def _with_hint(
    hint: Hint,
    prompts: Sequence[Prompt],
    records: Sequence[Record],
    tokenizer: Any,
    config: DataConfig,
    images: ImageInput | str,
) -> list[Prompt]:
    """Returns the prompts with their tokens behind which a hint's teacher scores their responses."""
    shown = [hint.shown_with(record) for record in records if hint.is_for(record)]
    with_hint = _encoded(shown, tokenizer, config, images)
    with_hints = []
    for prompt, record in zip(prompts, records, strict=True):
        if hint.is_for(record):
            encoded = next(with_hint)
            if encoded.num_tokens > hint.max_tokens:
                raise DataError(
                    f"{record.location}: the prompt with its hint has {encoded.size} tokens, more "
                    f"than teacher.{hint.teacher}.max_prompt_tokens = {hint.max_tokens}; raise it, "
                    "or shorten the hint"
                )
            tokens = np.asarray(encoded.tokens, np.int32)
            prompt = replace(prompt, hinted={**prompt.hinted, hint.teacher: tokens})
        with_hints.append(prompt)
    return with_hints


def load_training(
    config: DataConfig,
    tokenizer: Any,
    needs_answer: bool = True,
    hints: Sequence[Hint] = (),
    images: ImageInput | str = "no model was given",
) -> list[PromptSet]:
    """Returns the training datasets, in the configuration's order, with prompt_ids of their own.

    Raises DataError.
    """
    sets: list[PromptSet] = []
    for number, dataset in enumerate(config.datasets):
        first_id = sum(prompts.num_read for prompts in sets)
        key = config.key_of(number)
        sets.append(
            load_prompts(
                dataset,
                tokenizer,
                config,
                key,
                first_id,
                needs_answer,
                hints=hints,
                images=images,
            )
        )
    return sets


def dataset_options(dataset: Dataset, config: DataConfig) -> DataConfig:
    """data.* with what the dataset says itself."""
    chosen_options = dataset.model_dump(
        include={"question_column", "answer_column", "system_prompt", "instruction"},
        exclude_none=True,
    )
    return config.model_copy(update=chosen_options)


def first_prompt_lines(prompt: Prompt, tokenizer: Any) -> list[str]:
    """Show what engines are asked first, on the console: tokens as text, special ones included, so
    that a doubled one is seen.
    """
    lines = str(tokenizer.decode(prompt.tokens.tolist())).split("\n")
    more = (
        f"  ... {counted(len(lines) - _SHOWN_LINES, 'more line')}"
        if len(lines) > _SHOWN_LINES
        else None
    )
    shown = [printable(line) for line in lines[:_SHOWN_LINES]]
    shown = [
        line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
        for line in shown
    ]
    return [
        f"first prompt, {counted(len(prompt.tokens), 'token')}:",
        *(f"  {line}" for line in shown),
        *([more] if more else []),
    ]


@dataclass(frozen=True)
class _EncodedPrompt:
    """A rendered record and its tokens; of a text far too long the last ones, and how many it has
    at least.

    images: of its placeholders.
    """

    record: Record
    text: str
    tokens: Sequence[int]
    least_tokens: int = 0
    images: tuple[ShownImage, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole text; a lower bound where it was not tokenised whole."""
        return max(len(self.tokens), self.least_tokens)

    @property
    def size(self) -> str:
        """num_tokens, for messages."""
        return f"{'at least ' if self.least_tokens else ''}{self.num_tokens}"


def _encoded(
    records: Sequence[Record],
    tokenizer: Any,
    config: DataConfig,
    images: ImageInput | str,
) -> Iterator[_EncodedPrompt]:
    """Yields every record with its text and tokens. images: as load_prompts.

    What a template makes of all rows together need not fit in memory.
    """
    template = chosen_template(tokenizer, config)
    check_options(template, config)
    with_template = template is not None
    longest_token = _longest_token(tokenizer)
    bound = longest_token * _NORMALISED * config.max_prompt_tokens
    seconds_left = RENDER_ALL_LIMIT_S + RENDER_ROW_S * len(records)
    batch: list[tuple[Record, str]] = []
    num_characters = 0
    for number, record in enumerate(records, start=1):
        if isinstance(images, str) and record.images:
            num_images = counted(len(record.images), "image")
            raise DataError(
                f"{record.location}: {num_images}, but {images}; set model.path to one of "
                f"{', '.join(FAMILIES)}, or data.images_column to null"
            )
        began = time.thread_time()
        text = _render(record, tokenizer, config, template)
        seconds_left -= time.thread_time() - began
        if seconds_left < 0:
            raise DataError(
                f"{record.location}: the chat template is too slow, {number} of {len(records)} "
                f"rows took all of the {RENDER_ALL_LIMIT_S + RENDER_ROW_S * len(records):g} s; "
                "correct chat_template of model.path, or set data.chat_template=never"
            )
        batch.append((record, text))
        num_characters += min(len(text), bound)
        if num_characters < ENCODE_CHARACTERS and number < len(records):
            continue
        # A rendered template brings its own special tokens; plain text gets the tokenizer's (a
        # llama's first token). Tokenising megabytes takes seconds: the end of a text that cannot
        # fit is all that truncation keeps of it.
        encoded = _tokens([whole[-bound:] for _, whole in batch], tokenizer, with_template)
        for (encoded_record, whole), tokens in zip(batch, encoded, strict=True):
            if not tokens:
                raise DataError(
                    f"{encoded_record.location}: the prompt has no tokens; give a question or "
                    "remove the row"
                )
            least = len(whole) // longest_token // _NORMALISED + 1 if len(whole) > bound else 0
            shown: tuple[ShownImage, ...] = ()
            if isinstance(images, ImageInput) and not least:
                tokens, shown = images.shown(encoded_record, tokens)
            yield _EncodedPrompt(encoded_record, whole, tokens, least, shown)
        batch = []
        num_characters = 0


def _longest_token(tokenizer: Any) -> int:
    """Characters of the longest token, at least a usual bound."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else ()
    return max((len(token) for token in vocabulary), default=0) or _SHORTEST_TOKEN_BOUND


def _tokens(texts: list[str], tokenizer: Any, with_template: bool) -> list[list[int]]:
    try:
        tokens: list[list[int]] = tokenizer(texts, add_special_tokens=not with_template)[
            "input_ids"
        ]
    except (
        BaseException
    ) as error:  # what a damaged tokenizer raises is anything, a panic of its native code included
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"model.path: its tokenizer cannot encode a prompt ({type(error).__name__}: "
            f"{reason(error)}); restore the tokenizer's files from the model's source"
        ) from None
    return tokens


def _render(record: Record, tokenizer: Any, config: DataConfig, template: Any) -> str:
    """Returns the prompt's text up to the place where the response begins, with all that the row
    says.
    """
    messages = compose_messages(record, config)
    if record.images and template is None:
        raise DataError(
            f"{record.location}: images need a chat template, which says how the model is shown "
            "them; set data.chat_template"
        )
    if not knows_reasoning(template):
        messages = [with_reasoning(message) for message in messages]
    ending = (
        {"continue_final_message": True} if record.continues else {"add_generation_prompt": True}
    )

    def render(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        if record.images:
            messages = [with_image_parts(message) for message in messages]
        if template is None:
            return "\n".join(message["content"] for message in messages)
        described = {"tools": list(tools)} if tools else {}
        return rendered(
            tokenizer, template, messages, **ending, **described, **config.template_options
        )

    try:
        text = render(messages, record.tools)
        lost = left_out(render, text, messages, record.tools)
    except TemplateFailed as failed:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{record.location}: the chat template {failed}, with the roles {roles}; correct the "
            "row, chat_template of model.path, or data.system_prompt, or set "
            "data.chat_template=never"
        ) from None
    if lost is not None:
        renderer = (
            "plain text (there is no chat template)" if template is None else "the chat template"
        )
        raise DataError(
            f"{record.location}: {renderer} leaves out {lost}; correct the row, or name a template "
            "that renders it with data.chat_template"
        )
    return text


def knows_reasoning(template: Any) -> bool:
    """Returns whether the template may read an assistant's reasoning, which plain text does not
    need to.
    """
    return not isinstance(template, str) or _REASONING in template


def with_reasoning(message: Message) -> Message:
    """Returns the message with its reasoning in the content, for a template that does not know the
    field.
    """
    reasoning = message.get(_REASONING)
    if not isinstance(reasoning, str) or not reasoning:
        return message
    rest = {name: value for name, value in message.items() if name != _REASONING}
    return {**rest, "content": f"<think>\n{reasoning.strip()}\n</think>\n\n{message['content']}"}


def compose_messages(record: Record, config: DataConfig) -> list[Message]:
    """Returns the row's messages with the configured system prompt before (a row's own takes
    precedence) and the instruction appended to the last of the user's messages.
    """
    messages = [dict(message) for message in record.messages]
    if config.instruction:
        asked = [message for message in messages if message["role"] == "user"]
        if not asked:
            raise DataError(
                f"{record.location}: no message of role user to put data.instruction after; "
                "correct the row"
            )
        asked[-1]["content"] += "\n" + config.instruction
    if config.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages
