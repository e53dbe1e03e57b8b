"""Memory of tensors that are alive, and its peak, while some code runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of storages of `least` bytes or more that operators make, until nothing
    refers to them. What exists before does not count.
    """

    def __init__(self, least: int = 1) -> None:
        super().__init__()
        self.peak = 0
        self._least = least
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and self._key(x) not in before:
                self._count(x.untyped_storage())
        return result

    @staticmethod
    def _key(x: torch.Tensor) -> int:
        return x.untyped_storage()._cdata

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or storage.nbytes() < self._least:
            return
        self._live[key] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, key, None)
        self.peak = max(self.peak, sum(self._live.values()))
