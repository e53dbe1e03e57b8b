"""Figures that makers publish of devices, by names that people give: those that plans assume, and further ones."""

from __future__ import annotations

from pa_npu.errors import UserError
from pa_npu.platform.typical import TypicalSpeed, typical_speed

# An Ascend 910C (A3) has two dies, each a device.
PUBLISHED = {
    **{kind: typical_speed(kind) for kind in ("npu", "cuda", "cpu")},
    "a3": TypicalSpeed(
        "A3 (a die of an Ascend 910C)",
        376e12,
        1.6e12,
        0.35,
        0.008,
        2e-5,
        0.02,
        memory_gib=64,
        source="half of a 910C, arXiv 2506.12708: 752 Tflop/s, 128 GB at 3.2 TB/s, unified bus 392 "
        "GB/s, RoCE 400 Gbit/s",
    ),
    "h100": TypicalSpeed(
        "H100",
        989e12,
        3.35e12,
        0.4,
        0.006,
        2e-5,
        0.015,
        node_bytes=450e9,
        wire_bytes=50e9,
        memory_gib=80,
        prefix_block=16,
        source="NVIDIA H100 SXM data sheet: 989 Tflop/s dense, 3.35 TB/s, NVLink 900 GB/s both "
        "ways; 400 Gbit/s per device",
    ),
}
# Names by which a device can be asked for, beside the kinds of run.device.
_OTHER_NAMES = {"910b": "npu", "a2": "npu", "910c": "a3", "a100": "cuda"}


def published_speed(name: str) -> TypicalSpeed:
    """Return the speed of a device by its name or kind, in any case.

    Raises UserError for one that is not in the table.
    """
    key = name.lower()
    speed = PUBLISHED.get(_OTHER_NAMES.get(key, key))
    if speed is None:
        known = ", ".join([*PUBLISHED, *_OTHER_NAMES])
        raise UserError(f"{name[:40]!r} is no device with published figures; give one of {known}")
    return speed
