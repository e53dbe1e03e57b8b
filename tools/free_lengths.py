"""Responses of free lengths from a model with random weights: its end token is made likelier."""

from __future__ import annotations

import json
from pathlib import Path


def make_end_likelier(model: Path, scale: float) -> None:
    """Multiplies the end token's row of the output layer; once per directory, as it knows nothing
    of an earlier call.

    Where a state is near that row the end becomes likely, elsewhere less: lengths vary widely. Mean
    lengths are found by trying.
    """
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    end = json.loads((model / "config.json").read_text())["eos_token_id"]
    weights = load_file(file)
    weights["lm_head.weight"][end] *= scale
    save_file(weights, file, metadata={"format": "pt"})
