"""Platform: the interface of a device kind to the rest of the package, and what kinds share."""

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
        """Rotates `x` [tokens, heads, head_dim] by `cos`, `sin` [tokens, 1, head_dim], whose halves
        are equal.
        """

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(a) * b for the halves (a, b) of the last dimension."""

    def grouped_linear(
        self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        """Multiplies the first counts[0] rows by weight[0], the next counts[1] by weight[1] and so
        on; returns [n, out].

        rows: [n, in]. weight: [groups, out, in].
        """


class Platform(ABC):
    """One device kind (npu, cuda, cpu). Nothing outside this package asks which kind it is.

    A kind implements what is abstract here. The other methods fit a device without queues, and
    without memory or generators of its own.
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
    """Environment variable that restricts a process to some devices; None if there is none."""
    cluster_resource: str
    """Ray's name for one device of this kind, by which a cluster's nodes count their devices."""
    widest_dtype: torch.dtype = torch.float64
    """The most exact floating type in which models can be computed."""
    largest_bucket_bytes: int
    """Size from which on larger broadcasts of weights gain nothing."""
    ops: FusedOps
    """The platform's kernels for per-token operations of the model."""
    _resident_peak = ResidentPeak(own_processes)

    @abstractmethod
    def device(self, local_index: int) -> torch.device:
        """Returns device `local_index` of those that this process sees."""

    def set_device(self, local_index: int) -> None:  # noqa: B027
        """Makes device `local_index` the current one of this process."""

    @abstractmethod
    def device_count(self) -> int:
        """Returns the number of devices that this process may use."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Returns the bytes that this process has allocated on the current device."""

    def pop_memory_peak(self) -> MemoryPeak:
        """Returns the largest memory of this process and its children on the host, and of this
        process on the current device, since the last call.
        """
        return MemoryPeak(self._resident_peak.pop_peak(), device_peak_bytes(self.name))

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory of one device."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Memory that this process can still get on the current device."""

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Returns pinned host memory of the tensor's shape and type; the tensor itself if the
        device's memory is the host's.
        """
        return like

    def release_memory(self) -> None:  # noqa: B027
        """Frees device memory that the allocator keeps for this process and nothing uses."""

    def synchronize(self) -> None:  # noqa: B027
        """Waits until everything queued on the current device is done."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Returns a context for a background thread whose work does not wait behind the training
        stream, and does not hold that up.

        On entry the stream waits for what the training stream holds by then (such as the
        optimizer's update). On exit the thread waits for the stream, so that its results may be
        used anywhere. Each entry takes a stream of its own; the calling thread is put on the device
        of set_device(). Without device queues the context does nothing.
        """
        return nullcontext()

    def detached_stream(self) -> AbstractContextManager[None]:
        """Returns a context for the whole life of a background thread that has nothing to do with
        training: a stream of its own that waits for nothing.

        The calling thread is put on the device of set_device().
        """
        return nullcontext()

    def profile(self, directory: Path, name: str) -> AbstractContextManager[Any]:
        """Returns a context that records what runs on host and device inside, and on exit writes it
        to `directory`, to a file or folder whose name begins with `name`.

        torch.profiler writes one Chrome trace, name.TIME.pt.trace.json. Read it with TensorBoard,
        chrome://tracing or Perfetto; on npu also with MindStudio Insight.
        """
        profiler = self.profiler()
        recordable = profiler.ProfilerActivity
        kinds = dict.fromkeys(("CPU", self.name.upper()))
        activities = [getattr(recordable, kind) for kind in kinds if hasattr(recordable, kind)]
        handler = profiler.tensorboard_trace_handler(str(directory), worker_name=name)
        recorder: AbstractContextManager[Any] = profiler.profile(
            activities=activities, on_trace_ready=handler, record_shapes=True
        )
        return recorder

    def profiler(self) -> Any:
        """Returns the module with torch.profiler's interface that records this kind."""
        return torch.profiler

    def seed_all(self, seed: int) -> None:
        """Seeds Python, numpy and torch (host and device)."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> torch.Tensor | None:
        """Returns the state of the current device's generator; None if it is the host's."""
        return None

    def set_rng_state(self, state: torch.Tensor | None) -> None:  # noqa: B027
        """Restores what `rng_state` returned; None changes nothing."""

    def set_deterministic(self, enabled: bool) -> None:
        """Chooses deterministic kernels, or allows others. Call it before the first collective and
        the first kernel.
        """
        torch.use_deterministic_algorithms(enabled)
        # nothing here reads uninitialised memory
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    @abstractmethod
    def environment(self, role: Role) -> dict[str, str]:
        """Returns environment variables for a child process of this role, without those that the
        user has set.
        """

    def collective_environment(self, longest_s: float, deterministic: bool) -> dict[str, str]:
        """Returns the variables that collectives read when their communicator is made. All members
        of a group, engines and trainers, need the same ones.

        longest_s: how long a collective may take before the device ends it by itself; not used if
        torch's deadline is the only one.
        deterministic: makes reductions keep one order.

        Raises ConfigError if the user's environment has a deadline that comes too early.
        """
        return {}

    def group_timeout_s(self, longest_s: float) -> float:
        """Returns torch's timeout for groups whose collectives may take `longest_s`."""
        return longest_s

    def network_environment(self, address: str, interface: str) -> dict[str, str]:
        """Returns the variables that make collectives use `address`, which `interface` has, without
        those that the user has set. The launcher sets gloo's interface on every platform.
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
        # memory that the allocator holds and nothing uses
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
        # every thread has a current device of its own
        self._module.set_device(self._local_index)
        stream = self._module.Stream()
        stream.wait_stream(self._module.default_stream())
        with self._module.stream(stream):
            yield
        # not after an error: work that failed may never finish
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
    """Returns those defaults that the user's environment does not set already."""
    return {name: value for name, value in defaults.items() if name not in os.environ}
