"""Entry of a trainer rank, which the launcher starts: `python -m pa_npu.trainer.main --config FILE`.

The environment gives the rank's place (RANK, LOCAL_RANK, WORLD_SIZE as torchrun sets them) and the
store (PA_NPU_STORE=host:port).
"""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from pa_npu import platform as platforms
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.control.channel import connect
from pa_npu.errors import PaNpuError, exit_code
from pa_npu.families.spec import ModelSpec
from pa_npu.telemetry.logs import setup_logging
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.assemble import assemble_rank
from pa_npu.trainer.loop import profiled, train
from pa_npu.weight_transfer.transport import run_and_exit

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="resolved configuration of the run")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    setup_logging(f"trainer-{rank}")
    try:
        run_rank(load_config([arguments.config]), rank)
    except PaNpuError as error:
        return exit_code(error, logger)
    return 0


def run_rank(config: Config, rank: int) -> None:
    """Builds this rank's share of the model and runs the training loop."""
    local_rank = int(os.environ["LOCAL_RANK"])
    platform = platforms.get(config.run.device)
    platform.set_device(local_rank)
    host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    store = connect(host, int(port), config.run.startup_timeout_s)
    spec = ModelSpec.from_config(config)
    with Timeline.for_run(Path(config.run.dir), f"trainer-{rank}") as timeline:
        parts = assemble_rank(config, spec, platform, store, rank, local_rank, timeline)
        profiler = partial(profiled, config, platform, rank)
        with parts.late_engines or nullcontext():
            train(
                config,
                parts.learner,
                parts.border,
                parts.rollouts,
                timeline,
                profiler,
                parts.checks,
                parts.border.ends,
                None if parts.held_out is None else parts.held_out.at_border,
            )
        parts.close()


if __name__ == "__main__":
    run_and_exit(main)
