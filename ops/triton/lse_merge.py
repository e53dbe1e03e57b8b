"""Merge a partial attention result into rows of a running one, in place: one Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from pa_npu.attention.rows import Rows

# with a head of 128 in bf16 a program moves 3 x 4 KiB, enough to keep the memory busy
ROWS_PER_PROGRAM = 16


@triton.jit
def _lse_merge(  # type: ignore[no-untyped-def]  # triton would read annotations as argument types
    out,
    lse,
    part,
    part_lse,
    index,
    first_row,
    num_rows,
    out_row_stride,
    out_head_stride,
    part_row_stride,
    part_head_stride,
    lse_head_stride,
    part_lse_head_stride,
    HAS_INDEX: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    inside = row < num_rows
    target = (first_row + row).to(tl.int64)  # rows x heads x head_dim passes 2**31 on long packs
    if HAS_INDEX:
        target = tl.load(index + row, mask=inside, other=0)

    old_at = lse + head * lse_head_stride + target
    old = tl.load(old_at, mask=inside, other=float("-inf"))
    new = tl.load(part_lse + head * part_lse_head_stride + row, mask=inside, other=float("-inf"))
    # every warp loads these few values for itself, and none may find what another has stored
    # already
    tl.debug_barrier()
    top = tl.maximum(old, new)
    # both sides without keys: (-inf) - (-inf) is not a number
    top = tl.where(top == float("-inf"), 0.0, top)
    old_weight = tl.exp(old - top)
    new_weight = tl.exp(new - top)
    total = old_weight + new_weight
    tl.store(old_at, top + tl.log(total), mask=inside)
    divisor = tl.where(total > 0.0, total, 1.0)

    column = tl.arange(0, BLOCK_DIM)
    inside_2d = inside[:, None] & (column < HEAD_DIM)[None, :]
    out_at = out + target[:, None] * out_row_stride + head * out_head_stride + column[None, :]
    part_at = (
        part
        + row.to(tl.int64)[:, None] * part_row_stride
        + head * part_head_stride
        + column[None, :]
    )
    running = tl.load(out_at, mask=inside_2d, other=0.0).to(tl.float32)
    partial = tl.load(part_at, mask=inside_2d, other=0.0).to(tl.float32)
    merged = running * (old_weight / divisor)[:, None] + partial * (new_weight / divisor)[:, None]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=inside_2d)


def lse_merge_(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, rows: Rows
) -> None:
    """out [T, heads, head_dim], lse fp32 [heads, T]: updated in place at `rows`.

    part [rows, heads, head_dim], part_lse fp32 [heads, rows]: attention of the same queries over
    further keys.
    """
    num_rows, heads, head_dim = part.shape
    if (
        out.stride(-1) != 1
        or part.stride(-1) != 1
        or lse.stride(-1) != 1
        or part_lse.stride(-1) != 1
    ):
        raise ValueError("lse_merge_: the last dimension of every tensor must be contiguous")
    index = None if rows.span is not None else rows.index(out.device)
    _lse_merge[(triton.cdiv(num_rows, ROWS_PER_PROGRAM), heads)](
        out,
        lse,
        part,
        part_lse,
        # a pointer has to be passed; it is not read without HAS_INDEX
        out if index is None else index,
        0 if rows.span is None else rows.span[0],
        num_rows,
        out.stride(0),
        out.stride(1),
        part.stride(0),
        part.stride(1),
        lse.stride(0),
        part_lse.stride(0),
        HAS_INDEX=index is not None,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=ROWS_PER_PROGRAM,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
    )
