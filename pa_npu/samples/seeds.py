"""Sampling seeds: one per group and one per later turn, a hash of what identifies the tokens."""

from __future__ import annotations

import hashlib
import struct


def group_seed(run_seed: int, iteration: int, index: int) -> int:
    """Returns the 31-bit seed of group `index` of `iteration`; the first turn of its sample i uses
    seed + i.

    A hash rather than a sum, so that neighbouring groups, iterations and runs share no seeds. It
    depends on nothing that timing could change, which is half of what makes sync and periodic runs
    sample the same tokens (I4).
    """
    return _seed(struct.pack("<QQQ", run_seed, iteration, index), b"pa_npu.rollout")


def turn_seed(group: int, sample: int, turn: int) -> int:
    """Returns the 31-bit seed of a sample's turn, from its group's seed: seed + sample for the
    first turn (number 0), a hash for later ones.
    """
    if turn == 0:
        return group + sample
    return _seed(struct.pack("<QQQ", group, sample, turn), b"pa_npu.turn")


def _seed(identity: bytes, purpose: bytes) -> int:
    digest = hashlib.blake2b(identity, digest_size=4, person=purpose).digest()
    return int.from_bytes(digest, "little") >> 1
