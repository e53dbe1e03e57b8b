"""Conformance of training backends to what invariants promise: every fault is found, on one rank.

A suite of its own, which backend_conformance.py inherits; test_gradient_sum.py has more ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.algorithm.policy_gradient import PolicyGradient
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.errors import InvariantViolation
from tests.helpers import step_faults
from tests.helpers.backend import Source
from tests.helpers.backend_updates import (
    DTYPES,
    Make,
    config_of,
    microbatches,
    shares,
    train_share,
)
from tests.helpers.gradient_faults import FAULTS, faults_of, inject, negated
from tests.helpers.groups import trained_advantages

FEW_STEPS = [
    ("the step skipped", "bf16"),
    ("norms decayed, by their group", "fp32"),
    ("clipped twice", "fp32"),
    ("moments zeroed between updates", "fp32"),
    ("one tensor's gradient zero", "bf16"),
    ("gradients not zeroed", "fp32"),
    ("the gradient behind the log-probs doubled", "bf16"),
    ("advantages moved within a response", "fp32"),
    ("a denominator that is off, rightly named", "bf16"),
    ("the policy's values under the reference's name", "fp32"),
]


STEP_CASES = [
    pytest.param(fault, dtype, marks=[] if (fault, dtype) in FEW_STEPS else [pytest.mark.nightly])
    for fault in [*step_faults.FAULTS, step_faults.COPIES]
    for dtype in ("fp32", "bf16")
    if fault != step_faults.COPIES or dtype == "bf16"
]


FINITE_DIFFERENCE_FAULTS = [
    "the gradient doubled",
    "the gradient turned round",
    "the gradient behind the log-probs doubled",
    "advantages negated inside the loss",
]


class BackendFaultConformance:
    """See BackendConformance: fixtures `make` and `model`."""

    name: str
    """The backend's name in the registry."""
    has_no: frozenset[str] = frozenset()
    """Faults that it cannot have."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("fault", [name for name in faults_of(2, 1) if "buffer" not in name])
    def test_a_gradient_that_is_another_sum_is_an_invariant_broken(
        self, fault: str, dtype: str, make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pa_npu.algorithm import objective as objectives
        from pa_npu.control.messages import Dispatched, DispatchedGroup
        from pa_npu.samples import iterator
        from pa_npu.trainer.invariants import check_normalisers

        for place, name in (
            *(
                (objectives.Objective, attribute)
                for attribute in ("normaliser", "_denominator", "loss")
            ),
            (iterator, "pack"),
            (torch.autograd, "backward"),
        ):
            # put back what the fault changes
            monkeypatch.setattr(place, name, getattr(place, name))
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
                source.advantages = {g.index: trained_advantages(g) for g in share}
                learner.accumulate(source)
                normalisers.append(learner.step().normaliser)
            groups = [
                DispatchedGroup(g.index, 0, tuple(g.trained_lengths.tolist()))
                for s in shares()
                for g in s
            ]
            check_normalisers(Dispatched(0, tuple(groups)), normalisers, build_algorithm(config))

    @pytest.mark.parametrize(("fault", "dtype"), STEP_CASES)
    def test_a_step_or_a_loss_that_is_another_one_is_an_invariant_broken(
        self, fault: str, dtype: str, make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if fault in self.has_no:
            pytest.skip("it cannot have that")
        config = config_of(model, model={"dtype": dtype}, **step_faults.KEYS)
        learner = make(config)
        restored_after(monkeypatch)  # once the backend's modules are there
        step_faults.inject(fault, learner)
        learner.publish(0)
        with pytest.raises(InvariantViolation, match=f"I7 .*({step_faults.ALL[fault]})"):
            for share in shares():
                train_share(learner, share)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_without_a_fault_the_same_updates_pass(
        self, dtype: str, make: Make, model: Path
    ) -> None:
        learner = make(config_of(model, model={"dtype": dtype}, **step_faults.KEYS))
        for iteration in range(3):
            learner.publish(iteration)
            for share in shares():
                assert train_share(learner, share).report.grad_norm > 0

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_weights_that_move_along_the_gradient_change_log_probs_as_it_says(
        self, dtype: str, make: Make, model: Path
    ) -> None:
        """Other tensors every time; not a bit of what is trained afterwards is another one."""
        config = config_of(model, model={"dtype": dtype}, **step_faults.KEYS)
        learner, untouched = make(config), make(config)
        for one in (learner, untouched):
            one.publish(0)
        for number, share in enumerate([*shares(), *shares()]):
            before = learner.backend.digest()
            actual = learner.finite_difference(microbatches(share)[:2], {})
            assert actual is not None and actual.limit is not None and actual.tensors > 0, actual
            assert (
                abs(actual.measured - actual.predicted)
                <= actual.limit
                < 0.5 * abs(actual.predicted)
            )
            assert learner.backend.digest() == before
            if number < 2:
                for one in (learner, untouched):
                    train_share(one, share)
                assert learner.backend.digest() == untouched.backend.digest()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("fault", FINITE_DIFFERENCE_FAULTS)
    def test_a_finite_difference_shows_a_gradient_of_something_else(
        self, fault: str, dtype: str, make: Make, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        learner = make(config_of(model, model={"dtype": dtype}, **step_faults.KEYS))
        restored_after(monkeypatch)
        factor = {"the gradient doubled": 2.0, "the gradient turned round": -1.0}.get(fault)
        if factor is None:
            step_faults.inject(fault, learner)
        else:
            accumulate, scale = learner.backend.accumulate, learner.backend.scale_gradients

            def scaled(*arguments: Any) -> Any:
                reduced = accumulate(*arguments)
                scale(factor)
                return reduced

            monkeypatch.setattr(learner.backend, "accumulate", scaled)
        learner.publish(0)
        with pytest.raises(
            InvariantViolation,
            match=r"I7 gradient: .* moved along the gradient .* the gradient says",
        ):
            learner.finite_difference(microbatches(shares()[0])[:2], {})


def restored_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of modules go with the test."""
    from pa_npu.algorithm import objective as objectives

    places: list[tuple[Any, str]] = [(PolicyGradient, "loss_sums")]
    places += [(objectives.Objective, name) for name in ("_denominator", "loss")]
    for module in ("pa_npu.backends.megatron.optimizer", "pa_npu.backends.fsdp.optimizer"):
        places += [(sys.modules[module], "learning_rate")] if module in sys.modules else []
    if (toy := sys.modules.get("tests.helpers.toy_backend.backend")) is not None:
        places.append((toy, "learning_rate"))
    for place, name in places:
        monkeypatch.setattr(place, name, getattr(place, name))
