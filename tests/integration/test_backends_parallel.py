"""Loss, gradient norm and frozen log-probs do not depend on TP, PP, DP, SP, recomputation or the optimizer's sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.megatron import model_config
from tests.helpers.model_rank import launch, run_layout
from tests.helpers.models import make_model

pytestmark = pytest.mark.integration

TWO_RANKS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "TP2+SP": {"tensor_parallel": 2, "sequence_parallel": True},
    "TP2+SP+full": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
    "PP2": {"pipeline_parallel": 2},
    "PP2+selective": {"pipeline_parallel": 2, "recompute": "selective", "distributed_optimizer": False},
    "DP2": {},
    "DP2 unsharded": {"distributed_optimizer": False},
}
FOUR_RANKS = {
    "TP2 PP2 SP": {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True, "recompute": "full"},
    "PP2 DP2": {"pipeline_parallel": 2},
}


class World:
    """The results of all layouts of one family, each world started once."""

    def __init__(self, directory: Path, family: str, tied: bool) -> None:
        self.model = make_model(directory / "policy", family, tied=tied, seed=0)
        self.reference = make_model(directory / "reference", family, tied=tied, seed=1)
        self.single = run_layout(model_config(self.model), self.reference, dist.HashStore(), 0, 1)
        self.directory = directory

    def run(self, layouts: dict[str, dict[str, Any]], devices: int) -> dict[str, Any]:
        sections = {name: {"trainer": {"devices": devices, **trainer}} for name, trainer in layouts.items()}
        sections["bf16"] = {"trainer": {"devices": devices, **next(iter(layouts.values()))}, "model": {"dtype": "bf16"}}
        job = {"model": str(self.model), "reference": str(self.reference), "layouts": sections}
        return launch(job, devices, self.directory)


def assert_equal_updates(results: dict[str, Any], layouts: dict[str, dict[str, Any]], single: dict[str, Any]) -> None:
    for name in layouts:
        for update in range(2):
            for key in ("loss", "grad_norm"):
                ours, expected = results[name][key][update], single[key][update]
                assert ours == pytest.approx(expected, rel=1e-5), f"{name}, update {update}, {key}"
        assert results[name]["reference"] == pytest.approx(single["reference"], rel=1e-5), name
    for key in ("loss", "grad_norm"):
        assert results["bf16"][key] == pytest.approx(single[key], rel=0.05), f"bf16, {key}"
    losses = single["loss"]
    assert abs(losses[1] - losses[0]) > 1e-2 * abs(losses[0]), "the first update must show in the second loss"


def test_two_ranks_equal_one_for_qwen3_tied(tmp_path: Path) -> None:
    """q/k norms, whose gradients must be summed over TP, and tied embeddings, which PP keeps twice."""
    world = World(tmp_path, "qwen3", tied=True)
    results = world.run(TWO_RANKS, 2)
    assert_equal_updates(results, TWO_RANKS, world.single)

    errors = results["vocab_parallel"]
    assert max(errors.values()) < 1e-13, f"vocabulary-parallel log-prob against the full softmax in fp64: {errors}"
    first, second = results["PP2"]["ranks"]
    assert (first["stage"], second["stage"]) == (0, 1)
    assert [ranks["replica"] for ranks in results["DP2"]["ranks"]] == [0, 1]


def test_four_ranks_equal_one_for_qwen2_untied(tmp_path: Path) -> None:
    """Biases and a head of its own, with every kind of parallelism at once."""
    world = World(tmp_path, "qwen2", tied=False)
    results = world.run(FOUR_RANKS, 4)
    assert_equal_updates(results, FOUR_RANKS, world.single)
    for rank, ranks in enumerate(results["TP2 PP2 SP"]["ranks"]):
        assert (ranks["tensor"], ranks["stage"], ranks["rank"]) == (rank % 2, rank // 2, rank)
