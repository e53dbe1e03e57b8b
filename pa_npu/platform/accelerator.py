"""The base of the cuda and npu platforms: torch gives both device modules the same functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pa_npu.platform.base import Platform
from pa_npu.platform.typical import LARGEST_BUCKET_BYTES


class AcceleratorPlatform(Platform):
    """Device functions through `torch.cuda` or `torch.npu`; a subclass names the kind."""

    largest_bucket_bytes = LARGEST_BUCKET_BYTES
    _local_index = 0

    @property
    def _module(self) -> Any:
        return getattr(torch, self.name)

    def device(self, local_index: int) -> torch.device:
        return torch.device(self.name, local_index)

    def set_device(self, local_index: int) -> None:
        self._module.set_device(local_index)
        self._local_index = local_index

    def device_count(self) -> int:
        return int(self._module.device_count())

    def memory_bytes(self) -> int:
        return int(self._module.memory_allocated())

    def total_memory_bytes(self) -> int:
        return int(self._module.get_device_properties(self._module.current_device()).total_memory)

    def free_memory_bytes(self) -> int:
        free, _ = self._module.mem_get_info()
        cached = self._module.memory_reserved() - self._module.memory_allocated()  # the allocator's own, unused
        return int(free + cached)

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def release_memory(self) -> None:
        self._module.empty_cache()

    def synchronize(self) -> None:
        self._module.synchronize()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self._module.set_device(self._local_index)  # which device is the current one is a thread's own
        stream = self._module.Stream()
        stream.wait_stream(self._module.default_stream())
        with self._module.stream(stream):
            yield
        # not after an error: what failed may never finish
        stream.synchronize()

    @contextmanager
    def detached_stream(self) -> Iterator[None]:
        self._module.set_device(self._local_index)
        with self._module.stream(self._module.Stream()):
            yield

    def seed_all(self, seed: int) -> None:
        super().seed_all(seed)
        self._module.manual_seed_all(seed)

    def rng_state(self) -> torch.Tensor | None:
        state: torch.Tensor = self._module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        if state is not None:
            self._module.set_rng_state(state)
