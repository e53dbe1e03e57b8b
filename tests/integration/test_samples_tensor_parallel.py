"""Four ranks of one replica (TP=2, PP=2 over gloo) get the same groups from their reader, from a producer that is late.

The test is the coordinator; a fork of it with `main` is one rank. The collectives' timeout is
shorter than the producer's delay, so a rank that waited for rollouts inside a collective would
fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pa_npu.config.mesh import Mesh
from pa_npu.control.channel import CHUNK_BYTES, StoreChannel, connect
from pa_npu.errors import DeadlineExceeded
from pa_npu.samples.attachments import Attachment, Placeholders
from pa_npu.samples.columns import Column, RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.replica_feed import GroupsNotPassed, ReplicaLinks
from pa_npu.samples.rollout_buffer import RolloutBuffer, ShardPayloads, host_shard
from pa_npu.samples.wire import to_bytes
from tests.helpers.rank_processes import rank_processes
from tools.groups import group_of_responses

TENSOR_PARALLEL, PIPELINE_PARALLEL = 2, 2
RANKS = TENSOR_PARALLEL * PIPELINE_PARALLEL
GROUPS, RESPONSES, MICROBATCH_RESPONSES, PAD = 3, 4, 2, 4
COLLECTIVE_TIMEOUT_S, PRODUCER_DELAY_S, MISSING_TIMEOUT_S = 4.0, 5.0, 0.5


MADE_UP = Column("made_up", "uint16", (3, 2), "environment", "a loss")
EXPERT_CHOICES = Column("expert_choices", "uint8", (2,), "engine", "the router", tokens="all")
COLUMNS = RunColumns((MADE_UP, EXPERT_CHOICES))


IMAGE_START, IMAGE_TOKENS, IMAGE_BYTES = 3, 5, 5 * 4 * 1024 * 4


def image(number: int) -> Placeholders:
    """pixels float32 [20, 1024] and grid int64 [1, 3], behind tokens of the prompt."""
    random = np.random.default_rng(number)
    pixels = Attachment("pixels", random.random((4 * IMAGE_TOKENS, 1024), dtype=np.float32))
    grid = Attachment("grid", np.array([[1, 4, IMAGE_TOKENS]], np.int64))
    return Placeholders(IMAGE_START, IMAGE_TOKENS, (pixels, grid))


def attached(group: Group) -> Group:
    """The first group's samples show one image, the second's a pair of images, the last's none."""
    images = [[0, 0, 0, 0], [1, 1, 2, 2], []][group.index]
    starts = group.offsets().tolist()
    runs = [image(number).moved(start) for number, start in zip(images, starts, strict=False)]
    return replace(group, placeholders=runs)


def make_group(index: int) -> Group:
    """Its columns are told by its tokens."""
    group = attached(bare_group(index))
    made_up = (group.tokens * group.trained)[:, None, None] + np.arange(6).reshape(
        3, 2
    ) * group.trained[:, None, None]
    expert_choices = group.tokens[:, None] + np.arange(2)
    return replace(
        group,
        columns={
            MADE_UP: made_up.astype(np.uint16),
            EXPERT_CHOICES: expert_choices.astype(np.uint8),
        },
    )


def bare_group(index: int) -> Group:
    random = np.random.default_rng(index)
    # The last group is larger than one chunk of the store.
    lengths = random.integers(1, 200_000 if index == GROUPS - 1 else 50, RESPONSES, dtype=np.int32)
    lengths[0] = 400_000 if index == GROUPS - 1 else lengths[0]
    total = int(lengths.sum())
    return group_of_responses(
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


TENSORS = ("tokens", "rows", "targets", "ages", "response_index", "columns")


def digest(microbatches: Iterable[Microbatch]) -> list[str]:
    digests = []
    for microbatch in microbatches:
        sha = hashlib.sha256(
            repr((microbatch.group_indices, microbatch.sources, microbatch.layout.lengths)).encode()
        )
        for name in TENSORS:
            value = microbatch.columns if name == "columns" else {name: getattr(microbatch, name)}
            for tensor in (microbatch.packed | value).values():
                sha.update(tensor.numpy().tobytes())
        for packed in microbatch.attachments:
            sha.update(repr((sorted(packed.digests.items()), packed.length)).encode())
            for tensor in (packed.rows, packed.places, *packed.arrays.values()):
                sha.update(tensor.numpy().tobytes())
        digests.append(sha.hexdigest())
    return digests


def images_of(microbatch: Microbatch) -> list[tuple[int, int, int]]:
    """Of each image: its first packed row, its rows, and the bytes of its pixels."""
    return [
        (int(packed.rows[0]), len(packed.rows), packed.arrays["pixels"].nbytes)
        for packed in microbatch.attachments
    ]


def made_up_in_order(microbatch: Microbatch) -> bool:
    """Returns whether each target has the values that its token tells."""
    wanted = microbatch.targets[:, None, None].numpy() + np.arange(6).reshape(3, 2)
    return bool((microbatch.columns["made_up"].numpy() == wanted).all())


class WatchedBuffer(RolloutBuffer):
    """Counts how often this rank fetches a group's bytes from the store; in iteration 2 the process
    ends there.
    """

    num_reads = 0

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        self.num_reads += 1
        if iteration == 2:
            os._exit(0)
        return super().read_bytes(iteration, replica, slot)


def rank_main(rank: int, port: int) -> None:
    store = connect("127.0.0.1", port, 30.0)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=30),
    )
    stages = [
        list(range(s * TENSOR_PARALLEL, (s + 1) * TENSOR_PARALLEL))
        for s in range(PIPELINE_PARALLEL)
    ]
    tensor = [dist.new_group(ranks, timeout=timeout) for ranks in stages]
    replica = dist.new_group(list(range(RANKS)), timeout=timeout)
    links = ReplicaLinks(
        replica, tensor[rank // TENSOR_PARALLEL], Mesh(TENSOR_PARALLEL, PIPELINE_PARALLEL)
    )
    channel = StoreChannel(connect("127.0.0.1", port, 30.0))
    buffer = WatchedBuffer(channel, "run", readers=RANKS, columns=COLUMNS)
    own = host_shard(channel, 0, "127.0.0.1") if rank == 0 else None
    in_shards = RolloutBuffer(
        channel, "shards", RANKS, payloads=ShardPayloads(channel, 30.0, own), columns=COLUMNS
    )

    def iterator(
        iteration: int, timeout_s: float, source: RolloutBuffer = buffer
    ) -> MicrobatchIterator:
        return MicrobatchIterator(
            source,
            replica=0,
            num_replicas=1,
            iteration=iteration,
            groups=GROUPS,
            order="prompt",
            responses_per_microbatch=MICROBATCH_RESPONSES,
            shared_prompt=True,
            pad_multiple=PAD,
            timeout_s=timeout_s,
            links=links,
        )

    channel.add("ready", 1)
    sharded = iterator(0, 30.0, in_shards)
    from_shard = list(sharded)
    sharded.finish()
    channel.add("reads", 1)
    microbatches = iterator(0, 30.0)
    taken = list(microbatches)
    microbatches.finish()
    result: dict[str, Any] = {
        "trained": digest(taken),
        "in_order": [made_up_in_order(microbatch) for microbatch in taken],
        "images": [images_of(microbatch) for microbatch in taken],
        "waited_s": microbatches.waited_s,
        "traffic": asdict(microbatches.traffic),
    }
    same = [digest(actual) for actual in (taken, from_shard)]
    result["from_shard"] = {"same": same[0] == same[1], **asdict(sharded.traffic)}
    try:
        next(iterator(1, MISSING_TIMEOUT_S))
    except DeadlineExceeded as error:
        result["deadline"] = str(error)
    result["reads"] = buffer.num_reads
    if rank == 0:
        channel.put_bytes("result/0", json.dumps(result).encode())
    start = time.monotonic()
    try:
        next(iterator(2, 30.0))
    except GroupsNotPassed as error:
        result["reader_gone"] = str(error)
    result["told_after_s"] = time.monotonic() - start
    channel.put_bytes(f"result/{rank}", json.dumps(result).encode())
    os._exit(0)  # the group has lost a member


@pytest.mark.integration
def test_every_group_is_read_once_for_its_replica_and_each_rank_gets_it(tmp_path: Path) -> None:
    """From a producer that is late.

    Then a group that never comes, and a reader that ends while it reads.
    """
    with rank_processes(__name__, RANKS, timeout_s=120, directory=tmp_path) as ranks:
        ranks.wait_until_all_have_added("ready")
        buffer = RolloutBuffer(ranks.channel, "run", readers=RANKS, ahead=2, columns=COLUMNS)
        groups = [make_group(index) for index in range(GROUPS)]
        sizes = [len(to_bytes(group, COLUMNS)) for group in groups]
        bare = [len(to_bytes(replace(group, placeholders=()), COLUMNS)) for group in groups]
        sharded = RolloutBuffer(
            ranks.channel,
            "shards",
            readers=RANKS,
            payloads=ShardPayloads(ranks.channel, 30.0),
            columns=COLUMNS,
        )
        for slot, group in enumerate(groups):
            sharded.put(group, 0, slot)
        assert sizes[-1] > CHUNK_BYTES
        buffer.put(
            replace(
                groups[0],
                iteration=2,
                versions=groups[0].versions + 2 * groups[0].trained.astype(np.int32),
            ),
            0,
            0,
        )
        buffer.put(groups[0], 0, 0)
        ranks.wait_until_all_have_added("reads")
        time.sleep(PRODUCER_DELAY_S)
        for slot in (2, 1):  # out of order, as groups complete
            buffer.put(groups[slot], 0, slot)
        results = ranks.results()
    expected = [
        m for group in groups for m in build_microbatches(group, MICROBATCH_RESPONSES, True, PAD)
    ]
    sent = sum((16 + size) * (RANKS - 1) for size in sizes)
    for number, images in enumerate((1, 2, 0)):
        # tokens behind different images travel for each, and what says where images stand
        rest = sizes[number] - bare[number] - images * IMAGE_BYTES
        assert 0 <= rest < 1500 and (rest > 0) == (images > 0), "an image travels once per group"
    shown = [[IMAGE_START, IMAGE_TOKENS, IMAGE_BYTES]]
    for rank, result in enumerate(results):
        assert result["trained"] == digest(expected), f"rank {rank} trained something else"
        assert result["in_order"] == [True] * len(expected), (
            f"rank {rank}: made-up values of other targets"
        )
        assert result["images"] == [shown] * 4 + [[]] * 2, (
            f"rank {rank}: each half of a group has its image once"
        )
        # reading the first group takes a part of the delay, on a busy machine a second and more
        assert result["waited_s"] >= PRODUCER_DELAY_S / 2, "the wait must be counted as idle time"
        assert result["traffic"] == {
            "reads": GROUPS,
            "buffer_bytes": sum(sizes),
            "head_bytes": sum(sizes),
            "collective_bytes": sent,
        }
        from_head = result["from_shard"].pop("head_bytes")
        assert result["from_shard"] == {
            "same": True,
            "reads": GROUPS,
            "buffer_bytes": sum(sizes),
            "collective_bytes": sent,
        }
        assert 0 < from_head < 0.01 * sum(sizes), "of groups in a shard the head says what there is"
        assert f"deadline of {MISSING_TIMEOUT_S:g} s reached" in result["deadline"]
        assert "the group of slot 0, replica 0, iteration 1" in result["deadline"]
        if rank:
            assert "slot 0, replica 0, iteration 2 could not be passed" in result["reader_gone"]
            assert result["told_after_s"] < COLLECTIVE_TIMEOUT_S + 2
    assert [result["reads"] for result in results] == [GROUPS, 0, 0, 0], (
        "only the replica's reader reads"
    )
    names = [f"buffer/{name}/0/0/{slot}" for name in ("run", "shards") for slot in range(GROUPS)]
    left = [name for name in names if ranks.channel.exists(name)]
    assert not left, f"slots {left} stayed in the store after all ranks were done"


def main(argument: str) -> None:
    """Is a rank; argument: its number and the store's port."""
    rank, port = map(int, argument.split())
    rank_main(rank, port)
