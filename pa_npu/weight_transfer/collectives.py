"""Differences of the backends of collectives: how a group is made, given up, and shares a device.

Imports torch only.

    gloo   A pending collective cannot be ended; destroying the group's object waits for it.
    nccl   The first collective makes the communicator and blocks until all members take part. A
           watchdog ends the process if a collective fails or times out, unless
           TORCH_NCCL_ASYNC_ERROR_HANDLING=2 (CleanUpOnly) was set when the group was made. abort()
           makes every pending collective fail. Publish groups, whose failures this package handles,
           are made with 2. Groups of trainers and of engines keep torch's default, under which
           nothing goes on with wrong data.
    hccl   As nccl, with HCCL_ASYNC_ERROR_HANDLING=0 (torch_npu knows 0 and 1): its watchdog then
           leaves collectives alone. torch calls Backend::abort(), which torch_npu's
           ProcessGroupHCCL does not override, so that it does nothing. Its own functions are
           abort_hccl_comm(reason), which ends communicators, and clear_workmeta_list(), which makes
           the watchdog forget.

Two groups may use one device at the same time. gloo runs their collectives side by side. NCCL may
deadlock unless all members launch them in one order (its user guide, "Using multiple NCCL
communicators concurrently"), and HCCL promises nothing. So transfers in the background go through
host memory (pa_npu.publish.late_engines).

This is read in torch's ProcessGroupNCCL (2.7) and torch_npu's ProcessGroupHCCL (2.7.1), and tested
against stand-ins that behave so. Without such devices it is not shown that aborting ends a
broadcast whose kernel already runs, that it unblocks a communicator that is being made, and that
the device takes further collectives afterwards.
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
    """The rules of gloo, and of a backend that is not known."""

    lazy: ClassVar[bool] = False
    """Whether the first collective makes the communicator."""
    shares_device: ClassVar[bool] = True
    """Whether two ranks of a group may be on one device."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that the backend reads when a group is made, for publish groups."""
    refused: ClassVar[tuple[str, ...]] = ()
    """Variables under which another group than the wanted one would be made."""
    agreed: ClassVar[Mapping[str, str]] = {}
    """Variables that must be equal on all members of a group, with the backend's defaults."""

    def check(self) -> str | None:
        """Returns what is wrong with this process's environment for publish groups, or None."""
        for name in self.refused:
            if name in os.environ:
                return (
                    f"{name}={os.environ[name]} is set, under which HCCL makes other groups; "
                    "unset it"
                )
        return None

    def terms(self) -> str:
        """Returns this member's values of `agreed`, which the others compare."""
        values = []
        for name, default in self.agreed.items():
            values.append(f"{name}={os.environ.get(name, default).lower()}")
        return " ".join(values)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Sets `environment` while a group's object is made.

        No other group may be made meanwhile by code that needs its own values.
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
        """Ends what is pending in a group that is given up, if the backend can.

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
    # A rank table makes every group the table's. Groups derived from another group know nothing of
    # engines.
    refused = ("RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE")
    # The size is in MB per buffer and direction: ends of different sizes do not connect. Determinism
    # chooses the algorithm, on every member alike.
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
