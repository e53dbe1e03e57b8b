"""Values that are computed once for the rows of a packed sequence and live as long as they."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class KeepsTensors:
    """Keeps what is built for its rows: tensors by device, and attention's plans."""

    _cache: dict[Hashable, Any]

    def tensor(
        self, name: str, device: torch.device | str | None, build: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the tensor `name` on `device`.

        It is built on the host once, and copied to each device once.
        """
        host = self.cached(name, build)
        device = torch.device("cpu" if device is None else device)
        if device.type == "cpu":
            return host
        return self.cached((name, device), lambda: host.to(device))

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns what `build` returns, made once and kept as long as these rows."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]
