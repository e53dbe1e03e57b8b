"""NpuSim: a dispatch mode that runs operators on npu tensors with CPU kernels, and is strict about devices.

Valid only over the stub libraries of cann_stub.py, where device memory is host memory: a CPU tensor
can alias it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Work on the stubs as they are: allocation and metadata.
NATIVE = {
    "empty",
    "empty_strided",
    "set_",
    "resize_",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "_reshape_alias",
    "npu_get_npu_format",
    "get_npu_format",
    "copy_memory_",
}
# Operators that take operands on two devices on real hardware too. torch's advanced indexing moves
# indices to the device of what they index.
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
MIXED = {"aten::copy_", "aten::_to_copy", "aten::set_", *INDEXING}
RUNS_EVERYWHERE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
STRUCTURED, OF_OUT = (
    "CompositeExplicitAutogradNonFunctional",
    ("PrivateUse1", "CompositeExplicitAutograd"),
)
UNSUMMED = (torch.float64,)
COLLECTIVE_TIMEOUT = timedelta(seconds=60)

Reference = Callable[[dict[str, Any]], Any]


class NpuSim(TorchDispatchMode):
    """While active, operators on npu tensors run on CPU aliases of their memory.

    Collectives run on gloo: on the CPU backend of their group, which a group of hccl alone is given
    when it first needs it. It is active in the threads that are started meanwhile, too, although a
    dispatch mode is a thread's own.

    references: by name ("npu::npu_fusion_attention"), functions of a dictionary of the schema's
    arguments.
    calls: how often each operator ran. without_kernel: operators that torch_npu has no kernel for,
    which a real NPU would refuse or run on the host.
    Raises RuntimeError when CPU and npu tensors meet in one operator, AssertionError where HCCL
    would not sum a type.
    """

    def __init__(self, references: dict[str, Reference]) -> None:
        super().__init__()
        self.references = references
        self.calls: Counter[str] = Counter()
        self.without_kernel: set[str] = set()
        self._outside: list[Callable[[threading.Thread], None]] = []

    def __enter__(self) -> Any:
        run = threading.Thread.run
        self._outside.append(run)

        def run_inside(thread: threading.Thread) -> None:
            with _InThread(self):
                run(thread)

        threading.Thread.run = run_inside  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        threading.Thread.run = self._outside.pop()  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with the rank's own tensors
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        requested = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        # without memory: DTensor asks for shapes
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        on_npu = [tensor for tensor in tensors if _is_npu(tensor)]
        if "reduce" in func._schema.name and func._schema.name.startswith("c10d::"):
            assert all(tensor.dtype not in UNSUMMED for tensor in on_npu), (
                f"{func._schema.name}: HCCL sums no fp64"
            )
        if not on_npu and (requested is None or requested.type != "npu"):
            return func(*args, **kwargs)
        name = func._schema.name
        self._check_devices(name, tensors)
        is_view = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if is_view or name.split("::")[1] in NATIVE:
            return func(*args, **kwargs)
        self.calls[name] += 1
        self._check_kernel(func)
        target = requested if requested is not None else on_npu[0].device
        return self._run(func, args, kwargs, target)

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any], target: torch.device) -> Any:
        originals: dict[int, torch.Tensor] = {}
        aliases: list[torch.Tensor] = []  # keeps them alive, so that their ids stay theirs

        def to_host(leaf: Any) -> Any:
            if not _is_npu(leaf):
                return None if isinstance(leaf, torch.Generator) else leaf
            alias = cpu_alias(leaf)
            aliases.append(alias)
            originals[id(alias)] = leaf
            return alias

        def to_target(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in originals:  # written in place
                return originals[id(leaf)]
            return _copy_to_npu(leaf, target) if target.type == "npu" else leaf

        host_args, host_kwargs = tree_map(to_host, (args, kwargs))
        if host_kwargs.get("device") is not None:
            host_kwargs["device"] = torch.device("cpu")
        host_kwargs.pop("pin_memory", None)
        schema = func._schema
        if schema.name not in self.references:
            if schema.name.startswith("npu::"):
                raise NotImplementedError(
                    f"NpuSim has no reference for {schema.name}; add one to reference_ops"
                )
            if schema.name.startswith("c10d::"):
                _give_gloo(args)
            return tree_map(to_target, func(*host_args, **host_kwargs))
        named = {
            argument.name: value
            for argument, value in zip(schema.arguments, host_args, strict=False)
        }
        return tree_map(to_target, self.references[schema.name](named | host_kwargs))

    def _check_devices(self, name: str, tensors: list[torch.Tensor]) -> None:
        host = [
            tuple(tensor.shape)
            for tensor in tensors
            if tensor.device.type == "cpu" and tensor.dim() > 0
        ]
        if (
            host
            and name not in MIXED
            and not name.startswith("c10d::")
            and any(_is_npu(tensor) for tensor in tensors)
        ):
            raise RuntimeError(f"{name}: cpu tensors of shape {host} together with npu tensors")

    def _check_kernel(self, func: Any) -> None:
        overload = func._overloadname
        name = func._schema.name if overload == "default" else f"{func._schema.name}.{overload}"
        if not any(_has_kernel(name, key) for key in ("PrivateUse1", *RUNS_EVERYWHERE)):
            # structured operators are written in terms of this one; others have a general one in
            # terms of themselves
            out = f"{func._schema.name.rstrip('_')}.out"
            if not (_has_kernel(name, STRUCTURED) and any(_has_kernel(out, key) for key in OF_OUT)):
                self.without_kernel.add(name)


class _InThread(TorchDispatchMode):
    """A simulator, in one more thread."""

    def __init__(self, simulator: NpuSim) -> None:
        super().__init__()
        self._simulator = simulator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._simulator.__torch_dispatch__(func, types, args, kwargs)


def _give_gloo(args: tuple) -> None:
    """Register a gloo backend for the CPU in a collective's group if it has none, beside its own
    and on its own store.
    """
    boxed = next(
        arg
        for arg in args
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
    )
    group = dist.ProcessGroup.unbox(boxed)
    cpu, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
    if cpu in group._device_types:
        return
    store = dist.PrefixStore("gloo of the simulator", c10d._world.pg_map[group][1])
    group._register_backend(
        cpu, gloo, dist.ProcessGroupGloo(store, group.rank(), group.size(), COLLECTIVE_TIMEOUT)
    )


def _has_kernel(name: str, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    except RuntimeError:  # no operator of that name
        return False


def cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory, which it keeps: a collective may still read it when the
    tensor is gone.
    """
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    if num_bytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    buffer: Any = (ctypes.c_char * num_bytes).from_address(storage.data_ptr())
    buffer.owner = storage
    host = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        host, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _copy_to_npu(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    result = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    if host.numel():
        cpu_alias(result).copy_(host)
    return result


def _is_npu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "npu"
