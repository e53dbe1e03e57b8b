"""Merge and gather forms against the dense form in fp64: outputs and all gradients, on random layouts."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch

from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.attention.forms import gather_attention, merge_attention
from pa_npu.attention.kernels.cpu import CpuFlash
from pa_npu.attention.kernels.portable import Portable

# Largest |difference| of an output or gradient from dense fp64, as a share of its largest |value|.
BOUNDS = {torch.float64: 1e-14, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
FORMS = {"merge": merge_attention, "gather": gather_attention}
KERNELS = {"cpu-flash": CpuFlash(), "portable": Portable()}


def random_forest(seed: int) -> PrefixLayout:
    generator = random.Random(seed)
    parents, path = [-1], [0]
    for segment in range(1, generator.randint(3, 12)):
        parent = -1 if generator.random() < 0.15 else generator.choice(path)
        parents.append(parent)
        path = [*path[: path.index(parent) + 1], segment] if parent >= 0 else [segment]
    return PrefixLayout(
        tuple(generator.choice([0, 1, 3, 7, 33, 64]) for _ in parents), tuple(parents)
    )


LAYOUTS = {
    "ragged group": PrefixLayout.from_groups([(37, [5, 19, 1, 40])]),
    "three groups": PrefixLayout.from_groups([(64, [32] * 8), (3, [1, 1]), (130, [33, 90])]),
    "no response": PrefixLayout.from_groups([(65, [])]),
    "one token each": PrefixLayout.from_groups([(1, [1])]),
    "one response": PrefixLayout.from_groups([(70, [9])]),
    "empty prompt": PrefixLayout.from_groups([(0, [4, 6])]),
    "empty response": PrefixLayout.from_groups([(6, [0, 4])]),
    "separate": PrefixLayout.from_sequences([5, 5, 1, 30]),
    "padded": PrefixLayout.from_groups([(5, [3, 4])]).pad(16),
} | {f"forest {seed}": random_forest(seed) for seed in range(20)}


def inputs_for(
    layout: PrefixLayout, heads: int, kv_heads: int, dtype: torch.dtype, head_dim: int = 32
):
    generator = torch.Generator().manual_seed(layout.total)
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim), (heads, head_dim))
    return [torch.randn(layout.total, *shape, generator=generator).to(dtype) for shape in shapes]


def out_and_gradients(attend, q, k, v, grad):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def largest_error(found, expected):
    return max(
        ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        for a, b in zip(found, expected, strict=True)
    )


# MHA, GQA and MQA (with a scale of its own) take turns over the layouts, so that each meets each
# dtype.
HEADS = ((4, 4, 32**-0.5), (6, 2, 32**-0.5), (3, 1, 0.21))


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=list(LAYOUTS))
def test_equals_dense_fp64(number):
    layout = list(LAYOUTS.values())[number]
    for turn, (dtype, bound) in enumerate(BOUNDS.items()):
        heads, kv_heads, scale = HEADS[(number + turn) % 3]
        inputs = inputs_for(layout, heads, kv_heads, dtype)

        def dense(q, k, v, scale=scale):
            return shared_prompt_attention(q, k, v, layout, scale=scale, impl="dense")

        expected = out_and_gradients(dense, *(x.double() for x in inputs))
        for form, kernel in itertools.product(FORMS, KERNELS):

            def attend(q, k, v, form=form, kernel=kernel, scale=scale):
                return FORMS[form](q, k, v, layout, scale, KERNELS[kernel])

            found = out_and_gradients(attend, *inputs)
            error = largest_error(found, expected)
            assert all(a.dtype == dtype for a in found)
            assert error < bound, (
                f"{error:.1e}: {form} on {kernel}, {heads} heads over {kv_heads}, {dtype}"
            )


def test_dense_equals_softmax_written_per_token():
    """The reference itself, against a loop over queries and the keys that a path lists."""
    layout = PrefixLayout((4, 3, 0, 2, 5), (-1, 0, 1, 1, -1))
    q, k, v, _ = inputs_for(layout, 2, 1, torch.float64, head_dim=4)
    out = shared_prompt_attention(q, k, v, layout, impl="dense")
    for leaf in layout.leaves:
        rows = layout.path_rows(leaf)
        for position, row in enumerate(rows):
            seen = rows[: position + 1]
            for head in range(2):
                weights = torch.softmax(k[seen, 0] @ q[row, head] * 4**-0.5, 0)
                assert (out[row, head] - weights @ v[seen, 0]).abs().max() < 1e-15


@pytest.mark.parametrize("impl", ["auto", "merge", "gather"])
def test_a_response_sees_the_prompt_and_itself_only(impl):
    layout = PrefixLayout.from_groups([(20, [6, 7, 8])])
    q, k, v, _ = inputs_for(layout, 4, 2, torch.float32)
    out = shared_prompt_attention(q, k, v, layout, impl=impl)
    other = k.clone()
    other[layout.starts[1] : layout.ends[1]] += 1.0
    changed = (shared_prompt_attention(q, other, v, layout, impl=impl) != out).flatten(1).any(1)
    assert changed.tolist() == [
        layout.starts[1] <= row < layout.ends[1] for row in range(layout.total)
    ]
    other = k.clone()
    other[:20] += torch.randn(20, 2, 32, generator=torch.Generator().manual_seed(0))
    changed = (shared_prompt_attention(q, other, v, layout, impl=impl) != out).flatten(1).any(1)
    assert changed[1:].all()


@pytest.mark.parametrize("impl", ["auto", "merge", "gather"])
def test_takes_strided_slices_of_a_fused_projection(impl):
    """q, k and v as views of one [tokens, heads, head_dim] tensor, and a gradient with strides."""
    layout = PrefixLayout.from_groups([(9, [4, 5])])
    fused = torch.randn(
        layout.total, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def attend(x, impl):
        return shared_prompt_attention(
            *x.requires_grad_().split((4, 2, 2), dim=1), layout=layout, impl=impl
        )

    grads = []
    for name in (impl, "dense"):
        x = fused.clone()
        attend(x, name).transpose(0, 1).square().sum().backward()
        grads.append(x.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-13


def test_repeats_bit_for_bit():
    layout = LAYOUTS["three groups"]
    inputs = inputs_for(layout, 6, 2, torch.float32)
    for impl in ("merge", "gather"):
        first, second = (
            out_and_gradients(partial(shared_prompt_attention, layout=layout, impl=impl), *inputs)
            for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_one_response_costs_no_more_than_one_sequence():
    """A prompt with one response is compressed to the very call that one sequence makes."""
    inputs = inputs_for(LAYOUTS["one response"], 4, 2, torch.float32)
    found, expected = (
        out_and_gradients(lambda q, k, v: shared_prompt_attention(q, k, v, layout), *inputs)  # noqa: B023
        for layout in (LAYOUTS["one response"], PrefixLayout.from_sequences([79]))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gather_sums_the_gradients_of_many_responses_in_fp32():
    """A running sum of 256 bf16 terms would be off by percents."""
    layout = PrefixLayout.from_groups([(16, [2] * 256)])
    q, k, v, grad = inputs_for(layout, 1, 1, torch.bfloat16)
    grad = grad.abs()
    attend = {
        impl: (lambda q, k, v, impl=impl: shared_prompt_attention(q, k, v, layout, impl=impl))
        for impl in ("dense", "gather")
    }
    expected = out_and_gradients(attend["dense"], *(x.double() for x in (q, k, v, grad)))
    found = out_and_gradients(attend["gather"], q, k, v, grad)
    assert largest_error(found[3:], expected[3:]) < 5e-3
    rounded = torch.zeros(16, 1, 32, dtype=torch.bfloat16)  # negative control
    for leaf in layout.leaves:
        rows = layout.path_rows(leaf)
        one = PrefixLayout.from_sequences([len(rows)])
        inputs = [x[rows].double() for x in (q, k, v, grad)]
        inputs[3][:16] = 0 if leaf > 1 else inputs[3][:16]
        part = out_and_gradients(
            partial(shared_prompt_attention, layout=one, impl="dense"), *inputs
        )
        rounded += part[3][:16].bfloat16()
    assert largest_error([rounded], [expected[3][:16]]) > 1e-2


def test_auto_takes_the_measured_winner():
    kernel: Any = KERNELS["cpu-flash"]
    assert kernel.prefers_gather(PrefixLayout.from_groups([(64, [256] * 8)]))
    assert not kernel.prefers_gather(PrefixLayout.from_groups([(512, [64] * 8)]))
    assert not kernel.prefers_gather(PrefixLayout.from_groups([(64, [1024] * 8)]))
    assert not kernel.prefers_gather(PrefixLayout.from_sequences([64, 64]))


def test_refuses_what_does_not_fit():
    layout = PrefixLayout.from_groups([(4, [2, 3])])
    q, k = torch.zeros(9, 4, 8), torch.zeros(9, 2, 8)
    for arguments, message in (
        (
            (q[:8], k, k),
            "q: shape .* must be .* with 9 tokens, the sum of the layout's segments 0 to 2",
        ),
        ((q, k, k[:, :1]), "k .* and v .* must have one shape"),
        ((q, k[..., :4], k[..., :4]), "q's head_dim 8"),
        (
            (q, k.repeat(1, 2, 1)[:, :3], k.repeat(1, 2, 1)[:, :3]),
            "q: 4 heads must be a multiple of the 3",
        ),
        ((q, k.double(), k), "k: torch.float64 .* must match q"),
        ((q[:, :, None], k, k), "q: shape"),
    ):
        with pytest.raises(ValueError, match=message):
            shared_prompt_attention(*arguments, layout)
    with pytest.raises(ValueError, match="impl: 'flash' is not one of auto, dense, merge, gather"):
        shared_prompt_attention(q, k, k, layout, impl="flash")
    with pytest.raises(ValueError, match="no attention kernel for device meta"):
        shared_prompt_attention(q.to("meta"), k.to("meta"), k.to("meta"), layout)
    nothing = PrefixLayout.from_sequences([0, 0])
    assert shared_prompt_attention(q[:0], k[:0], k[:0], nothing).shape == (0, 4, 8)
