"""Tokens of older weights: keys that make sense together, and updates on them against the same updates by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import build_microbatches
from tests.helpers.algorithms import checked
from tests.helpers.groups import sample_advantages, with_trained
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.reports import numbers
from tests.helpers.shelf import shelf_iterator
from tests.helpers.trainer_rank import make_groups
from tests.unit.trainer.test_updates import (
    GROUPS,
    LEARNING_RATE,
    RESPONSES,
    make_config,
    make_learner,
)

# these import megatron, which the helper above has prepared
from pa_npu.backends.megatron.factory import load_stage  # isort: skip
from pa_npu.trainer.loop import consume  # isort: skip


def keys(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {"model": {"path": "m"}, "data": {"train": "t"}}
    return checked({**base, **sections})


ROLLING: dict[str, Any] = {"publish": {"mode": "rolling"}, "rollout": {"engines": 4}}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"algorithm": {"advantage": "batch-std"}, "schedule": {"stream": False}},
            "algorithm.advantage: batch-std",
        ),
        ({"algorithm": {"name": "reinforce++-baseline"}}, "of algorithm.name=reinforce"),
        (
            {"algorithm": {"loss": "reinforce"}},
            "set algorithm.importance_sampling to token or sequence",
        ),
        ({"schedule": {"compare_iterations": 2}}, "schedule.compare_iterations: 2"),
        ({"schedule": {"compare_iterations": 4}}, "schedule.compare_iterations: 4"),
        ({"schedule": {"iterations": 1}}, "lower max_staleness"),
        (
            {"publish": {"mode": "delayed"}, "schedule": {"max_staleness": 0}},
            "publish.mode: delayed with schedule.max_staleness = 0",
        ),
        ({"publish": {"mode": "delayed", "divergence": 0.1}}, "decided when engines are through"),
        (
            {"publish": {"mode": "delayed"}, "rollout": {"tensor_parallel": 2}},
            "set tensor_parallel to 1",
        ),
        (
            ROLLING | {"schedule": {"max_staleness": 0}},
            "publish.mode: rolling with schedule.max_staleness = 0",
        ),
        (ROLLING | {"rollout": {"engines": 2}}, "set engines to 3 or more"),
        (ROLLING | {"schedule": {"dynamic_sampling": True}}, "which groups are replaced"),
        (
            ROLLING | {"schedule": {"max_staleness": 2, "tokens_per_update": 99}},
            "which groups are carried",
        ),
        (ROLLING | {"agent": {"port": 8000}}, "samples for other programs would be of no version"),
        (
            ROLLING | {"evaluate": {"overlap": True}, "data": {"train": "t", "test": "t"}},
            "rolling with evaluate.overlap",
        ),
        (
            {"algorithm": {"ratio": "sampling", "importance_sampling": "token"}},
            "counts the sampling policy twice",
        ),
        (
            {"algorithm": {"importance_floor": 0.5}},
            "algorithm.importance_floor: 0.5 would be read by nothing",
        ),
    ],
)
def test_what_makes_no_sense_with_older_weights_is_refused_in_one_line(
    sections: dict[str, Any], says: str
) -> None:
    stale = {**sections, "schedule": {"max_staleness": 1, **sections.get("schedule", {})}}
    with pytest.raises(ValueError, match=says):
        keys(**stale)


def test_age_weights_need_ages() -> None:
    with pytest.raises(
        ValueError, match=r"algorithm.age_exponent: 0\.5: with schedule.max_staleness = 0"
    ):
        keys(algorithm={"age_exponent": 0.5})
    assert (
        keys(algorithm={"age_exponent": 0.5}, schedule={"max_staleness": 2}).algorithm.age_exponent
        == 0.5
    )


def test_the_policy_of_the_ratio_follows_from_staleness_and_weights() -> None:
    stale = {"max_staleness": 1, "updates_per_iteration": 2}
    one_behind = keys(schedule={"max_staleness": 1})
    assert (
        build_algorithm(keys()).ratio == "proximal"
        and build_algorithm(one_behind).ratio == "sampling"
    )
    weighed = keys(schedule=stale, algorithm={"importance_sampling": "token"})
    assert build_algorithm(weighed).ratio == "proximal" and trainer_models(weighed).computed == (
        "old",
    )
    assert trainer_models(keys(schedule=stale)).computed == (), (
        "no old policy is computed that nothing reads"
    )
    # a copy of what engines hold is kept where nothing else keeps it
    assert (
        trainer_models(one_behind).keeps_published and not trainer_models(weighed).keeps_published
    )
    assert not trainer_models(keys()).keeps_published


@pytest.mark.parametrize(("staleness", "end"), [(0, 5), (1, 5), (2, 5), (3, 4)])
def test_which_version_produces_which_iteration_follows_from_two_numbers(
    staleness: int, end: int
) -> None:
    """The rule of docs/staleness.md: version max(first, i - k), never an older one, every iteration
    once.
    """
    freshness = Freshness(staleness)
    first = 2
    ahead = 2
    produced = {}
    for version in range(first, end):
        while ahead < end and freshness.allows(ahead, version):
            produced[ahead] = version
            ahead += 1
    assert produced == {
        iteration: max(first, iteration - staleness) for iteration in range(first, end)
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


def source(groups: list[Group], iteration: int, freshness: Freshness) -> MicrobatchIterator:
    return shelf_iterator(groups, iteration, responses=RESPONSES, freshness=freshness)


def aged(groups: list[Group], iteration: int) -> list[Group]:
    """Tokens of versions iteration - 2 to iteration, several within a response, by engines near
    what the model says.
    """
    rng = np.random.default_rng(iteration)
    return [
        with_trained(
            group,
            logprobs=np.minimum(-4.85 + 0.3 * rng.standard_normal(group.num_trained), 0.0),
            versions=iteration - rng.integers(0, 3, group.num_trained),
        )
        for group in groups
    ]


ALGORITHMS: dict[str, dict[str, Any]] = {
    "sampling": {},
    "decoupled": {"importance_sampling": "token", "importance_cap": 1.3, "age_exponent": 0.5},
    "icepop": {
        **{"importance_sampling": "token", "importance_cap": 1.3, "importance_floor": 0.8},
    },
    "uncorrected": {"ratio": "proximal"},
}


def by_hand(
    model: Path, groups: list[Group], name: str, iteration: int, updates: int
) -> tuple[Any, dict[str, Any]]:
    """Weights after the updates, and the statistics of the whole iteration."""
    stage = load_stage(make_config(model), ModelSpec.read(str(model)), PLATFORM)
    optimizer = torch.optim.AdamW(
        stage.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )

    def logprobs(group: Group) -> torch.Tensor:
        (m,) = build_microbatches(group, RESPONSES, True, 1)
        return stage(
            m.tokens[None], m.layout, m.rows, m.targets, temperature=1.0, chunk=64
        ).logprobs

    with torch.no_grad():
        proximal = [logprobs(group) for group in groups]
    weights = []
    cuts = []
    ages = []
    for share in np.split(np.arange(len(groups)), updates):
        terms = []
        for index in share:
            group = groups[index]
            now = logprobs(groups[index])
            engine = torch.from_numpy(group.logprobs[group.trained])
            age = torch.from_numpy(iteration - group.versions[group.trained]).float()
            advantage = torch.from_numpy(sample_advantages(group).repeat(group.trained_lengths))
            ratio = (now - (engine if name == "sampling" else proximal[index])).exp()
            term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            weight = (proximal[index] - engine).exp()
            cut = weight > 1.3
            if name == "decoupled":
                weight = weight.clamp(max=1.3) * (1 + age) ** -0.5
                term = term * weight
            elif name == "icepop":
                cut = cut | (weight < 0.8)
                weight = torch.where(cut, 0.0, weight)
                term = term * weight
            else:
                weight = (now.detach() - engine).exp()
            terms.append(term)
            weights += weight.tolist()
            cuts += cut.tolist()
            ages += age.tolist()
        loss = torch.cat(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    w = np.array(weights)
    statistics = {
        "age_mean": np.mean(ages),
        "age_max": max(ages),
        "effective_sample_size": w.sum() ** 2 / (len(w) * (w**2).sum()),
    }
    if name in ("decoupled", "icepop"):
        statistics["importance_truncated_ratio"] = np.mean(cuts)
    return {
        name: parameter.detach() for name, parameter in stage.policy.named_parameters()
    }, statistics


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_on_older_tokens_are_those_by_hand(name: str, updates: int, model: Path) -> None:
    iteration = 4
    groups = aged(make_groups(iteration, GROUPS, RESPONSES, seed=5), iteration)
    schedule = {"max_staleness": 2, "updates_per_iteration": updates}
    learner, stage = make_learner(make_config(model, schedule=schedule, algorithm=ALGORITHMS[name]))
    learner.publish(iteration)
    consumed = consume(learner, source(groups, iteration, Freshness(2)), updates)
    report = numbers(consumed.report)
    weights, statistics = by_hand(model, groups, name, iteration, updates)
    for parameter_name, parameter in stage.policy.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), weights[parameter_name], rtol=1e-4, atol=2e-6
        )
    for statistic, value in statistics.items():
        rel = 1e-5 if updates == 1 else 0.02  # the effective size of two updates is their mean
        assert report[statistic] == pytest.approx(value, rel=rel), statistic
    assert 0 < report["age_mean"] < report["age_max"] == 2
    assert consumed.exact.n == 0, "older weights' log-probs are no exact comparison"
    assert consumed.aged.n == sum(group.num_trained for group in groups)
    if name != "uncorrected":
        plain, _ = by_hand(model, groups, "uncorrected", iteration, updates)
        moved = max((plain[key] - weights[key]).abs().max().item() for key in weights)
        assert moved > 100 * 2e-6, "a correction must show"


def test_tokens_beyond_max_staleness_stop_the_run(model: Path) -> None:
    groups = aged(make_groups(4, GROUPS, RESPONSES, seed=5), 4)
    learner, _ = make_learner(make_config(model, schedule={"max_staleness": 2}))
    learner.publish(4)
    with pytest.raises(
        InvariantViolation, match=r"I1 version: .* weight version 2, but version 4 .*staleness = 1"
    ):
        consume(learner, source(groups, 4, Freshness(1)), 1)


def test_published_weights_stay_while_the_policy_moves_on(model: Path) -> None:
    """An engine that is started again while trainers are ahead gets the version that its iteration
    is produced by.
    """
    learner, stage = make_learner(make_config(model, schedule={"max_staleness": 1}))
    learner.publish(3)
    before = {name: parameter.clone() for name, parameter in stage.policy.named_parameters()}
    consume(learner, source(make_groups(3, GROUPS, RESPONSES, seed=5), 3, Freshness(1)), 1)
    assert learner.gate.acquire(3), "version 3 can still be delivered after the step"
    learner.gate.release()
    kept = dict(stage.model("published").named_parameters())
    assert all(torch.equal(kept[name], value) for name, value in before.items())
    assert any(
        not torch.equal(parameter, before[name])
        for name, parameter in stage.policy.named_parameters()
    )
    assert [name for name, _ in stage.named_parameters()] == [f"policy.{name}" for name in before]
    learner.publish(4)
    assert not learner.gate.acquire(3) and learner.gate.acquire(4)
    learner.gate.release()
