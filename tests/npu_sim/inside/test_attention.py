"""shared_prompt_attention on npu tensors through torch_npu's schemas and autograd, against dense fp64."""

from __future__ import annotations

import pytest
import torch

from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.attention.calls import attend, gradients
from pa_npu.attention.context import RankRows
from pa_npu.attention.division import divide
from pa_npu.attention.kernels import npu
from tests.npu_sim.reference_ops import all_references
from tests.npu_sim.simulator import NpuSim

LAYOUTS = {
    "group": PrefixLayout.from_groups([(9, [4, 1, 6])]),
    "three groups": PrefixLayout.from_groups([(7, [3, 5]), (1, [1, 1]), (12, [2, 9, 4])]),
    "separate": PrefixLayout.from_sequences([5, 1, 8]),
    "padded": PrefixLayout.from_groups([(6, [2, 0, 3])]).pad(16),
    "tree": PrefixLayout((5, 3, 2, 1, 4, 0, 2, 6), (-1, 0, 1, 1, 0, 4, 5, -1)),
}
# largest |difference| from dense fp64 relative to its largest value, for outputs and gradients
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=["honoured", "ignored", "refused"])
def sim(request: pytest.FixtureRequest) -> NpuSim:
    """A simulated NPU whose CANN honours softmax_layout="TND", ignores it or has no operator that
    takes it.
    """
    npu.stats_layout.cache_clear()
    return NpuSim(all_references(request.param))


def run_dense(q, k, v, grad, layout, scale=None):
    """Output and gradients of the dense form in fp64 on the CPU."""
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out = shared_prompt_attention(*inputs, layout, scale=scale, impl="dense")
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.double())]


def run_npu(q, k, v, grad, layout, impl, scale=None):
    inputs = [x.to("npu").requires_grad_() for x in (q, k, v)]
    out = shared_prompt_attention(*inputs, layout, scale=scale, impl=impl)
    out.backward(grad.to("npu"))
    return [x.detach().cpu() for x in (out, *(x.grad for x in inputs))]


def random_inputs(layout, heads, kv_heads, head_dim, dtype):
    generator = torch.Generator().manual_seed(layout.total)
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim), (heads, head_dim))
    return [torch.randn(layout.total, *shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("impl", ["merge", "gather"])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads"),
    [(torch.float32, 4, 2), (torch.bfloat16, 3, 1), (torch.float16, 2, 2)],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_dense_in_every_stats_layout(sim, layout, heads, kv_heads, dtype, impl):
    inputs = random_inputs(layout, heads, kv_heads, 16, dtype)
    expected = run_dense(*inputs, layout=layout)
    with sim:
        actual = run_npu(*inputs, layout=layout, impl=impl)
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        assert error < BOUNDS[dtype], f"{name} differs by {error:.1e} of its largest value"


@pytest.mark.parametrize("gathers", [False, True], ids=["merge", "gather"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_of_two_ranks_equal_dense_in_every_stats_layout(sim, layout, gathers):
    """Context parallelism's calls, with keys that are gathered already."""
    division = divide(layout, 2)
    q, k, v, grad = random_inputs(division.layout, 4, 2, 16, torch.float32)
    grad[division.num_rows :] = 0.0
    expected = run_dense(q, k, v, grad, division.layout, scale=0.25)
    actual = [torch.zeros_like(x) for x in (q, q, k, v)]
    kernel = npu.NpuFusion()
    with sim:
        keys = k.to("npu")
        values = v.to("npu")
        for rank in range(2):
            own = division.rows[rank]
            plan = RankRows(division, rank).plan(gathers=gathers, per_depth=kernel.per_depth)
            queries = q[own].to("npu")
            result = attend(queries, keys, values, plan, 0.25, kernel)
            parts = gradients(
                grad[own].to("npu"),
                queries,
                keys,
                values,
                result,
                plan,
                0.25,
                kernel,
                wide_sums=True,
            )
            actual[0][own] = result.out.cpu()
            actual[1][own] = parts[0].cpu()
            actual[2] += parts[1].cpu()
            actual[3] += parts[2].cpu()
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        assert error < BOUNDS[torch.float32], f"{name} differs by {error:.1e} of its largest value"


LAYOUT_FOUND = {
    "honoured": npu.StatsLayout("TND", "TND"),
    "ignored": npu.StatsLayout("TND", "NTD"),
    "refused": npu.StatsLayout(None, "NTD"),
}


def test_detects_the_stats_layout(sim, request):
    with sim:
        layout = npu.stats_layout(torch.device("npu", 0), torch.bfloat16)
    assert layout == LAYOUT_FOUND[request.node.callspec.params["sim"]]


def test_fp32_keeps_to_the_default_layout(sim):
    """With another one the operator leaves the templates that are known to be deterministic."""
    with sim:
        layout = npu.stats_layout(torch.device("npu", 0), torch.float32)
    assert layout == npu.StatsLayout(None, "NTD")


def test_errors_that_have_nothing_to_do_with_the_layout_are_not_taken_for_an_older_cann(
    monkeypatch,
):
    references = all_references()

    def out_of_memory(arguments):
        raise RuntimeError("NPU out of memory")

    npu.stats_layout.cache_clear()
    device = torch.device("npu", 0)
    with (
        NpuSim(references | {"npu::npu_fusion_attention": out_of_memory}),
        pytest.raises(RuntimeError, match="memory"),
    ):
        npu.stats_layout(device, torch.bfloat16)


def test_wrong_stats_layout_is_seen_by_the_comparison(sim, monkeypatch, request):
    """Negative control: reading the statistics in the other layout gives wrong numbers."""
    actual = LAYOUT_FOUND[request.node.callspec.params["sim"]]
    wrong = npu.StatsLayout(actual.argument, {"TND": "NTD", "NTD": "TND"}[actual.memory])
    monkeypatch.setattr(npu, "stats_layout", lambda device, dtype: wrong)
    layout = LAYOUTS["group"]
    inputs = random_inputs(layout, 4, 2, 16, torch.float16)
    with sim:
        actual = run_npu(*inputs, layout=layout, impl="merge")
    assert (actual[0].double() - run_dense(*inputs, layout=layout)[0]).abs().max() > 1e-2


def test_one_call_per_depth_and_every_operator_has_a_kernel(sim):
    layout = LAYOUTS["three groups"]
    inputs = random_inputs(layout, 4, 2, 16, torch.bfloat16)
    with sim:
        npu.stats_layout(torch.device("npu", 0), torch.bfloat16)
        sim.calls.clear()
        run_npu(*inputs, layout=layout, impl="merge", scale=0.3)
    assert sim.calls["npu::npu_fusion_attention"] == 2
    assert sim.calls["npu::npu_fusion_attention_grad"] == 2
    assert not sim.without_kernel


def test_refuses_what_the_operator_cannot_take(sim):
    layout = PrefixLayout.from_sequences([1] * 1025)
    with sim:
        q = torch.zeros(1025, 1, 16, device="npu")
        with pytest.raises(
            ValueError, match="segment 1024: npu_fusion_attention takes 1024 sequences"
        ):
            shared_prompt_attention(q, q, q, layout, impl="merge")
        with pytest.raises(ValueError, match="float64"):
            shared_prompt_attention(*[q.double()] * 3, layout=layout, impl="merge")
