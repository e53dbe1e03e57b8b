"""A whole decoder on a packed group equals the same decoder on separate sequences: log-probs and all gradients."""

from __future__ import annotations

import pytest
import torch

from pa_npu.attention import PrefixLayout, shared_prompt_attention

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 61, 32, 4, 2, 8
GROUPS = [(13, [5, 1, 9]), (4, [6, 2])]


def make_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN)}
    for layer in range(2):
        shapes |= {
            f"{layer}.qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            f"{layer}.proj": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.up": (64, HIDDEN),
            f"{layer}.down": (HIDDEN, 64),
        }
    return {
        name: (
            torch.randn(shape, generator=generator, dtype=torch.float64) * HIDDEN**-0.5
        ).requires_grad_()
        for name, shape in shapes.items()
    }


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    frequencies = 100.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = (positions[:, None] * frequencies)[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        -1,
    )


def decode(weights, tokens, positions, attend):
    """Logits [tokens, vocabulary] of a two-layer decoder; attend(q, k, v) on [tokens, heads,
    head_dim].
    """
    x = weights["embedding"][tokens]
    for layer in range(2):
        qkv = (torch.nn.functional.rms_norm(x, (HIDDEN,)) @ weights[f"{layer}.qkv"].T).unflatten(
            -1, (-1, HEAD_DIM)
        )
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        x = (
            x
            + attend(rotate(q, positions), rotate(k, positions), v).flatten(1)
            @ weights[f"{layer}.proj"].T
        )
        x = x + torch.nn.functional.silu(x @ weights[f"{layer}.up"].T) @ weights[f"{layer}.down"].T
    return torch.nn.functional.rms_norm(x, (HIDDEN,)) @ weights["head"].T


def causal(q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)


def data():
    layout = PrefixLayout.from_groups(GROUPS)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (layout.total,), generator=generator)
    loss_weights = torch.randn(
        sum(layout.lengths[leaf] for leaf in layout.leaves), generator=generator
    ).double()
    return layout, tokens, loss_weights


def separate_logprobs(weights, layout, tokens):
    """The response tokens' log-probs of every sequence, run on its own with torch's attention."""
    results = []
    for leaf in layout.leaves:
        rows = layout.path_rows(leaf)
        logits = decode(weights, tokens[rows], torch.arange(len(rows)), causal)
        prompt = len(rows) - layout.lengths[leaf]
        logprobs = logits.log_softmax(-1)[prompt - 1 : -1]
        results.append(logprobs.gather(1, tokens[rows][prompt:, None])[:, 0])
    return torch.cat(results)


def packed_logprobs(weights, layout, tokens, impl, positions=None, predictors=None):
    """The same from one packed pass; positions and predictors replace the layout's in negative
    controls.
    """
    positions = layout.position_ids() if positions is None else positions
    predictors = layout.predictor_rows() if predictors is None else predictors
    logits = decode(
        weights,
        tokens,
        positions,
        lambda q, k, v: shared_prompt_attention(q, k, v, layout, impl=impl),
    )
    targets = torch.cat(
        [torch.arange(layout.starts[leaf], layout.ends[leaf]) for leaf in layout.leaves]
    )
    return logits[predictors[targets]].log_softmax(-1).gather(1, tokens[targets][:, None])[:, 0]


@pytest.mark.parametrize("impl", ["auto", "dense", "merge", "gather"])
def test_packed_group_equals_separate_sequences(impl):
    layout, tokens, loss_weights = data()
    weights = make_weights()
    expected = separate_logprobs(weights, layout, tokens)
    expected_grads = torch.autograd.grad((expected * loss_weights).sum(), list(weights.values()))
    found = packed_logprobs(weights, layout, tokens, impl)
    grads = torch.autograd.grad((found * loss_weights).sum(), list(weights.values()))
    assert (found - expected).abs().max() < 1e-13
    for name, a, b in zip(weights, grads, expected_grads, strict=True):
        assert (a - b).norm() < 1e-13 * b.norm(), name


def test_positions_that_do_not_restart_are_wrong():
    """Negative control."""
    layout, tokens, _ = data()
    weights = make_weights()
    found = packed_logprobs(weights, layout, tokens, "auto", positions=torch.arange(layout.total))
    assert (found - separate_logprobs(weights, layout, tokens)).abs().max() > 1e-2


def test_predicting_from_the_row_before_is_wrong():
    """Negative control: the row before a response's first token is the end of another response."""
    layout, tokens, _ = data()
    weights = make_weights()
    found = packed_logprobs(
        weights, layout, tokens, "auto", predictors=torch.arange(layout.total) - 1
    )
    difference = (found - separate_logprobs(weights, layout, tokens)).abs()
    firsts = torch.tensor([0, *[layout.lengths[leaf] for leaf in layout.leaves]]).cumsum(0)[:-1]
    wrong = firsts[[1, 2, 4]]  # all but the first response of each group
    assert difference[wrong].min() > 1e-2
    difference[wrong] = 0
    assert difference.max() < 1e-13
