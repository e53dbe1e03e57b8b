"""The index of a torch.distributed checkpoint, and the ranks' notes of what they have written.

Both are pickles, which would call whatever they name. They are read by an unpickler that admits
nothing but the classes of an index.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from pa_npu.errors import DataError

T = TypeVar("T")

# An index, and a rank's note, consist of data classes and enumerations of these modules, types of
# tensors, and the following.
_INDEX_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.storage",
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
    # data classes in core 0.12; later cores keep their names, empty, to read its indices
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
}


class IndexReader(pickle.Unpickler):
    """Reads an index; raises UnpicklingError at a name that no index contains."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        is_known = (module, name) in _INDEX_NAMES
        if is_known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if module in _INDEX_MODULES and "." not in name:
            kind = super().find_class(module, name)
            if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum)):
                return kind
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _member_of(enumeration: Any, name: Any) -> Enum:
    """Returns a member of an enumeration: Python 3.11.0 to 3.11.3 write one as getattr(class, name).

    Raises UnpicklingError for anything else, since getattr of a class would reach everything.
    """
    is_enumeration = isinstance(enumeration, type) and issubclass(enumeration, Enum)
    if is_enumeration and name in enumeration.__members__:
        return enumeration.__members__[name]
    raise pickle.UnpicklingError("GLOBAL builtins.getattr")


def refusing(directory: str, read: Callable[[], T]) -> T:
    """Returns the result of `read`.

    Raises DataError if a pickle cannot be read, or names what no checkpoint contains.
    """
    try:
        return read()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"names {named[1]}, which no checkpoint contains" if named else "cannot be read"
        raise DataError(
            f"checkpoint {directory} is refused: one of its files {reason}; this package did not "
            "write it; take a checkpoint from a place that you trust"
        ) from None


def note_written(directory: Path, results: Iterable[WriteResult]) -> list[str]:
    """Leaves a note for rank 0, which may be on another node, of what this rank or its forked
    writer has written; returns the files' names.
    """
    results = list(results)
    _note_of(directory, dist.get_rank()).write_bytes(pickle.dumps(results))
    return sorted({result.storage_data.relative_path for result in results})


def collect_written(directory: Path) -> list[list[WriteResult]]:
    """Returns each rank's note of what it has written, and removes the notes."""
    written = []
    for note in [_note_of(directory, rank) for rank in range(dist.get_world_size())]:
        with note.open("rb") as stream:
            written.append(IndexReader(stream).load())
        note.unlink()
    return written


def _note_of(directory: Path, rank: int) -> Path:
    return directory / f".written_{rank}"
