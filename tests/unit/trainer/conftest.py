"""Fixtures of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With an entropy of 2.5 nats of at most 4.9: where all tokens are nearly as likely, their
    log-probs say nothing.
    """
    path = make_model(tmp_path_factory.mktemp("model"))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] *= 4.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with single_process(model_config(path)):
        yield path
