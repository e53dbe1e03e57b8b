"""To whom an engine's first worker passes on the weights that it receives, as the coordinator decides it. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RelayPlan:
    """names: of the groups that the worker leads, one per pipeline stage, in stage order. workers: of all engines in them."""

    names: tuple[str, ...]
    workers: int

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RelayPlan:
        return cls(tuple(map(str, raw["names"])), int(raw["workers"]))
