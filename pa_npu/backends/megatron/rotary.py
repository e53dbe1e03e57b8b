"""Rotary positions per token: cos and sin rows for the restarted positions of a packed sequence."""

from __future__ import annotations

import math
from typing import Any

import torch

from pa_npu.errors import DataError
from pa_npu.families.spec import ModelSpec

SCALINGS = ("default", "linear", "llama3")


class RotaryTable:
    """cos and sin of every position, grown on demand and kept per device and dtype; rows are picked by position."""

    def __init__(self, spec: ModelSpec) -> None:
        self._inverse_frequencies = inverse_frequencies(spec)
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


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """fp32 [head_dim / 2]: theta ** (-2i / head_dim), scaled by `rope_scaling` (transformers' modeling_rope_utils).

    Raises DataError for a scaling other than default, linear and llama3.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in SCALINGS:
        raise DataError(
            f"model.path: {spec.path}: rope scaling {kind!r} is not supported; use a model with {', '.join(SCALINGS)}"
        )
    if kind == "default":
        return frequencies
    try:
        factor = float(scaling["factor"])
        if kind == "linear":
            return frequencies / factor
        return _llama3(frequencies, factor, scaling)
    except KeyError as error:
        raise DataError(
            f"model.path: {spec.path}: rope scaling {kind} has no {error.args[0]!r}; use an unmodified HF config"
        ) from None


def _llama3(frequencies: torch.Tensor, factor: float, scaling: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, scaled)
