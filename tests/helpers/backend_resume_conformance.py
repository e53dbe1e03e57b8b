"""Conformance of training backends to what invariants promise after a checkpoint was loaded: every fault is found, on one rank.

A suite of its own, which backend_conformance.py inherits. A rank trains an iteration and saves;
another one loads that, with a fault in the load or from then on, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.checkpoints.directories import directory_name
from pa_npu.config.schema import Config
from pa_npu.errors import DataError, InvariantViolation
from pa_npu.trainer.learner import Learner
from tests.helpers import step_faults
from tests.helpers.backend_fault_conformance import restored_after
from tests.helpers.backend_updates import DTYPES, Make, config_of, save, shares, train_share

_STATE = "the optimizer's state of rank 0 is not the one that was saved"


def _scale(factor: float, *names: str) -> Callable[[Learner], None]:
    def change(learner: Learner) -> None:
        for tensor in learner.backend.stepped():
            for name in names:
                getattr(tensor, name).mul_(factor)

    return change


def _exchange_moments(learner: Learner) -> None:
    for tensor in learner.backend.stepped():
        assert tensor.mean is not None and tensor.square is not None
        mean = tensor.mean.clone()
        tensor.mean.copy_(tensor.square)
        tensor.square.copy_(mean.abs())


def _exchange_tensors(learner: Learner) -> None:
    """Of two tensors of one size: what a load by position, and not by name, may do."""
    by_size: dict[int, Any] = {}
    for tensor in learner.backend.stepped():
        peer = by_size.setdefault(tensor.weights.numel(), tensor)
        if peer is not tensor and not torch.equal(peer.mean, tensor.mean):
            mean = peer.mean.clone()
            peer.mean.copy_(tensor.mean)
            tensor.mean.copy_(mean)
            return
    raise AssertionError("no two tensors of one size")


def _round_weights(learner: Learner) -> None:
    for tensor in learner.backend.stepped():
        tensor.weights.copy_(tensor.weights.bfloat16().float())


def _keep_old_copies(learner: Learner) -> None:
    for tensor in learner.backend.stepped():
        assert tensor.model is not None
        tensor.model.mul_(1.5)


def _reference_is_policy(learner: Learner) -> None:
    backend = learner.backend
    backend.copy_policy("reference")
    backend.name_policy(learner._reference_state(), "reference")  # type: ignore[arg-type]


def _begin_schedule(learner: Learner) -> None:
    backend: Any = learner.backend
    optimizer = getattr(backend, "_optimizer", None)
    for owner, name in ((backend, "_updates"), (optimizer, "updates"), (backend, "updates")):
        if isinstance(getattr(owner, name, None), int):
            setattr(owner, name, 0)


def _begin_bias_correction(learner: Learner) -> None:
    for optimizer in step_faults.torch_optimizers(learner.backend):
        for group in optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] = 0 * state["step"]


def _old_policy_stays(learner: Learner) -> None:
    """The copy of the policy that ratios are taken against is that of before the load, version 0."""
    backend: Any = learner.backend
    copy_policy = backend.copy_policy

    def copied(name: str) -> None:
        if name != "old":
            copy_policy(name)
        else:
            backend.name_policy(learner._policy, "old")

    backend.copy_policy = copied


BETWEEN = "updates counted from the checkpoint before"
IN_LOAD: dict[str, tuple[Callable[[Learner], None], str]] = {
    "both moments zeroed": (_scale(0.0, "mean", "square"), _STATE),
    "the mean moment zeroed": (_scale(0.0, "mean"), _STATE),
    "the square moment zeroed": (_scale(0.0, "square"), _STATE),
    "moments exchanged": (_exchange_moments, _STATE),
    "moments of two tensors exchanged": (_exchange_tensors, _STATE),
    "weights changed by a thousandth": (_scale(1.001, "weights"), _STATE),
    "weights rounded to the model's type": (_round_weights, _STATE),
    BETWEEN: (lambda learner: None, _STATE),
    "the policy loaded as the reference": (
        _reference_is_policy,
        "the reference of rank 0 has other weights than the one that was saved",
    ),
    "the model's copies not written by the load": (
        _keep_old_copies,
        "I7 step: .*the model computes with .* in an element of",
    ),
    "the schedule begun anew": (_begin_schedule, r"I7 step: .*has the learning rate|the step made"),
    "the bias correction begun anew": (_begin_bias_correction, "I7 step: .*the step made"),
    "the decay of norms as of another group": (
        lambda learner: step_faults.decay_norms(learner.backend),
        "I7 step: .*the weight decay of",
    ),
    "the old policy of before the load": (
        _old_policy_stays,
        "I7 gradient: .*the old policy's log-probs differ from the policy's",
    ),
}
"""Faults of a load: what they change once the backend has loaded, and what is said of it."""
FROM_THEN_ON = (
    "the step skipped",
    "gradients not zeroed",
    "one tensor's gradient zero",
    "moments zeroed between updates",
    "the policy copied into the reference",
    "advantages negated inside the loss",
)
"""Faults of step_faults.py, put into the rank that has loaded."""
FEW = [
    ("both moments zeroed", "fp32"),
    ("moments of two tensors exchanged", "bf16"),
    ("the policy loaded as the reference", "fp32"),
    ("the model's copies not written by the load", "bf16"),
    ("the schedule begun anew", "fp32"),
    ("gradients not zeroed", "bf16"),
]
OF_COPIES = "the model's copies not written by the load"
OF_NORMS = "the decay of norms as of another group"
CASES = [
    pytest.param(fault, dtype, marks=[] if (fault, dtype) in FEW else [pytest.mark.nightly])
    for fault in (*IN_LOAD, *FROM_THEN_ON)
    for dtype in ("fp32", "bf16")
    if fault != OF_COPIES or dtype == "bf16"
]


class BackendResumeConformance:
    """See BackendConformance: fixtures `make` and `model`."""

    name: str
    has_no: frozenset[str] = frozenset()

    def saved(self, make: Make, model: Path, dtype: str, directory: Path) -> tuple[Config, Path]:
        """Trains an iteration and saves it; returns its configuration and the checkpoint."""
        keys = {**step_faults.KEYS, "trainer": {"backend": self.name}}
        config = config_of(model, model={"dtype": dtype}, **keys)
        learner = make(config)
        learner.publish(0)
        for share in shares():
            train_share(learner, share)
        save(learner, directory, 1)
        return config, directory / "checkpoints" / directory_name(1)

    @pytest.mark.parametrize(("fault", "dtype"), CASES)
    def test_a_fault_of_a_load_or_after_it_ends_the_run(
        self,
        fault: str,
        dtype: str,
        make: Make,
        model: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        of_backend = {OF_COPIES: step_faults.COPIES, OF_NORMS: "norms decayed"}.get(fault, fault)
        if of_backend in self.has_no:
            pytest.skip("it cannot have that")
        config, checkpoint = self.saved(make, model, dtype, tmp_path)
        restored_after(monkeypatch)
        resumed = make(config)
        resumed.publish(0)
        if fault in IN_LOAD:
            change, message = IN_LOAD[fault]
            monkeypatch.setattr(resumed.backend, "load", partial(_load, fault, resumed, change))
        else:
            message = f"I7 .*({step_faults.ALL[fault]})"
        with pytest.raises((DataError, InvariantViolation), match=message):
            resumed.load(checkpoint)
            if fault in FROM_THEN_ON:
                step_faults.inject(fault, resumed)
            resumed.publish(1)
            for share in shares():
                train_share(resumed, share)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_without_a_fault_a_resumed_rank_makes_the_updates_of_the_one_that_went_on(
        self, dtype: str, make: Make, model: Path, tmp_path: Path
    ) -> None:
        config, checkpoint = self.saved(make, model, dtype, tmp_path)
        digests = []
        for number in range(2):
            resumed = make(config)
            assert resumed.load(checkpoint) == 1
            resumed.publish(1)
            for share in shares():
                train_share(resumed, share)
            if not number:
                save(resumed, tmp_path / "again", 2)
            digests.append(resumed.backend.digest())
        assert digests[0] == digests[1]
        last = make(config)
        assert last.load(tmp_path / "again" / "checkpoints" / directory_name(2)) == 2
        assert last.backend.digest() == digests[0]


def _load(fault: str, resumed: Learner, change: Callable[[Learner], None], directory: Path) -> Any:
    meta = type(resumed.backend).load(resumed.backend, directory)
    with torch.no_grad():
        change(resumed)
    if fault == BETWEEN:
        object.__setattr__(meta, "updates", meta.updates - 1)
    return meta
