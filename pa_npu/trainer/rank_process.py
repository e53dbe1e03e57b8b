"""What every process of a trainer rank begins with: its arguments, its place, its device and the store.

The environment gives the rank's place (RANK, LOCAL_RANK, WORLD_SIZE as torchrun sets them) and the
store (PA_NPU_STORE=host:port).
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import connect
from pa_npu.errors import PaNpuError, exit_code
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.telemetry.logs import setup_logging
from pa_npu.telemetry.timeline import Timeline

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RankProcess:
    """A trainer rank whose device is set and whose store is connected.

    local_rank: this process's device among its visible ones. timeline: open as long as the rank
    works.
    """

    config: Config
    spec: ModelSpec
    platform: Platform
    rank: int
    local_rank: int
    store: dist.TCPStore
    timeline: Timeline


def run_rank_process(description: str, work: Callable[[RankProcess], None]) -> int:
    """Reads arguments and environment, does a rank's work, and returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="resolved configuration")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    setup_logging(f"trainer-{rank}")
    try:
        config = load_config([arguments.config])
        local_rank = int(os.environ["LOCAL_RANK"])
        platform = platforms.get(config.run.device)
        platform.set_device(local_rank)
        host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
        store = connect(host, int(port), config.run.startup_timeout_s)
        spec = ModelSpec.from_config(config)
        with Timeline.for_run(Path(config.run.dir), f"trainer-{rank}") as timeline:
            work(RankProcess(config, spec, platform, rank, local_rank, store, timeline))
    except PaNpuError as error:
        return exit_code(error, logger)
    return 0
