#!/usr/bin/env python
"""Time a weight publish against one bare gloo broadcast of the same bytes to the same workers, alternating in one run.

    python tools/bench_publish.py [--layers N] [--dtype bf16|fp32] [--tensor-parallel 1,2] [--workers 1,2]
                                  [--bucket-mib 16,64] [--repeats 5] [--family qwen3_moe] [--json FILE] [--markdown FILE]
                                  [--senders leader,shards,all] [--copies 1]
    python tools/bench_publish.py --publishes 2000                       # one connection for all: time and memory stay flat
    python tools/bench_publish.py --model 7b|32b [--link-gbps 25] [--gather-gbps 50] [--iteration-s 120]     # arithmetic only

Trainer ranks (TP) and engine workers are processes of this machine. A publish is everything between
the trainers' call and the moment when all workers have had every HF tensor complete in memory:
gather over TP, packing, broadcast, assembly. (What an engine's loader then does with a tensor is
its own; the bare broadcast has no loader either.) The bare broadcast sends one ready buffer into
another, so it is the upper bound for this transport and machine. With TP > 1 the shards of the
other ranks must reach the leader first; the bare gather does just that, in one broadcast per rank.
With --family qwen3_moe the TP ranks also share the experts of a mixture, 16 in each layer, which
are as many bytes as the dense layer.

--senders says which ranks send (publish.senders): one that gathers, all TP ranks, or these of all
--copies of the weights.

Columns: who sends, and how many; MiB sent, buckets of a worker, GB/s (10^9 bytes) of the publish,
of the bare broadcast, and of bare gather and broadcast one after another (medians); the publish
over each of the two (the aim: at least 0.5 of the broadcast); the share of a publish that the first
sender spent waiting for the transport; seconds of a publish; and MiB out of the busiest trainer
rank: its share of the weights, and what the system counted that this process wrote to sockets
(/proc/self/io, Linux), gather included.

With --model nothing is sent: it prints the seconds that pa_npu.planning.prediction.costs expects on
links of the given speed (GB/s, 10^9 bytes: a port of 200 Gbit/s is 25), for several TP and bucket
sizes, and their share of an iteration.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.backends.megatron.weights import hf_map
from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Mesh
from pa_npu.config.sections.operation import Senders
from pa_npu.families.shape import Experts, Rope
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.prediction.costs import PublishLink, publish_seconds
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.manifest import Manifest, check_covered
from pa_npu.weight_transfer.receiver import Receiver

TIMEOUT_S = 120.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COLUMNS: tuple[str, ...] = (
    "TP",
    "copies",
    "senders",
    "workers",
    "bucket MiB",
    "MiB",
    "buckets",
    "publish GB/s",
    "broadcast GB/s",
    "with gather GB/s",
    "of broadcast",
    "of both",
    "wire wait",
    "seconds",
    "busiest sends MiB",
    "busiest wrote MiB",
)


@dataclass(frozen=True)
class Row:
    tensor_parallel: int
    copies: int
    senders: str
    num_senders: int
    workers: int
    bucket_mib: float
    bytes: int
    buckets: int
    publish_s: float
    broadcast_s: float
    gather_s: float
    wire_wait_s: float
    sent_bytes: int
    written_bytes: float

    def cells(self) -> list[str]:
        return [
            str(self.tensor_parallel),
            str(self.copies),
            f"{self.num_senders} ({self.senders})",
            str(self.workers),
            f"{self.bucket_mib:g}",
            f"{self.bytes / 2**20:.0f}",
            str(self.buckets),
            f"{self.bytes / self.publish_s / 1e9:.2f}",
            f"{self.bytes / self.broadcast_s / 1e9:.2f}",
            f"{self.bytes / (self.broadcast_s + self.gather_s) / 1e9:.2f}",
            f"{self.broadcast_s / self.publish_s:.2f}",
            f"{(self.broadcast_s + self.gather_s) / self.publish_s:.2f}",
            f"{self.wire_wait_s / self.publish_s:.0%}",
            f"{self.publish_s:.3f}",
            f"{self.sent_bytes / 2**20:.1f}",
            f"{self.written_bytes / 2**20:.1f}",
        ]


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    dtype: str
    tensor_parallel: int
    workers: int
    bucket_mib: tuple[float, ...]
    repeats: int
    port: int
    senders: Senders = "leader"
    copies: int = 1

    @property
    def mesh(self) -> Mesh:
        size = self.tensor_parallel
        expert = size if self.spec.experts else 1
        return Mesh(size, data=self.copies, expert=expert, experts_tensor=1)

    @property
    def num_trainers(self) -> int:
        return self.tensor_parallel * self.copies

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self.spec.num_parameters * DTYPES[self.dtype].itemsize


def _spec(layers: int) -> ModelSpec:
    return ModelSpec(
        path="stand-in",
        family="llama",
        num_layers=layers,
        hidden_size=1024,
        ffn_size=2816,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=32000,
        rope=Rope(1e6),
        norm_eps=1e-6,
        qkv_bias=False,
        qk_norm=False,
        tied=True,
        max_positions=4096,
        eos_token_ids=(1,),
    )


def _mixture(layers: int) -> ModelSpec:
    dense = _spec(layers)
    experts = Experts(16, 4, dense.ffn_size // 16, True, tuple(range(layers)))
    return replace(dense, family="qwen3_moe", qk_norm=True, experts=experts)


FAMILIES = {"llama": _spec, "qwen3_moe": _mixture}

# Qwen2.5-7B and 32B
MODELS = {
    "7b": replace(
        _spec(28),
        hidden_size=3584,
        ffn_size=18944,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=152064,
        qkv_bias=True,
        tied=False,
    ),
    "32b": replace(
        _spec(64),
        hidden_size=5120,
        ffn_size=27648,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=152064,
        qkv_bias=True,
        tied=False,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=8,
        help="layers of the model (hidden 1024), 24 MiB each in bf16",
    )
    parser.add_argument(
        "--family", choices=FAMILIES, default="llama", help="a mixture has as many bytes"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="type of the weights")
    parser.add_argument(
        "--tensor-parallel", type=_ints, default=(1, 2), help="TP sizes, separated by commas"
    )
    parser.add_argument(
        "--senders",
        type=_words,
        default=("leader",),
        help="leader, shards, all, separated by commas (publish.senders)",
    )
    parser.add_argument(
        "--copies", type=int, default=1, help="replicas, each with its own copy of the weights"
    )
    parser.add_argument("--workers", type=_ints, default=(1, 2), help="numbers of engine workers")
    parser.add_argument("--bucket-mib", type=_floats, default=(4.0, 16.0), help="bucket sizes")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed repetitions; medians are printed"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument(
        "--publishes",
        type=int,
        help="publish so often over one connection, and print time and memory",
    )
    parser.add_argument("--model", choices=MODELS, help="print the expected seconds of this model")
    parser.add_argument(
        "--link-gbps",
        type=float,
        default=25.0,
        help="GB/s of the slowest link from trainer to engine",
    )
    parser.add_argument(
        "--gather-gbps", type=float, default=50.0, help="GB/s between the ranks of a TP group"
    )
    parser.add_argument(
        "--iteration-s", type=float, help="seconds of an iteration, for the share of the publish"
    )
    arguments = parser.parse_args(argv)
    if arguments.model:
        link = PublishLink(arguments.link_gbps * 1e9, arguments.gather_gbps * 1e9)
        return print_table(expected(arguments.model, link, arguments.iteration_s))
    if arguments.publishes:
        return print_table(endurance(arguments.publishes))
    rows: list[Row] = []
    for tensor_parallel, workers, senders in itertools.product(
        arguments.tensor_parallel, arguments.workers, arguments.senders
    ):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        case = Case(
            spec=FAMILIES[arguments.family](arguments.layers),
            dtype=arguments.dtype,
            tensor_parallel=tensor_parallel,
            workers=workers,
            bucket_mib=arguments.bucket_mib,
            repeats=arguments.repeats,
            port=store.port,
            senders=senders,
            copies=arguments.copies,
        )
        rows += run_case(case)
    table = [list(COLUMNS), *(row.cells() for row in rows)]
    print_table(table)
    if arguments.json:
        arguments.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8"
        )
    if arguments.markdown:
        lines = [" | ".join(line) for line in table]
        lines.insert(1, " | ".join("--:" for _ in COLUMNS))
        arguments.markdown.write_text(
            "\n".join(f"| {line} |" for line in lines) + "\n", encoding="utf-8"
        )
    return 0


def print_table(table: list[list[str]]) -> int:
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return 0


def expected(model: str, link: PublishLink, iteration_s: float | None) -> list[list[str]]:
    """Returns the seconds of one publish on such links, as a table."""
    size = 2 * MODELS[model].num_parameters  # bf16
    table = [
        [
            "model",
            "GB in bf16",
            "TP",
            "senders",
            "bucket MiB",
            "busiest sends GB",
            "seconds",
            "GB/s",
            "of an iteration",
        ]
    ]
    ways = [(1, 1), (4, 1), (4, 4), (8, 1), (8, 8)]
    for (tensor_parallel, senders), bucket_mib in itertools.product(ways, (4, 16, 64)):
        seconds = publish_seconds(
            size,
            bucket_mib * 2**20,
            tensor_parallel,
            link,
            senders=senders,
            gathers=senders == 1,
        )
        share = f"{seconds / iteration_s:.1%}" if iteration_s else "-"
        cells = [
            model,
            f"{size / 1e9:.1f}",
            str(tensor_parallel),
            str(senders),
            str(bucket_mib),
            f"{size / senders / 1e9:.2f}",
            f"{seconds:.2f}",
        ]
        table.append([*cells, f"{size / seconds / 1e9:.1f}", share])
    return table


def endurance(publishes: int) -> list[list[str]]:
    """Publish a small model again and again over one connection; a line for every tenth of the
    publishes.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [
        context.Process(
            target=enduring, args=(rank, store.port, publishes, results), name=f"member-{rank}"
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        lines = dict(results.get(timeout=TIMEOUT_S * 10) for _ in processes)
    finally:
        for process in processes:
            process.kill()
    table = [["publishes", "median ms", "trainer MiB", "engine MiB"]]
    for (done, trainer_ms, trainer_mib), (_, _, engine_mib) in zip(lines[0], lines[1], strict=True):
        table.append([str(done), f"{trainer_ms:.2f}", f"{trainer_mib:.1f}", f"{engine_mib:.1f}"])
    return table


def enduring(rank: int, port: int, publishes: int, results: Any) -> None:
    """Rank 0 is the trainer, rank 1 the engine worker; tells (publishes so far, median ms, resident
    MiB) per tenth.
    """
    torch.set_num_threads(1)
    spec = replace(_spec(2), hidden_size=256, ffn_size=512, vocab_size=4096)
    platform = platforms.get("cpu")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if rank == 0:
        publisher = Publisher(
            StageTensors(
                stand_in_stage(spec, Mesh(), torch.bfloat16), spec, Mesh().place(0), 2**20
            ),
            store_host="127.0.0.1",
            store_port=port,
            timeout_s=TIMEOUT_S,
            backend="gloo",
            device=torch.device("cpu"),
        )
        store.set("manifest", json.dumps(asdict(publisher.manifest())))
        step: Callable[[int], object] = partial(publisher.publish, members=PublishMembers(0, 1))
    else:
        announced = json.loads(store.get("manifest"))
        group = transport.join_group(
            "127.0.0.1",
            port,
            transport.group_name(announced["name"], 0),
            1,
            2,
            "gloo",
            TIMEOUT_S,
            "endurance",
        )
        manifest = Manifest.from_json(announced["manifest"])
        receiver = Receiver([manifest], [group], 1, torch.device("cpu"), TIMEOUT_S)
        step = lambda version: deque(receiver.receive(version), maxlen=0)  # noqa: E731 - the loop below is for both
    lines = []
    seconds = []
    for version in range(publishes):
        start = time.perf_counter()
        step(version)
        seconds.append(time.perf_counter() - start)
        if (version + 1) % max(1, publishes // 10) == 0:
            lines.append(
                (version + 1, statistics.median(seconds) * 1e3, platform.memory_bytes() / 2**20)
            )
            seconds.clear()
    results.put((rank, lines))


def run_case(case: Case) -> list[Row]:
    """Start the processes of one row and return what the leader measured."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [
        context.Process(target=trainer, args=(case, rank, results), name=f"trainer-{rank}")
        for rank in range(case.num_trainers)
    ]
    processes += [
        context.Process(target=worker, args=(case, rank), name=f"worker-{rank}")
        for rank in range(1, case.workers + 1)
    ]
    for process in processes:
        process.start()
    try:
        rows: list[Row] = results.get(timeout=TIMEOUT_S * 4)
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    return rows


def trainer(case: Case, rank: int, results: Any) -> None:
    torch.set_num_threads(1)
    size = case.tensor_parallel
    store = dist.TCPStore("127.0.0.1", case.port, is_master=False, wait_for_workers=False)
    peers = _join(case, f"tp {rank // size}", rank % size, size)
    everyone = _join(
        case,
        "everyone",
        rank if rank == 0 else case.workers + rank,
        case.num_trainers + case.workers,
    )
    bare = _join(case, "bare", 0, 1 + case.workers) if rank == 0 else None
    mesh = case.mesh
    place = mesh.place(rank)
    publishers = mesh.publishers(case.senders)
    takes_part = place.sends or rank in publishers
    module = stand_in_stage(case.spec, mesh, DTYPES[case.dtype])
    rows = []
    for bucket_mib in case.bucket_mib:
        with closing(
            Publisher(
                StageTensors(
                    module,
                    case.spec,
                    place,
                    int(bucket_mib * 2**20),
                    peers,
                    senders=case.senders,
                )
                if takes_part
                else None,
                store_host="127.0.0.1",
                store_port=case.port,
                timeout_s=TIMEOUT_S,
                backend="gloo",
                device=torch.device("cpu"),
            )
        ) as publisher:
            if publisher.is_leader:
                store.set(f"manifest/{bucket_mib}/{rank}", json.dumps(asdict(publisher.manifest())))
            members = PublishMembers(0, case.workers)
            publisher.connect(members)
            publish_s = []
            broadcast_s = []
            gather_s = []
            wire_wait_s = []
            written = []
            num_bytes = case.num_bytes
            flat = torch.ones(num_bytes, dtype=torch.uint8)
            shards = torch.ones(size, num_bytes // size, dtype=torch.uint8)
            for repetition in range(case.repeats + 1):  # the first warms up
                start = _together(everyone)
                wrote = _written_bytes()
                stats = publisher.publish(repetition, members)
                written.append(_written_bytes() - wrote)
                publish_s.append(_together(everyone) - start)
                wire_wait_s.append(stats.wire_wait_s)
                start = _together(everyone)
                if bare is not None:
                    transport.broadcast(bare, flat).wait()
                broadcast_s.append(_together(everyone) - start)
                start = _together(everyone)
                for peer in range(1, size if rank < size else 0):
                    transport.broadcast(peers, shards[peer], root=peer).wait()
                gathered = _together(everyone)
                gather_s.append(gathered - start if size > 1 else 0.0)
        done = f"{bucket_mib}/{rank}"
        numbers = [stats.bytes, statistics.median(written[1:]), len(stats.digests.split())]
        store.set(f"sent/{done}", json.dumps(numbers))
        if rank:
            continue
        sent = []
        for other in range(case.num_trainers):
            sent.append(json.loads(store.get(f"sent/{bucket_mib}/{other}")))
        rows.append(
            Row(
                tensor_parallel=size,
                copies=case.copies,
                senders=case.senders,
                num_senders=len(publishers),
                workers=case.workers,
                bucket_mib=bucket_mib,
                bytes=sum(of_rank[0] for of_rank in sent),
                buckets=sum(of_rank[2] for of_rank in sent),
                publish_s=statistics.median(publish_s[1:]),
                broadcast_s=statistics.median(broadcast_s[1:]),
                gather_s=statistics.median(gather_s[1:]),
                wire_wait_s=statistics.median(wire_wait_s[1:]),
                sent_bytes=max(of_rank[0] for of_rank in sent),
                written_bytes=max(of_rank[1] for of_rank in sent),
            )
        )
    if rank == 0:
        results.put(rows)


def worker(case: Case, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", case.port, is_master=False, wait_for_workers=False)
    everyone = _join(case, "everyone", rank, case.num_trainers + case.workers)
    bare = _join(case, "bare", rank, 1 + case.workers)
    for bucket_mib in case.bucket_mib:
        manifests = []
        groups = []
        for sender in case.mesh.publishers(case.senders):
            announced = json.loads(store.get(f"manifest/{bucket_mib}/{sender}"))
            manifests.append(Manifest.from_json(announced["manifest"]))
            name = transport.group_name(announced["name"], 0)
            groups.append(_join(case, name, rank, 1 + case.workers))
        check_covered(manifests)
        receiver = Receiver(manifests, groups, rank, torch.device("cpu"), TIMEOUT_S)
        flat = torch.ones(case.num_bytes, dtype=torch.uint8)
        for repetition in range(case.repeats + 1):
            _together(everyone)
            for _ in receiver.receive(repetition):
                pass
            _together(everyone)
            _together(everyone)
            transport.broadcast(bare, flat).wait()
            for _ in range(3):  # end of the broadcast, begin and end of the bare gather
                _together(everyone)
        receiver.close()


def stand_in_stage(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype) -> torch.nn.Module:
    """One rank's parameters of the whole model under Megatron's names; there is nothing to run."""
    module = torch.nn.Module()
    layer = [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
    ]
    layer += [
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
    ] * spec.qk_norm
    dense = ["linear_fc1.weight", "linear_fc2.weight"]
    sparse = ["router.weight", "experts.gate_up", "experts.down"]
    layer += [
        "pre_mlp_layernorm.weight",
        *(f"mlp.{name}" for name in (sparse if spec.experts else dense)),
    ]
    names = [f"decoder.layers.{index}.{name}" for index in range(spec.num_layers) for name in layer]
    for name in (hf_map.EMBEDDING, *names, hf_map.FINAL_NORM):
        tensors = hf_map.sources(name, spec, 0)
        shapes = [t.local_shape(mesh.tensor) for t in tensors if t.expert == tensors[0].expert]
        stacked = (
            ()
            if spec.experts is None or tensors[0].expert is None
            else (spec.experts.count // mesh.expert,)
        )
        owner = module
        (*path, leaf) = name.split(".")
        for child in path:
            if child not in dict(owner.named_children()):
                owner.add_module(child, torch.nn.Module())
            owner = owner.get_submodule(child)
        values = torch.full(
            (*stacked, sum(shape[0] for shape in shapes), *shapes[0][1:]), 0.5, dtype=dtype
        )
        owner.register_parameter(leaf, torch.nn.Parameter(values, requires_grad=False))
    for index, child_layer in enumerate(module.get_submodule("decoder.layers").children()):
        child_layer.layer_number = index + 1  # type: ignore[assignment]
    return module


def _join(case: Case, name: str, rank: int, size: int) -> dist.ProcessGroup:
    return transport.join_group(
        "127.0.0.1", case.port, name, rank, size, "gloo", TIMEOUT_S, f"benchmark group {name}"
    )


def _written_bytes() -> int:
    """Returns the bytes that this process has written, to sockets too; 0 where nobody counts."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    for line in counters.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(": ")
        if name == "wchar":
            return int(value)
    return 0


def _together(group: dist.ProcessGroup) -> float:
    """Returns the time after all processes have come here."""
    group.barrier().wait()
    return time.perf_counter()


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _words(text: str) -> tuple[Senders, ...]:
    words = tuple(text.split(","))
    wrong = [word for word in words if word not in get_args(Senders)]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(get_args(Senders))}")
    return words  # type: ignore[return-value]


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
