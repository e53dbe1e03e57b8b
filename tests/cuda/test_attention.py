"""Shared-prompt attention by torch's flash operators on a GPU, against dense attention in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.attention.forms import gather_attention, kernel_for, kernel_name, merge_attention
from pa_npu.attention.kernels import cuda
from pa_npu.attention.kernels.base import merge_lse
from pa_npu.attention.rows import Rows

LAYOUTS = {
    "group": PrefixLayout.from_groups([(300, [40, 1, 260])]),
    "three groups": PrefixLayout.from_groups([(7, [3, 5]), (1, [1, 1]), (129, [2, 90, 140])]),
    "tree": PrefixLayout((50, 33, 2, 1, 74, 0, 2, 66), (-1, 0, 1, 1, 0, 4, 5, -1)),
}
# largest difference over largest value: the rounding of a type's products and of what is kept in it
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def inputs(layout: PrefixLayout, dtype: torch.dtype, head_dim: int) -> list[torch.Tensor]:
    """q, k, v and a gradient: 8 query heads, 2 of keys and values."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(layout.total, heads, head_dim, generator=generator).to("cuda", dtype)
        for heads in (8, 2, 2, 8)
    ]


def worst(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("merges_with", ["triton", "torch"])
@pytest.mark.parametrize("form", [merge_attention, gather_attention])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_gradients_equal_dense_attention_in_fp64(
    layout: PrefixLayout,
    dtype: torch.dtype,
    form: Callable[..., torch.Tensor],
    merges_with: str,
    monkeypatch,
) -> None:
    if merges_with == "torch":
        monkeypatch.setattr(cuda, "_triton_merge", lambda: None)
    else:
        pytest.importorskip("triton")
    q, k, v, grad = inputs(layout, dtype, 64)
    assert kernel_name(q) == ("portable" if dtype == torch.float32 else "cuda-flash")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = form(*leaves, layout, 0.125, kernel_for(q))
    out.backward(grad)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = shared_prompt_attention(*wide, layout, scale=0.125, impl="dense")
    exact.backward(grad.double())
    assert worst(out, exact) < BOUNDS[dtype]
    for name, ours, reference in zip("qkv", leaves, wide, strict=True):
        assert worst(ours.grad, reference.grad) < BOUNDS[dtype], name
    # negative control: responses that do not see their prompt are far outside of the bound
    alone = PrefixLayout(layout.lengths, (-1,) * len(layout.lengths))
    assert (
        worst(shared_prompt_attention(*wide, alone, scale=0.125, impl="dense"), exact.detach())
        > 0.1
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_passes_give_the_same_bits(dtype: torch.dtype) -> None:
    layout = LAYOUTS["three groups"]
    q, k, v, grad = inputs(layout, dtype, 128)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = shared_prompt_attention(*leaves, layout)
            out.backward(grad)
            results.append([out.detach(), *(x.grad for x in leaves)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_triton_merge_equals_the_formula_in_fp64() -> None:
    """Thousands of rows too: with few of them the warps of a program run in step, and a race
    between them does not show.
    """
    pytest.importorskip("triton")
    from ops.triton.lse_merge import lse_merge_

    torch.manual_seed(0)
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        for head_dim, spans in (
            (64, [(5, 42)]),
            (48, [(1, 7), (9, 30)]),
            (128, [(0, 4000), (4096, 5000)]),
        ):
            rows = Rows.from_spans(spans)
            count, total = (
                sum(end - start for start, end in spans),
                50 if spans[-1][1] < 50 else 5000,
            )
            out, part = (
                torch.randn(n, 3, head_dim, device="cuda").to(dtype) for n in (total, count)
            )
            lse, part_lse = (3 * torch.randn(3, n, device="cuda") for n in (total, count))
            wide_out, wide_lse = out.double(), lse.double()
            merge_lse(wide_out, wide_lse.t(), part.double(), part_lse.double().t(), rows)
            lse_merge_(out, lse, part, part_lse, rows)
            assert (out.double() - wide_out).abs().max() < bound * wide_out.abs().max(), (
                dtype,
                head_dim,
            )
            assert (lse - wide_lse).abs().max() < 2e-6
