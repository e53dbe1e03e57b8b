"""The learning rate and state in host memory, which all backends' optimizers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from pa_npu.config.schema import Config
from pa_npu.platform.base import Platform


def learning_rate(config: Config, update: int) -> float:
    """Returns the rate of an update, counted from 1: linear warm-up, then decay to the last
    iteration's. Update 1 of a warm-up of n updates has 1/n of the full rate.
    """
    options = config.optimizer
    iterations = config.schedule.iterations
    warmup = config.schedule.updates(options.warmup_of(iterations))
    last = config.schedule.updates(iterations)
    max_rate = options.learning_rate
    min_rate = options.min_learning_rate
    if warmup and update <= warmup:
        return max_rate * update / warmup
    last = max(last, warmup + 1)
    if options.decay == "constant":
        return max_rate
    if update > last:
        return min_rate
    share = (update - warmup) / (last - warmup)
    if options.decay == "linear":
        return min_rate + (max_rate - min_rate) * (1.0 - share)
    return min_rate + (max_rate - min_rate) * 0.5 * (math.cos(math.pi * share) + 1.0)


class OffloadedState:
    """Keeps the state of one rank's optimizer on the host, except during a step (optimizer.offload).
    Without that key it does nothing.

        decoding, forward, backward: on the host ──fetched──> step ──parked──> on the host

    Tensors stay the same objects and change their memory, so that optimizers, state dicts and
    checkpoints need not know. The constructor parks the tensors that exist already.

    tensors: returns those of the state, each with memory of its own; called at each step, since an
    optimizer makes some of them in its first step.
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
        """Has the state on the device inside, to step or to load."""
        for tensor, host in self._parked:
            tensor.data = host.to(self._device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            self._park()

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Has copies of the state inside, to plan a save. A save keeps the tensors that it gets,
        while pinned memory is used again at the next step, and a forked process may not have it.
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
        host_memory = {id(tensor): host for tensor, host in self._parked}
        self._parked = []
        for tensor in self._tensors():
            host = host_memory.get(id(tensor))
            if host is None:
                host = self._platform.host_memory(tensor)
            if host is not tensor:  # the same if the device's memory is the host's
                self._parked.append((tensor, host))
        for tensor, host in self._parked:
            host.copy_(tensor, non_blocking=True)
        self._platform.synchronize()
        for tensor, host in self._parked:
            tensor.data = host
        if self._parked:
            self._platform.release_memory()
