"""Conformance of training backends: every TrainBackend passes these on one rank; test_gradient_sum.py has more.

`make(config)` gives a Learner over a fresh backend with the weights of config.model.path, inside the one process group that the
backend is content with. Numbers are compared with the same update by hand on the HF model: plain autograd and torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pa_npu.algorithm.objective import Objective, PolicyState
from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.trainer.learner import Learner
from tests.helpers.adapters import plain
from tests.helpers.backend import Source
from tests.helpers.gradient_faults import FAULTS, faults_of, inject, negated
from tests.helpers.megatron import model_config
from tests.helpers.trainer_rank import make_groups

Make = Callable[[Config], Learner]
GROUPS, RESPONSES, LEARNING_RATE = 4, 4, 3e-3


def config_of(model: Path, /, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        "schedule": {"prompts_per_iteration": GROUPS, "updates_per_iteration": 2},
        "algorithm": {"kl_coef": 0.1},
        "optimizer": {"learning_rate": LEARNING_RATE, "clip_grad": 0.0, "epsilon": 1e-3},
        "publish": {"noise_margin": None},
    }
    return model_config(
        model, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    )


def shares() -> list[list[Group]]:
    groups = make_groups(0, GROUPS, RESPONSES, seed=5)
    return [groups[: GROUPS // 2], groups[GROUPS // 2 :]]


def microbatches(groups: list[Group]) -> list[Microbatch]:
    return [one for group in groups for one in build_microbatches(group, RESPONSES // 2, True, 1)]


def by_hand(policy: Any) -> list[dict[str, torch.Tensor]]:
    """An HF model's weights after each of the two updates: the clip to the first weights, 0.1 K3 to the same."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)

    def logprobs(group: Group) -> list[torch.Tensor]:
        found = []
        for tokens, trained in zip(group.sequences(), np.split(group.trained, group.offsets()[1:-1]), strict=True):
            ids = torch.from_numpy(tokens.astype(np.int64))
            table = policy(ids[None]).logits[0, :-1].log_softmax(-1)
            found.append(table.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(trained[1:])])
        return found

    after = []
    with torch.no_grad():
        first = {group.index: logprobs(group) for share in shares() for group in share}
    for share in shares():
        terms = []
        for group in share:
            advantages = np.split(group.advantages[group.trained], np.cumsum(group.trained_lengths)[:-1])
            for new, old, advantage in zip(logprobs(group), first[group.index], advantages, strict=True):
                value, ratio = torch.from_numpy(advantage), (new - old).exp()
                kl = (old - new).exp() - 1 - (old - new)
                terms.append(0.1 * kl - torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value))
        optimizer.zero_grad()
        torch.cat(terms).mean().backward()
        optimizer.step()
        after.append({name: tensor.clone() for name, tensor in policy.state_dict().items()})
    return after


class BackendConformance:
    """Subclass it as a test class with a fixture `make`, and a fixture `model`, an HF directory."""

    def train(self, learner: Learner) -> None:
        learner.publish(0)
        for share in shares():
            learner.accumulate(Source(microbatches(share)))
            learner.step()

    def by_hand(self, model: Path) -> list[dict[str, torch.Tensor]]:
        """See by_hand; whole HF models."""
        return by_hand(plain(model))

    def exported(self, learner: Learner, directory: Path) -> dict[str, torch.Tensor]:
        learner.backend.export(directory)
        return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}

    def test_two_updates_are_those_by_hand(self, make: Make, model: Path, tmp_path: Path) -> None:
        """Forward over packed prefixes, backward, division, the step, the old policy and the reference, and the export."""
        learner = make(config_of(model))
        self.train(learner)
        weights, expected = self.exported(learner, tmp_path / "hf"), self.by_hand(model)
        assert weights.keys() <= expected[1].keys() and len(weights) > 10
        for name, tensor in weights.items():
            torch.testing.assert_close(
                tensor.float(), expected[1][name], rtol=1e-3, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
            )
        assert max((expected[1][name] - expected[0][name]).abs().max().item() for name in weights) > 1e-3

    def test_gradients_are_undivided_sums_from_zero_and_scale(self, make: Make, model: Path) -> None:
        config = config_of(model)
        learner = make(config)
        learner.publish(0)
        backend, sizes = learner.backend, []
        for _ in range(2):  # the second begins with zero again
            backend.accumulate(Source(microbatches(shares()[0])), Objective(config, backend.device))
            sizes.append(float(backend.gradient_size()))
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-5) and sizes[0] > 0
        backend.scale_gradients(0.25)
        assert float(backend.gradient_size()) == pytest.approx(sizes[0] / 4, rel=1e-5)
        step = backend.step()
        assert np.isfinite(step.grad_norm) and step.learning_rate == pytest.approx(LEARNING_RATE)

    def test_copies_take_the_policys_weights_and_their_name_along(self, make: Make, model: Path) -> None:
        learner = make(config_of(model))
        self.train(learner)
        backend, seen = learner.backend, []
        assert backend.digest("old") != backend.digest(), "a copy stays"
        backend.name_policy(PolicyState(7))
        backend.copy_policy("old")
        assert backend.digest("old") == backend.digest()
        backend.evaluate(microbatches(shares()[0])[:1], lambda _, outputs: seen.append(outputs))
        assert seen[0].policy.weights == seen[0].frozen["old"].weights == PolicyState(7)
        assert torch.equal(seen[0].policy.values, seen[0].frozen["old"].values)
        assert not torch.equal(seen[0].policy.values, seen[0].frozen["reference"].values)

    def test_evaluating_changes_nothing(self, make: Make, model: Path) -> None:
        learner = make(config_of(model))
        before = learner.backend.digest()
        first, again = (learner.probe(microbatches(shares()[0])) for _ in range(2))
        assert first == again and first.differences.n > 0 and learner.backend.digest() == before

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("fault", [name for name in faults_of(2, 1) if "buffer" not in name])
    def test_a_gradient_that_is_another_sum_is_an_invariant_broken(
        self, fault: str, dtype: str, make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pa_npu.algorithm import objective as objectives
        from pa_npu.control.messages import Dispatched, DispatchedGroup
        from pa_npu.samples import iterator
        from pa_npu.trainer.gradient_sum import check_normalisers

        for place, name in (
            *((objectives, "normaliser"), (objectives.Objective, "_denominator"), (objectives.Objective, "loss")),
            *((iterator, "pack"), (torch.autograd, "backward")),
        ):
            monkeypatch.setattr(place, name, getattr(place, name))  # put back what the fault changes
        algorithm = {"clip_low": 0.3, "clip_high": 0.3}
        config = config_of(model, model={"dtype": dtype}, algorithm=algorithm)
        learner = make(config)
        inject(fault, learner)
        learner.publish(0)
        normalisers = []
        with pytest.raises(InvariantViolation, match=f"I7 gradient: .*{FAULTS[fault]}"):
            for share in shares():
                source = Source(microbatches(share))
                if "advantages" in fault:
                    source = Source([negated(one) for one in microbatches(share)])
                source.advantages = {g.index: g.advantages[g.offsets()[1:] - 1].tolist() for g in share}
                learner.accumulate(source)
                normalisers.append(learner.step().normaliser)
            groups = [DispatchedGroup(g.index, 0, tuple(g.trained_lengths.tolist())) for s in shares() for g in s]
            check_normalisers(Dispatched(0, tuple(groups)), normalisers, config)
