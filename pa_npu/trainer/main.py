"""Entry of a trainer rank of a run, which the launcher starts: `python -m pa_npu.trainer.main --config FILE`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from pa_npu.trainer.assemble import assemble_rank
from pa_npu.trainer.loop import profiled, train
from pa_npu.trainer.rank_process import RankProcess, run_rank_process
from pa_npu.weight_transfer.transport import run_and_exit


def main() -> int:
    return run_rank_process(__doc__.splitlines()[0], run_rank)


def run_rank(process: RankProcess) -> None:
    """Builds this rank's share of the model and runs the training loop."""
    config = process.config
    parts = assemble_rank(
        config,
        process.spec,
        process.platform,
        process.store,
        process.rank,
        process.local_rank,
        process.timeline,
    )
    profiler = partial(profiled, config, process.platform, process.rank)
    with parts.late_engines or nullcontext():
        train(
            config,
            parts.learner,
            parts.border,
            parts.rollouts,
            process.timeline,
            profiler,
            parts.checks,
            parts.border.ends,
            None if parts.held_out is None else parts.held_out.at_border,
        )
    parts.close()


if __name__ == "__main__":
    run_and_exit(main)
