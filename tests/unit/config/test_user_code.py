"""A user's own loss, advantage and reward are tried before anything starts; what is wrong is one line with file and line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pa_npu.algorithm.advantages import GROUP_ADVANTAGES, group_advantages
from pa_npu.algorithm.policy_losses import POLICY_LOSSES
from pa_npu.algorithm.registry import KINDS
from pa_npu.algorithm.rules import load_config
from pa_npu.algorithm.trial import check_algorithm, try_class, try_loss
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.errors import ConfigError, UserError
from pa_npu.rewards.check import check_reward_functions, sample_group
from tests.helpers.algorithms import algorithm_of

MODULE = """
import torch
from pa_npu.algorithm.policy_losses import PolicyTerms

def terms(loss):
    return PolicyTerms(loss, torch.zeros_like(loss, dtype=torch.bool))

def good(batch, config):
    return terms(-(batch.logprobs - batch.old_logprobs).exp() * batch.advantages)

def raises(batch, config):
    return terms(batch.log_probs)

def plain(batch, config):
    return -batch.advantages * batch.logprobs

def summed(batch, config):
    return terms((-batch.advantages * batch.logprobs).sum())

def detached(batch, config):
    return terms(-batch.advantages * batch.logprobs.detach())

def unrelated(batch, config):
    return terms((-batch.advantages * torch.ones_like(batch.logprobs, requires_grad=True)))

def nan(batch, config):
    return terms(batch.logprobs.sqrt())

def nan_gradient(batch, config):
    return terms((batch.logprobs - batch.logprobs).sqrt() * 0 + batch.logprobs)

def clipped_text(batch, config):
    return PolicyTerms(batch.logprobs, "none")

def one_parameter(batch):
    return terms(batch.logprobs)

number = 5

def squared(rewards):
    return rewards ** 2

def ranks(rewards):
    return list(range(len(rewards)))

def scalar(rewards):
    return rewards.mean()

def infinite(rewards):
    return rewards / 0.0

def broken(rewards):
    return rewards["a"]
"""

# without torch, which every worker's process would import
REWARDS = """
def reward(group):
    return [float(group.row["level"])] * len(group.responses)

def missing_column(group):
    return [group.row["colour"] for _ in group.responses]

def too_few(group):
    return [1.0]

def dies(group):
    import os
    os._exit(3)
"""


@pytest.fixture(autouse=True)
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its name, a new one for every test because modules are imported once."""
    name = f"mine_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_rewards.py").write_text(REWARDS)
    (tmp_path / "broken_import.py").write_text("import torch\n\nimport no_such_thing\n")
    (tmp_path / "broken_syntax.py").write_text("def f(:\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises", "failed on a made-up batch: AttributeError"),
        ("plain", "returned a Tensor; return PolicyTerms"),
        ("summed", r"its loss has the shape \[\] for 14 tokens"),
        ("detached", "its loss has no gradient"),
        ("unrelated", "its gradient for batch.logprobs is zero"),
        ("nan", "its loss is not finite"),
        ("nan_gradient", "its gradient is not finite"),
        ("clipped_text", "its clipped is a str"),
        ("one_parameter", "TypeError"),
        ("number", "is a int, not a function"),
        ("nowhere", "cannot be imported"),
    ],
)
def test_a_loss_that_is_none_is_one_line(users_module: str, function: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        try_loss(AlgorithmConfig(loss=f"{users_module}:{function}"))
    line = str(refused.value)
    assert line.startswith(f"algorithm.loss: {users_module}:{function}") and "\n" not in line
    if function not in ("number", "nowhere"):
        assert f"{users_module}.py:" in line, "no file and line of the user's code"


def test_a_module_that_is_none_is_named_with_its_line(users_module: str) -> None:
    with pytest.raises(ConfigError, match=r"broken_import\.py:3"):
        try_loss(AlgorithmConfig(loss="broken_import:f"))
    with pytest.raises(ConfigError, match=r"SyntaxError.*broken_syntax\.py:1"):
        try_loss(AlgorithmConfig(loss="broken_syntax:f"))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_of_ours_passes_the_same_trial(name: str) -> None:
    try_loss(AlgorithmConfig(loss=name))


@pytest.mark.parametrize("name", KINDS)
def test_every_algorithm_of_ours_passes_the_trial_of_a_users_class(name: str) -> None:
    kl_coef = 0.1 if name in ("dpo", "preference") else 0.0
    config = algorithm_of(AlgorithmConfig(loss=name, kl_coef=kl_coef)).config
    if KINDS[name].samples_from == "rows":  # without engines
        config = config.model_copy(
            update={
                "rollout": config.rollout.model_copy(
                    update={"engines": 0, "responses_per_prompt": 2}
                )
            }
        )
    try_class(config)


def test_the_names_in_the_configuration_are_those_that_exist() -> None:
    described = {
        name: AlgorithmConfig.model_fields[name].description or "" for name in ("loss", "advantage")
    }
    assert set(KINDS) == {*POLICY_LOSSES, "dpo", "preference", "cross-entropy"}
    assert all(name in described["loss"] for name in KINDS)
    assert all(f"{name}:" in described["advantage"] for name in (*GROUP_ADVANTAGES, "batch-std"))


def config_of(**keys: str) -> Config:
    return algorithm_of(AlgorithmConfig(**keys)).config


def test_the_trial_is_a_process_of_its_own_and_takes_good_functions(users_module: str) -> None:
    check_algorithm(config_of(loss=f"{users_module}:good", advantage=f"{users_module}:squared"))
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage: ends:f: the process that tried it ended with 7"
    ):
        check_algorithm(config_of(advantage="ends:f"))


def test_an_advantage_of_ones_own_is_used_by_name(users_module: str) -> None:
    rewards = np.array([0.5, 2.0], np.float32)
    assert group_advantages(rewards, f"{users_module}:squared").tolist() == [0.25, 4.0]
    ranks = group_advantages(rewards, f"{users_module}:ranks")
    assert ranks.tolist() == [0, 1] and ranks.dtype == np.float32


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("scalar", r"returned the shape \(\) for 3 rewards"),
        ("infinite", "not all finite"),
        ("broken", "failed: IndexError"),
        ("nowhere", "cannot be imported"),
    ],
)
def test_an_advantage_that_is_none_is_one_line(
    users_module: str, function: str, problem: str
) -> None:
    with np.errstate(divide="ignore"), pytest.raises(ConfigError, match=problem) as refused:
        group_advantages(np.array([1.0, 2.0, 4.0], np.float32), f"{users_module}:{function}")
    assert str(refused.value).startswith(f"algorithm.advantage: {users_module}:{function}")


@pytest.mark.parametrize("key", ["algorithm.loss", "algorithm.advantage"])
def test_a_name_that_is_neither_ours_nor_module_and_function_is_refused_by_the_configuration(
    key: str,
) -> None:
    for value in ("nonsense", ":f", "m:", ":"):
        with pytest.raises(ConfigError, match=rf"{key}: '.*' is not .* or module:function"):
            load_config([], ["model.path=m", "data.train=t", f"{key}='{value}'"])


def users_rewards(name: str) -> Config:
    return load_config(
        [],
        ["model.path=m", "data.train=t", f"reward.functions=[{{name: '{name}'}}, {{name: math}}]"],
    )


def test_a_reward_function_is_called_once_for_a_row_of_the_dataset(users_module: str) -> None:
    sample, module = sample_group("What is 2+2?", "4", {"level": 3}, 4), f"{users_module}_rewards"
    check_reward_functions(users_rewards(f"{module}:reward"), sample)
    for function, problem in (
        ("missing_column", "KeyError: 'colour'"),
        ("too_few", "returned 1 rewards for 4 responses"),
        ("dies", "its reward worker died 3 times"),
    ):
        with pytest.raises(UserError, match=problem) as refused:
            check_reward_functions(users_rewards(f"{module}:{function}"), sample)
        assert function == "dies" or f"{module}.py:" in str(refused.value)
        assert str(refused.value).startswith("reward.functions: ")
