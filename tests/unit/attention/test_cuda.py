"""The CUDA kernel without a GPU: its calls go through the operators' real schemas to a reference on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.attention.forms import gather_attention, merge_attention
from pa_npu.attention.kernels import cuda
from pa_npu.attention.layout import compress
from pa_npu.errors import UserError

LAYOUTS = {
    "group": PrefixLayout.from_groups([(9, [4, 1, 6])]),
    "three groups": PrefixLayout.from_groups([(7, [3, 5]), (1, [1, 1]), (12, [2, 9, 4])]),
    "tree": PrefixLayout((5, 3, 2, 1, 4, 0, 2, 6), (-1, 0, 1, 1, 0, 4, 5, -1)),
}


class FlashOperators(TorchDispatchMode):
    """aten's flash varlen operators as documented: int32 cumulative lengths, bottom-right causal,
    log-sum-exp [heads, T].
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._flash_attention_forward.default:
            self.calls += 1
            return self.forward(*args, **kwargs)
        if func is torch.ops.aten._flash_attention_backward.default:
            self.calls += 1
            return self.backward(*args, **kwargs)
        return func(*args, **(kwargs or {}))

    def forward(
        self, q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale
    ):
        assert dropout_p == 0.0 and not return_debug_mask
        self.check(q, k, cum_q, cum_k, max_q, max_k)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[1], q.shape[0])
        for rows, keys in self.sequences(cum_q, cum_k):
            scores = self.scores(q[rows], k[keys], is_causal, scale)
            lse[:, rows] = scores.logsumexp(-1).float()
            values = v[keys].double().repeat_interleave(q.shape[1] // v.shape[1], 1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        return (
            out,
            lse,
            torch.zeros(2, dtype=torch.uint64),
            torch.zeros((), dtype=torch.uint64),
            torch.empty(0),
        )

    def backward(
        self,
        grad,
        q,
        k,
        v,
        out,
        lse,
        cum_q,
        cum_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        state,
        offset,
        scale,
    ):
        assert (
            dropout_p == 0.0
            and state.dtype == offset.dtype == torch.uint64
            and grad.is_contiguous()
        )
        self.check(q, k, cum_q, cum_k, max_q, max_k)
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
        for rows, keys in self.sequences(cum_q, cum_k):
            probabilities = (
                self.scores(q[rows], k[keys], is_causal, scale) - lse[:, rows].double()[..., None]
            ).exp()
            wide_k, wide_v = (x[keys].double().repeat_interleave(group, 1) for x in (k, v))
            dout = grad[rows].double()
            correction = (dout * out[rows].double()).sum(-1).T[..., None]
            dscores = (
                probabilities * (torch.einsum("qhd,khd->hqk", dout, wide_v) - correction) * scale
            )
            dq[rows] = torch.einsum("hqk,khd->qhd", dscores, wide_k)
            dk[keys] = (
                torch.einsum("hqk,qhd->khd", dscores, q[rows].double())
                .unflatten(1, (-1, group))
                .sum(2)
            )
            dv[keys] = (
                torch.einsum("hqk,qhd->khd", probabilities, dout).unflatten(1, (-1, group)).sum(2)
            )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def check(q, k, cum_q, cum_k, max_q, max_k):
        for x, cumulative, longest in ((q, cum_q, max_q), (k, cum_k, max_k)):
            assert (
                cumulative.dtype == torch.int32
                and cumulative[0] == 0
                and cumulative[-1] == x.shape[0]
            )
            assert longest == cumulative.diff().max() and cumulative.diff().min() > 0
        assert len(cum_q) == len(cum_k) and q.shape[1] % k.shape[1] == 0

    @staticmethod
    def sequences(cum_q, cum_k):
        q, k = cum_q.tolist(), cum_k.tolist()
        return [(slice(*a), slice(*b)) for a, b in zip(zip(q, q[1:]), zip(k, k[1:]), strict=True)]  # noqa: B905, RUF007

    @staticmethod
    def scores(q, k, is_causal, scale):
        keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
        if is_causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(
                1 + scores.shape[2] - scores.shape[1]
            )
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores


@pytest.mark.parametrize("form", [merge_attention, gather_attention])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_dense(layout, form, monkeypatch):
    monkeypatch.setattr(cuda, "_triton_merge", lambda: None)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(layout.total, heads, 16, generator=generator) for heads in (4, 2, 2, 4)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with FlashOperators() as operators:
        out = form(*leaves, layout, 0.25, cuda.CudaFlash())
        out.backward(grad)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = shared_prompt_attention(*wide, layout, scale=0.25, impl="dense")
    expected.backward(grad.double())
    assert (out - expected).abs().max() < 2e-6
    for name, a, b in zip("qkv", leaves, wide, strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-5, name
    if form is merge_attention:  # one forward and one backward for the segments and for each depth
        assert operators.calls == 2 * (1 + max(compress(layout).depths))


def test_auto_gathers_short_prefixes_and_merges_long_ones():
    """Rows that gather copies, in total: also those of many short prefixes, and of each level of a
    tree.
    """
    prefers_gather = cuda.CudaFlash().prefers_gather
    assert prefers_gather(PrefixLayout.from_groups([(512, [64] * 8)]))
    assert prefers_gather(PrefixLayout.from_groups([(2048, [256] * 16)]))
    assert not prefers_gather(PrefixLayout.from_groups([(2049, [256] * 16)]))
    assert not prefers_gather(PrefixLayout.from_groups([(512, [64] * 8)] * 9))
    assert not prefers_gather(PrefixLayout.from_sequences([512, 64])), (
        "nothing is shared, so there is nothing to copy"
    )


def test_supports_what_the_operators_take(monkeypatch):
    assert cuda.CudaFlash.supports(torch.zeros(1, 1, 128, dtype=torch.bfloat16))
    assert not cuda.CudaFlash.supports(torch.zeros(1, 1, 128))
    assert not cuda.CudaFlash.supports(torch.zeros(1, 1, 12, dtype=torch.float16))
    assert not cuda.CudaFlash.supports(torch.zeros(1, 1, 264, dtype=torch.float16))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not cuda.CudaFlash.supports(torch.zeros(1, 1, 128, dtype=torch.bfloat16)), (
        "their log-sum-exp is another"
    )


def test_refuses_a_torch_with_other_operators(monkeypatch):
    cuda._check_schemas.cache_clear()
    monkeypatch.setattr(cuda, "_FORWARD", ("query", "key", "value", "cu_seqlens"))
    with pytest.raises(
        UserError, match=r"_flash_attention_forward of torch .* takes .*; use one of these"
    ):
        cuda._check_schemas()


TRITON_CHECK = """
import torch
from ops.triton.lse_merge import lse_merge_
from pa_npu.attention.kernels.base import merge_lse
from pa_npu.attention.rows import Rows

torch.manual_seed(0)
for dtype, bound in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
    for head_dim, spans in ((64, [(5, 42)]), (48, [(1, 7), (9, 30)])):
        rows = Rows.from_spans(spans)
        count = sum(end - start for start, end in spans)
        out, part = torch.randn(50, 3, head_dim).to(dtype), torch.randn(count, 3, head_dim).to(dtype)
        lse, part_lse = 3 * torch.randn(3, 50), 3 * torch.randn(3, count)
        wide_out, wide_lse = out.double(), lse.double()
        merge_lse(wide_out, wide_lse.t(), part.double(), part_lse.double().t(), rows)
        lse_merge_(out, lse, part, part_lse, rows)
        assert (out.double() - wide_out).abs().max() < bound * wide_out.abs().max(), (dtype, head_dim)
        assert (lse - wide_lse).abs().max() < 2e-6
        untouched = torch.ones(50, dtype=torch.bool)
        untouched[rows.index(out.device)] = False
        assert torch.equal(out[untouched].double(), wide_out[untouched])
# a side without keys leaves the other as it is, two of them give no NaN
out, part = torch.randn(4, 1, 64), torch.randn(4, 1, 64)
before = out.clone()
lse = torch.tensor([[0.0, float("-inf"), float("-inf"), 1.0]])
lse_merge_(out, lse, part, torch.tensor([[float("-inf"), 2.0, float("-inf"), 1.0]]), Rows.from_spans([(0, 4)]))
assert torch.equal(out[0], before[0]) and torch.equal(out[1], part[1]) and not out.isnan().any()
assert lse[0, :2].tolist() == [0.0, 2.0] and lse[0, 2] == float("-inf")
assert torch.allclose(out[3], (before[3] + part[3]) / 2)
print("merged")
"""


def test_triton_merge_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-W", "ignore", "-c", TRITON_CHECK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "merged", done.stderr
