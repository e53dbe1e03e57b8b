"""Sampling seeds: one per group, derived from the run, the iteration and the group's place in it."""

from __future__ import annotations

import hashlib
import struct


def group_seed(run_seed: int, iteration: int, index: int) -> int:
    """31-bit seed of group `index` of `iteration`; its response i uses seed + i.

    A hash rather than a sum, so that neighbouring groups, iterations and runs share no seeds. It depends on nothing
    that timing could change, which is half of what makes sync and periodic runs sample the same tokens (I4).
    """
    digest = hashlib.blake2b(
        struct.pack("<QQQ", run_seed, iteration, index), digest_size=4, person=b"pa_npu.rollout"
    ).digest()
    return int.from_bytes(digest, "little") >> 1
