"""The options of `pa-npu serve`. They are apart from serve.py, which imports torch: help need not wait for it.

pa-npu serve model.path=MODEL lora.rank=32                    adapters, one set for each client's model
pa-npu serve model.path=MODEL service.port=8421               all weights
TINKER_BASE_URL=http://127.0.0.1:8421 TINKER_API_KEY=$(cat RUN/service/key) python loop.py

service and trainers end    both are started again: the log is replayed, clients go on
engine ends                 it is started again, and gets the weights that are asked for
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pa_npu.algorithm.rules import load_config
from pa_npu.launcher.subcommands import configuration_options, configured_overrides

_DEFAULTS = (
    "trainer.backend=fsdp",
    "rollout.backend=transformers",
    "checkpoint.export_hf=false",
    "publish.senders=leader",
)


def serve_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = __doc__.partition("\n\n")[2] if __doc__ else None
    configuration_options(parser)


def serve(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Serves a configuration until a signal comes. Raises UserError before anything starts."""
    values: dict[tuple[str, ...], str] = {("data", "train"): "unread"}
    given = configured_overrides(options, rest)
    config = load_config(options.config, [*_DEFAULTS, *given], values)
    from pa_npu.launcher import serve as processes

    return processes.serve(config)
