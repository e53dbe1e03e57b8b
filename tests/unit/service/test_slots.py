"""Slots over the fsdp backend: losses and gradients by the documented formulas, steps by torch's AdamW, slots beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.service.slots import MEAN, SQUARE, WEIGHTS, Slots
from pa_npu.service.wire import AdamParameters, Datum, Refused
from tests.helpers.models import make_model
from tests.helpers.service import (
    call_of,
    documented,
    make_slots,
    random_datum,
    service_config,
)

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIP,
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "gspo": CLIP,
    "dro": {"beta": 0.05},
}
VOCAB = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def full(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Slots, Any]]:
    """All weights are trained."""
    config = service_config(model, tmp_path_factory.mktemp("run"), lora={"rank": 0})
    slots, backend = make_slots(config)
    yield slots, backend
    backend.close()


def plain(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logprobs_of(policy: Any, datum: Datum) -> torch.Tensor:
    table = policy(torch.from_numpy(datum.tokens[None].astype(np.int64))).logits[0].log_softmax(-1)
    targets = torch.tensor(np.array(datum.inputs["target_tokens"]))
    return table.gather(-1, targets.reshape(len(targets), -1)).reshape(targets.shape)


def data_of(loss: str, seed: int = 0) -> list[Datum]:
    """Five datums, of which three share a beginning."""
    random = np.random.default_rng(seed)
    begin = random.integers(0, VOCAB, 40)
    sampled = loss != "cross_entropy"
    data = [random_datum(random, 60, VOCAB, begin=begin, sampled=sampled) for _ in range(3)]
    data += [random_datum(random, length, VOCAB, sampled=sampled) for length in (9, 33)]
    if loss == "gspo":
        for datum in data:
            mask = (random.random(len(datum.tokens)) < 0.6).astype(np.float32)
            mask[0] = 1
            datum.inputs["sequence_ratio_mask"] = mask  # type: ignore[index]
    return data


def gradient_by_formula(
    model: Path, data: Sequence[Datum], loss: str, config: dict[str, float]
) -> tuple[float, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns loss, log-probs and gradients of transformers' model with the documented formula."""
    policy = plain(model)
    values = [logprobs_of(policy, datum) for datum in data]
    total = sum(
        documented(loss, datum, value, config) for datum, value in zip(data, values, strict=True)
    )
    total.backward()
    gradients = {name: weight.grad for name, weight in policy.named_parameters()}
    return float(total.detach()), [value.detach() for value in values], gradients


def accumulated(slots: Slots, name: str) -> dict[str, torch.Tensor]:
    return slots._slots[name].parts["gradient"]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_the_documented_sums(
    loss: str, full: tuple[Slots, Any], model: Path
) -> None:
    slots, _ = full
    data, config = data_of(loss), LOSSES[loss]
    slots.create("m", 0)
    outputs = slots.forward_backward("m", call_of(data, loss, config))
    expected, values, gradients = gradient_by_formula(model, data, loss, config)
    assert outputs.loss == pytest.approx(expected, rel=1e-5, abs=1e-4)
    for ours, theirs in zip(outputs.logprobs, values, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=2e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in accumulated(slots, "m").items():
        difference = (gradient - gradients[name].flatten()).abs().max()
        assert float(difference) < 2e-5 * largest, name
    assert slots.forward("m", call_of(data, loss, config)).loss == pytest.approx(outputs.loss)


def test_a_mean_in_place_of_the_sum_would_show(full: tuple[Slots, Any], model: Path) -> None:
    """Negative control: other servers divide; the formula's test must see that."""
    slots, _ = full
    data = data_of("ppo")
    slots.create("m", 0)
    slots.forward_backward("m", call_of(data, "ppo", CLIP))
    tokens = sum(len(datum.tokens) for datum in data)
    _, _, gradients = gradient_by_formula(model, data, "ppo", CLIP)
    name, own = max(accumulated(slots, "m").items(), key=lambda item: float(item[1].abs().max()))
    divided = (own / tokens - gradients[name].flatten()).abs().max()
    assert float(divided) > 0.1 * float(gradients[name].abs().max())


def test_two_calls_add_up_and_the_step_is_adamws(full: tuple[Slots, Any], model: Path) -> None:
    """Rate, betas, eps, decay and clip are each step's own."""
    slots, backend = full
    slots.create("m", 0)
    policy = plain(model)
    steps = [
        AdamParameters(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0),
        AdamParameters(3e-3, 0.8, 0.99, 1e-6, 0.1, 0.5),
    ]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1.0)
    for number, adam in enumerate(steps):
        for call in range(2):
            data = data_of("cross_entropy", seed=10 * number + call)
            slots.forward_backward("m", call_of(data, "cross_entropy"))
            for datum in data:
                documented("cross_entropy", datum, logprobs_of(policy, datum), {}).backward()
        metrics = slots.step("m", adam)
        if adam.grad_clip_norm:
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), adam.grad_clip_norm)
            assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for group in optimizer.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(policy.named_parameters())
    for tensor in backend.stepped():
        expected = weights[tensor.name].detach().flatten()
        # a first step of Adam has the sign of the gradient, whatever its size
        close = (tensor.weights - expected).abs() < 5e-5
        assert float(close.float().mean()) > 0.999, tensor.name


def test_a_step_without_a_gradient_and_one_that_is_not_finite_change_nothing(
    full: tuple[Slots, Any],
) -> None:
    slots, _ = full
    slots.create("m", 0)
    before = slots.digest("m")
    with pytest.raises(Refused, match="nothing was accumulated"):
        slots.step("m", AdamParameters())
    data = data_of("importance_sampling")
    data[0].inputs["logprobs"][3] = -200.0  # type: ignore[index]
    with pytest.raises(Refused, match="not finite"):
        slots.forward_backward("m", call_of(data, "importance_sampling"))
    assert slots.digest("m") == before and "gradient" not in slots._slots["m"].parts


def test_several_targets_at_a_place(full: tuple[Slots, Any], model: Path) -> None:
    """Cross-entropy with a distribution as target, [N, K], as distillation sends it."""
    slots, _ = full
    random = np.random.default_rng(3)
    tokens = random.integers(0, VOCAB, 12).astype(np.int32)
    targets = random.integers(0, VOCAB, (12, 5))
    weights = random.random((12, 5)).astype(np.float32)
    datum = Datum(tokens, {"target_tokens": targets, "weights": weights})
    slots.create("m", 0)
    outputs = slots.forward_backward("m", call_of([datum], "cross_entropy"))
    expected, (values,), _ = gradient_by_formula(model, [datum], "cross_entropy", {})
    assert outputs.logprobs[0].shape == (12, 5)
    np.testing.assert_allclose(outputs.logprobs[0], values.numpy(), atol=2e-5)
    assert outputs.loss == pytest.approx(expected, rel=1e-5)


def test_a_custom_loss_is_its_gradient_as_weights(full: tuple[Slots, Any], model: Path) -> None:
    """What the SDK does of forward_backward_custom: forward, its own loss, weighted cross-entropy."""
    slots, _ = full
    data = data_of("cross_entropy")
    policy = plain(model)
    total = sum((logprobs_of(policy, datum).mean() ** 2) for datum in data)
    total.backward()
    slots.create("m", 0)
    found = slots.forward("m", call_of(data, "cross_entropy")).logprobs
    weighted = []
    for datum, values in zip(data, found, strict=True):
        logprobs = torch.tensor(values, requires_grad=True)
        (logprobs.mean() ** 2).backward()
        assert logprobs.grad is not None
        inputs = {**datum.inputs, "weights": -logprobs.grad.numpy()}
        weighted.append(Datum(datum.tokens, inputs))
    slots.forward_backward("m", call_of(weighted, "cross_entropy"))
    gradients = {name: weight.grad for name, weight in policy.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in accumulated(slots, "m").items():
        difference = (gradient - gradients[name].flatten()).abs().max()
        assert float(difference) < 5e-5 * largest, name


def train(slots: Slots, name: str, seed: int) -> list[Any]:
    """Two steps; returns every answer."""
    answers: list[Any] = []
    for step in range(2):
        data = data_of("cross_entropy", seed=seed + step)
        outputs = slots.forward_backward(name, call_of(data, "cross_entropy"))
        answers += [outputs.loss, *(values.tobytes() for values in outputs.logprobs)]
        answers.append(slots.step(name, AdamParameters(learning_rate=1e-2)))
    answers.append(slots.digest(name))
    return answers


def test_a_client_gets_the_same_bits_alone_and_beside_others(
    model: Path, full: tuple[Slots, Any], tmp_path: Path
) -> None:
    slots, _ = full
    slots.create("alone", 1)
    alone = train(slots, "alone", 5)
    slots.create("a", 1)
    slots.create("b", 2)
    answers: dict[str, list[Any]] = {"a": [], "b": []}
    for step in range(2):  # their calls in turn
        calls = {}
        for name, seed in (("a", 5), ("b", 77)):
            data = data_of("cross_entropy", seed=seed + step)
            calls[name] = slots.forward_backward(name, call_of(data, "cross_entropy"))
        for name, outputs in calls.items():
            answers[name] += [outputs.loss, *(values.tobytes() for values in outputs.logprobs)]
            answers[name].append(slots.step(name, AdamParameters(learning_rate=1e-2)))
    assert [*answers["a"], slots.digest("a")] == alone
    assert slots.digest("b") != slots.digest("a")


def test_a_saved_slot_goes_on_to_the_bit(full: tuple[Slots, Any], tmp_path: Path) -> None:
    """With a gradient that was accumulated before, and without the optimizer from zero moments."""
    slots, _ = full
    slots.create("a", 1)
    train(slots, "a", 3)
    data = data_of("cross_entropy", seed=9)
    slots.forward_backward("a", call_of(data, "cross_entropy"))
    file = tmp_path / "state.safetensors"
    slots.save("a", file, ["weights", "mean", "square", "gradient"])
    slots.create("b", 2)
    slots.load("b", file, with_optimizer=True)
    for name in ("a", "b"):
        slots.step(name, AdamParameters(learning_rate=1e-2))
    assert slots.digest("a") == slots.digest("b")
    slots.load("b", file, with_optimizer=False)
    parts = slots._slots["b"].parts
    assert not any(parts[MEAN][name].any() or parts[SQUARE][name].any() for name in parts[WEIGHTS])
    assert slots._slots["b"].updates == 0


def test_a_damaged_state_and_one_of_another_base_are_refused(
    full: tuple[Slots, Any], tmp_path: Path
) -> None:
    slots, _ = full
    slots.create("a", 1)
    file = tmp_path / "state.safetensors"
    slots.save("a", file, ["weights"])
    with pytest.raises(Refused, match="no optimizer state"):
        slots.load("a", file, with_optimizer=True)
    slots.base = "another"
    with pytest.raises(Refused, match="another base"):
        slots.load("a", file, with_optimizer=False)
    slots.base = "base of the test"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(Refused, match="cannot be read"):
        slots.load("a", file, with_optimizer=False)
