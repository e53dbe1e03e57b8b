"""The list of process-wide changes to torch, numpy and Megatron, and `prepare`, which applies a device kind's in order.

prepare("cpu")      before anything imports megatron.core; further calls do nothing
PATCHES             each with what, why, where, and when it can go; `doctor` prints it
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from pa_npu.backends.megatron.patches import cuda_on_cpu, mindspeed, repairs
from pa_npu.errors import PaNpuError
from pa_npu.weight_transfer.gloo_device import share_device

_CORE = "megatron-core 0.12.1 to 0.16.1"
_prepared: set[str] = set()


@dataclass(frozen=True)
class Patch:
    """One change to the process.

    target: what is replaced. devices: the device kinds that need it. versions: of what it repairs.
    mindspeed: False where MindSpeed makes it unnecessary, True where it belongs to MindSpeed, None
    where that does not matter.
    apply: makes the change, given the device kind; leaves alone what does not need it.
    """

    target: str
    reason: str
    devices: tuple[str, ...]
    versions: str
    remove_when: str
    apply: Callable[[str], None]
    before_import: bool = False
    mindspeed: bool | None = None

    def line(self) -> str:
        """Returns the line that `doctor` prints."""
        with_or_without = {None: "", True: ", with MindSpeed", False: ", without MindSpeed"}[
            self.mindspeed
        ]
        return (
            f"{self.target} ({', '.join(self.devices)}{with_or_without}; {self.versions}): "
            f"{self.reason}; remove when {self.remove_when}"
        )


_ALL = ("npu", "cuda", "cpu")


def _share_gloo_device(kind: str) -> None:
    share_device()


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.distributed.distributed_c10d.ProcessGroupGloo, by weight_transfer.gloo_device",
        "each gloo group, also of one rank, has a thread that wakes a hundred times a second; all of "
        "a process get one",
        _ALL,
        "torch 2.7 to 2.13",
        "torch shares the device of its gloo groups",
        _share_gloo_device,
    ),
    Patch(
        "torch.cuda, torch's tensor factories, Tensor.to, Tensor.cuda, Module.cuda",
        "megatron-core asks for CUDA devices by name; on the CPU they lead to the CPU",
        ("cpu",),
        _CORE,
        "megatron-core takes its device from the caller",
        lambda kind: cuda_on_cpu.redirect_cuda_to_cpu(),
        before_import=True,
    ),
    Patch(
        "torch.cuda, by torch_npu.contrib.transfer_to_npu",
        "megatron-core and MindSpeed ask for CUDA devices by name; on Ascend they lead to the NPU",
        ("npu",),
        _CORE,
        "megatron-core takes its device from the caller",
        lambda kind: mindspeed.transfer_to_npu(),
        before_import=True,
    ),
    Patch(
        "megatron.core and torch, by mindspeed.megatron_adaptor",
        "MindSpeed adapts optimizer, type checks and pipeline shapes to Ascend; its patches that "
        "change results are undone",
        ("npu",),
        "MindSpeed core_r0.12.1",
        "megatron-core runs on Ascend by itself",
        lambda kind: mindspeed.activate(),
        before_import=True,
        mindspeed=True,
    ),
    Patch(
        "torch.cuda.get_device_capability",
        "megatron-core asks for the compute capability at its import, which an NPU has not",
        ("npu",),
        _CORE,
        "megatron-core asks no more, or torch_npu answers",
        lambda kind: mindspeed.answer_device_capability(),
        before_import=True,
        mindspeed=False,
    ),
    Patch(
        "torch.Tensor.type, for callers inside megatron",
        "megatron's optimizers compare param.type() with CUDA's type names",
        ("npu", "cpu"),
        _CORE,
        "megatron-core compares dtype instead",
        lambda kind: repairs.answer_cuda_types(kind),
        before_import=True,
        mindspeed=False,
    ),
    Patch(
        "megatron.core.jit",
        "megatron-core compiles about 20 helpers at its import, which costs seconds and gains "
        "nothing outside CUDA",
        ("npu", "cpu"),
        _CORE,
        "megatron-core compiles on first use",
        lambda kind: repairs.replace_megatron_jit(),
        before_import=True,
        mindspeed=False,
    ),
    Patch(
        "megatron.core.tensor_parallel.random._get_cuda_rng_state, _set_cuda_rng_state",
        "megatron's generator tracker reaches CUDA's generators by private calls",
        ("cpu",),
        _CORE,
        "megatron-core's tracker uses public functions of the device",
        lambda kind: cuda_on_cpu.redirect_megatron_rng(),
    ),
    Patch(
        "numpy.product",
        "megatron's checkpoint validation calls it, and numpy 2 has removed it",
        _ALL,
        "megatron-core 0.12 with numpy >= 2",
        "core 0.12 is supported no more",
        lambda kind: repairs.restore_numpy_product(),
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async._write_item",
        "torch 2.7 gave the private function that writes a shard a required argument",
        _ALL,
        "megatron-core 0.12 with torch >= 2.7",
        "core 0.12 is supported no more",
        lambda kind: repairs.fix_write_item(),
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue",
        "planning a checkpoint starts a server process for a queue that nobody uses here",
        _ALL,
        _CORE,
        "megatron-core plans a checkpoint without making the queue of its own writers",
        lambda kind: repairs.replace_results_queue(),
    ),
    Patch(
        "megatron.core.fp8_utils._quantize_param_shard_impl",
        "without TransformerEngine the distributed optimizer's fp8 copy raises even when no "
        "parameter is fp8",
        _ALL,
        "megatron-core 0.12",
        "core 0.12 is supported no more",
        lambda kind: repairs.fix_empty_fp8_shards(),
    ),
    Patch(
        "megatron.core.optimizer.Adam and its flags",
        "without apex and TransformerEngine megatron falls back to torch's AdamW, whose step "
        "tensors cannot be resharded",
        _ALL,
        _CORE,
        "megatron-core reshards torch's AdamW",
        repairs.install_adam,
    ),
)


def patches_of(kind: str, with_mindspeed: bool) -> list[Patch]:
    """Returns the patches that `prepare(kind)` applies, in order."""
    return [
        patch
        for patch in PATCHES
        if kind in patch.devices and patch.mindspeed in (None, with_mindspeed)
    ]


def prepare(kind: str) -> None:
    """Make `import megatron.core` work in this process on devices of `kind`, and import it. Further
    calls do nothing.

    Raises PaNpuError where megatron.core is imported already, UserError where MindSpeed is
    installed without what it needs.
    """
    if kind in _prepared:
        return
    with_mindspeed = kind == "npu" and mindspeed.is_installed()
    patches = patches_of(kind, with_mindspeed)
    if any(patch.before_import for patch in patches):
        require_no_megatron(kind)
    for patch in patches:
        if patch.before_import:
            patch.apply(kind)
    import_megatron()
    for patch in patches:
        if not patch.before_import:
            patch.apply(kind)
    _prepared.add(kind)


def require_no_megatron(caller: str) -> None:
    """Raise when megatron.core is already imported: what was bound at its import can no longer be
    redirected.
    """
    if "megatron.core" in sys.modules:
        raise PaNpuError(
            f"{caller}: megatron.core is already imported; call patches.table.prepare() before any "
            "import of it"
        )


def import_megatron() -> None:
    """Import what the trainer uses of megatron-core, without its advice to install apex and
    TransformerEngine.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401 - imported for its effect
    # core 0.16 warns of every layer whose MLP is not one of its own classes
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
