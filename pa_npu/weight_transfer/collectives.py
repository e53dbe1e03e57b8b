"""Differences of the backends of collectives: how a group is made, given up, and shares a device. Imports torch only.

    gloo   A pending collective cannot be ended; the group's object waits for it when it is
           destroyed.
    nccl   The first collective makes the communicator and blocks until all members take part. A
           watchdog ends the process when a collective fails or times out, unless
           TORCH_NCCL_ASYNC_ERROR_HANDLING=2 (CleanUpOnly) was set when the group was made, and
           abort() makes every pending collective fail. So publish groups, whose failures this
           package handles, are made with 2; the trainers' and the engine's own keep torch's
           default, under which nothing goes on with wrong data.
    hccl   As nccl, with HCCL_ASYNC_ERROR_HANDLING=0 (torch_npu knows 0 and 1): its watchdog then
           leaves collectives alone. torch calls Backend::abort(), which torch_npu's
           ProcessGroupHCCL does not override, so that it does nothing; its own are
           abort_hccl_comm(reason), which ends communicators, and clear_workmeta_list(), which makes
           the watchdog forget.

Collectives of two groups on one device at the same time: gloo runs them side by side. NCCL may
deadlock unless all members launch them in one order (its user guide, "Using multiple NCCL
communicators concurrently"), and HCCL promises nothing. So what runs beside training goes through
host memory (pa_npu.publish.late_engines).

Read in torch's ProcessGroupNCCL (2.7) and torch_npu's ProcessGroupHCCL (2.7.1), and tested against
stand-ins that behave so. Not shown without such devices: that aborting ends a broadcast whose
kernel already runs, that it unblocks a communicator that is being made, and that the device takes
further collectives afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist

_environment_lock = threading.Lock()


class Gloo:
    """gloo's rules, and what holds for a backend that none is known of."""

    lazy: ClassVar[bool] = False
    """Whether the first collective makes the communicator."""
    shares_device: ClassVar[bool] = True
    """Whether two ranks of a group may be on one device."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that the backend reads when a group is made, for publish groups."""
    refused: ClassVar[tuple[str, ...]] = ()
    """Variables under which a publish group would not be what was asked for."""
    agreed: ClassVar[Mapping[str, str]] = {}
    """Variables that must be equal on all members of a group, with the backend's defaults."""

    def check(self) -> str | None:
        """Name what is wrong with this process's environment for publish groups."""
        found = next((name for name in self.refused if name in os.environ), None)
        return (
            f"{found}={os.environ[found]} is set, under which HCCL makes other groups; unset it"
            if found
            else None
        )

    def terms(self) -> str:
        """This member's values of `agreed`, for the others to compare."""
        return " ".join(
            f"{name}={os.environ.get(name, default).lower()}"
            for name, default in self.agreed.items()
        )

    @contextmanager
    def making(self) -> Iterator[None]:
        """While a group's object is made: no other group may be made meanwhile by code that wants
        its own values.
        """
        with _environment_lock:
            before = {name: os.environ.get(name) for name in self.environment}
            os.environ.update(self.environment)
            try:
                yield
            finally:
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    def abort(self, group: dist.ProcessGroup, device: torch.device, reason: str) -> None:
        """End what is pending in a group that is given up, where the backend can.

        May block; may raise RuntimeError.
        """


class Nccl(Gloo):
    lazy = True
    shares_device = False
    environment: ClassVar[Mapping[str, str]] = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}

    def abort(self, group: dist.ProcessGroup, device: torch.device, reason: str) -> None:
        target: Any = group if hasattr(group, "abort") else group._get_backend(device)
        target.abort()


class Hccl(Gloo):
    lazy = True
    shares_device = False
    environment: ClassVar[Mapping[str, str]] = {"HCCL_ASYNC_ERROR_HANDLING": "0"}
    # a rank table makes every group the table's; groups derived from another know nothing of
    # engines
    refused = ("RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE")
    # MB per buffer and direction: ends of different sizes do not connect. Determinism chooses the
    # algorithm, on every member alike
    agreed: ClassVar[Mapping[str, str]] = {"HCCL_BUFFSIZE": "200", "HCCL_DETERMINISTIC": "false"}

    def abort(self, group: dist.ProcessGroup, device: torch.device, reason: str) -> None:
        backend: Any = group._get_backend(device)
        try:
            backend.abort_hccl_comm(reason)
        finally:
            backend.clear_workmeta_list()


_RULES: dict[str, Gloo] = {"gloo": Gloo(), "nccl": Nccl(), "hccl": Hccl()}


def rules(backend: str) -> Gloo:
    return _RULES.get(backend, _RULES["gloo"])
