"""The keys of the configuration: one class per section; each key has a text, a default and bounds.

Unknown keys are refused. Rules between keys are in `pa_npu.config.rules`.
"""

from __future__ import annotations

import os
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Item = TypeVar("Item")
Several = Annotated[tuple[Item, ...], Field(strict=False)]
"""A list in YAML, a tuple here."""

FilePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""The path of a file or directory.

A leading `~` or `~user` is the home directory, as in a shell.
"""


class Section(BaseModel):
    """Base of all sections. It is immutable, refuses unknown keys, and converts no value from one
    type to another.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )
