"""Presets: what algorithm.name fills in, and each preset's loss against its paper's formula written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from pa_npu.algorithm.algorithm import ScoredSamples
from pa_npu.algorithm.normaliser import Counts
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.rules import load_config
from pa_npu.config.keys import keys_help
from pa_npu.config.load import dump_config
from pa_npu.config.presets import PRESETS, PresetName
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.errors import ConfigError
from pa_npu.rewards.functions import function_specs
from tests.helpers.algorithms import checked

MAX_LENGTH = 8
REWARDS = [[1.0, 0.0, 0.5], [0.0, 2.0, 0.0]]
LENGTHS = [[3, 5, 2], [1, 4, 6]]


def preset_config(name: PresetName, **algorithm: object) -> Config:
    size = PRESETS[name].rollout.get("responses_per_prompt", len(LENGTHS[0]))
    tree = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "algorithm": {"name": name, **algorithm},
        "schedule": {"stream": PRESETS[name].algorithm.get("advantage") != "batch-std"},
        "rollout": {"max_response_tokens": MAX_LENGTH, "responses_per_prompt": size},
    }
    if name == "distill":
        tree["teacher"] = {"large": {"model": "t"}}
    return Config.model_validate(tree)


# Each formula: (log-probs, old, reference: lists of [response tokens] per response; advantages per
# response) -> loss.


def clipped(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def sample_std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def standardised(rewards: list[list[float]]) -> list[float]:
    return [(r - sum(g) / len(g)) / sample_std(g) for g in rewards for r in g]


def centred(rewards: list[list[float]]) -> list[float]:
    return [r - sum(g) / len(g) for g in rewards for r in g]


Tokens = list[torch.Tensor]


def grpo(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    terms = []
    for new, before, ref, advantage in zip(
        logprobs, old, reference, standardised(REWARDS), strict=True
    ):
        kl = (ref - new).exp() - (ref - new) - 1
        terms.append((clipped((new - before).exp(), advantage, 0.2, 0.2) - 0.04 * kl).mean())
    return -torch.stack(terms).mean()


def dr_grpo(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    terms = [
        clipped((new - before).exp(), advantage, 0.2, 0.2).sum()
        for new, before, advantage in zip(logprobs, old, centred(REWARDS), strict=True)
    ]
    return -torch.stack(terms).sum() / (len(terms) * MAX_LENGTH)


def token_mean(advantages: list[float], low: float, high: float) -> Callable[..., torch.Tensor]:
    def formula(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
        terms = [
            clipped((new - before).exp(), advantage, low, high)
            for new, before, advantage in zip(logprobs, old, advantages, strict=True)
        ]
        return -torch.cat(terms).mean()

    return formula


def distilled(logprobs: Tokens, old: Tokens, teacher: Tokens) -> torch.Tensor:
    terms = []
    for new, before, taught in zip(logprobs, old, teacher, strict=True):
        advantages = taught - new.detach()
        ratio = (new - before).exp()
        terms.append(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))
    return -torch.cat(terms).mean()


def rloo(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    baselines = [(sum(group) - r) / (len(group) - 1) for group in REWARDS for r in group]
    rewards = [r for group in REWARDS for r in group]
    terms = [(r - b) * new.sum() for r, b, new in zip(rewards, baselines, logprobs, strict=True)]
    return -torch.stack(terms).mean()


def rloo_with_kl(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    """The reward is R - 0.1 sum of (log pi_old - log pi_ref), before the leave-one-out baseline."""
    penalties = [
        0.1 * (before - ref).sum().item() for before, ref in zip(old, reference, strict=True)
    ]
    flat = [r for group in REWARDS for r in group]
    rewards = [r - penalty for r, penalty in zip(flat, penalties, strict=True)]
    terms = []
    for number, (reward, new) in enumerate(zip(rewards, logprobs, strict=True)):
        first = number // 3 * 3
        others = [rewards[i] for i in range(first, first + 3) if i != number]
        terms.append((reward - sum(others) / 2) * new.sum())
    return -torch.stack(terms).mean()


def reinforce_pp(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    shaped = centred(REWARDS)
    deviation = sample_std(shaped)
    return token_mean([a / deviation for a in shaped], 0.2, 0.2)(logprobs, old, reference)


def gspo(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    terms = []
    for new, before, advantage in zip(logprobs, old, standardised(REWARDS), strict=True):
        ratio = ((new - before).sum() / len(new)).exp()
        terms.append(clipped(ratio, advantage, 3e-4, 4e-4))
    return -torch.stack(terms).mean()


def cispo(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    terms = [
        (new - before).exp().detach().clamp(max=5.0) * advantage * new
        for new, before, advantage in zip(logprobs, old, standardised(REWARDS), strict=True)
    ]
    return -torch.cat(terms).mean()


def online_dpo(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    gained = [(new - before).sum() for new, before in zip(logprobs, reference, strict=True)]
    # of each group's rewards, the places of the first largest and the first smallest
    margins = [gained[0] - gained[1], gained[4] - gained[3]]
    return -torch.stack([torch.sigmoid(0.1 * margin).log() for margin in margins]).mean()


def dpo(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    gained = [(new - before).sum() for new, before in zip(logprobs, reference, strict=True)]
    # three pairs, the chosen one first
    margins = [gained[0] - gained[1], gained[2] - gained[3], gained[4] - gained[5]]
    return -torch.stack([torch.sigmoid(0.1 * margin).log() for margin in margins]).mean()


def cross_entropy(logprobs: Tokens, old: Tokens, reference: Tokens) -> torch.Tensor:
    return -torch.cat(logprobs).mean()


FORMULAS: dict[PresetName, Callable[[Tokens, Tokens, Tokens], torch.Tensor]] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "dapo": token_mean(standardised(REWARDS), 0.2, 0.28),
    "rloo": rloo,
    "reinforce++-baseline": reinforce_pp,
    "gspo": gspo,
    "cispo": cispo,
    "critic-free-ppo": token_mean(centred(REWARDS), 0.2, 0.2),
    "online-dpo": online_dpo,
    "sft": cross_entropy,
    "dpo": dpo,
    "distill": distilled,
}


def our_loss(
    config: Config, logprobs: torch.Tensor, old: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """As trainer and coordinator compute it, from rewards to the normalised loss."""
    algorithm = build_algorithm(config)
    groups, size = [], config.rollout.responses_per_prompt
    all_rewards = [reward for group in REWARDS for reward in group]
    all_lengths = [length for group in LENGTHS for length in group]
    for start in range(0, len(all_lengths), size):
        rewards, responses = all_rewards[start : start + size], all_lengths[start : start + size]
        tokens = np.zeros(sum(responses), np.int32)
        trained = np.ones(sum(responses), np.bool_)
        groups.append(
            ScoredSamples(
                np.array(rewards, np.float32), np.array(responses, np.int32), tokens, trained
            )
        )
    lengths = [n for group in LENGTHS for n in group]
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    batch = TokenBatch(
        logprobs=logprobs,
        entropy=torch.zeros_like(old),
        old_logprobs=old,
        reference_logprobs=reference if config.algorithm.has_reference else None,
        engine_logprobs=old,
        advantages=torch.from_numpy(np.concatenate(algorithm.batch_credit(groups))).double(),
        weights=algorithm.token_weights(lengths, torch.device("cpu")).double(),
        response_index=index,
        num_responses=len(lengths),
        group_size=size,
        columns={"teacher.large": reference},
    )
    sums = algorithm.loss_sums(batch)
    units = (
        0.0 if algorithm.counted_metric is None else float(sums.metrics[algorithm.counted_metric])
    )
    return sums.loss / algorithm.normaliser(
        Counts(tokens=sum(lengths), responses=len(lengths), units=units)
    )


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_of_a_preset_are_its_papers(name: PresetName) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = [n for group in LENGTHS for n in group]
    spread = 3e-4 if name == "gspo" else 0.8  # so that ratios lie on both sides of the clip
    logprobs = (
        -torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
    ).requires_grad_()
    old = logprobs.detach() + spread * torch.randn(
        sum(lengths), generator=generator, dtype=torch.float64
    )
    reference = logprobs.detach() + 0.3 * torch.randn(
        sum(lengths), generator=generator, dtype=torch.float64
    )

    ours = our_loss(preset_config(name), logprobs, old, reference)
    theirs = FORMULAS[name](*(list(x.split(lengths)) for x in (logprobs, old, reference)))
    (gradient,) = torch.autograd.grad(ours, logprobs)
    (expected,) = torch.autograd.grad(theirs, logprobs)
    # DEVIATION_EPSILON and fp32 advantages are the difference
    assert ours.item() == pytest.approx(theirs.item(), rel=5e-4)
    torch.testing.assert_close(gradient, expected, rtol=5e-4, atol=1e-7)

    wrong = "centred" if name in ("rloo", "grpo") else "leave-one-out"
    # of the second the advantage is an order alone, and the last two read none
    if name not in ("reinforce++-baseline", "online-dpo", "sft", "dpo"):
        other = our_loss(preset_config(name, advantage=wrong), logprobs, old, reference)
        assert other.item() != pytest.approx(theirs.item(), rel=1e-2), "another advantage must show"


def test_kl_in_the_reward_equals_rewards_that_contain_it() -> None:
    generator = torch.Generator().manual_seed(4)
    lengths = [n for group in LENGTHS for n in group]
    logprobs = (
        -torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
    ).requires_grad_()
    old = logprobs.detach().clone()
    reference = old + torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    split = [list(x.split(lengths)) for x in (logprobs, old, reference)]
    ours = our_loss(preset_config("rloo", kl_coef=0.1), logprobs, old, reference)
    theirs = rloo_with_kl(*split)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(ours, logprobs)
    (expected,) = torch.autograd.grad(theirs, logprobs)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    without = our_loss(preset_config("rloo"), logprobs, old, reference)
    assert without.item() != pytest.approx(theirs.item(), rel=1e-2), "the KL must show"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"algorithm": {"advantage": "group-std"}},
            "algorithm.kl_in: reward with algorithm.advantage=group-std",
        ),
        (
            {"microbatch": {"responses": 1}},
            "algorithm.kl_in: reward needs all responses of a group in one microbatch",
        ),
    ],
)
def test_kl_in_the_reward_is_refused_where_it_cannot_be_exact(
    overrides: dict[str, dict[str, object]], message: str
) -> None:
    algorithm = {"name": "rloo", "kl_coef": 0.1, **overrides.get("algorithm", {})}
    with pytest.raises(ValueError, match=message):
        checked(
            {"model": {"path": "m"}, "data": {"train": "t"}, **overrides, "algorithm": algorithm}
        )


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"kl_in": "reward"},
            "algorithm.kl_in: reward would be read by nothing; set algorithm.kl_coef",
        ),
        (
            {"loss": "cispo", "delta": 2.0},
            "algorithm.delta: 2.0 would be read by nothing; set algorithm.loss to clip or gspo",
        ),
        (
            {"loss": "reinforce", "dual_clip": 3.0},
            "algorithm.dual_clip: 3.0 would be read by nothing",
        ),
        (
            {"dual_clip": 3.0, "delta": 2.0},
            "algorithm.delta: 2.0 with algorithm.dual_clip = 3.0: both bound the loss",
        ),
        ({"kl_estimator": "k1"}, "algorithm.kl_estimator: k1 would be read by nothing"),
        (
            {"importance_cap": 3.0},
            "algorithm.importance_cap: 3.0 .* set algorithm.importance_sampling to token or",
        ),
        (
            {"name": "rloo", "clip_high": 0.3},
            "algorithm.clip_high: 0.3 .* with a ratio to clip, or remove the key",
        ),
    ],
)
def test_a_changed_key_that_nothing_reads_is_refused(
    algorithm: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        checked({"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": algorithm})


def test_every_preset_has_a_formula_and_only_known_keys() -> None:
    assert set(FORMULAS) == set(PRESETS) == set(get_args(PresetName))
    for name, preset in PRESETS.items():
        config = preset_config(name)
        for key, value in preset.algorithm.items():
            assert getattr(config.algorithm, key) == value, f"{name}: {key}"


def test_keys_of_the_user_win_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\nalgorithm: {name: dapo, clip_high: 0.5}\n")
    config = load_config([str(file)], ["algorithm.aggregation=sequence-mean"])
    assert (config.algorithm.clip_high, config.algorithm.aggregation) == (0.5, "sequence-mean")
    assert load_config([str(file)]).algorithm.clip_high == 0.5
    assert load_config([str(file)], ["algorithm.name=null"]).algorithm.aggregation == "token-mean"


@pytest.mark.parametrize("name", PRESETS)
def test_the_resolved_tree_shows_all_values_and_reloads_equal(
    name: PresetName, tmp_path: Path
) -> None:
    config = preset_config(name)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(config))
    assert load_config([str(file)]) == config
    text = file.read_text()
    for key, value in PRESETS[name].algorithm.items():
        assert f"{key}: {value}" in text or isinstance(value, float), key


def test_no_name_is_the_defaults_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    plain = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    assert plain.algorithm == AlgorithmConfig()
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\nalgorithm: {name: grpo2}\n")
    with pytest.raises(
        ConfigError,
        match=r"c.yaml:3: algorithm.name: \"grpo2\" .*did you mean grpo\? .*grpo \| dr-grpo",
    ):
        load_config([str(file)])


def test_a_preset_that_cannot_stream_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {path: m}\ndata: {train: t}\nalgorithm:\n  name: reinforce++-baseline\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"c.yaml:3: algorithm.advantage: batch-std \(of .*set schedule.stream=false",
    ):
        load_config([str(file)])
    assert load_config([str(file)], ["schedule.stream=false"]).algorithm.advantage == "batch-std"


def test_sections_given_as_models_are_filled_too() -> None:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "algorithm": AlgorithmConfig(name="dr-grpo", clip_high=0.3),
        }
    )
    assert (config.algorithm.aggregation, config.algorithm.clip_high) == ("dr-grpo", 0.3)


def test_help_documents_every_preset() -> None:
    text = keys_help()
    for name, preset in PRESETS.items():
        assert f"{name}: {preset.source}" in text


def test_dapo_shapes_overlong_rewards_over_the_last_fifth_unless_rewards_are_given(
    tmp_path: Path,
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\nalgorithm: {name: dapo}\n")
    config = load_config([str(file)], ["rollout.max_response_tokens=20480"])
    math, overlong = function_specs(
        config.reward, max_response_tokens=config.rollout.max_response_tokens
    )
    assert math.name == "math"
    assert (overlong.name, overlong.max_tokens, overlong.buffer_tokens) == ("overlong", 20480, 4096)
    own = load_config([str(file)], ["reward.functions=[{name: math}]"])
    assert [f.name for f in own.reward.functions] == ["math"]
    with pytest.raises(
        ConfigError,
        match=r"buffer_tokens = 9, more than rollout.max_response_tokens = 8; lower buffer_tokens",
    ):
        load_config(
            [str(file)],
            [
                "rollout.max_response_tokens=8",
                "reward.functions=[{name: overlong, buffer_tokens: 9}]",
            ],
        )
