"""`pa-npu export`: the policy of a checkpoint as an HF directory, in one process without a device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pa_npu.launcher.subcommands import configuration


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a directory .../iteration_NNNNNN")
    parser.add_argument("--output", required=True, metavar="DIR", help="the HF directory to write")
    parser.add_argument("--model", metavar="DIR", help="the HF model that the run began with, if it has moved")
    parser.add_argument(
        "--merged", action="store_true", help="merge adapters (LoRA) into the model, as export_hf=merged"
    )


def main(options: argparse.Namespace, rest: Sequence[str]) -> int:
    configuration.refuse(rest)
    from pa_npu.backends.registry import export_checkpoint

    with configuration.called({"checkpoint.load": "--checkpoint", "model.path": "--model"}):
        export_checkpoint(Path(options.checkpoint), Path(options.output), options.model, options.merged)
    print(f"wrote {options.output}")
    return 0
