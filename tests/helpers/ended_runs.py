"""Whole runs that have ended: launched one after another, and compared by weights and by their chains."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers.launched import Launched, settings

# what two runs have in common that computed the same, however they were arranged
COMPUTED = (
    "groups",
    "prompts",
    "context",
    "tokens",
    "logprobs",
    "rewards",
    "advantages",
    "places",
    "gradient_norms",
    "weights_before",
    "weights_after",
)


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended well.

    weights: that it exported. records, chain: lines of metrics.jsonl and chain.jsonl.
    """

    directory: Path
    weights: dict[str, torch.Tensor]
    records: list[dict[str, Any]]
    chain: list[dict[str, Any]]

    @property
    def logs(self) -> str:
        return "".join(file.read_text() for file in self.directory.rglob("*.log"))

    @property
    def mib_of_senders(self) -> list[float]:
        """Returns MiB of the first publish, of each trainer rank that sent some, largest first."""
        sent = re.findall(r"published version 0, ([0-9.]+) MiB of it from here", self.logs)
        return sorted((float(size) for size in sent if float(size)), reverse=True)


def run_to_end(
    inputs: Path,
    directory: Path,
    keys: Mapping[str, object],
    *,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
) -> EndedRun:
    """Runs `settings` with these keys in a new directory. inputs: as random_tiny makes it."""
    directory.mkdir()
    chosen = {"data__test": "null", "telemetry__trackers": "[]", **keys}
    arguments = settings(inputs, directory / "run", **chosen)
    launched = Launched(directory, "run", *arguments, variables=variables)
    try:
        assert launched.popen.wait(limit_s) == 0, launched.output
    finally:
        launched.close()
    run = directory / "run"
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((run / "hf").glob("*.safetensors")):
        weights |= load_file(file)
    return EndedRun(run, weights, _lines(run / "metrics.jsonl"), _lines(run / "chain.jsonl"))


def assert_same_to_the_bit(actual: EndedRun, expected: EndedRun) -> None:
    """Compares what both computed in every iteration, and the weights that they end with."""
    assert len(actual.chain) == len(expected.chain) > 0
    for ours, theirs in zip(actual.chain, expected.chain, strict=True):
        different = [name for name in COMPUTED if ours[name] != theirs[name]]
        assert not different, f"iteration {ours['iteration']}: {different}"
    assert actual.weights.keys() == expected.weights.keys() and expected.weights
    different = [
        name
        for name, weight in expected.weights.items()
        if not torch.equal(actual.weights[name], weight)
    ]
    assert not different


def assert_trained(run: EndedRun, first: Path) -> None:
    """Checks that the run changed weights of the checkpoint `first` that it began with.

    What it ends with would be equal in any two runs otherwise.
    """
    before = load_file(first)
    assert any(not torch.equal(run.weights[name], before[name]) for name in run.weights)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
