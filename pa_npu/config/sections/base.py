"""The base of all sections of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: immutable, and no key is accepted and ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


Index = Annotated[int, Field(ge=0)]
