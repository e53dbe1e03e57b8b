"""How memory is made known to another process of the same machine: a handle per device kind. Imports torch only.

    cuda   torch's CUDA IPC: UntypedStorage._share_cuda_ and _new_shared_cuda, which torch.multiprocessing sends tensors with
    npu    torch_npu's own of the same shape, _share_npu_ and _new_shared_npu (7.2.0 or later with CANN 8.3 and HDK 25.3)
    cpu    a file descriptor of shared memory: _share_fd_cpu_ and _new_shared_fd_cpu; the other process opens it through /proc

A device handle is of a whole allocation, with the offset of the piece in it, and says at which index the sender sees the device.
The receiver puts its own index there, as both usually see one device at different ones; where it is another device of the machine,
the receiver reads it over the link between the two (CUDA: cudaIpcMemLazyEnablePeerAccess; CANN: "cross-device mapping"). The sender
keeps the memory: a handle does not.

Read in torch's multiprocessing.reductions (2.13), torch_npu's of the same name (2.13), vLLM's and vllm-ascend's engines for weight
transfer over IPC, and CANN's introduction to IPC in torch_npu. cpu and cuda were run, npu was not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

_BYTES = "bytes"


@dataclass(frozen=True)
class _Kind:
    """export: a storage to the fields of its handle. open: such fields and the receiver's device to the storage."""

    export: Callable[[torch.UntypedStorage], Sequence[Any]]
    open: Callable[[Sequence[Any], torch.device], torch.UntypedStorage]


def export(memory: torch.Tensor, kind: str) -> list[Any]:
    """A handle as JSON values. memory: [bytes] of uint8 that begins its own storage. Raises RuntimeError and its kinds."""
    return [{_BYTES: field.hex()} if isinstance(field, bytes) else field for field in _find(kind).export(_of(memory))]


def open_memory(handle: Sequence[Any], kind: str, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The sender's memory, [num_bytes] of uint8. device: this process's. Raises RuntimeError, ValueError, TypeError or OSError."""
    fields = [bytes.fromhex(field[_BYTES]) if isinstance(field, dict) else field for field in handle]
    storage = _find(kind).open(fields, device)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (num_bytes,), (1,))


def machine() -> str:
    """A text that is equal in all processes of this machine since it started, and nowhere else."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # no Linux
        return os.uname().nodename


def _of(memory: torch.Tensor) -> torch.UntypedStorage:
    assert memory.dtype == torch.uint8 and memory.storage_offset() == 0
    return memory.untyped_storage()


def _find(kind: str) -> _Kind:
    if kind not in _KINDS:
        raise ValueError(f"memory of kind {kind!r} has no handles here; known are {', '.join(_KINDS)}")
    return _KINDS[kind]


def _device_kind(name: str) -> _Kind:
    def open_on(fields: Sequence[Any], device: torch.device) -> torch.UntypedStorage:
        index = device.index if device.index is not None else torch.accelerator.current_device_index()
        torch.empty(0, device=device)  # the first use of a device makes it ready, which opening takes for granted
        opened: torch.UntypedStorage = getattr(torch.UntypedStorage, f"_new_shared_{name}")(index, *fields[1:])
        return opened

    return _Kind(lambda storage: getattr(storage, f"_share_{name}_")(), open_on)


def _export_descriptor(storage: torch.UntypedStorage) -> Sequence[Any]:
    descriptor, size = storage._share_fd_cpu_()
    return os.getpid(), descriptor, size


def _open_descriptor(fields: Sequence[Any], device: torch.device) -> torch.UntypedStorage:
    process, theirs, size = (int(field) for field in fields)
    descriptor = os.open(f"/proc/{process}/fd/{theirs}", os.O_RDWR)
    try:
        opened: torch.UntypedStorage = cast(Any, torch.UntypedStorage)._new_shared_fd_cpu(descriptor, size)
        return opened
    finally:
        os.close(descriptor)


_KINDS = {
    "cuda": _device_kind("cuda"),
    "npu": _device_kind("npu"),
    "cpu": _Kind(_export_descriptor, _open_descriptor),
}
