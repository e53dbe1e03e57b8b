"""Figures of usual devices, for plans that are made where the hardware is not at hand; imports nothing."""

from __future__ import annotations

# Of publish.bucket_mib=auto on accelerators. At 25 GB/s it is 2.7 ms on the wire, 27 times a collective's latency.
LARGEST_BUCKET_BYTES = 64 * 2**20

# Memory of the devices that a plan for absent hardware assumes, GiB. cpu: devices are cores without memory of their own.
_TYPICAL_MEMORY_GIB = {"npu": ("Ascend 910B", 64), "cuda": ("A100 or H100", 80)}


def typical_memory(kind: str) -> tuple[str, int] | None:
    """(what device, its bytes) to plan with where the hardware is not at hand; None for a kind without memory of its own."""
    name, gib = _TYPICAL_MEMORY_GIB.get(kind, ("", 0))
    return (name, gib * 2**30) if gib else None
