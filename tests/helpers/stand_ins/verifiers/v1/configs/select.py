"""Which tasks are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SelectConfig:
    limit: int | None = None

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> SelectConfig:
        return cls(**fields)
