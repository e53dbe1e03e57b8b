"""The interface of a device kind to the rest of the package, and what kinds share."""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from pa_npu.platform.memory_peaks import MemoryPeak, ResidentPeak, device_peak_bytes, own_processes
from pa_npu.platform.typical import LARGEST_BUCKET_BYTES

Role = Literal["launcher", "engine", "coordinator", "trainer"]


class FusedOps(Protocol):
    """Per-token operations with a better kernel on some platforms; every implementation is
    differentiable.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in fp32 and rounded to `x.dtype` before
        `weight` is applied.
        """

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate `x` [tokens, heads, head_dim] by `cos`, `sin` [tokens, 1, head_dim] (equal
        halves).
        """

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(a) * b for the halves (a, b) of the last dimension."""

    def grouped_linear(
        self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        """rows [n, in], of which the first counts[0] meet weight[0], the next counts[1] weight[1]
        and so on -> [n, out].

        weight: [groups, out, in].
        """


class Platform(ABC):
    """One device kind (npu, cuda, cpu). Nothing outside this package asks which one it is talking
    to.

    A kind says what is abstract here. The rest is that of a device without queues, and without
    memory or generators of its own.
    """

    name: str
    """npu, cuda or cpu; also the device type of its tensors."""
    comm_backend: str
    """Backend of collectives on device tensors: hccl, nccl or gloo."""
    process_group_backend: str
    """Argument of `init_process_group`: also serves CPU tensors, which checkpoints and object
    collectives use.
    """
    visible_devices_env: str | None = None
    """Environment variable that restricts a process to some devices; None where there is none."""
    cluster_resource: str
    """Ray's name for one device of this kind, by which a cluster's nodes say what they have."""
    widest_dtype: torch.dtype = torch.float64
    """The most exact floating type that models can be computed in."""
    largest_bucket_bytes: int
    """Size from which on larger broadcasts of weights gain nothing."""
    ops: FusedOps
    """The platform's kernels for what the model computes per token."""
    _resident_peak = ResidentPeak(own_processes)

    @abstractmethod
    def device(self, local_index: int) -> torch.device:
        """Device `local_index` of this process's visible ones."""

    def set_device(self, local_index: int) -> None:  # noqa: B027
        """Make device `local_index` the current one of this process."""

    @abstractmethod
    def device_count(self) -> int:
        """Number of devices this process may use."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that this process has allocated on the current device."""

    def take_memory_peak(self) -> MemoryPeak:
        """The most that this process and its children had on the host, and on the current device,
        since the last call.
        """
        return MemoryPeak(self._resident_peak.take(), device_peak_bytes(self.name))

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory of one device."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Memory that this process can still get on the current device."""

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory of the host of the tensor's shape and type; the tensor itself where the
        host's is the device's.
        """
        return like

    def release_memory(self) -> None:  # noqa: B027
        """Give the device back what the allocator keeps for this process and nothing uses."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait until everything queued on the current device is done."""

    def side_stream(self) -> AbstractContextManager[None]:
        """For a background thread: what it queues inside does not wait behind the training stream,
        nor the other way.

        On entry the stream waits for what the training stream holds by then (such as the
        optimizer's update), on exit the thread waits for the stream, so that its results may be
        used anywhere. Each entry takes a stream of its own; the calling thread is put on the device
        of set_device(). Without device queues it does nothing.
        """
        return nullcontext()

    def detached_stream(self) -> AbstractContextManager[None]:
        """For a background thread that has nothing to do with training: a stream of its own that
        waits for nothing.

        For the whole of the thread's life; the calling thread is put on the device of set_device().
        """
        return nullcontext()

    def profile(self, directory: Path, name: str) -> AbstractContextManager[Any]:
        """Record what runs on host and device inside, and write it to `directory` on exit, file or
        folder `name`....

        By torch.profiler one Chrome trace, name.TIME.pt.trace.json. Read it with TensorBoard,
        chrome://tracing or Perfetto; on npu also with MindStudio Insight.
        """
        profiler = self.profiler()
        known = profiler.ProfilerActivity
        kinds = dict.fromkeys(("CPU", self.name.upper()))
        activities = [getattr(known, kind) for kind in kinds if hasattr(known, kind)]
        handler = profiler.tensorboard_trace_handler(str(directory), worker_name=name)
        recorder: AbstractContextManager[Any] = profiler.profile(
            activities=activities, on_trace_ready=handler, record_shapes=True
        )
        return recorder

    def profiler(self) -> Any:
        """The module with torch.profiler's interface that records this kind."""
        return torch.profiler

    def seed_all(self, seed: int) -> None:
        """Seed Python, numpy and torch (host and device)."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> torch.Tensor | None:
        """State of the current device's generator; None where it is the host's."""
        return None

    def set_rng_state(self, state: torch.Tensor | None) -> None:  # noqa: B027
        """Restore what `rng_state` gave; nothing for None."""

    def set_deterministic(self, enabled: bool) -> None:
        """Choose deterministic kernels, or allow others.

        Call it before the first collective and the first kernel.
        """
        torch.use_deterministic_algorithms(enabled)
        # nothing here reads uninitialised memory
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    @abstractmethod
    def environment(self, role: Role) -> dict[str, str]:
        """Environment defaults for a child process of this role; variables the user has set are
        left out.
        """

    def collective_environment(self, longest_s: float, deterministic: bool) -> dict[str, str]:
        """Variables that collectives read when their communicator is made, equal on all members of
        a group, engines and trainers.

        longest_s: what a collective may take before the device ends it by itself; nothing where
        torch's deadline is the only one.
        deterministic: reductions in one order. Raises ConfigError where the user's environment has
        a deadline that comes too early.
        """
        return {}

    def group_timeout_s(self, longest_s: float) -> float:
        """torch's own timeout of groups whose collectives may take so long."""
        return longest_s

    def network_environment(self, address: str, interface: str) -> dict[str, str]:
        """Variables that make collectives use `address`, which `interface` has; variables the user
        has set are left out.

        gloo's interface is the launcher's to set, on every platform.
        """
        return {}


class AcceleratorPlatform(Platform):
    """The part that cuda and npu share: torch gives `torch.cuda` and `torch.npu` the same
    functions. A subclass names the kind.
    """

    largest_bucket_bytes = LARGEST_BUCKET_BYTES
    _local_index = 0

    @property
    def _module(self) -> Any:
        return getattr(torch, self.name)

    def device(self, local_index: int) -> torch.device:
        return torch.device(self.name, local_index)

    def set_device(self, local_index: int) -> None:
        self._module.set_device(local_index)
        self._local_index = local_index

    def device_count(self) -> int:
        return int(self._module.device_count())

    def memory_bytes(self) -> int:
        return int(self._module.memory_allocated())

    def total_memory_bytes(self) -> int:
        return int(self._module.get_device_properties(self._module.current_device()).total_memory)

    def free_memory_bytes(self) -> int:
        free, _ = self._module.mem_get_info()
        # the allocator's own, unused
        cached = self._module.memory_reserved() - self._module.memory_allocated()
        return int(free + cached)

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def release_memory(self) -> None:
        self._module.empty_cache()

    def synchronize(self) -> None:
        self._module.synchronize()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        # which device is the current one is a thread's own
        self._module.set_device(self._local_index)
        stream = self._module.Stream()
        stream.wait_stream(self._module.default_stream())
        with self._module.stream(stream):
            yield
        # not after an error: what failed may never finish
        stream.synchronize()

    @contextmanager
    def detached_stream(self) -> Iterator[None]:
        self._module.set_device(self._local_index)
        with self._module.stream(self._module.Stream()):
            yield

    def seed_all(self, seed: int) -> None:
        super().seed_all(seed)
        self._module.manual_seed_all(seed)

    def rng_state(self) -> torch.Tensor | None:
        state: torch.Tensor = self._module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        if state is not None:
            self._module.set_rng_state(state)


def without_users(defaults: dict[str, str]) -> dict[str, str]:
    """The defaults that the user's environment does not set already."""
    return {name: value for name, value in defaults.items() if name not in os.environ}
