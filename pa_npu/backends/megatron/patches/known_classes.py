"""Reading Megatron's checkpoint files without running what they say: out of a pickle come tensors, numbers and known classes only.

Megatron and torch.distributed.checkpoint unpickle `.metadata`, `common.pt` and every object in a shard, which would call whatever
the file names. Within `known_classes_only` the index is read by an unpickler that admits the classes of an index, and everything
else by torch's own (`weights_only`).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from pa_npu.errors import DataError

# An index consists of data classes and enumerations of these modules, types of tensors, and the following.
_INDEX_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
    "megatron.core.dist_checkpointing.strategies.torch",
)
_INDEX_NAMES = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
# NumPy's generator is among the RNG states. Its rebuilding function has a name per major release.
_ARRAY: Any = np.zeros(1, np.uint32).__reduce__()[0]
_ARRAYS: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (_ARRAY, "numpy.core.multiarray._reconstruct"),
    (_ARRAY, "numpy._core.multiarray._reconstruct"),
]


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _INDEX_NAMES
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if module in _INDEX_MODULES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


@contextmanager
def known_classes_only(directory: str) -> Iterator[None]:
    """Raises DataError in place of calling what a file of `directory` names."""
    load = torch.load

    def load_data(*arguments: Any, **options: Any) -> Any:
        with torch.serialization.safe_globals(_ARRAYS):
            return _refusing(directory, lambda: load(*arguments, **{**options, "weights_only": True}))

    def load_index(stream: IO[bytes]) -> Any:
        return _refusing(directory, lambda: _IndexReader(stream).load())

    unpickles: Any = filesystem
    torch.load, unpickles.pickle = load_data, SimpleNamespace(load=load_index)
    try:
        yield
    except CheckpointException as error:  # on all ranks, with what each of them has met
        for failure, _ in error.failures.values():
            if isinstance(failure, DataError):
                raise failure from None
        raise
    finally:
        torch.load, unpickles.pickle = load, pickle


def _refusing(directory: str, read: Any) -> Any:
    try:
        return read()
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"names {named[1]}, which no checkpoint contains" if named else "cannot be read"
        raise DataError(
            f"checkpoint {directory} is refused: one of its files {reason}; this package did not write it; take a checkpoint "
            f"from a place that you trust"
        ) from None
