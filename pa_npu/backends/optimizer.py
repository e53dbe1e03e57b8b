"""Optimizers of all backends alike: the learning rate by updates, and state in host memory (optimizer.offload)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from pa_npu.config.schema import Config
from pa_npu.platform.base import Platform


def learning_rate(config: Config, update: int) -> float:
    """The rate of an update, from 1: linear warm-up, then decay to the last iteration's.

    Update 1 of a warm-up of n has 1/n.
    """
    options = config.optimizer
    iterations = config.schedule.iterations
    warmup = config.schedule.updates(options.warmup_of(iterations))
    last = config.schedule.updates(iterations)
    most, least = options.learning_rate, options.min_learning_rate
    if warmup and update <= warmup:
        return most * update / warmup
    last = max(last, warmup + 1)
    if options.decay == "constant":
        return most
    if update > last:
        return least
    share = (update - warmup) / (last - warmup)
    if options.decay == "linear":
        return least + (most - least) * (1.0 - share)
    return least + (most - least) * 0.5 * (math.cos(math.pi * share) + 1.0)


class OffloadedState:
    """One rank's state of its optimizer, on the device in a step alone; of nothing where the
    configuration does not ask for it.

        decoding, forward, backward: on the host ──fetched──> step ──parked──> on the host

    Tensors stay the objects that they are and change their memory, so that optimizers, state dicts
    and checkpoints know nothing of it. Parks what there is already.

    tensors: those of the state, each with memory of its own; asked at each step, since an optimizer
    makes some in its first.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        config: Config,
        platform: Platform,
        device: torch.device,
    ) -> None:
        self._tensors = tensors if config.optimizer.offload else tuple
        self._platform = platform
        self._device = device
        # each with its memory on the host
        self._parked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._park()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """To step or to load."""
        for tensor, host in self._parked:
            tensor.data = host.to(self._device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            self._park()

    @contextmanager
    def copied(self) -> Iterator[None]:
        """To plan a save, which keeps what is here: pinned memory is parked in again, and a forked
        process may not have it.
        """
        for tensor, host in self._parked:
            tensor.data = host.clone()
        try:
            yield
        finally:
            for tensor, host in self._parked:
                tensor.data = host

    @torch.no_grad()
    def _park(self) -> None:
        before = {id(tensor): host for tensor, host in self._parked}
        found = [(tensor, before.get(id(tensor))) for tensor in self._tensors()]
        pairs = [
            (tensor, self._platform.host_memory(tensor) if host is None else host)
            for tensor, host in found
        ]
        self._parked = [(tensor, host) for tensor, host in pairs if host is not tensor]
        for tensor, host in self._parked:
            host.copy_(tensor, non_blocking=True)
        self._platform.synchronize()
        for tensor, host in self._parked:
            tensor.data = host
        if self._parked:
            self._platform.release_memory()
