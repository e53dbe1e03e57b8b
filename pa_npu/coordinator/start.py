"""What a coordinator is started with: the address of the run's store, and the version that it goes on from."""

from __future__ import annotations

import os
from pathlib import Path

from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.schema import Config
from pa_npu.errors import UserError


def store_address() -> tuple[str, int]:
    """Raises UserError where the launcher has not said it."""
    address = os.environ.get("PA_NPU_STORE", "")
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise UserError(
            f"PA_NPU_STORE: {address!r} is not host:port; start the coordinator through the "
            "launcher"
        )
    return host, int(port)


def first_version(config: Config) -> int:
    """The weight version that is trained first: 0, or that of the checkpoint."""
    return read_meta(Path(config.checkpoint.load)).version if config.checkpoint.load else 0
