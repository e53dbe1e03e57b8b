"""The fused NPU operators in fp64, with the rules of their documentation checked on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

SoftmaxLayout = Literal["honoured", "ignored", "refused"]
STATS_WIDTH = 8
MASK_SIZE = 2048
MAX_SEQUENCES = 1024


class FusionAttention:
    """npu_fusion_attention and its gradient in TND.

    softmax_layout: what becomes of softmax_layout="TND". CANN with aclnnFlashAttentionVarLenScoreV4
    (8.3 and later) has it "honoured"; torch_npu over an older one "refused"; an operator may also
    have it "ignored". Without it the memory of the statistics is [heads, length, 8] per sequence,
    whatever their shape says.
    """

    def __init__(self, softmax_layout: SoftmaxLayout) -> None:
        self.softmax_layout = softmax_layout

    def references(self) -> dict[str, Any]:
        return {
            "npu::npu_fusion_attention": self.forward,
            "npu::npu_fusion_attention_grad": self.backward,
        }

    def forward(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        q, k, v = arguments["query"], arguments["key"], arguments["value"]
        _check(arguments)
        self._check_softmax_layout(arguments)
        heads = arguments["head_num"]
        out = torch.zeros(q.shape, dtype=torch.float64)
        maximum = torch.zeros(q.shape[0], heads, STATS_WIDTH)
        total = torch.zeros(q.shape[0], heads, STATS_WIDTH)
        for rows, keys, scores in _sequences(arguments, q, k, arguments.get("scale", 1.0)):
            highest = scores.amax(-1)
            exponentials = (scores - highest[..., None]).exp()
            sums = exponentials.sum(-1)
            values = v[keys].double().repeat_interleave(heads // v.shape[1], 1)
            out[rows] = torch.einsum("hqk,khd->qhd", exponentials / sums[..., None], values)
            maximum[rows] = highest.T[..., None].float()
            total[rows] = sums.T[..., None].float()
        if self._is_ntd(arguments):
            lengths = _lengths(arguments["actual_seq_qlen"])
            maximum, total = tnd_to_ntd(maximum, lengths), tnd_to_ntd(total, lengths)
        return out.to(q.dtype), maximum, total, torch.empty(0, dtype=q.dtype), 0, 0, 0

    def backward(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        q, k, v, grad, out = (
            arguments[name] for name in ("query", "key", "value", "dy", "attention_in")
        )
        _check(arguments)
        self._check_softmax_layout(arguments)
        assert grad.is_contiguous() and out.shape == grad.shape == q.shape
        maximum, total = arguments["softmax_max"], arguments["softmax_sum"]
        assert maximum.shape == total.shape == (q.shape[0], arguments["head_num"], STATS_WIDTH)
        if self._is_ntd(arguments):
            lengths = _lengths(arguments["actual_seq_qlen"])
            maximum, total = ntd_to_tnd(maximum, lengths), ntd_to_tnd(total, lengths)
        group = arguments["head_num"] // k.shape[1]
        dq = torch.zeros(q.shape, dtype=torch.float64)
        dk, dv = (
            torch.zeros(k.shape, dtype=torch.float64),
            torch.zeros(v.shape, dtype=torch.float64),
        )
        scale = arguments.get("scale_value", 1.0)
        for rows, keys, scores in _sequences(arguments, q, k, scale):
            keys_, values = (x[keys].double().repeat_interleave(group, 1) for x in (k, v))
            highest, sums = (x[rows, :, 0].double().T[..., None] for x in (maximum, total))
            probabilities = (scores - highest).exp() / sums
            dout = grad[rows].double()
            correction = (dout * out[rows].double()).sum(-1).T[..., None]
            dscores = (
                probabilities * (torch.einsum("qhd,khd->hqk", dout, values) - correction) * scale
            )
            dq[rows] = torch.einsum("hqk,khd->qhd", dscores, keys_)
            dk[keys] += (
                torch.einsum("hqk,qhd->khd", dscores, q[rows].double())
                .unflatten(1, (-1, group))
                .sum(2)
            )
            dv[keys] += (
                torch.einsum("hqk,qhd->khd", probabilities, dout).unflatten(1, (-1, group)).sum(2)
            )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), torch.empty(0), torch.empty(0)

    def _is_ntd(self, arguments: dict[str, Any]) -> bool:
        return not (
            self.softmax_layout == "honoured" and arguments.get("softmax_layout", "") == "TND"
        )

    def _check_softmax_layout(self, arguments: dict[str, Any]) -> None:
        if arguments.get("softmax_layout", "") == "":
            return
        if self.softmax_layout == "refused":
            raise RuntimeError("The param softmax_layout is not supported")
        assert arguments["query"].dtype != torch.float32, (
            "fp32 has deterministic templates in the default layout only"
        )


def dense_attention(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """npu_fusion_attention_v3 without a mask, as torch_npu calls it for scaled_dot_product_attention:
    [batch, heads, length, head_dim].
    """
    q, k, v = _dense(arguments)
    probabilities, highest, sums = _dense_probabilities(q, k, arguments.get("scale", 1.0))
    out = probabilities @ v
    shape = (*highest.shape, STATS_WIDTH)
    maximum, total = (x[..., None].float().expand(shape).contiguous() for x in (highest, sums))
    nothing = torch.empty(0, dtype=arguments["query"].dtype)
    seed = torch.zeros(1, dtype=torch.int64)
    return out.to(arguments["query"].dtype), maximum, total, nothing, seed, seed.clone()


def dense_attention_backward(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """npu_fusion_attention_grad_v3 for the same."""
    q, k, v = _dense(arguments)
    grad, out = (arguments[name].double() for name in ("dy", "attention_in"))
    scale = arguments.get("scale_value", 1.0)
    probabilities, highest, _ = _dense_probabilities(q, k, scale)
    assert arguments["softmax_max"].shape == (*highest.shape, STATS_WIDTH)
    correction = (grad * out).sum(-1, keepdim=True)
    dscores = probabilities * (grad @ v.mT - correction) * scale
    gradients = (dscores @ k, dscores.mT @ q, probabilities.mT @ grad)
    dtype = arguments["query"].dtype
    return *(gradient.to(dtype) for gradient in gradients), torch.empty(0), torch.empty(0)


def _dense(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    q, k, v = (arguments[name].double() for name in ("query", "key", "value"))
    assert arguments["input_layout"] == "BNSD" and q.dim() == 4
    assert q.shape == k.shape == v.shape and arguments["head_num"] == q.shape[1]
    assert arguments.get("atten_mask") is None and arguments.get("keep_prob", 1.0) == 1.0
    return q, k, v


def _dense_probabilities(
    q: torch.Tensor, k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = q @ k.mT * scale
    highest = scores.amax(-1)
    exponentials = (scores - highest[..., None]).exp()
    sums = exponentials.sum(-1)
    return exponentials / sums[..., None], highest, sums


def tnd_to_ntd(stats: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[tokens, heads, 8] by shape and memory -> the same shape over memory that is [heads, length,
    8] per sequence.
    """
    return torch.cat([part.transpose(0, 1).flatten() for part in stats.split(lengths)]).view(
        stats.shape
    )


def ntd_to_tnd(stats: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Inverse of tnd_to_ntd."""
    _, heads, width = stats.shape
    parts = stats.flatten().split([length * heads * width for length in lengths])
    return torch.cat([part.view(heads, -1, width).transpose(0, 1) for part in parts])


def _check(arguments: dict[str, Any]) -> None:
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    q_ends, k_ends = arguments["actual_seq_qlen"], arguments["actual_seq_kvlen"]
    assert arguments["input_layout"] == "TND" and arguments["head_num"] == q.shape[1]
    assert q.dtype == k.dtype == v.dtype and q.dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
    )
    assert q.shape[-1] == k.shape[-1] <= 768 and q.shape[1] % k.shape[1] == 0
    assert len(q_ends) == len(k_ends) <= MAX_SEQUENCES
    assert q_ends[-1] == q.shape[0] and k_ends[-1] == k.shape[0], (
        "cumulative lengths end at the number of tokens"
    )
    assert min(_lengths(q_ends)) >= 0 and min(_lengths(k_ends)) >= 0, (
        "cumulative lengths do not fall"
    )
    assert arguments.get("sparse_mode", 0) in (0, 3) and arguments.get("softmax_layout", "") in (
        "",
        "TND",
    )
    mask = arguments.get("atten_mask")
    if mask is not None and arguments.get("sparse_mode", 0) == 3:
        assert mask.dtype == torch.bool and mask.shape == (MASK_SIZE, MASK_SIZE)
        assert torch.equal(mask, torch.ones_like(mask).triu(1)), (
            "the compressed mask is an upper triangle"
        )


def _sequences(
    arguments: dict[str, Any], q: torch.Tensor, k: torch.Tensor, scale: float
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows, key rows and masked scores [heads, rows, keys] of every sequence that has queries."""
    q_start = k_start = 0
    group = arguments["head_num"] // k.shape[1]
    for q_end, k_end in zip(
        arguments["actual_seq_qlen"], arguments["actual_seq_kvlen"], strict=True
    ):
        if q_end > q_start:
            keys = k[k_start:k_end].double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[q_start:q_end].double(), keys) * scale
            if (
                arguments.get("atten_mask") is not None
            ):  # without a mask sparse_mode counts for nothing
                assert arguments["sparse_mode"] == 3
                hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(
                    1 + scores.shape[2] - scores.shape[1]
                )
                scores = scores.masked_fill(hidden, float("-inf"))
            yield slice(q_start, q_end), slice(k_start, k_end), scores
        q_start, k_start = q_end, k_end


def _lengths(ends: list[int]) -> list[int]:
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def rms_norm(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_rms_norm: (normed, reciprocal of the root mean square)."""
    x = arguments["input"].float()
    reciprocal = (x.square().mean(-1, keepdim=True) + arguments.get("epsilon", 1e-6)).rsqrt()
    return (x * reciprocal).to(arguments["input"].dtype) * arguments["gamma"], reciprocal


def rms_norm_backward(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, gamma, reciprocal, grad = (
        arguments["input"].float(),
        arguments["gamma"].float(),
        arguments["rstd"],
        arguments["dy"].float(),
    )
    normed, scaled = x * reciprocal, grad * gamma
    dx = reciprocal * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dgamma = (grad * normed).flatten(0, -2).sum(0)
    return dx.to(arguments["input"].dtype), dgamma


def rotary(arguments: dict[str, Any]) -> torch.Tensor:
    """npu_rotary_mul in mode half: x cos + rotated(x) sin."""
    x = arguments["input"]
    assert arguments.get("rotary_mode", "half") == "half" and x.dim() == 4
    return (x.float() * arguments["r1"].float() + _rotated(x.float()) * arguments["r2"].float()).to(
        x.dtype
    )


def rotary_backward(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = arguments["input"]
    grad, cos, sin = arguments["grad"].float(), arguments["r1"], arguments["r2"]
    dx = grad * cos.float() - _rotated(grad * sin.float())
    dcos = (grad * x.float()).sum_to_size(cos.shape)
    dsin = (grad * _rotated(x.float())).sum_to_size(sin.shape)
    return dx.to(x.dtype), dcos.to(cos.dtype), dsin.to(sin.dtype)


def swiglu(arguments: dict[str, Any]) -> torch.Tensor:
    """npu_swiglu: silu(a) * b for the halves (a, b)."""
    gate, up = arguments["input"].float().chunk(2, arguments.get("dim", -1))
    return (torch.nn.functional.silu(gate) * up).to(arguments["input"].dtype)


def swiglu_backward(arguments: dict[str, Any]) -> torch.Tensor:
    gate, up = arguments["input"].float().chunk(2, arguments.get("dim", -1))
    grad, sigmoid = arguments["grad_output"].float(), gate.sigmoid()
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, grad * gate * sigmoid), arguments.get("dim", -1)).to(
        arguments["input"].dtype
    )


def grouped_matmul(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """npu_grouped_matmul of one tensor, one weight and one result (split_item 3), as
    aclnnGroupedMatmulV4 documents it.

    group_type 0 divides the rows of x, 2 the dimension that is summed over, along which x must be a
    transposed view.
    """
    (x,), (weight,) = arguments["x"], arguments["weight"]
    assert (
        arguments["split_item"] == 3
        and arguments.get("group_list_type", 0) == 0
        and arguments["group_list"].dtype == torch.int64
    )
    assert x.dtype == weight.dtype and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    counts = _lengths(arguments["group_list"].tolist())
    assert x.numel() and weight.numel() and min(counts) >= 0, (
        "nothing to multiply, or group_list falls"
    )
    if arguments["group_type"] == 0:
        assert sum(counts) == x.shape[0] and weight.dim() == 3 and len(counts) == len(weight)
        parts = zip(x.double().split(counts), weight.double(), strict=True)
        return [torch.cat([rows @ own for rows, own in parts]).to(x.dtype)]
    assert (
        arguments["group_type"] == 2
        and sum(counts) == x.shape[1] == weight.shape[0]
        and x.t().is_contiguous()
    )
    parts = zip(x.double().split(counts, 1), weight.double().split(counts), strict=True)
    return [torch.stack([columns @ rows for columns, rows in parts]).to(x.dtype)]


def fused_adamw(arguments: dict[str, Any]) -> None:
    """aten::_fused_adamw_ as torch_npu hands it to aclnnApplyAdamWV2, in place; steps are int64 and
    count from 1.

    Formula: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2.
    """
    assert not arguments["amsgrad"] and not arguments["maximize"]
    lr, beta1, beta2, eps = (
        arguments["lr"],
        arguments["beta1"],
        arguments["beta2"],
        arguments["eps"],
    )
    names = ("self", "grads", "exp_avgs", "exp_avg_sqs", "state_steps")
    for parameter, grad, average, square, step in zip(
        *(arguments[name] for name in names), strict=True
    ):
        assert step.dtype == torch.int64
        count = int(step)
        parameter.mul_(1 - lr * arguments["weight_decay"])
        average.lerp_(grad.to(average.dtype), 1 - beta1)
        square.mul_(beta2).addcmul_(grad.to(square.dtype), grad.to(square.dtype), value=1 - beta2)
        denominator = (square / (1 - beta2**count)).sqrt().add_(eps)
        parameter.addcdiv_(average, denominator, value=-lr / (1 - beta1**count))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def matmul_backward(arguments: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """torch_npu has matmul's gradient as one operator, which a CPU has not."""
    grad, left, right = (arguments[name] for name in ("grad", "self", "other"))
    assert left.dim() >= 2 and right.dim() >= 2
    dleft, dright = grad @ right.mT, left.mT @ grad
    return tuple(
        value.sum_to_size(like.shape) if wanted else None
        for value, like, wanted in zip(
            (dleft, dright), (left, right), arguments["mask"], strict=True
        )
    )


def gather_backward(arguments: dict[str, Any]) -> torch.Tensor:
    """npu_gather_backward, torch_npu's gradient of gather as one operator."""
    grad = arguments["grad"]
    return grad.new_zeros(arguments["self_size"]).scatter_add(
        arguments["dim"], arguments["index"], grad
    )


def dtype_cast(arguments: dict[str, Any]) -> torch.Tensor:
    return torch.Tensor.to(arguments["input"], arguments["dtype"])


def format_cast(arguments: dict[str, Any]) -> torch.Tensor:
    """npu_format_cast, by which torch_npu lays out weights of convolutions as they come to a device:
    other places of memory, no other values.
    """
    return torch.clone(arguments["input"])


def all_references(softmax_layout: SoftmaxLayout = "honoured") -> dict[str, Any]:
    """Every reference, by operator name."""
    return FusionAttention(softmax_layout).references() | {
        "npu::npu_fusion_attention_v3": dense_attention,
        "npu::npu_fusion_attention_grad_v3": dense_attention_backward,
        "npu::npu_rms_norm": rms_norm,
        "npu::npu_rms_norm_backward": rms_norm_backward,
        "npu::npu_rotary_mul": rotary,
        "npu::npu_rotary_mul_backward": rotary_backward,
        "npu::npu_swiglu": swiglu,
        "npu::npu_swiglu_backward": swiglu_backward,
        "npu::npu_grouped_matmul": grouped_matmul,
        "npu::npu_gather_backward": gather_backward,
        "npu::_npu_dtype_cast": dtype_cast,
        "npu::npu_format_cast": format_cast,
        "aten::_fused_adamw_": fused_adamw,
        "aten::matmul_backward": matmul_backward,
    }
