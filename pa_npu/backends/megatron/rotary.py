"""Rotary positions per token: cos and sin rows for the restarted positions of a packed sequence."""

from __future__ import annotations

import math

import torch

from pa_npu.families.rope import Rope
from pa_npu.families.spec import ModelSpec


class RotaryTable:
    """cos and sin of every position, grown on demand and kept per device and dtype; rows are picked by position."""

    def __init__(self, spec: ModelSpec) -> None:
        self._inverse_frequencies = inverse_frequencies(spec.rope, spec.head_dim)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(
        self, positions: torch.Tensor, num_positions: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [tokens, 1, head_dim] in `dtype`, both halves equal.

        positions: int64 [tokens] on the device, all below `num_positions` (a host number, so that nothing waits for the
        device).
        """
        cos, sin = self._table(positions.device, dtype, num_positions)
        return cos[positions], sin[positions]

    def _table(self, device: torch.device, dtype: torch.dtype, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._tables.get((device, dtype))
        if table is None or table[0].shape[0] < num_positions:
            length = 1 << max(num_positions - 1, 255).bit_length()
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._inverse_frequencies)
            angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
            table = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
            self._tables[device, dtype] = table
        return table


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2], as transformers' modeling_rope_utils computes them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, float(rope.original_positions)
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, scaled)
