"""The chat template that prompts are rendered with, and which variables it reads: an option that it does not know is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pa_npu.config.plain_file import read_plain, reason
from pa_npu.config.sections.inputs import DataConfig
from pa_npu.data.limits import TimeLimitReached, memory_limit, time_limit
from pa_npu.data.rows import LONGEST_ROW_BYTES
from pa_npu.errors import DataError

LONGEST_TEMPLATE_BYTES = 1 << 20
LONGEST_PROMPT_CHARACTERS = LONGEST_ROW_BYTES
RENDER_TIME_LIMIT_S = 5.0  # of processor time; a prompt is rendered in less than a millisecond
RENDER_MEMORY_BYTES = 1 << 30  # the longest row's characters, of four bytes each, in a few copies

# What every rendering gives it.
_GIVEN = frozenset(
    {
        "messages",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        "bos_token",
        "eos_token",
    }
)
_SPECIAL = "_token"  # pad_token, unk_token and others are the tokenizer's


def chosen_template(tokenizer: Any, config: DataConfig) -> Any:
    """Returns a text, or several by name where the tokenizer has several; None where prompts are
    plain text. Raises DataError.
    """
    template = getattr(tokenizer, "chat_template", None) or None
    if config.chat_template == "always" and template is None:
        raise DataError(
            "data.chat_template: always, but the model's tokenizer has no chat template; set it to "
            "auto or never, or name a file with one"
        )
    if config.chat_template in ("auto", "always"):
        return template
    return None if config.chat_template == "never" else read_template(config.chat_template)


class TemplateFailed(Exception):
    """The template makes no text of these messages; says why."""


def rendered(tokenizer: Any, template: Any, messages: Sequence[Any], **options: Any) -> str:
    """Returns the text that the template makes of messages, within limits of time and memory.

    Raises TemplateFailed.
    """

    def render() -> Any:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, chat_template=template, **options
        )

    text = _limited(render)
    if not isinstance(text, str) or len(text) > LONGEST_PROMPT_CHARACTERS:
        raise TemplateFailed(f"gives more than {LONGEST_PROMPT_CHARACTERS} characters")
    return text


def rendered_with_mask(
    tokenizer: Any, template: Any, messages: Sequence[Any], **options: Any
) -> tuple[list[int], list[int]]:
    """Returns the tokens that the template makes of messages, and 1 for each between its generation
    marks.

    Within the same limits. Raises TemplateFailed.
    """

    def render() -> Any:
        return tokenizer.apply_chat_template(
            list(messages),
            tokenize=True,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **options,
        )

    encoded = _limited(render)
    return list(encoded["input_ids"]), list(encoded["assistant_masks"])


def _limited(render: Callable[[], Any]) -> Any:
    """Calls `render` within limits of time and memory, and returns its text. Raises TemplateFailed."""
    try:
        with memory_limit(RENDER_MEMORY_BYTES), time_limit(RENDER_TIME_LIMIT_S):
            return render()
    except TimeLimitReached:
        raise TemplateFailed(f"does not end within {RENDER_TIME_LIMIT_S:g} s") from None
    except MemoryError:
        raise TemplateFailed(f"takes more than {RENDER_MEMORY_BYTES >> 20} MiB of memory") from None
    except (
        Exception
    ) as error:  # a template may raise whatever it likes, e.g. for a role that it does not know
        raise TemplateFailed(f"refuses these messages ({reason(error)})") from None


def check_options(template: Any, config: DataConfig) -> None:
    """Raises DataError where data.template_options holds what the template does not read."""
    if not config.template_options:
        return
    if template is None:
        raise DataError(
            "data.template_options: the model's tokenizer has no chat template to read them; "
            "remove the key, or name a template with data.chat_template"
        )
    known = template_variables(template)
    for name in config.template_options:
        if name in _GIVEN or (known is not None and name not in known):
            raise DataError(
                f"data.template_options: the model's chat template does not read {name} (it reads "
                f"{', '.join(sorted(known or ())) or 'none'}); remove it"
            )


def read_template(file: str) -> str:
    """Returns the text of a template's file. Raises DataError."""
    try:
        text = read_plain(file, LONGEST_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template: {file} cannot be read ({reason(error)}); name a file with a chat "
            "template"
        ) from None
    if not text.strip():
        raise DataError(f"data.chat_template: {file} is empty; name a file with a chat template")
    return text


def template_variables(template: Any) -> set[str] | None:
    """Names that a user may set; None where that cannot be told: several templates, or tags that
    are not jinja's.
    """
    import jinja2
    import jinja2.meta

    if not isinstance(template, str):
        return None
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except (jinja2.TemplateError, RecursionError):
        return None  # rendering says what is wrong with it, if anything is
    return {name for name in variables - _GIVEN if not name.endswith(_SPECIAL)}
