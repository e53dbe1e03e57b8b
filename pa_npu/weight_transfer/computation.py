"""The numbers that a model's modules compute with beside their weights, compared by both ends (I5).

Trainers and engines read one config.json, but each end's own code interprets it: a rotary base or
scaling that a release reads from another key, an attention scale, an epsilon, a router's number of
experts. In bf16 an error of some percent in one of them drowns in the rounding of log-probs. So
each end reports what its live modules hold, and the two must agree before the first iteration.

Imports torch and msgspec only, because it runs inside engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

# Rotations are compared at these positions, near and far, as long as both ends have them.
POSITIONS = (1, 17, 120, 1000, 4000, 30000)
# Some engines keep a rotation in the model's type: bf16 rounds a cosine by 2^-9.
_ROTATION_TOLERANCE = 2.0**-7
_RELATIVE_TOLERANCE = 1e-5


class Computation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers of one end. An empty field is unknown, and is not compared.

    rotations: by position, the cosines and then the sines of every rotated pair, scaled as they are
        applied.
    attention_scales, norm_epsilons: distinct values over all modules, rising.
    experts_per_token: distinct values over all routers.
    renormalises: whether routers scale the chosen weights to a sum of 1.
    """

    rotations: dict[int, list[float]] = {}
    attention_scales: list[float] = []
    norm_epsilons: list[float] = []
    experts_per_token: list[int] = []
    renormalises: list[bool] = []


def rotations_of(
    inverse_frequencies: torch.Tensor, scale: float = 1.0, num_positions: int | None = None
) -> dict[int, list[float]]:
    """Returns Computation.rotations.

    `inverse_frequencies`: [pairs]. `num_positions`: of the model; None if it has no limit.
    """
    rotations: dict[int, list[float]] = {}
    for position in POSITIONS:
        if num_positions is not None and position >= num_positions:
            break
        # As models do, the angle is computed in fp32, which rounds far positions.
        angles = inverse_frequencies.detach().float().cpu() * float(position)
        rotations[position] = torch.cat([angles.cos(), angles.sin()]).mul(scale).tolist()
    return rotations


def computation_of(modules: Iterable[torch.nn.Module]) -> Computation:
    """Reads modules of transformers and of vLLM, by the attributes that their computation uses."""
    rotations: dict[int, list[float]] = {}
    scales: set[float] = set()
    epsilons: set[float] = set()
    experts: set[int] = set()
    renormalises: set[bool] = set()
    for module in modules:
        name = type(module).__name__
        if "RMSNorm" in name:
            epsilons |= _numbers(module, "variance_epsilon", "eps")
        if "Attention" in name:
            of_engine = _numbers(getattr(module, "impl", None), "scale")
            scales |= of_engine or _numbers(module, "scaling")
        if not rotations and "Rotary" in name:
            rotations = _rotations(module)
        if _is_router(module):
            experts.add(int(module.top_k))  # type: ignore[arg-type]
            values = _values(module, "norm_topk_prob", "renormalize")
            renormalises |= {bool(value) for value in values}
    return Computation(
        rotations=rotations,
        attention_scales=sorted(scales),
        norm_epsilons=sorted(epsilons),
        experts_per_token=sorted(experts),
        renormalises=sorted(renormalises),
    )


def disagreements(trainers: Computation, engine: Computation) -> list[str]:
    """Returns in words the differences of the two ends; empty if they agree in all known fields."""
    differences: list[str] = []
    for position in sorted(trainers.rotations.keys() & engine.rotations.keys()):
        ours = trainers.rotations[position]
        theirs = engine.rotations[position]
        if len(ours) != len(theirs):
            differences.append(
                f"rotary embedding: {len(ours) // 2} pairs here, {len(theirs) // 2} there"
            )
            break
        largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        if not largest <= _ROTATION_TOLERANCE * max(1.0, max(map(abs, ours))):
            differences.append(
                f"rotary embedding: cosines and sines of position {position} differ by up to "
                f"{largest:.3g}"
            )
            break
    values: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "attention scale": (trainers.attention_scales, engine.attention_scales),
        "epsilon of norms": (trainers.norm_epsilons, engine.norm_epsilons),
        "experts per token": (trainers.experts_per_token, engine.experts_per_token),
        "routers that renormalise": (trainers.renormalises, engine.renormalises),
    }
    for name, (of_trainers, of_engine) in values.items():
        if of_trainers and of_engine and not _equal(of_trainers, of_engine):
            differences.append(
                f"{name}: {_listed(of_trainers)} of trainers, {_listed(of_engine)} of the engine"
            )
    return differences


def _equal(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(
        math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE) for a, b in zip(ours, theirs, strict=True)
    )


def _listed(values: Sequence[float]) -> str:
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values[:4]]
    return ", ".join(texts)


def _values(module: Any, *names: str) -> list[Any]:
    """Returns the first attribute that a module has, in a list; empty if it has none."""
    for name in names:
        value = getattr(module, name, None)
        if value is not None:
            return [value]
    return []


def _numbers(module: Any, *names: str) -> set[float]:
    return {float(value) for value in _values(module, *names) if isinstance(value, int | float)}


def _is_router(module: Any) -> bool:
    """Returns whether a module chooses experts.

    Routers of transformers and vLLM have top_k and number their experts.
    """
    counts = ("num_experts", "global_num_experts")
    return isinstance(getattr(module, "top_k", None), int) and any(
        hasattr(module, name) for name in counts
    )


def _rotations(module: Any) -> dict[int, list[float]]:
    """Returns the rotations of a rotary module, vLLM's or transformers'."""
    cache = getattr(module, "cos_sin_cache", None)
    # vLLM's is [positions, cosines then sines].
    if isinstance(cache, torch.Tensor) and cache.dim() == 2:
        positions = [position for position in POSITIONS if position < len(cache)]
        return {position: cache[position].float().tolist() for position in positions}
    frequencies = getattr(module, "inv_freq", None)
    if isinstance(frequencies, torch.Tensor) and frequencies.dim() == 1:  # transformers'
        return rotations_of(frequencies, float(getattr(module, "attention_scaling", 1.0)))
    return {}
