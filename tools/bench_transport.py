#!/usr/bin/env python
"""The way of groups and weights here (c10d store, collectives) beside Ray actors and Ray's object store, which move the same bytes.

    python tools/bench_transport.py [--rows 8x128,8x512,16x2048] [--groups 400] [--weights 512] [--repetitions 3] [--markdown FILE]

A row GxR has groups of G responses of R tokens. A producer makes each group's bytes known, a
consumer in a process of its own takes them and parses the group, both in turn and at most --ahead
of one another, as coordinator and trainer do:

    store        RolloutBuffer on the c10d store of a third process: what runs use
    actor        an actor that keeps bytes by key: the producer puts them, the consumer asks for them
    references   the producer puts bytes into the object store, an actor keeps references, the consumer gets the object

groups/s: with all of them under way. ms: from the put until the consumer has parsed it, one group
at a time. CPU us: of the producer, per group. Each put waits until its place has the group.
Weights: from one process into tensors of another, in buckets of 64 MiB, by gloo's broadcast and by
the object store (a put, a get without a copy, the copy into the tensor). Medians of repetitions, in
turn. Needs ray (pip install 'pa_npu[ray]').
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.control.channel import StoreChannel, connect
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.wire import from_bytes, to_bytes
from tools.groups import group_of_responses

# run as a file, this folder's parent is not on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.hardware import processor

HOST = "127.0.0.1"
PROMPT = 256
BUCKET_BYTES = 64 * 2**20
LIMIT_S = 120.0
WAYS = ("store", "actor", "references")
Put = Callable[[int], None]


@dataclass(frozen=True)
class Measured:
    """Figures of one repetition. latency_s: median of a group alone; cpu_s: of the producer, per
    group under way.
    """

    groups_per_s: float
    latency_s: float
    cpu_s: float


def group_of(responses: int, length: int, index: int) -> Group:
    """Returns a group of random tokens with the columns of every run."""
    rng = np.random.default_rng([37, index])
    total = np.arange(responses, dtype=np.float32) % 2
    return group_of_responses(
        iteration=0,
        version=0,
        index=index,
        prompt_id=index,
        prompt_tokens=rng.integers(3, 150_000, PROMPT).astype(np.int32),
        response_tokens=rng.integers(3, 150_000, responses * length).astype(np.int32),
        response_lengths=np.full(responses, length),
        logprobs=(rng.standard_normal(responses * length) - 2.0).astype(np.float32),
        rewards=total,
        advantages=total - total.mean(),
        finished=np.ones(responses, bool),
    )


def pump(put: Put, taken: Connection, groups: int, ahead: int) -> Measured:
    """Put groups one at a time, then all of them with at most `ahead` under way; `taken` has a
    message for each that was parsed.
    """
    alone = []
    for index in range(20):
        start_s = time.perf_counter()
        put(index)
        await_one(taken)
        alone.append(time.perf_counter() - start_s)
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    under_way = 0
    for index in range(20, 20 + groups):
        put(index)
        under_way += 1
        while under_way >= ahead or taken.poll():
            await_one(taken)
            under_way -= 1
    for _ in range(under_way):
        await_one(taken)
    seconds = time.perf_counter() - start_s
    cpu_s = time.process_time() - start_cpu_s
    return Measured(groups / seconds, statistics.median(alone), cpu_s / groups)


def await_one(taken: Connection) -> None:
    if not taken.poll(LIMIT_S):
        raise SystemExit(f"bench_transport: the consumer took no group within {LIMIT_S:g} s")
    taken.recv()


# ---- the store


def by_store(shape: tuple[int, int], groups: int, ahead: int) -> Measured:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    host = context.Process(target=host_store, args=(theirs,), daemon=True)
    host.start()
    with ended(host):
        port = ours.recv()
        taken, reports = context.Pipe()
        consumer = context.Process(target=take_from_store, args=(port, reports), daemon=True)
        consumer.start()
        with ended(consumer):
            await_one(taken)
            buffer = RolloutBuffer(StoreChannel(connect(HOST, port, LIMIT_S)), "run", readers=1)
            some = [group_of(*shape, index) for index in range(8)]
            return pump(
                lambda index: buffer.put(some[index % len(some)], 0, index), taken, groups, ahead
            )


def host_store(reports: Connection) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    reports.send(store.port)
    time.sleep(3600)


def take_from_store(port: int, reports: Connection) -> None:
    buffer = RolloutBuffer(StoreChannel(connect(HOST, port, LIMIT_S)), "run", readers=1)
    reports.send("ready")
    slot = 0
    while True:
        buffer.wait(0, 0, slot, LIMIT_S)
        buffer.read(0, 0, slot)
        buffer.done(0, 0, slot)
        reports.send(slot)
        slot += 1


@contextlib.contextmanager
def ended(process: Any) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.join()


# ---- Ray


def ray_module() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise SystemExit(
            "bench_transport: ray is not installed: pip install 'pa_npu[ray]'"
        ) from None


class Keeper:
    """An actor: what the producer put, until the consumer asks for it."""

    def __init__(self) -> None:
        import asyncio

        self._kept: dict[int, Any] = {}
        self._arrived: dict[int, Any] = {}
        self._event = asyncio.Event

    async def put(self, index: int, value: Any) -> None:
        self._kept[index] = value
        self._arrived.setdefault(index, self._event()).set()

    async def take(self, index: int) -> Any:
        await self._arrived.setdefault(index, self._event()).wait()
        del self._arrived[index]
        return self._kept.pop(index)


class Consumer:
    """An actor that takes and parses groups one after another."""

    def take(self, keeper: Any, count: int, connection_address: tuple[Any, ...]) -> None:
        from multiprocessing.connection import Client

        ray = ray_module()
        with Client(connection_address[0], authkey=connection_address[1]) as connection:
            for index in range(count):
                value = ray.get(keeper.take.remote(index), timeout=LIMIT_S)
                if isinstance(value, list):  # a reference
                    value = ray.get(value[0], timeout=LIMIT_S)
                from_bytes(value)
                connection.send(index)


def by_ray(shape: tuple[int, int], groups: int, ahead: int, *, references: bool) -> Measured:
    from multiprocessing.connection import Listener

    ray = ray_module()
    keeper = ray.remote(Keeper).options(num_cpus=0).remote()
    consumer = ray.remote(Consumer).options(num_cpus=0).remote()
    key = os.urandom(16)
    some = [group_of(*shape, index) for index in range(8)]

    def put(index: int) -> None:
        data = to_bytes(some[index % len(some)])
        # a reference inside of a list is not resolved on its way
        ray.get(keeper.put.remote(index, [ray.put(data)] if references else data), timeout=LIMIT_S)

    with Listener((HOST, 0), authkey=key) as listener:
        taking = consumer.take.remote(keeper, 20 + groups, (listener.address, key))
        try:
            with listener.accept() as taken:
                measured = pump(put, taken, groups, ahead)
            ray.get(taking, timeout=LIMIT_S)
            return measured
        finally:
            for actor in (keeper, consumer):
                ray.kill(actor)


# ---- weights


def weights_by_collective(num_bytes: int) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    peer = context.Process(
        target=receive_weights, args=(store.port, num_bytes, theirs), daemon=True
    )
    peer.start()
    with ended(peer):
        group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("weights", store), 0, 2, timedelta(seconds=LIMIT_S)
        )
        bucket = torch.ones(BUCKET_BYTES, dtype=torch.uint8)
        await_one(ours)
        group.broadcast(bucket[:1024], 0).wait()
        start_s = time.perf_counter()
        for _ in range(num_bytes // BUCKET_BYTES):
            group.broadcast(bucket, 0).wait()
        await_one(ours)
        return time.perf_counter() - start_s


def receive_weights(port: int, num_bytes: int, reports: Connection) -> None:
    torch.set_num_threads(1)
    store = connect(HOST, port, LIMIT_S)
    group: Any = dist.ProcessGroupGloo(
        dist.PrefixStore("weights", store), 1, 2, timedelta(seconds=LIMIT_S)
    )
    weights = torch.zeros(num_bytes, dtype=torch.uint8)
    reports.send("ready")
    group.broadcast(weights[:1024], 0).wait()
    for part in weights.split(BUCKET_BYTES):
        group.broadcast(part, 0).wait()
    reports.send("done")
    time.sleep(60)


class Loader:
    """An actor whose tensors get what the object store has."""

    def __init__(self, num_bytes: int) -> None:
        self._weights = torch.zeros(num_bytes, dtype=torch.uint8)

    def load(self, part: int, values: Any) -> None:
        import warnings

        with warnings.catch_warnings():  # values of the object store cannot be written, and are not
            warnings.simplefilter("ignore")
            self._weights.split(BUCKET_BYTES)[part].copy_(torch.from_numpy(values))


def weights_by_objects(num_bytes: int) -> float:
    ray = ray_module()
    loader = ray.remote(Loader).options(num_cpus=0).remote(num_bytes)
    bucket = np.ones(BUCKET_BYTES, np.uint8)
    ray.get(loader.load.remote(0, ray.put(bucket)), timeout=LIMIT_S)
    start_s = time.perf_counter()
    loaded = [
        loader.load.remote(part, ray.put(bucket)) for part in range(num_bytes // BUCKET_BYTES)
    ]
    ray.get(loaded, timeout=LIMIT_S)
    seconds = time.perf_counter() - start_s
    ray.kill(loader)
    return seconds


# ---- the tables


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="8x128,8x512,16x2048", help="GxR, separated by commas")
    parser.add_argument("--groups", type=int, default=400, help="groups of a repetition")
    parser.add_argument("--ahead", type=int, default=32, help="most groups under way")
    parser.add_argument("--weights", type=int, default=512, help="MiB of weights")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    ray = ray_module()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    rows = []
    for text in args.rows.split(","):
        responses, length = map(int, text.split("x"))
        shape = responses, length
        measured: dict[str, list[Measured]] = {way: [] for way in WAYS}
        for _ in range(args.repetitions):
            measured["store"].append(by_store(shape, args.groups, args.ahead))
            for way in WAYS[1:]:
                measured[way].append(
                    by_ray(shape, args.groups, args.ahead, references=way == "references")
                )
        kib = len(to_bytes(group_of(*shape, 0))) / 1024
        rows += [row(text, kib, way, measured[way]) for way in WAYS]
        print("\n".join(rows[-len(WAYS) :]), flush=True)
    num_bytes = args.weights * 2**20
    times = [
        (weights_by_collective(num_bytes), weights_by_objects(num_bytes))
        for _ in range(args.repetitions)
    ]
    collective, objects = (
        num_bytes / statistics.median(way) / 1e9 for way in zip(*times, strict=True)
    )
    text = table(rows, args.weights, collective, objects, args.repetitions)
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    return 0


def row(shape: str, kib: float, way: str, measured: Sequence[Measured]) -> str:
    def median(name: str) -> float:
        return statistics.median(getattr(run, name) for run in measured)

    return (
        f"| {shape} | {kib:,.0f} | {way} | {median('groups_per_s'):,.0f} | "
        f"{1e3 * median('latency_s'):.2f} | {1e6 * median('cpu_s'):,.0f} |"
    )


def table(
    rows: Sequence[str], weights: int, collective: float, objects: float, repetitions: int
) -> str:
    head = "| G x R | KiB | way | groups/s | ms | CPU us |\n|---|---:|---|---:|---:|---:|\n"
    heading = f"{os.cpu_count()} cores ({processor()}), medians of {repetitions}, in turn."
    ways = (
        f"{weights} MiB of weights: broadcast {collective:.2f} GB/s, object store {objects:.2f} "
        "GB/s.\n"
    )
    return f"{heading}\n\n{head}" + "\n".join(rows) + f"\n\n{ways}"


if __name__ == "__main__":
    sys.exit(main())
