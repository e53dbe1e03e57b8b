"""CONTRIBUTING.md's recipe for a built-in advantage names all places that an advantage needs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pa_npu.algorithm import advantages, rules
from pa_npu.algorithm.corrections import kl_reward_advantages
from pa_npu.algorithm.trial import _made_up_batch
from pa_npu.config.schema import Config

ROOT = Path(__file__).resolve().parents[3]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text().partition("### A built-in advantage")[2]
NAMES = ("leave-one-out", "leave_one_out")


def test_the_recipe_lists_every_file_of_the_package_that_knows_the_example() -> None:
    """The preset `rloo` chooses it, and is no part of it."""
    places = "\n".join(line for line in RECIPE.splitlines() if line.startswith("|"))
    listed = set(re.findall(r"`((?:pa_npu|tests|docs)/[\w/.]+)`", places))
    for file in listed:
        assert any(name in (ROOT / file).read_text() for name in NAMES), f"{file} has no part of it"
    knowing = set()
    for path in (ROOT / "pa_npu").rglob("*.py"):
        if any(name in path.read_text() for name in NAMES):
            knowing.add(path.relative_to(ROOT).as_posix())
    assert knowing - {"pa_npu/config/presets.py"} <= listed, "add the place, or need it no more"


def doubled(rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (2.0 * (rewards - rewards.mean())).astype(np.float32)


def config() -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "algorithm": {
                "loss": "reinforce",
                "advantage": "doubled",
                "kl_in": "reward",
                "kl_coef": 0.1,
            },
        }
    )


@pytest.mark.parametrize("is_linear", [True, False])
def test_an_advantage_in_the_recipes_tables_is_known_everywhere(
    monkeypatch: pytest.MonkeyPatch, is_linear: bool
) -> None:
    assert "'doubled' is not group-std" in next(rules.broken_rules(config())), "negative control"
    monkeypatch.setitem(advantages.GROUP_ADVANTAGES, "doubled", doubled)
    known = (*advantages.GROUP_ADVANTAGES, advantages.BATCH_STD)
    monkeypatch.setattr(rules, "KNOWN_ADVANTAGES", known)
    if is_linear:
        monkeypatch.setitem(advantages.LINEAR_ADVANTAGES, "doubled", lambda size: 2.0)

    rewards = np.array([0, 1, 1], np.float32)
    credited = advantages.group_advantages(rewards, "doubled")
    np.testing.assert_allclose(credited, [-4 / 3, 2 / 3, 2 / 3], rtol=1e-6)
    assert advantages.broken_advantages(rewards, credited, "doubled") is None
    broken = [line for line in rules.broken_rules(config()) if "advantage" in line]
    if is_linear:
        assert not broken
    else:
        assert "algorithm.kl_in: reward with algorithm.advantage=doubled" in broken[0]
    if is_linear:
        batch = _made_up_batch()
        torch.testing.assert_close(
            kl_reward_advantages(batch, "k1", 0.1, "doubled"),
            2.0 * kl_reward_advantages(batch, "k1", 0.1, "centred"),
        )
