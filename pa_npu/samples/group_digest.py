"""Digests of a group that goes into the buffer.

For the run's chain (telemetry/chain.py), and for trainers, which see by them that they read what
was put (I2).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping

import numpy as np

from pa_npu.samples.columns import FIXED
from pa_npu.samples.group import Group
from pa_npu.telemetry.chain import NUMBERS, GroupDigest


def digest_group(
    group: Group, slots: Mapping[tuple[int, int], tuple[int, int] | None]
) -> GroupDigest:
    """Returns the digests of a group's content and the numbers of its responses.

    slots: each (replica, slot) that has the group, with the responses [first, last) that the
    replica trains; None means all.
    """
    size = group.num_samples
    tokens = group.tokens[group.trained]
    logprobs = group.logprobs[group.trained]
    lengths = group.trained_lengths
    # a response's first run of trained tokens has its advantage
    run_starts = group.runs[0]
    first_rows = run_starts[run_starts.searchsorted(group.offsets()[:-1])]
    ends = lengths.cumsum()
    starts = ends - lengths
    bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
    token_bytes = memoryview(tokens)
    logprob_bytes = memoryview(logprobs)
    # rows in the order of NUMBERS; a few operations on all of them, as this is done for every group
    responses = np.empty((len(NUMBERS), size), "<u4")
    responses[0] = [zlib.crc32(token_bytes[start:end]) for start, end in bounds]
    responses[1] = [zlib.crc32(logprob_bytes[start:end]) for start, end in bounds]
    responses[2] = lengths
    floats = responses.view("<f4")
    floats[3] = np.add.reduceat(logprobs.astype(np.float64), starts)
    floats[4] = group.rewards
    floats[5] = group.advantages[first_rows]
    places = []
    for (replica, slot), part in slots.items():
        first, last = part or (0, size)
        places.append((replica, slot, first, last))
    return GroupDigest(
        index=group.index,
        prompt=group.prompt_id,
        places=tuple(places),
        context=_context(group),
        tokens=_digest(tokens),
        logprobs=_digest(logprobs),
        responses=responses,
    )


def content_digest(group: Group) -> str:
    """Returns a digest of all that a group says, but for declared columns, of which each end makes
    some, and for the part that a replica trains.
    """
    arrays = [getattr(group, column.name) for column in FIXED]
    arrays += [group.lengths, group.finished, group.rewards]
    if group.weight is not None:
        arrays.append(group.weight)
    # a checksum of each array finds every accident that a digest finds, in a sixth of its time
    pieces = [f"{group.run_seed} {group.iteration} {group.index} {group.prompt_id}".encode()]
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).data)
        pieces.append(struct.pack("<QI", array.size, checksum))
    for run in group.placeholders:
        pieces.append(f"{run.start} {run.length}".encode() + run.content)
    return hashlib.blake2b(b"".join(pieces), digest_size=8).hexdigest()


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(array.data, digest_size=16).digest()


def _context(group: Group) -> bytes:
    """Returns the digest of everything that trainers get beside the policy's tokens, their
    log-probs, rewards and advantages.

    Runs of trained tokens say which tokens are trained, and have one component and one version
    each, so that nothing is read twice. Attachments have digests already. If all tokens have
    component 1 and weight 1, and nothing is attached, this is the digest of earlier releases.
    """
    starts, ends = group.runs
    arrays = [
        group.lengths,
        group.finished,
        starts,
        ends,
        group.versions[starts],
        group.tokens[~group.trained],
    ]
    components = group.component[starts]
    if (components != 1).any():
        arrays.append(components)
    if group.weight is not None:
        arrays.append(group.weight)
    pieces = [array.tobytes() for array in arrays]
    for column in sorted(group.columns, key=lambda column: column.name):
        pieces += [column.name.encode(), group.columns[column].tobytes()]
    for run in group.placeholders:
        pieces += [np.array([run.start, run.length], "<i8").tobytes(), run.content]
    return hashlib.blake2b(b"".join(pieces), digest_size=16).digest()
