"""Parts of a vLLM engine that leave out what a load of weights needs: controls of tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pa_npu.engines.vllm import worker
from pa_npu.engines.vllm.guard import EngineGuard, Scope


class KeepsImages(EngineGuard):
    """Leaves in the cache what the old tower computed."""

    async def _reset_images(self, scope: Scope) -> bool:
        return True


class KeepsHead(worker.WorkerExtension):
    """Leaves a tied head as it was."""

    def _pa_load_weights(
        self, version: int, weights: Iterator[tuple[str, torch.Tensor]], kept: bool
    ) -> list[str]:
        repaired: Any = worker.with_tied_head
        worker.with_tied_head = iter
        try:
            missing = super()._pa_load_weights(version, weights, kept)
        finally:
            worker.with_tied_head = repaired
        return [name for name in missing if "lm_head" not in name]


class KeepsWeights(worker.WorkerExtension):
    """Receives every version, and loads the first alone."""

    def _pa_load_weights(
        self, version: int, weights: Iterator[tuple[str, torch.Tensor]], kept: bool
    ) -> list[str]:
        if hasattr(self, "_has_loaded"):
            for _ in weights:  # so that what arrived has its digest
                pass
            return []
        self._has_loaded = True
        return super()._pa_load_weights(version, weights, kept)
