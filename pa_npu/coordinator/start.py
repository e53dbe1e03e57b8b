"""The first steps of every coordinator, whether engines write its groups or rows are trained."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.schema import Config
from pa_npu.coordinator.loop import Coordinator
from pa_npu.coordinator.record import RunRecords
from pa_npu.errors import UserError


def store_address() -> tuple[str, int]:
    """Returns host and port of the run's store. Raises UserError if the launcher did not set them."""
    address = os.environ.get("PA_NPU_STORE", "")
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise UserError(
            f"PA_NPU_STORE: {address!r} is not host:port; start the coordinator through the "
            "launcher"
        )
    return host, int(port)


def first_version(config: Config) -> int:
    """Returns the weight version that is trained first: 0, or that of the checkpoint."""
    if not config.checkpoint.load:
        return 0
    return read_meta(Path(config.checkpoint.load)).version


def make_records(config: Config, first: int, tokenizer: Any) -> RunRecords:
    """Makes the writer of the run's records; `first` is the version that the run begins with."""
    return RunRecords(config, first, lambda token: str(tokenizer.decode([token])))


async def lead(coordinator: Coordinator) -> None:
    """Runs the coordinator, all of whose parts exist now, to the end of the run."""
    gc.collect()
    # what is here stays to the run's end, and every full collection would look at it again
    gc.freeze()
    await coordinator.run()
