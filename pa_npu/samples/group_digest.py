"""Takes a group's digests for the run's chain (telemetry/chain.py) from what goes into the buffer."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import numpy as np

from pa_npu.samples.group import Group
from pa_npu.telemetry.chain import RESPONSE, GroupDigest


def digest_group(group: Group, slots: Mapping[tuple[int, int], tuple[int, int] | None]) -> GroupDigest:
    """slots: each (replica, slot) that has the group, and which responses that replica trains;
    None: all."""
    size = group.num_samples
    tokens, logprobs = group.tokens[group.trained], group.logprobs[group.trained]
    lengths = group.trained_lengths
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # a response's first trained token has its advantage
    first_rows = np.flatnonzero(group.trained)[starts]
    responses = np.empty(size, RESPONSE)
    bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
    responses["tokens"] = [zlib.crc32(tokens[start:end].data) for start, end in bounds]
    responses["logprobs"] = [zlib.crc32(logprobs[start:end].data) for start, end in bounds]
    responses["length"] = lengths
    responses["logprob_sum"] = np.add.reduceat(logprobs, starts, dtype=np.float64)
    responses["reward"] = group.rewards
    responses["advantage"] = group.advantages[first_rows]
    places = tuple((*slot, *(part or (0, size))) for slot, part in slots.items())
    return GroupDigest(
        index=group.index,
        prompt=group.prompt_id,
        places=places,
        context=_context(group),
        tokens=_digest(tokens),
        logprobs=_digest(logprobs),
        responses=responses,
    )


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(array.data, digest_size=16).digest()


def _context(group: Group) -> bytes:
    """Of what trainers get beside the policy's tokens and their log-probs."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (group.lengths, group.tokens, group.trained, group.versions, group.finished):
        digest.update(np.ascontiguousarray(array).data)
    for column in sorted(group.columns, key=lambda column: column.name):
        digest.update(column.name.encode())
        digest.update(np.ascontiguousarray(group.columns[column]).tobytes())
    return digest.digest()
