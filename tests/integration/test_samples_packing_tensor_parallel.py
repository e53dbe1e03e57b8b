"""Two TP ranks pack what the leader found in the buffer, and wait for a microbatch's first group outside of collectives.

The test is the coordinator; a fork of it with `main` is one rank. It puts groups while the ranks
are between microbatches, so that what is there is known. The collectives' timeout is shorter than
the pause before the second put.
"""

from __future__ import annotations

import hashlib
import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pa_npu.config.mesh import Mesh
from pa_npu.control.channel import StoreChannel, connect
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import Microbatch, cut, pack
from pa_npu.samples.replica_feed import ReplicaLinks
from pa_npu.samples.rollout_buffer import RolloutBuffer
from tests.helpers.rank_processes import rank_processes
from tests.helpers.trainer_rank import make_groups

RANKS, RESPONSES, MAX_TOKENS, PAD = 2, 4, 100, 4
# slots put together, the one that the ranks wait for last, so that the others are there when it is
ARRIVALS = ((0,), (2, 3, 1), (5, 4))
COLLECTIVE_TIMEOUT_S, PAUSE_S = 5.0, 5.5
GROUPS = make_groups(0, 6, RESPONSES, seed=1)


def digest(microbatch: Microbatch) -> str:
    sha = hashlib.sha256(repr((microbatch.group_indices, microbatch.layout.lengths)).encode())
    for name in ("tokens", "rows", "targets", "engine_logprobs", "advantages", "response_index"):
        sha.update(getattr(microbatch, name).numpy().tobytes())
    return sha.hexdigest()


class BlindBuffer(RolloutBuffer):
    """A peer's: it must not look for itself, because the answer may have changed since the leader
    looked.
    """

    def ready(self, iteration: int, replica: int, slot: int) -> bool:
        raise AssertionError("only the leader may ask whether a slot is ready")


def rank_main(rank: int, port: int) -> None:
    store = connect("127.0.0.1", port, 30.0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=30),
    )
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    group = dist.new_group(list(range(RANKS)), timeout=timeout)
    channel = StoreChannel(connect("127.0.0.1", port, 30.0))
    microbatches = MicrobatchIterator(
        (BlindBuffer if rank else RolloutBuffer)(channel, "run", readers=RANKS),
        replica=0,
        num_replicas=1,
        iteration=0,
        groups=len(GROUPS),
        order="completion",
        responses_per_microbatch=RESPONSES,
        shared_prompt=True,
        pad_multiple=PAD,
        max_tokens=MAX_TOKENS,
        timeout_s=30.0,
        links=ReplicaLinks(
            dist.new_group(list(range(RANKS)), timeout=timeout), tensor=group, mesh=Mesh(RANKS)
        ),
    )
    digests = []
    for number, microbatch in enumerate(microbatches):
        digests.append(digest(microbatch))
        channel.add(f"taken/{number}", 1)
    microbatches.finish()
    channel.put_bytes(f"result/{rank}", json.dumps(digests).encode())
    dist.destroy_process_group()


@pytest.mark.integration
def test_tensor_parallel_ranks_pack_what_the_leader_found(tmp_path: Path) -> None:
    with rank_processes(__name__, RANKS, timeout_s=60, directory=tmp_path) as ranks:
        buffer = RolloutBuffer(ranks.channel, "run", readers=RANKS)
        for number, slots in enumerate(ARRIVALS):
            if number:
                ranks.wait_until_all_have_added(f"taken/{number - 1}")
            if number == 1:
                time.sleep(PAUSE_S)
            for slot in slots:
                buffer.put(GROUPS[slot], 0, slot)
        results = ranks.results()
        left = [
            slot for slot in range(len(GROUPS)) if ranks.channel.exists(f"buffer/run/0/0/{slot}")
        ]
        assert not left, f"slots {left} stayed in the store after all ranks were done"
    packs = [
        [piece for slot in sorted(slots) for piece in cut(GROUPS[slot], RESPONSES)]
        for slots in ARRIVALS
    ]
    microbatches = [pack(pieces, True, PAD) for pieces in packs]
    assert all(microbatch.layout.total <= MAX_TOKENS for microbatch in microbatches), (
        "the test's own numbers"
    )
    expected = [digest(microbatch) for microbatch in microbatches]
    for rank, digests in enumerate(results):
        assert digests == expected, f"rank {rank} packed something else"


def main(argument: str) -> None:
    """Is a rank; argument: its number and the store's port."""
    rank, port = map(int, argument.split())
    rank_main(rank, port)
