"""The interface of a device kind to the rest of the package: the Platform protocol and the pieces its members share."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from pa_npu.platform.memory_peaks import MemoryPeak

Role = Literal["launcher", "engine", "coordinator", "trainer"]


class FusedOps(Protocol):
    """Per-token operations with a better kernel on some platforms; every implementation is differentiable."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in fp32 and rounded to `x.dtype` before `weight` is applied."""

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate `x` [tokens, heads, head_dim] by `cos`, `sin` [tokens, 1, head_dim] (equal halves)."""

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(a) * b for the halves (a, b) of the last dimension."""

    def grouped_linear(self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """rows [n, in], of which the first counts[0] meet weight[0], the next counts[1] weight[1] and so on -> [n, out].

        weight: [groups, out, in].
        """


class Platform(Protocol):
    """One device kind (npu, cuda, cpu). Nothing outside this package asks which one it is talking to."""

    @property
    def name(self) -> str:
        """npu, cuda or cpu; also the device type of its tensors."""

    @property
    def comm_backend(self) -> str:
        """Backend of collectives on device tensors: hccl, nccl or gloo."""

    @property
    def process_group_backend(self) -> str:
        """Argument of `init_process_group`: also serves CPU tensors, which checkpoints and object collectives use."""

    @property
    def visible_devices_env(self) -> str | None:
        """Environment variable that restricts a process to some devices; None where there is none."""

    @property
    def cluster_resource(self) -> str:
        """Ray's name for one device of this kind, by which a cluster's nodes say what they have."""

    @property
    def widest_dtype(self) -> torch.dtype:
        """The most exact floating type that models can be computed in."""

    @property
    def ops(self) -> FusedOps:
        """The platform's kernels for what the model computes per token."""

    def device(self, local_index: int) -> torch.device:
        """Device `local_index` of this process's visible ones."""

    def set_device(self, local_index: int) -> None:
        """Make device `local_index` the current one of this process."""

    def device_count(self) -> int:
        """Number of devices this process may use."""

    def memory_bytes(self) -> int:
        """Bytes that this process has allocated on the current device."""

    def take_memory_peak(self) -> MemoryPeak:
        """The most that this process and its children had on the host, and on the current device, since the last call."""

    def total_memory_bytes(self) -> int:
        """Memory of one device."""

    def free_memory_bytes(self) -> int:
        """Memory that this process can still get on the current device."""

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory of the host of the tensor's shape and type; the tensor itself where the host's is the device's."""

    def release_memory(self) -> None:
        """Give the device back what the allocator keeps for this process and nothing uses."""

    @property
    def largest_bucket_bytes(self) -> int:
        """Size from which on larger broadcasts of weights gain nothing."""

    def synchronize(self) -> None:
        """Wait until everything queued on the current device is done."""

    def side_stream(self) -> AbstractContextManager[None]:
        """For a background thread: what it queues inside does not wait behind the training stream, nor the other way.

        On entry the stream waits for what the training stream holds by then (such as the optimizer's update), on exit
        the thread waits for the stream, so that its results may be used anywhere. Each entry takes a stream of its own;
        the calling thread is put on the device of set_device(). Without device queues it does nothing.
        """

    def detached_stream(self) -> AbstractContextManager[None]:
        """For a background thread that has nothing to do with training: a stream of its own that waits for nothing.

        For the whole of the thread's life; the calling thread is put on the device of set_device().
        """

    def profile(self, directory: Path, name: str) -> AbstractContextManager[Any]:
        """Record what runs on host and device inside, and write it to `directory` on exit, file or folder `name`....

        Read it with TensorBoard, chrome://tracing or Perfetto; on npu also with MindStudio Insight.
        """

    def seed_all(self, seed: int) -> None:
        """Seed Python, numpy and torch (host and device)."""

    def rng_state(self) -> torch.Tensor | None:
        """State of the current device's generator; None where it is the host's."""

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Restore what `rng_state` gave; nothing for None."""

    def set_deterministic(self, enabled: bool) -> None:
        """Choose deterministic kernels, or allow others. Call it before the first collective and the first kernel."""

    def environment(self, role: Role) -> dict[str, str]:
        """Environment defaults for a child process of this role; variables the user has set are left out."""

    def collective_environment(self, longest_s: float, deterministic: bool) -> dict[str, str]:
        """Variables that collectives read when their communicator is made, equal on all members of a group, engines and trainers.

        longest_s: what a collective may take before the device ends it by itself. deterministic: reductions in one order.
        Raises ConfigError where the user's environment has a deadline that comes too early.
        """

    def group_timeout_s(self, longest_s: float) -> float:
        """torch's own timeout of groups whose collectives may take so long."""

    def network_environment(self, address: str, interface: str) -> dict[str, str]:
        """Variables that make collectives use `address`, which `interface` has; variables the user has set are left out."""


def torch_profile(activities: Iterable[Any], directory: Path, name: str) -> AbstractContextManager[Any]:
    """Platform.profile by torch.profiler: one Chrome trace, name.TIME.pt.trace.json."""
    handler = torch.profiler.tensorboard_trace_handler(str(directory), worker_name=name)
    return torch.profiler.profile(activities=activities, on_trace_ready=handler, record_shapes=True)


def seed_host(seed: int) -> None:
    """Seed the host generators: Python, numpy and torch's CPU generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def use_deterministic_algorithms(enabled: bool) -> None:
    """torch's switch, without filling every fresh tensor: nothing here reads uninitialised memory."""
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
