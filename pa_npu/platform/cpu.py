"""The CPU platform: gloo, and one device per core."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from pa_npu.platform import base
from pa_npu.platform.memory_peaks import MemoryPeak, ResidentPeak, own_processes, resident_bytes
from pa_npu.platform.ops import TorchOps


class CpuPlatform:
    """Development, tests and the quick start. A device is one core: trainers and engines are pinned by the launcher."""

    name = "cpu"
    comm_backend = "gloo"
    process_group_backend = "gloo"
    visible_devices_env = None
    cluster_resource = "CPU"
    widest_dtype = torch.float64
    # beyond 32 MiB glibc takes new pages for every buffer, whose first touch costs as much as the transfer
    largest_bucket_bytes = 16 * 2**20

    def __init__(self) -> None:
        self.ops = TorchOps()
        self._resident_peak = ResidentPeak(own_processes)

    def device(self, local_index: int) -> torch.device:
        return torch.device("cpu")

    def set_device(self, local_index: int) -> None:
        """Nothing to choose: pinning is the launcher's."""

    def device_count(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)

    def memory_bytes(self) -> int:
        """Resident memory of this process; where nobody says it, its most since the start."""
        return resident_bytes(os.getpid()) or ResidentPeak(own_processes).take()

    def take_memory_peak(self) -> MemoryPeak:
        return MemoryPeak(self._resident_peak.take())

    def total_memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_memory_bytes(self) -> int:
        import psutil  # for trainers, which alone ask; an engine's interpreter may not have it

        return int(psutil.virtual_memory().available)

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        return like

    def release_memory(self) -> None:
        """The host's allocator keeps little."""

    def synchronize(self) -> None:
        """Everything runs in order already."""

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def detached_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def profile(self, directory: Path, name: str) -> AbstractContextManager[Any]:
        return base.torch_profile([torch.profiler.ProfilerActivity.CPU], directory, name)

    def seed_all(self, seed: int) -> None:
        base.seed_host(seed)

    def rng_state(self) -> torch.Tensor | None:
        return None

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """The host's generator is restored by whoever restores it."""

    def set_deterministic(self, enabled: bool) -> None:
        base.use_deterministic_algorithms(enabled)

    def environment(self, role: base.Role) -> dict[str, str]:
        defaults = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # an installed torch_npu must not load into a CPU run
        if role in ("trainer", "coordinator"):
            defaults["OMP_NUM_THREADS"] = "1"  # a device is one core
        if role == "trainer":
            defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron warns without it, whatever the device
        return {name: value for name, value in defaults.items() if name not in os.environ}

    def collective_environment(self, longest_s: float, deterministic: bool) -> dict[str, str]:
        return {}  # torch's deadline is the only one

    def group_timeout_s(self, longest_s: float) -> float:
        return longest_s

    def network_environment(self, address: str, interface: str) -> dict[str, str]:
        return {}  # gloo's interface is the launcher's to set, on every platform
