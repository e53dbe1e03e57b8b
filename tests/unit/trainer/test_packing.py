"""An update does not depend on which groups share a microbatch, whatever the loss and its aggregation (I3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import cut, pack
from tests.helpers.backend import Source, make_learner
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.reports import numbers
from tests.helpers.trainer_rank import make_groups

GROUPS, RESPONSES = 4, 4
# every consumer of response_index and of the token weights
ALGORITHMS: list[dict[str, Any]] = [
    {"loss": "clip", "aggregation": "token-mean", "kl_coef": 0.1, "entropy_coef": 0.01},
    {"loss": "gspo", "aggregation": "sequence-mean"},
    {
        "loss": "cispo",
        "aggregation": "dr-grpo",
        "importance_sampling": "token",
        "importance_cap": 1.0,
    },
    {
        "loss": "reinforce",
        "aggregation": "sequence-sum",
        "importance_sampling": "sequence",
        "importance_cap": 1.0,
    },
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


def update(
    model: Path, algorithm: dict[str, Any], packs: list[list[Group]], shared: bool = True
) -> dict[str, float]:
    """The report of one iteration from fresh weights."""
    config = model_config(
        model,
        algorithm=algorithm,
        rollout={"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        schedule={"prompts_per_iteration": GROUPS},
    )
    learner, _ = make_learner(config)
    learner.accumulate(Source([pack(pieces, shared, 1) for pieces in packs]))
    return numbers(learner.step().report)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a['loss']}, {a['aggregation']}")
def test_packed_groups_give_the_update_of_groups_alone(
    algorithm: dict[str, Any], model: Path
) -> None:
    groups = make_groups(0, GROUPS, RESPONSES, seed=5)
    for group in groups:
        # near what the model says (about -log 128), so that importance weights lie on both sides of
        # their cap
        group.logprobs[group.trained] -= 4.3
    whole = [cut(group, RESPONSES) for group in groups]
    halves = [piece for group in groups for piece in cut(group, RESPONSES // 2)]
    expected = update(model, algorithm, whole)
    cuts = {
        "all groups": [[piece for pieces in whole for piece in pieces]],
        "over the borders of groups": [halves[:1], halves[1:4], halves[4:]],
    }
    for name, packs in cuts.items():
        for shared in (True, False):
            found = update(model, algorithm, packs, shared)
            assert found["microbatches"] == len(packs)
            assert found["tokens_response"] == expected["tokens_response"]
            for key in (
                "loss",
                "policy_loss",
                "grad_norm",
                "kl",
                "entropy",
                "logprob_diff_mean",
                "logprob_diff_max",
            ):
                assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-8), (
                    f"{name}, {shared=}, {key}"
                )
    assert expected["microbatches"] == GROUPS
    if algorithm.get("importance_sampling"):
        assert 0 < expected["importance_truncated_ratio"] < 1, (
            "the case must lie on both sides of the cap"
        )
        assert 0 < expected["importance_weight_mean"] < algorithm["importance_cap"]
    other = update(model, algorithm, whole[1:])
    assert other["grad_norm"] != pytest.approx(expected["grad_norm"], rel=1e-3), (
        "a lost group must show"
    )
