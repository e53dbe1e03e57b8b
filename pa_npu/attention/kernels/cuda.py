"""CUDA kernel: torch's flash-attention varlen operators.

They are called directly, so that their backward takes merged outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from pa_npu.attention.kernels.base import Partial, merge_lse
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.plans import CrossCall, VarlenCall
from pa_npu.errors import UserError

# Positional arguments, the same from torch 2.7 to 2.13. Later versions add keywords with defaults
# to the forward and renamed the backward's two generator tensors in place.
_FORWARD = (
    "query",
    "key",
    "value",
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "dropout_p",
    "is_causal",
)
_BACKWARD = ("grad_out", "query", "key", "value", "out", "logsumexp", *_FORWARD[3:])
_FORWARD_POSITIONS = len(_FORWARD) + 1  # and return_debug_mask
_BACKWARD_POSITIONS = len(_BACKWARD) + 2  # and the generator tensors
_MAX_COPIED_ROWS = 16 * 2048


class CudaFlash:
    """Stats are (log-sum-exp [heads, rows], generator state, generator offset); both only dropout
    reads.

    `torch.nn.attention.varlen` would not do: its backward cannot be given a merged log-sum-exp. The
    operators align their causal mask bottom-right and take fewer key/value heads than query heads.
    ROCm's have another log-sum-exp.
    """

    per_depth = True

    def __init__(self) -> None:
        _check_schemas()

    @staticmethod
    def supports(q: torch.Tensor) -> bool:
        """Returns True if the operators are CUDA's and take q's dtype and head size."""
        takes = (
            q.dtype in (torch.float16, torch.bfloat16)
            and q.shape[-1] % 8 == 0
            and q.shape[-1] <= 256
        )
        return takes and torch.version.hip is None

    def prefers_gather(self, layout: PrefixLayout) -> bool:
        # Gather copies the keys and values of every prefix once per response, merge starts further
        # kernels. Measured on an H100 (docs/results/attention_cuda.md): even at 16 prefixes of
        # 2,048 rows, gather first below that, merge above.
        return 0 < sum(layout.offsets) <= _MAX_COPIED_ROWS

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> Partial:
        out, lse, state, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_sequences(call, q.device), 0.0, call.causal, False, scale=scale
        )
        return Partial(out, (lse, state, offset), call)

    def merge(self, running: Partial, part: Partial, cross: CrossCall) -> None:
        merge = _triton_merge() or _torch_merge
        merge(running.out, running.stats[0], part.out, part.stats[0], cross.q_rows)

    def select(self, running: Partial, cross: CrossCall) -> Partial:
        lse = cross.q_rows.take(running.stats[0], dim=1).contiguous()
        return Partial(cross.q_rows.take(running.out), (lse, *running.stats[1:]), cross.call)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        result: Partial,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        call = result.call
        lse, state, offset = result.stats
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            q,
            k,
            v,
            result.out,
            lse,
            *_sequences(call, q.device),
            0.0,
            call.causal,
            state,
            offset,
            scale=scale,
        )


def merge_name() -> str:
    """Returns which implementation merges partial results, for `doctor`."""
    return "triton" if _triton_merge() is not None else "torch"


def _sequences(
    call: VarlenCall, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """cum_seq_q, cum_seq_k, max_q, max_k."""
    return (
        call.cumulative("q", device),
        call.cumulative("k", device),
        max(call.q_lengths),
        max(call.k_lengths),
    )


def _torch_merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, rows: Any
) -> None:
    merge_lse(out, lse.t(), part, part_lse.t(), rows)


@cache
def _triton_merge() -> Any:
    """Returns the Triton merge, or None where Triton is not installed (Windows)."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from ops.triton.lse_merge import lse_merge_

    return lse_merge_


@cache
def _check_schemas() -> None:
    """Refuse a torch whose operators take other arguments than this file passes."""
    for operator, names, positions in (
        (torch.ops.aten._flash_attention_forward.default, _FORWARD, _FORWARD_POSITIONS),
        (torch.ops.aten._flash_attention_backward.default, _BACKWARD, _BACKWARD_POSITIONS),
    ):
        taken = [
            argument.name for argument in operator._schema.arguments if not argument.kwarg_only
        ]
        if tuple(taken[: len(names)]) != names or len(taken) != positions:
            raise UserError(
                f"attention.implementation: {operator._schema.name} of torch {torch.__version__} "
                f"takes {taken}, which is not what torch 2.7 to 2.13 take; use one of these, or "
                "attention.implementation=dense"
            )
