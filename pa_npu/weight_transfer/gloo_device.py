"""One gloo device for all process groups of a process.

torch gives every gloo group a device of its own, and a device has a thread that wakes a hundred
times a second, also for a group of one rank. A trainer rank with Megatron's groups has twenty of
them and an engine ten, which takes some percent of a core and disturbs what computes there.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_INTERFACES = "GLOO_SOCKET_IFNAME"
"""torch's variable: interfaces, separated by commas, each with a device of its own."""


def share_device() -> bool:
    """Lets all gloo groups that a process makes from here on use one device, however often called.

    Returns False where this torch has no gloo, or none that takes a device; then each group makes
    its own.
    """
    gloo = getattr(dist, "ProcessGroupGloo", None)
    if gloo is None or not hasattr(gloo, "create_default_device") or not hasattr(gloo, "_Options"):
        return False
    if distributed_c10d.ProcessGroupGloo is gloo:
        setattr(distributed_c10d, "ProcessGroupGloo", _on_one_device(gloo))  # noqa: B010
    return True


def _on_one_device(gloo: Any) -> Any:
    """Returns what stands in for torch's class where it makes groups and tells them apart."""

    @cache
    def devices_of(process: int, interfaces: str) -> list[Any]:
        """process: of which a fork has not the threads."""
        names = [name for name in interfaces.split(",") if name]
        if not names:
            return [gloo.create_default_device()]
        return [gloo.create_device(interface=name) for name in names]

    class Maker(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, gloo)

        def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            options = gloo._Options()
            options._devices = devices_of(os.getpid(), os.environ.get(_INTERFACES, ""))
            options._threads = 2 * len(options._devices)  # as torch has it
            options._timeout = timeout
            return gloo(store, rank, size, options)

    class GlooOnOneDevice(metaclass=Maker):
        pass

    return GlooOnOneDevice
