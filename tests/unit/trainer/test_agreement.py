"""I5 with a real model: each fault that a run must not survive ends it, and the yardstick follows tokens and weights alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.errors import InvariantViolation
from pa_npu.samples.microbatch import build_microbatches
from tests.helpers.agreement_run import DTYPES, RESPONSES, TOKENS, Engine, Run, trained
from tests.helpers.groups import with_trained

FAULTS = ["skipped publish", "scaled weights", "temperature"]
SCALE, TEMPERATURE = 1.01, 1.3


def engine_with(fault: str | None, published: Path, before: Engine, dtype: str) -> Engine:
    """Returns the engine after a publish, with the published weights or a fault. before: the engine
    until then.
    """
    if fault == "skipped publish":
        return before
    return Engine(
        published,
        dtype,
        scale=SCALE if fault == "scaled weights" else 1.0,
        temperature=TEMPERATURE if fault == "temperature" else 1.0,
    )


# in CI fp32 has the faults at the smallest learning rate, below
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        pytest.param(fault, dtype, marks=[pytest.mark.nightly] if fault and dtype == "fp32" else [])
        for fault in (None, *FAULTS)
        for dtype in DTYPES
    ],
)
def test_each_fault_ends_the_run_in_either_type_and_none_does_not(
    fault: str | None, dtype: str, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path, dtype)
    engine = Engine(model, dtype)
    run.learner.publish(0)
    run.probe(0, engine)
    run.iteration(0, engine)
    after = engine_with(fault, run.exported("hf"), engine, dtype)
    run.learner.publish(1)
    if fault is None:
        run.probe(1, after)
        run.iteration(1, after)
        return
    with pytest.raises(InvariantViolation, match=r"I5 agreement: in .* engines hold other weights"):
        run.iteration(1, after)


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
@pytest.mark.parametrize("fault", ["scaled weights", "temperature", "lower temperature"])
def test_a_fault_that_is_there_from_the_beginning_is_not_taken_for_noise(
    fault: str, dtype: str, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path, dtype)
    wrong = Engine(model, dtype, temperature=0.8) if fault == "lower temperature" else None
    engine = wrong or engine_with(fault, model, Engine(model, dtype), dtype)
    run.learner.publish(0)
    with pytest.raises(
        InvariantViolation, match=r"I5 agreement: in (training iteration|the probe after .*) 0 "
    ):
        run.iteration(0, engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_that_draws_likely_tokens_too_often_ends_the_run(
    dtype: str, model: Path, tmp_path: Path
) -> None:
    """Its log-probs are right, and agree."""
    run = Run(model, tmp_path, dtype)
    run.learner.publish(0)
    message = r"I5 agreement: in .* the engines drew more likely tokens than their log-probs say"
    weights = model
    with pytest.raises(InvariantViolation, match=message):
        for number in range(6):
            run.iteration(number, Engine(weights, dtype, exponent=6.0), version=number)
            weights = run.exported(f"hf{number}")
            run.learner.publish(number + 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_in_fp32_a_fault_shows_at_any_learning_rate(
    fault: str, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path, optimizer={"learning_rate": 1e-6})
    engine = Engine(model, "fp32")
    run.learner.publish(0)
    run.iteration(0, engine)
    after = engine_with(fault, run.exported("hf"), engine, "fp32")
    run.learner.publish(1)
    with pytest.raises(InvariantViolation, match="I5 agreement"):
        run.iteration(1, after)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_group_shows_a_wrong_temperature_before_anything_is_learned_from_it(
    dtype: str, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path, dtype)
    run.learner.publish(0)
    before = [parameter.detach().clone() for parameter in run.stage.policy.parameters()]
    with pytest.raises(
        InvariantViolation, match="I5 agreement: in the probe after publishing version 0"
    ):
        run.iteration(0, Engine(model, dtype, temperature=TEMPERATURE))
    assert all(map(torch.equal, before, run.stage.policy.parameters()))
    gradients = [parameter.main_grad for parameter in run.stage.policy.parameters()]
    assert not any(gradient.any() for gradient in gradients), "it is judged before its backward"


# --- the yardstick


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_engine_moves_the_yardstick(dtype: str, model: Path, tmp_path: Path) -> None:
    """It follows from tokens and weights: other log-probs of the same tokens give the same numbers,
    and change nothing.
    """
    run = Run(model, tmp_path, dtype)
    group = Engine(model, dtype).group(0, 0, 0)
    before = [parameter.detach().clone() for parameter in run.stage.policy.parameters()]
    found = [
        run.learner.rounding(build_microbatches(one, RESPONSES, True, 1))
        for one in (group, trained(lambda logprobs: logprobs * 1.5)([group])[0])
    ]
    assert found[0] is not None and found[0] == found[1] and found[0].responses == RESPONSES
    assert RESPONSES / 2 < found[0].independent < RESPONSES, "few of their tokens are the same"
    assert 0.1 < found[0].absolute_mean / {"fp32": 2e-7, "bf16": 8e-3}[dtype] < 3
    assert all(map(torch.equal, before, run.stage.policy.parameters()))
    update = run.iteration(0, Engine(model, dtype))
    assert update.report.grad_norm > 0, "gradient hooks are still on the parameters"


def test_in_bf16_the_yardstick_is_the_distance_to_the_same_weights_in_fp32(
    model: Path, tmp_path: Path
) -> None:
    """Against a whole second model in fp32 with the bf16 weights."""
    run = Run(model, tmp_path / "narrow", "bf16")
    group = Engine(model, "bf16").group(0, 0, 0)
    wide = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float()
    with torch.no_grad():
        sequences = torch.from_numpy(np.stack(group.sequences()).astype(np.int64))
        table = wide(sequences).logits[:, :-1].log_softmax(-1)
    exact = table.gather(-1, sequences[:, 1:, None])[:, -TOKENS:, 0].reshape(-1).numpy()
    (microbatch,) = build_microbatches(with_trained(group, logprobs=exact), RESPONSES, True, 1)
    found = run.learner.rounding([microbatch])
    assert found is not None
    assert found.absolute == pytest.approx(run.learner.probe([microbatch]).absolute, rel=2e-3)
