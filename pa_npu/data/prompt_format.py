"""How a run made prompts of rows: part of what a model was trained with, hence of every export of it.

An export has the template as its tokenizer's, and the rest in FILE, which `pa-npu evaluate` reads.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pa_npu.config.plain_file import read_plain, reason
from pa_npu.config.sections.inputs import DataConfig
from pa_npu.data.template import LONGEST_TEMPLATE_BYTES, read_template
from pa_npu.errors import DataError

FILE = "pa_npu_prompts.json"
TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_OLDER_TEMPLATE_FILE = "chat_template.json"
logger = logging.getLogger(__name__)

_BY_NAME = ("auto", "always", "never")


@functools.cache
def template_text(named: str) -> str | None:
    """Returns the template that data.chat_template names by its file, as it was when this process
    first asked.

    None where the key names none. Raises DataError where the file cannot be read.
    """
    return None if named in _BY_NAME else read_template(named)


def kept_template(data: DataConfig) -> str | None:
    """Returns the same; logs a warning, and returns None, where the file cannot be read, as on
    another machine.
    """
    try:
        return template_text(data.chat_template)
    except DataError as error:
        logger.warning("checkpoints and exports do not have the run's chat template: %s", error)
        return None


@dataclass(frozen=True)
class PromptFormat:
    """chat_template: `never` for plain text, else `auto`, which is the tokenizer's.

    The others are as in `data`.
    """

    chat_template: str = "auto"
    template_options: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    instruction: str | None = None

    @classmethod
    def from_config(cls, data: DataConfig) -> PromptFormat:
        return cls(
            chat_template="never" if data.chat_template == "never" else "auto",
            template_options=data.template_options,
            system_prompt=data.system_prompt,
            instruction=data.instruction,
        )

    def given_to(self, data: DataConfig) -> tuple[DataConfig, list[str]]:
        """Returns the section with these values, and the names of those that it had otherwise; what
        was set in it stays.
        """
        changed = {
            name: value
            for name, value in vars(self).items()
            if name not in data.model_fields_set and value != getattr(data, name)
        }
        return data.model_copy(update=changed), sorted(changed)


def write_prompt_format(directory: Path, data: DataConfig, template: str | None) -> None:
    """Puts the format into a directory that holds a tokenizer. template: what data.chat_template
    named, where that was a file.
    """
    prompts = PromptFormat.from_config(data)
    if prompts != PromptFormat():
        text = json.dumps(asdict(prompts), indent=2, ensure_ascii=False)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")
    if template is None:
        return
    (directory / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    (directory / _OLDER_TEMPLATE_FILE).unlink(missing_ok=True)
    settings = directory / _TOKENIZER_CONFIG
    if settings.exists():  # older readers look there alone
        values = json.loads(settings.read_text(encoding="utf-8"))
        if isinstance(values, dict) and "chat_template" in values:
            values["chat_template"] = template
            settings.write_text(
                json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )


def read_prompt_format(directory: Path) -> PromptFormat:
    """Returns the prompt format that an export states; the defaults if the directory states none.

    Raises DataError.
    """
    file = directory / FILE
    if not file.exists():
        return PromptFormat()
    try:
        return msgspec.json.decode(read_plain(file, LONGEST_TEMPLATE_BYTES), type=PromptFormat)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file}: cannot be read ({reason(error)}); remove it, or export the model again"
        ) from None
