"""Merge a partial attention result into rows of the running one, in place.

The Ascend C operator does it, or plain torch.

For one query over two disjoint sets of keys, with running output o, maximum m of the scaled scores
and sum s of exp(score - m), and the same (p, n, t) of the partial call:

    M = max(m, n)    a = s exp(m - M)    b = t exp(n - M)    S = a + b
    o <- (a o + b p) / S    m <- M    s <- S

A side without keys has maximum -inf (or the lowest float), sum 0 and any finite output; both sides
may be so. Backward needs nothing from here: it differentiates each part with the merged output and
statistics.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, chain
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

LIBRARY_NAME = "libpa_npu_ascendc.so"
LIBRARY_VARIABLE = "PA_NPU_ASCENDC_LIBRARY"
KERNEL_STAT_WIDTH = 8
KERNEL_DIM_STEP = 16
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tables are a few kilobytes each; a run sees one per distinct layout and depth.
TABLE_CACHE_ENTRIES = 512

Interval = tuple[int, int]


@dataclass(frozen=True)
class LseMergeStatus:
    """Which implementation merges on NPU tensors, and why; every other device uses torch."""

    implementation: str  # "ascendc" or "torch"
    reason: str
    library: Path


def lse_merge_(
    out: torch.Tensor,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    part_out: torch.Tensor,
    part_max: torch.Tensor,
    part_sum: torch.Tensor,
    row_intervals: Sequence[Interval],
    segments: Sequence[int] | None = None,
    part_segments: Sequence[int] | None = None,
) -> None:
    """Merge `part_*` into the rows `row_intervals` of `out`, `softmax_max`, `softmax_sum`, in
    place.

    out [tokens, heads, dim]; softmax_max, softmax_sum [tokens, heads, width], `width` equal copies
    (8 on Ascend), fp32 (fp64 where out is fp64). part_* likewise with the rows of the intervals one
    after the other.
    row_intervals: (first, last + 1) pairs, ascending and disjoint.
    segments, part_segments: None where memory of the statistics is as the shape says. In the NTD
    layout (npu_fusion_attention with softmax_layout="") memory of each sequence of the call that
    made them is [heads, length, width], and these are the lengths. The operator checks that all of
    this fits together.
    """
    tensors = (out, softmax_max, softmax_sum, part_out, part_max, part_sum)
    if not part_out.numel():
        return
    lengths = None if segments is None else tuple(segments)
    part_lengths = None if part_segments is None else tuple(part_segments)
    merge = _merge_ascendc if _use_kernel(tensors) else _merge_torch
    merge(tensors, tuple(row_intervals), lengths, part_lengths)


def available() -> LseMergeStatus:
    """Returns what merges on NPU tensors, for `doctor`; loads the operator library if it exists."""
    library = Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).parent / "lib" / LIBRARY_NAME)
    if not library.exists():
        reason = (
            f"{library} is not built; run python -m ops.ascendc.build where CANN, torch and "
            "torch_npu are"
        )
        return LseMergeStatus("torch", reason, library)
    if not hasattr(torch, "npu"):
        return LseMergeStatus(
            "torch", "torch_npu is not imported, so there are no NPU tensors", library
        )
    return _load(library)


@cache
def _load(library: Path) -> LseMergeStatus:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return LseMergeStatus("torch", f"{library} does not load: {error}", library)
    return LseMergeStatus("ascendc", f"loaded {library}", library)


def kernel_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why the Ascend C operator cannot merge on this device, or None if it can.

    dtype, head_dim: of the outputs [tokens, heads, head_dim].
    """
    if device.type != "npu":
        return f"the tensors are on {device}, the operator needs npu"
    status = available()
    if status.implementation != "ascendc":
        return status.reason
    if dtype not in KERNEL_DTYPES:
        return f"no kernel for outputs in {dtype}"
    if head_dim % KERNEL_DIM_STEP:
        return f"needs a head dimension in steps of {KERNEL_DIM_STEP}"
    return None


def _use_kernel(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Returns True if the Ascend C operator takes these tensors; on npu the log says why not."""
    out = tensors[0]
    softmax_max = tensors[1]
    if out.device.type != "npu":
        return False
    obstacle = kernel_obstacle(out.device, out.dtype, out.shape[2])
    if obstacle is None and (
        softmax_max.dtype != torch.float32 or softmax_max.shape[2] != KERNEL_STAT_WIDTH
    ):
        obstacle = (
            f"needs {KERNEL_STAT_WIDTH} copies of each statistic in fp32, not "
            f"{softmax_max.shape[2]} in {softmax_max.dtype}"
        )
    if obstacle is None and not all(tensor.is_contiguous() for tensor in tensors):
        obstacle = "needs contiguous tensors"
    if obstacle is not None:
        _announce_fallback(obstacle)
    return obstacle is None


@cache
def _announce_fallback(obstacle: str) -> None:
    """Logs the reason for using torch, once per reason."""
    logger.info("lse_merge_ on npu uses torch: %s", obstacle)


def _merge_ascendc(
    tensors: tuple[torch.Tensor, ...],
    intervals: tuple[Interval, ...],
    lengths: tuple[int, ...] | None,
    part_lengths: tuple[int, ...] | None,
) -> None:
    out = tensors[0]
    tokens, heads, dim = out.shape
    table, header = _device_table(
        intervals, lengths, part_lengths, (tokens, heads, dim), out.dtype, out.device
    )
    torch.ops.pa_npu.lse_merge_(*tensors, table, list(header))


@lru_cache(maxsize=TABLE_CACHE_ENTRIES)
def _device_table(
    intervals: tuple[Interval, ...],
    lengths: tuple[int, ...] | None,
    part_lengths: tuple[int, ...] | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns the operator's table on the device, and its header on the host.

    All layers of a microbatch share one.
    """
    bounds = list(chain.from_iterable(intervals))
    table = torch.ops.pa_npu.lse_merge_table(
        bounds,
        list(lengths or ()),
        list(part_lengths or ()),
        *shape,
        dtype,
        lengths is not None,
        part_lengths is not None,
        torch.ops.pa_npu.vector_cores(device.index or 0),
    )
    header = tuple(table[: torch.ops.pa_npu.lse_merge_header_words()].tolist())
    return table.to(device), header


def _merge_torch(
    tensors: tuple[torch.Tensor, ...],
    intervals: tuple[Interval, ...],
    lengths: tuple[int, ...] | None,
    part_lengths: tuple[int, ...] | None,
) -> None:
    out, softmax_max, softmax_sum, part_out, part_max, part_sum = tensors
    accumulate_dtype = torch.promote_types(
        torch.promote_types(out.dtype, softmax_max.dtype), torch.float32
    )
    lowest = torch.finfo(accumulate_dtype).min
    smallest = torch.finfo(accumulate_dtype).tiny
    starts = None if lengths is None else (0, *accumulate(lengths))
    part_starts = None if part_lengths is None else (0, *accumulate(part_lengths))
    for row, part_row, count in _pieces(intervals, starts, part_starts):
        running_max = _stats_view(softmax_max, row, count, starts)
        running_sum = _stats_view(softmax_sum, row, count, starts)
        max_a = running_max.to(accumulate_dtype).clamp_min(lowest)
        max_b = (
            _stats_view(part_max, part_row, count, part_starts)
            .to(accumulate_dtype)
            .clamp_min(lowest)
        )
        merged_max = torch.maximum(max_a, max_b)
        sum_a = running_sum * (max_a - merged_max).exp()
        sum_b = _stats_view(part_sum, part_row, count, part_starts) * (max_b - merged_max).exp()
        merged_sum = sum_a + sum_b
        divisor = merged_sum.clamp_min(smallest)
        running_max.copy_(merged_max)
        running_sum.copy_(merged_sum)
        rows = out[row : row + count]
        weighted = part_out[part_row : part_row + count] * (sum_b / divisor)[..., :1]
        rows.copy_((rows * (sum_a / divisor)[..., :1]).add_(weighted))


def _pieces(
    intervals: tuple[Interval, ...],
    starts: tuple[int, ...] | None,
    part_starts: tuple[int, ...] | None,
) -> Iterator[tuple[int, int, int]]:
    """Yields (row, row of the partial result, count), cut where a sequence of an NTD layout ends."""
    part_row = 0
    for start, end in intervals:
        row = start
        while row < end:
            count = end - row
            if starts is not None:
                count = min(count, _sequence_at(row, starts)[1] - row)
            if part_starts is not None:
                count = min(count, _sequence_at(part_row, part_starts)[1] - part_row)
            yield row, part_row, count
            row += count
            part_row += count


def _stats_view(
    stats: torch.Tensor, row: int, count: int, starts: tuple[int, ...] | None
) -> torch.Tensor:
    """Returns a view [count, heads, width] of token rows inside one sequence."""
    if starts is None:
        return stats[row : row + count]
    first, last = _sequence_at(row, starts)
    _, heads, width = stats.shape
    sequence = stats.view(-1)[first * heads * width : last * heads * width].view(
        heads, last - first, width
    )
    return sequence[:, row - first : row - first + count].transpose(0, 1)


def _sequence_at(row: int, starts: tuple[int, ...]) -> Interval:
    """Returns the bounds of the sequence that holds a row."""
    after = bisect_right(starts, row)
    return starts[after - 1], starts[after]
