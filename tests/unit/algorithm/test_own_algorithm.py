"""A class of the user's own, with a second component on the environment's tokens: its update is its formula on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.own_algorithm import ALGORITHM, OBSERVATION_WEIGHT
from pa_npu.algorithm.normaliser import Counts
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trial import check_algorithm, try_class
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.invariants import check_normalisers
from pa_npu.trainer.learner import Learner, Update
from tests.helpers.backend import Source, make_learner
from tests.helpers.groups import trained_advantages
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups

RATE, GROUPS, RESPONSES = 3e-3, 3, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    with single_process(model_config(path)):
        yield path


def config_of(model: Path, backend: str = "megatron", **algorithm: Any) -> Config:
    return model_config(
        model,
        algorithm={"name": ALGORITHM, **algorithm},
        trainer={"backend": backend},
        rollout={"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        schedule={"prompts_per_iteration": GROUPS},
        optimizer={"learning_rate": RATE, "clip_grad": 0.0, "epsilon": 1e-3},
        publish={"noise_margin": None},
    )


def learner_of(config: Config) -> Learner:
    if config.trainer.backend == "megatron":
        return make_learner(config)[0]
    spec, timeline = ModelSpec.read(config.model.path), Timeline(None, "")
    module = backend_module(config.trainer.backend)
    backend = module.create(config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline)
    return Learner(config, backend, PLATFORM, timeline)


def labelled(group: Group, config: Config) -> Group:
    """The group with the components that the algorithm gives its tokens, and weights that are not 1
    on every third.
    """
    algorithm = build_algorithm(config)
    spans = [
        slice(start, end)
        for start, end in zip(group.offsets()[:-1], group.offsets()[1:], strict=True)
    ]
    component = np.concatenate(
        [
            algorithm.token_components(group.tokens[s], group.component[s], group.written[s])
            for s in spans
        ]
    )
    weight = np.ones(len(component), np.float32)
    weight[::3] = 0.5
    weight[component == 0] = 1
    return replace(group, component=component, weight=weight)


def groups_of(config: Config) -> list[Group]:
    return [labelled(group, config) for group in make_groups(0, GROUPS, RESPONSES, seed=7)]


def update(learner: Learner, groups: list[Group], responses: int) -> Update:
    pieces = [one for group in groups for one in build_microbatches(group, responses, True, 1)]
    source = Source(pieces)
    source.advantages = {group.index: trained_advantages(group) for group in groups}
    learner.publish(0)
    learner.accumulate(source)
    return learner.step()


def by_hand(
    model: Path, groups: list[Group], *, observations: float
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, norm of its gradient and weights after AdamW's step, one sequence after another with
    dense attention, in fp32.

    On the policy's tokens -A r, with the ratio r to the same policy; on the prompt's -observations
    log p. Each is multiplied by its weight, and all are divided by the number of the policy's
    tokens.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    total, policy_tokens = torch.zeros(()), 0
    for group in groups:
        starts, ends = group.offsets()[:-1].tolist(), group.offsets()[1:].tolist()
        for start, end in zip(starts, ends, strict=True):
            ids = torch.from_numpy(group.tokens[start:end].astype(np.int64))
            logprobs = (
                policy(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            )
            for place in range(1, end - start):
                row = start + place
                weight = float(group.weight[row])  # type: ignore[index]
                if group.versions[row] >= 0:
                    policy_tokens += 1
                    ratio = (logprobs[place - 1] - logprobs[place - 1].detach()).exp()
                    total = total - weight * float(group.advantages[row]) * ratio
                else:
                    total = total - weight * observations * logprobs[place - 1]
    loss = total / policy_tokens
    loss.backward()
    norm = torch.sqrt(
        sum(
            (p.grad.square().sum() for p in policy.parameters() if p.grad is not None),
            torch.zeros(()),
        )
    )
    optimizer.step()
    return (
        loss.item(),
        norm.item(),
        {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()},
    )


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_its_update_is_the_formulas_by_hand(backend: str, model: Path, tmp_path: Path) -> None:
    config = config_of(model, backend)
    groups = groups_of(config)
    learner = learner_of(config)
    done = update(learner, groups, responses=2)
    loss, norm, weights = by_hand(model, groups, observations=OBSERVATION_WEIGHT)
    assert done.report.loss == pytest.approx(loss, rel=1e-5)
    assert done.report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert done.normaliser == sum(int(group.written.sum()) for group in groups), (
        "of the policy's tokens alone"
    )
    learner.backend.export(tmp_path)
    exported = {
        name: tensor
        for file in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert exported.keys() <= weights.keys() and len(exported) > 10
    for name, tensor in exported.items():
        torch.testing.assert_close(
            tensor.float(), weights[name], rtol=1e-3, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
    without, other_norm, _ = by_hand(model, groups, observations=0.0)
    assert loss != pytest.approx(without, rel=1e-2) and norm != pytest.approx(
        other_norm, rel=1e-3
    ), "it must show"


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_no_cut_into_microbatches_changes_its_update(aggregation: str, model: Path) -> None:
    """I3, with components and weights: pieces of one, two and four samples."""
    config = config_of(model, aggregation=aggregation)
    groups = groups_of(config)
    updates = [update(learner_of(config), groups, responses) for responses in (1, 2, 4)]
    for other in updates[1:]:
        assert other.normaliser == updates[0].normaliser
        assert other.report.loss == pytest.approx(updates[0].report.loss, rel=1e-5)
        assert other.report.grad_norm == pytest.approx(updates[0].report.grad_norm, rel=1e-5)


def test_a_policys_token_without_a_version_is_no_component_of_its(model: Path) -> None:
    config = config_of(model)
    algorithm, group = build_algorithm(config), groups_of(config)[0]
    assert algorithm.broken_components(group.component, group.written) is None
    without = group.written.copy()
    without[int(group.written.argmax())] = False
    assert "1 tokens of component 1 (policy) have no weight version" in str(
        algorithm.broken_components(group.component, without)
    )
    third = np.where(group.component == 2, 3, group.component).astype(np.uint8)
    assert "there is no component 3; the algorithm has 1 (policy), 2 (observations)" in str(
        algorithm.broken_components(third, group.written)
    )


BROKEN = """
from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.policy_gradient import PolicyGradient

class Half(Algorithm):
    components = PolicyGradient.components

class NoAlgorithm:
    pass

class Raises(PolicyGradient):
    def credit(self, group):
        return group.reward

class Flat(PolicyGradient):
    def credit(self, group):
        return group.rewards

class OtherMetrics(PolicyGradient):
    metric_names = ("loss", "policy_loss")
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Half", "has no .*credit.*; write what is missing"),
        ("NoAlgorithm", "is no class of algorithms"),
        ("Raises", r"failed on a made-up batch: AttributeError.*broken_algorithms\.py:\d+"),
        ("Flat", "credit returned"),
        ("OtherMetrics", "name the same ones"),
        ("Missing", "cannot be imported"),
    ],
)
def test_a_class_that_is_none_is_one_line(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_algorithms.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = {"name": f"broken_algorithms:{name}"}
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": keys}
    )
    with pytest.raises(ConfigError, match=problem) as refused:
        try_class(config)
    assert str(refused.value).startswith("algorithm.name: ") and "\n" not in str(refused.value)


def test_the_example_passes_the_trial_in_a_process_of_its_own(model: Path) -> None:
    check_algorithm(config_of(model))


def test_a_normaliser_that_counts_all_components_is_an_invariant_broken(model: Path) -> None:
    """I7: the divisor is recomputed from what was dispatched, of the leading component."""
    from pa_npu.control.messages import Dispatched, DispatchedGroup

    config = config_of(model)
    algorithm, groups = build_algorithm(config), groups_of(config)
    dispatched = Dispatched(
        0,
        tuple(
            DispatchedGroup(
                index=group.index,
                replica=0,
                response_tokens=tuple(group.trained_lengths.tolist()),
                leading_tokens=tuple(group.leading_lengths.tolist()),
            )
            for group in groups
        ),
    )
    leading = sum(int(group.leading_lengths.sum()) for group in groups)
    trained = sum(group.num_trained for group in groups)
    assert (
        algorithm.normaliser(Counts(tokens=leading, responses=GROUPS * RESPONSES))
        == leading
        < trained
    )
    check_normalisers(dispatched, [float(leading)], algorithm)
    with pytest.raises(InvariantViolation, match=r"I7 gradient: .* which should add up to"):
        check_normalisers(dispatched, [float(trained)], algorithm)
