"""The CPU platform: gloo, and one device per core."""

from __future__ import annotations

import os

import torch

from pa_npu.platform.base import Platform, Role, without_users
from pa_npu.platform.memory_peaks import ResidentPeak, own_processes, resident_bytes
from pa_npu.platform.ops import TorchOps


class CpuPlatform(Platform):
    """Development, tests and the quick start.

    A device is one core: trainers and engines are pinned by the launcher.
    """

    name = "cpu"
    comm_backend = "gloo"
    process_group_backend = "gloo"
    cluster_resource = "CPU"
    # for buffers beyond 32 MiB glibc takes new pages every time, and touching these for the first
    # time costs as much as the transfer
    largest_bucket_bytes = 16 * 2**20

    def __init__(self) -> None:
        self.ops = TorchOps()

    def device(self, local_index: int) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def memory_bytes(self) -> int:
        """Returns the resident memory of this process; its peak on systems that do not tell."""
        return resident_bytes(os.getpid()) or ResidentPeak(own_processes).pop_peak()

    def total_memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_memory_bytes(self) -> int:
        import psutil  # for trainers, which alone ask; an engine's interpreter may not have it

        return int(psutil.virtual_memory().available)

    def environment(self, role: Role) -> dict[str, str]:
        # an installed torch_npu must not load into a CPU run
        defaults = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        if role in ("trainer", "coordinator"):
            defaults["OMP_NUM_THREADS"] = "1"  # a device is one core
        if role == "trainer":
            # Megatron warns without it, whatever the device
            defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        return without_users(defaults)
