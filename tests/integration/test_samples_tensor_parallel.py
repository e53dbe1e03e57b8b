"""Four ranks of one replica (TP=2, PP=2 over gloo) read the same groups from a producer that is late.

The test is the coordinator; run as a script this file is one rank. The collectives' timeout is shorter than the producer's
delay, so a rank that waited for rollouts inside a collective would fail.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pa_npu.control.channel import CHUNK_BYTES, StoreChannel, connect
from pa_npu.errors import DeadlineExceeded
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.rollout_buffer import StoreRolloutBuffer
from pa_npu.samples.types import Group
from pa_npu.samples.wire import to_bytes
from tests.helpers.rank_processes import rank_processes

TENSOR_PARALLEL, PIPELINE_PARALLEL = 2, 2
RANKS = TENSOR_PARALLEL * PIPELINE_PARALLEL
GROUPS, RESPONSES, MICROBATCH_RESPONSES, PAD = 3, 4, 2, 4
COLLECTIVE_TIMEOUT_S, PRODUCER_DELAY_S, MISSING_TIMEOUT_S = 4.0, 5.0, 0.5


def make_group(index: int) -> Group:
    random = np.random.default_rng(index)
    # The last group is larger than one chunk of the store.
    lengths = random.integers(1, 200_000 if index == GROUPS - 1 else 50, RESPONSES, dtype=np.int32)
    lengths[0] = 400_000 if index == GROUPS - 1 else lengths[0]
    total = int(lengths.sum())
    return Group.of_responses(
        iteration=0,
        version=0,
        index=index,
        prompt_id=index,
        prompt_tokens=random.integers(0, 1000, 17, dtype=np.int32),
        response_tokens=random.integers(0, 1000, total, dtype=np.int32),
        response_lengths=lengths,
        logprobs=-random.random(total, dtype=np.float32),
        rewards=random.random(RESPONSES, dtype=np.float32),
        advantages=random.standard_normal(RESPONSES, dtype=np.float32),
        finished=np.ones(RESPONSES, np.uint8),
    )


def digest(microbatches: Iterable[Microbatch]) -> list[str]:
    digests = []
    for microbatch in microbatches:
        sha = hashlib.sha256(repr((microbatch.group_indices, microbatch.layout.lengths)).encode())
        for name in ("tokens", "rows", "targets", "engine_logprobs", "advantages", "response_index"):
            sha.update(getattr(microbatch, name).numpy().tobytes())
        digests.append(sha.hexdigest())
    return digests


class CountingBuffer(StoreRolloutBuffer):
    """Counts how often this rank fetches a group's bytes from the store."""

    num_reads = 0

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        self.num_reads += 1
        return super().read_bytes(iteration, replica, slot)


def rank_main(rank: int, port: int) -> None:
    store = connect("127.0.0.1", port, 30.0)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    stages = [list(range(s * TENSOR_PARALLEL, (s + 1) * TENSOR_PARALLEL)) for s in range(PIPELINE_PARALLEL)]
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in stages]
    channel = StoreChannel(connect("127.0.0.1", port, 30.0))
    buffer = CountingBuffer(channel, "run", readers=RANKS)

    def iterator(iteration: int, timeout_s: float) -> MicrobatchIterator:
        return MicrobatchIterator(
            buffer,
            replica=0,
            num_replicas=1,
            iteration=iteration,
            groups=GROUPS,
            order="prompt",
            responses_per_microbatch=MICROBATCH_RESPONSES,
            shared_prompt=True,
            pad_multiple=PAD,
            timeout_s=timeout_s,
            tensor_group=groups[rank // TENSOR_PARALLEL],
        )

    channel.add("ready", 1)
    microbatches = iterator(0, 30.0)
    result: dict[str, Any] = {"digests": digest(microbatches), "waited_s": microbatches.waited_s}
    microbatches.finish()
    try:
        next(iterator(1, MISSING_TIMEOUT_S))
    except DeadlineExceeded as error:
        result["deadline"] = str(error)
    result["reads"] = buffer.num_reads
    channel.put_bytes(f"result/{rank}", json.dumps(result).encode())
    dist.destroy_process_group()


@pytest.mark.integration
def test_all_ranks_of_a_replica_get_the_same_microbatches_from_a_late_producer() -> None:
    with rank_processes(__file__, RANKS, timeout_s=120) as ranks:
        ranks.wait_until_all_have_added("ready")
        buffer = StoreRolloutBuffer(ranks.channel, "run", readers=RANKS)
        groups = [make_group(index) for index in range(GROUPS)]
        assert len(to_bytes(groups[-1])) > CHUNK_BYTES
        buffer.put(groups[0], 0, 0)
        time.sleep(PRODUCER_DELAY_S)
        for slot in (2, 1):  # out of order, as groups complete
            buffer.put(groups[slot], 0, slot)
        results = ranks.results()
    expected = digest(m for group in groups for m in build_microbatches(group, MICROBATCH_RESPONSES, True, PAD))
    for rank, result in enumerate(results):
        assert result["digests"] == expected, f"rank {rank} trained something else"
        assert result["waited_s"] >= PRODUCER_DELAY_S - 0.5, "the wait must be counted as idle time"
        assert f"deadline of {MISSING_TIMEOUT_S:g} s reached" in result["deadline"]
        assert "the group of slot 0, replica 0, iteration 1" in result["deadline"]
    assert [result["reads"] for result in results] == [GROUPS, 0, GROUPS, 0], "only the leader of a stage reads"
    left = [slot for slot in range(GROUPS) if ranks.channel.exists(f"buffer/run/0/0/{slot}")]
    assert not left, f"slots {left} stayed in the store after all ranks were done"


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]))
