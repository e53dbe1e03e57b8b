"""Chunked log-prob and entropy against the full softmax in fp64: values, gradients, padding, and what is held in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pa_npu.backends.logprob import MostLikely, score_rows

ROWS, HIDDEN, VOCAB = 13, 16, 50


def make_inputs(
    dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = (torch.randn(ROWS, HIDDEN, generator=generator) * scale).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def full_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_softmax = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return log_softmax.gather(-1, targets[:, None]).squeeze(-1), -(
        log_softmax.exp() * log_softmax
    ).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 13, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_values_and_gradients_equal_the_full_softmax(
    chunk: int, temperature: float, entropy_grad: bool, dtype: torch.dtype, bound: float
) -> None:
    hidden, weight, targets = make_inputs(dtype)
    down, down_entropy = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1)).to(dtype)
    logprobs, entropy, *_ = score_rows(
        hidden,
        weight,
        targets,
        vocab_size=VOCAB,
        temperature=temperature,
        chunk=chunk,
        entropy_grad=entropy_grad,
    )
    reference = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected, expected_entropy = full_softmax(*reference, targets=targets, temperature=temperature)
    scale = expected.abs().max()
    assert (logprobs - expected).abs().max() < bound * scale
    assert (entropy - expected_entropy).abs().max() < bound * scale
    assert entropy.requires_grad == entropy_grad

    loss, expected_loss = (logprobs * down).sum(), (expected * down).sum()
    if entropy_grad:
        loss, expected_loss = (
            loss + (entropy * down_entropy).sum(),
            expected_loss + (expected_entropy * down_entropy).sum(),
        )
    loss.backward()
    expected_loss.backward()
    for ours, theirs in zip((hidden, weight), reference, strict=True):
        assert (ours.grad - theirs.grad).abs().max() < bound * theirs.grad.abs().max()


def grouped(log_softmax: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Log-probs of the choices, and of all others together, from the whole distribution."""
    others = log_softmax.scatter(-1, choices, float("-inf"))
    of_choices = log_softmax.gather(-1, choices)
    rest = others.logsumexp(-1, keepdim=True).clamp(min=-60.0)
    return torch.cat([of_choices, rest], dim=-1)


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("count", [1, 7, VOCAB - 1, VOCAB])
@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 4e-6)])
def test_further_tokens_and_the_rest_have_the_full_softmaxs_values_and_gradients(
    chunk: int,
    count: int,
    entropy_grad: bool,
    cap: float | None,
    dtype: torch.dtype,
    bound: float,
) -> None:
    hidden, weight, targets = make_inputs(dtype)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "temperature": 0.7,
        "chunk": chunk,
        "entropy_grad": entropy_grad,
        "cap": cap,
    }
    choices = torch.rand(ROWS, VOCAB, generator=torch.Generator().manual_seed(3)).topk(count)[1]
    scores = score_rows(hidden, weight, targets, choices=choices, **settings)
    assert scores.choices is choices and scores.choice_logprobs is not None

    reference = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = reference[0] @ reference[1].t()
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    log_softmax = (logits / 0.7).log_softmax(-1)
    expected = grouped(log_softmax, choices)
    if count < VOCAB:
        error = (scores.choice_logprobs - expected).abs().max()
        assert error < bound * expected.abs().max()
    else:
        assert (scores.choice_logprobs[:, -1] == -60.0).all(), "no token is left"

    down = torch.randn(ROWS, count + 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    if count == VOCAB:
        down[:, -1] = 0.0
    loss = (scores.choice_logprobs * down).sum() + scores.logprobs.sum()
    target_logprobs = log_softmax.gather(-1, targets[:, None]).squeeze(-1)
    expected_loss = (expected * down).sum() + target_logprobs.sum()
    if entropy_grad:
        loss = loss + scores.entropy.sum()
        expected_loss = expected_loss - (log_softmax.exp() * log_softmax).sum()
    loss.backward()
    expected_loss.backward()
    for ours, theirs in zip((hidden, weight), reference, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max() < bound * theirs.grad.abs().max()


@pytest.mark.parametrize("below", [VOCAB, 20])
def test_the_most_likely_tokens_are_the_full_softmaxs(below: int) -> None:
    hidden, weight, targets = make_inputs(torch.float64)
    most_likely = MostLikely(6, below=below)
    scores = score_rows(hidden, weight, targets, vocab_size=VOCAB, most_likely=most_likely, chunk=4)
    log_softmax = (hidden @ weight.t()).log_softmax(-1)
    assert scores.choices is not None and scores.choice_logprobs is not None
    assert torch.equal(scores.choices, log_softmax[:, :below].topk(6)[1])
    torch.testing.assert_close(scores.choice_logprobs, grouped(log_softmax, scores.choices))
    with pytest.raises(ValueError, match="most_likely: 21 tokens of 20"):
        score_rows(hidden, weight, targets, vocab_size=VOCAB, most_likely=MostLikely(21, below=20))


@pytest.mark.parametrize("gap", [8.0, 30.0, 55.0])
def test_a_rest_that_is_nearly_nothing_keeps_its_digits(gap: float) -> None:
    """1 minus the choices' probabilities would be 0, or noise, in fp32."""
    hidden = torch.eye(1).requires_grad_()
    weight = torch.tensor([[gap], [gap - 1.0], [0.0], [-1.0]]).requires_grad_()
    choices = torch.tensor([[0, 1]])
    scores = score_rows(hidden, weight, torch.tensor([0]), vocab_size=4, choices=choices)
    assert scores.choice_logprobs is not None
    reference = weight.detach().double().requires_grad_()
    expected = grouped((reference[:, 0][None]).log_softmax(-1), choices)
    torch.testing.assert_close(scores.choice_logprobs.double(), expected, rtol=1e-5, atol=1e-6)
    scores.choice_logprobs[0, -1].backward()
    expected[0, -1].backward()
    assert weight.grad is not None and reference.grad is not None
    torch.testing.assert_close(weight.grad.double(), reference.grad, rtol=1e-5, atol=1e-6)


def test_large_logits_neither_overflow_nor_lose_the_target() -> None:
    hidden, weight, targets = make_inputs(torch.float32, scale=300.0)
    logprobs, entropy, *_ = score_rows(hidden, weight, targets, vocab_size=VOCAB)
    expected, _ = full_softmax(hidden, weight, targets, 1.0)
    assert logprobs.isfinite().all() and entropy.isfinite().all()
    assert (logprobs - expected).abs().max() < 1e-6 * expected.abs().max()


def test_padding_rows_are_no_part_of_the_softmax() -> None:
    hidden, weight, targets = make_inputs(torch.float64)
    padded = torch.cat(
        [weight.detach(), torch.full((6, HIDDEN), 9.0, dtype=weight.dtype)]
    ).requires_grad_()
    expected, _, *_ = score_rows(hidden, weight, targets, vocab_size=VOCAB)
    logprobs, _, *_ = score_rows(hidden, padded, targets, vocab_size=VOCAB)
    assert torch.equal(logprobs, expected)
    logprobs.sum().backward()
    assert padded.grad is not None and not padded.grad[VOCAB:].any()
    as_tokens, _, *_ = score_rows(hidden, padded, targets, vocab_size=VOCAB + 6)
    assert (as_tokens - expected).abs().max() > 0.1, "the padding rows must matter when they count"


def test_bf16_head_gradient_is_summed_over_chunks_in_fp32() -> None:
    hidden, weight, targets = make_inputs(torch.bfloat16)
    logprobs, _, *_ = score_rows(hidden, weight, targets, vocab_size=VOCAB, chunk=1)
    logprobs.sum().backward()
    assert (
        logprobs.dtype == torch.float32
        and weight.grad is not None
        and weight.grad.dtype == torch.bfloat16
    )
    reference = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected, _ = full_softmax(*reference, targets=targets, temperature=1.0)
    expected.sum().backward()
    error = (weight.grad - reference[1].grad).norm() / reference[1].grad.norm()
    assert error < 0.01


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_logits_of_all_rows_never_exist() -> None:
    rows, vocab, chunk = 512, 64, 32
    hidden, weight = (
        torch.randn(rows, 4, requires_grad=True),
        torch.randn(vocab, 4, requires_grad=True),
    )
    with LargestTensor() as largest:
        logprobs, entropy, *_ = score_rows(
            hidden,
            weight,
            torch.zeros(rows, dtype=torch.long),
            vocab_size=vocab,
            chunk=chunk,
            entropy_grad=True,
        )
        (logprobs + entropy).sum().backward()
        scores = score_rows(
            hidden,
            weight,
            torch.zeros(rows, dtype=torch.long),
            vocab_size=vocab,
            chunk=chunk,
            choices=torch.arange(3).expand(rows, 3),
        )
        assert scores.choice_logprobs is not None
        scores.choice_logprobs.sum().backward()
    assert largest.numel <= max(chunk * vocab, hidden.numel())
    with LargestTensor() as largest:
        full_softmax(hidden, weight, torch.zeros(rows, dtype=torch.long), 1.0)
    assert largest.numel == rows * vocab, "the measure must see full logits where they exist"
