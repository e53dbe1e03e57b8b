"""Loss, gradient norm and frozen log-probs do not depend on TP, PP, DP, SP, recomputation or the optimizer's sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers.megatron import hf_gradients, model_config
from tests.helpers.model_rank import (
    GROUPS,
    launch,
    microbatches,
    policy_loss,
    run_layout,
    sequences,
)
from tests.helpers.models import make_model

pytestmark = pytest.mark.integration

TWO_RANKS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "TP2+full": {"tensor_parallel": 2, "recompute": "full"},
    "PP2": {"pipeline_parallel": 2},
    "PP2+selective": {
        "pipeline_parallel": 2,
        "recompute": "selective",
        "distributed_optimizer": False,
    },
    "DP2": {},
    "DP2 unsharded": {"distributed_optimizer": False},
}
FOUR_RANKS = {
    "TP2 PP2": {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "full"},
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
        sections = {
            name: {"trainer": {"devices": devices, **trainer}} for name, trainer in layouts.items()
        }
        sections["bf16"] = {
            "trainer": {"devices": devices, **next(iter(layouts.values()))},
            "model": {"dtype": "bf16"},
        }
        job = {"model": str(self.model), "reference": str(self.reference), "layouts": sections}
        return launch(job, devices, self.directory)


def assert_equal_updates(
    results: dict[str, Any], layouts: dict[str, dict[str, Any]], single: dict[str, Any]
) -> None:
    for name in layouts:
        for update in range(2):
            for key in ("loss", "grad_norm"):
                ours, expected = results[name][key][update], single[key][update]
                assert ours == pytest.approx(expected, rel=1e-5), f"{name}, update {update}, {key}"
        assert results[name]["reference"] == pytest.approx(single["reference"], rel=1e-5), name
    for key in ("loss", "grad_norm"):
        assert results["bf16"][key] == pytest.approx(single[key], rel=0.05), f"bf16, {key}"
    losses = single["loss"]
    assert abs(losses[1] - losses[0]) > 1e-2 * abs(losses[0]), (
        "the first update must show in the second loss"
    )


def test_two_ranks_equal_one_for_qwen3_tied(tmp_path: Path) -> None:
    """q/k norms, whose gradients must be summed over TP, and tied embeddings, which PP keeps twice."""
    world = World(tmp_path, "qwen3", tied=True)
    results = world.run(TWO_RANKS, 2)
    assert_equal_updates(results, TWO_RANKS, world.single)

    errors = results["vocab_parallel"]
    assert max(errors.values()) < 2e-13, (
        f"vocabulary-parallel log-prob against the full softmax in fp64: {errors}"
    )
    first, second = results["PP2"]["ranks"]
    assert (first["stage"], second["stage"]) == (0, 1)
    assert [ranks["replica"] for ranks in results["DP2"]["ranks"]] == [0, 1]


MIXTURE_ON_TWO: dict[str, dict[str, Any]] = {
    "EP2": {"expert_parallel": 2},
    "EP2 unsharded": {"expert_parallel": 2, "distributed_optimizer": False},
    "EP2 separate": {"expert_parallel": 2, "distributed_optimizer": False, "shared_prompt": False},
    "TP2 EP2": {"tensor_parallel": 2, "expert_parallel": 2, "recompute": "full"},
    "TP2 with all experts": {"tensor_parallel": 2, "distributed_optimizer": False},
}
MIXTURE_ON_FOUR: dict[str, dict[str, Any]] = {
    "TP2 x EP2": {
        "tensor_parallel": 2,
        "expert_parallel": 2,
        "distributed_optimizer": False,
    },
    "TP2 x EP4": {"tensor_parallel": 2, "expert_parallel": 4},
    "PP2 x EP2": {"pipeline_parallel": 2, "expert_parallel": 2, "distributed_optimizer": False},
    "PP2 x EP2 sharded": {"pipeline_parallel": 2, "expert_parallel": 2},
}
MIXTURE_ON_FOUR |= {
    f"{name} separate": {**MIXTURE_ON_FOUR[name], "shared_prompt": False}
    for name in ("TP2 x EP2", "PP2 x EP2")
}


class Mixture(World):
    """A mixture of experts with a dense layer in the middle, and what transformers makes of the
    same microbatches.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        more = {"layers": 4, "mlp_only_layers": [1]}
        self.model = make_model(directory / "policy", "qwen3_moe", seed=0, **more)
        self.reference = make_model(directory / "reference", "qwen3_moe", seed=1, **more)
        self.single = run_layout(model_config(self.model), self.reference, dist.HashStore(), 0, 1)
        hf_model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        for (prompt, responses), (tokens, *_, weights) in zip(GROUPS, microbatches(), strict=True):
            parts = zip(sequences(tokens, prompt, responses), weights.split(responses), strict=True)
            for sequence, own in parts:
                logits = hf_model(sequence[None]).logits[0, prompt - 1 : -1] / 0.9
                logprobs = logits.log_softmax(-1).gather(-1, sequence[prompt:, None]).squeeze(-1)
                policy_loss(logprobs, own).backward()
        # by which Megatron's schedule divides
        num_targets = sum(sum(responses) for _, responses in GROUPS)
        self.gradients = {
            name: gradient / num_targets for name, gradient in hf_gradients(hf_model).items()
        }

    def check(self, layouts: dict[str, dict[str, Any]], devices: int) -> None:
        """Both updates equal those of one rank; gradients, where the optimizer is not sharded,
        those of transformers.
        """
        sections = {
            name: {
                "trainer": {
                    "devices": devices,
                    **{k: v for k, v in keys.items() if k != "shared_prompt"},
                },
                "attention": {"shared_prompt": keys.get("shared_prompt", True)},
            }
            for name, keys in layouts.items()
        }
        written = self.directory / "gradients"
        paths = {
            "model": str(self.model),
            "reference": str(self.reference),
            "gradients": str(written),
        }
        results = launch({**paths, "layouts": sections}, devices, self.directory)
        for name, keys in layouts.items():
            for key in ("loss", "grad_norm", "reference"):
                assert results[name][key] == pytest.approx(self.single[key], rel=1e-5), (
                    f"{name}, {key}"
                )
            if keys.get("distributed_optimizer", True):
                continue
            actual = {
                k: v
                for file in (written / name).glob("*.safetensors")
                for k, v in load_file(file).items()
            }
            assert actual.keys() == self.gradients.keys()
            for tensor, expected in self.gradients.items():
                error = (actual[tensor] - expected).abs().max() / expected.abs().max().clamp_min(
                    1e-4
                )
                assert error < 1e-5, (
                    f"{name}: gradient of {tensor} differs by {error:.1e} of its largest element"
                )


def test_experts_shared_by_two_ranks_train_as_transformers_does(tmp_path: Path) -> None:
    """Both ways of dispatch, shared prompts on and off, sharded optimizer or not, replicas or
    tensor-parallel ranks.
    """
    Mixture(tmp_path).check(MIXTURE_ON_TWO, 2)


def test_experts_shared_by_four_ranks_beside_tensor_and_pipeline_parallelism_train_as_transformers_does(
    tmp_path: Path,
) -> None:
    Mixture(tmp_path).check(MIXTURE_ON_FOUR, 4)


def test_four_ranks_equal_one_for_qwen2_untied(tmp_path: Path) -> None:
    """Biases and a head of its own, with every kind of parallelism at once."""
    world = World(tmp_path, "qwen2", tied=False)
    results = world.run(FOUR_RANKS, 4)
    assert_equal_updates(results, FOUR_RANKS, world.single)
    for rank, ranks in enumerate(results["TP2 PP2"]["ranks"]):
        assert (ranks["tensor"], ranks["stage"], ranks["rank"]) == (rank % 2, rank // 2, rank)
