"""Parts without a run: versions, and what the devices compute against fp64 on the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pa_npu import platform as platforms
from pa_npu.algorithm.rules import load_config
from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.attention.forms import gather_attention, kernel_for, kernel_name, merge_attention
from pa_npu.attention.lse_merge import available, lse_merge_
from pa_npu.errors import UserError
from pa_npu.launcher.doctor import doctor
from pa_npu.launcher.selftest.parts import Bench, Finding
from pa_npu.launcher.selftest.runs import tiny_settings
from pa_npu.launcher.trainer_versions import trainer_problems

LAYOUTS = {
    "group": PrefixLayout.from_groups([(300, [40, 1, 260])]),
    "three groups": PrefixLayout.from_groups([(7, [3, 5]), (1, [1, 1]), (129, [2, 90, 140])]),
    "tree": PrefixLayout((50, 33, 2, 1, 74, 0, 2, 66), (-1, 0, 1, 1, 0, 4, 5, -1)),
}
# largest difference over largest value: the rounding of a type's products and of what is kept in it
BOUNDS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_UNSEEN = 0.1  # at least so far off is attention whose responses do not see their prompt


def versions(bench: Bench) -> list[Finding]:
    """`doctor` for the runs to come, whose text is this part's log; and what is not of a supported
    row.
    """
    run_dir = f"run.dir={bench.folder / 'runs' / 'versions'}"
    problems = doctor(load_config([], [*tiny_settings(bench), run_dir, *bench.overrides]))
    return [
        Finding("problems that doctor names", problems, 0),
        Finding(
            "versions outside of the nearest supported row", len(trainer_problems(bench.device)), 0
        ),
    ]


def attention(bench: Bench) -> list[Finding]:
    """Forward and backward of each form in each type over layouts, against dense attention in fp64
    on the host.
    """
    device = _device(bench)
    findings = []
    for dtype, bound in BOUNDS.items():
        for form in (merge_attention, gather_attention):
            worst = max(_worst_of(layout, dtype, form, device) for layout in LAYOUTS.values())
            kernel = kernel_name(torch.empty(1, 1, 64, dtype=dtype, device=device))
            shape = (
                f"{form.__name__.removesuffix('_attention')}, "
                f"{str(dtype).removeprefix('torch.')}, {kernel}"
            )
            findings.append(Finding(f"largest difference: {shape}", worst, bound))
    layout = LAYOUTS["three groups"]
    q, k, v, _ = _inputs(layout, torch.float64)
    alone = PrefixLayout(layout.lengths, (-1,) * len(layout.lengths))
    unseen = _worst(
        shared_prompt_attention(q, k, v, alone, impl="dense"),
        shared_prompt_attention(q, k, v, layout, impl="dense"),
    )
    findings.append(
        Finding("control: responses that do not see their prompt", unseen, _UNSEEN, least=True)
    )
    prompt = 512
    responses = [64] * 8
    shared = PrefixLayout.from_groups([(prompt, responses)])
    repeated = PrefixLayout.from_sequences([prompt + response for response in responses])
    tokens = sum(prompt + response for response in responses)
    return [
        *findings,
        Finding(
            "forward and backward, a prompt of 512 shared by 8",
            tokens / _seconds(shared, device),
            unit="tokens/s",
        ),
        Finding("the same, prompts repeated", tokens / _seconds(repeated, device), unit="tokens/s"),
    ]


def _seconds(layout: PrefixLayout, device: torch.device) -> float:
    """Returns the seconds of the fastest of some passes in a trainer's usual type."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v, grad = (
        x.to(device).requires_grad_(number < 3) for number, x in enumerate(_inputs(layout, dtype))
    )
    seconds = []
    for _ in range(5):
        start_s = time.monotonic()
        shared_prompt_attention(q, k, v, layout).backward(grad)
        _gradient(q).sum().item()  # waits for the device
        seconds.append(time.monotonic() - start_s)
    return min(seconds)


def operator(bench: Bench) -> list[Finding]:
    """Compares the merge of partial results on the device, in each type, with the formula in fp64
    on the host.
    """
    device = _device(bench)
    status = available()
    print(f"merges with {status.implementation}: {status.reason}")
    generator = torch.Generator().manual_seed(0)
    findings = []
    for dtype, bound in BOUNDS.items():
        tokens = 4096
        rows = [(5, 1000), (2048, 4000)]
        index = torch.cat([torch.arange(*ends) for ends in rows])
        out, part = (
            torch.randn(n, 4, 64, generator=generator).to(dtype) for n in (tokens, len(index))
        )
        # a largest score and a sum of exponentials for each query, of the running result and of the
        # part; 8 equal copies
        m, s, n, t = (
            torch.rand(count, 4, 1, generator=generator).expand(-1, -1, 8).contiguous() + 0.5
            for count in (tokens, tokens, len(index), len(index))
        )
        running, largest, total = (x.clone().to(device) for x in (out, m, s))
        lse_merge_(running, largest, total, part.to(device), n.to(device), t.to(device), rows)
        top = torch.maximum(m[index], n).double()
        ours = s[index] * (m[index] - top).exp()
        theirs = t * (n - top).exp()
        exact = out.double()
        weighed = ours[..., :1] * out[index].double() + theirs[..., :1] * part.double()
        exact[index] = weighed / (ours + theirs)[..., :1]
        findings.append(
            Finding(
                f"merge, {str(dtype).removeprefix('torch.')}", _worst(running.cpu(), exact), bound
            )
        )
    return findings


def _device(bench: Bench) -> torch.device:
    platform = platforms.get(bench.device)
    if platform.device_count() < 1:
        raise UserError(f"run.device: {bench.device} has no device; check what doctor says")
    return torch.device(bench.device if bench.device == "cpu" else f"{bench.device}:0")


def _inputs(layout: PrefixLayout, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and a gradient on the host: 8 query heads, 2 of keys and values."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(layout.total, heads, 64, generator=generator).to(dtype)
        for heads in (8, 2, 2, 8)
    ]


def _worst_of(
    layout: PrefixLayout,
    dtype: torch.dtype,
    form: Callable[..., torch.Tensor],
    device: torch.device,
) -> float:
    q, k, v, grad = _inputs(layout, dtype)
    leaves = [x.clone().to(device).requires_grad_() for x in (q, k, v)]
    out = form(*leaves, layout, 0.125, kernel_for(leaves[0]))
    out.backward(grad.to(device))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = shared_prompt_attention(wide[0], wide[1], wide[2], layout, scale=0.125, impl="dense")
    exact.backward(grad.double())
    pairs = [
        (out, exact),
        *((_gradient(ours), _gradient(theirs)) for ours, theirs in zip(leaves, wide, strict=True)),
    ]
    return max(_worst(ours.detach().cpu(), reference.detach()) for ours, reference in pairs)


def _worst(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad
