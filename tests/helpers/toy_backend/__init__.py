"""A training backend on plain torch, written from the conformance suite: trainer.backend=tests.helpers.toy_backend:BACKEND.

One device per replica; replicas sum their gradients over gloo.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


def fit(config: Any, spec: Any) -> tuple[Any, list[str]]:
    return config, []


def create(
    config: Any, spec: Any, platform: Any, store: Any, rank: int, local_rank: int, timeline: Any
) -> Any:  # imported when it is asked for
    from tests.helpers.toy_backend.backend import ToyBackend

    return ToyBackend(config, spec, platform, store, rank, local_rank)


def export_checkpoint(
    checkpoint: Path, output: Path, model: str | None = None, merged: bool = False
) -> None:
    from tests.helpers.toy_backend.backend import export_checkpoint

    export_checkpoint(checkpoint, output, model)


BACKEND = SimpleNamespace(
    changes=lambda: [], fit=fit, create=create, export_checkpoint=export_checkpoint
)
