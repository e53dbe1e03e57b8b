"""Figures of usual devices, for plans that are made where the hardware is not at hand; standard library only."""

from __future__ import annotations

from dataclasses import dataclass

# Of publish.bucket_mib=auto on accelerators. At 25 GB/s it is 2.7 ms on the wire, 27 times a collective's latency.
LARGEST_BUCKET_BYTES = 64 * 2**20

# Memory of the devices that a plan for absent hardware assumes, GiB. cpu: devices are cores without memory of their own.
_TYPICAL_MEMORY_GIB = {"npu": ("Ascend 910B", 64), "cuda": ("A100 or H100", 80)}


@dataclass(frozen=True)
class TypicalSpeed:
    """Of one device. flops, memory_bytes: per second, at their peaks. training: share of the peak that training reaches.

    decode_step_s: what a decode step costs whatever it computes. sequence_s: what each sequence adds to it beside arithmetic and
    reading its keys and values. group_s: what a group costs a trainer beside arithmetic.
    """

    name: str
    flops: float
    memory_bytes: float
    training: float
    decode_step_s: float
    sequence_s: float
    group_s: float


# Peaks are the makers'. A 7B engine then has 18 ms + 0.05 ms per sequence, as was measured on such devices. cpu: one core, measured
# with models of 0.5 to 2.4 M parameters, which are mostly dispatch of operations.
_TYPICAL_SPEED = {
    "npu": TypicalSpeed("Ascend 910B", 313e12, 1.6e12, 0.35, 0.008, 2e-5, 0.02),
    "cuda": TypicalSpeed("A100", 312e12, 2.0e12, 0.4, 0.008, 2e-5, 0.02),
    "cpu": TypicalSpeed("a core", 60e9, 20e9, 0.8, 0.005, 1.3e-4, 0.009),
}


def typical_memory(kind: str) -> tuple[str, int] | None:
    """(what device, its bytes) to plan with where the hardware is not at hand; None for a kind without memory of its own."""
    name, gib = _TYPICAL_MEMORY_GIB.get(kind, ("", 0))
    return (name, gib * 2**30) if gib else None


def typical_speed(kind: str) -> TypicalSpeed:
    """Of a device of this kind; Ascend's where the kind is not known."""
    return _TYPICAL_SPEED.get(kind, _TYPICAL_SPEED["npu"])
