"""Everything that this backend changes in torch, numpy and Megatron for the whole process: one list, applied by `prepare`.

`table.PATCHES` has every change with its reason and with what makes it unnecessary; `prepare(kind)` applies those of a device kind
and imports megatron.core at the right moment. The other files hold the functions that make the changes.
"""

from pa_npu.backends.megatron.patches.table import PATCHES, Patch, prepare

__all__ = ["PATCHES", "Patch", "prepare"]
