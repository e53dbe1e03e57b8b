"""Reading Megatron's checkpoint files without running what they say: out of a pickle come tensors, numbers and known classes only.

Megatron and torch.distributed.checkpoint unpickle `.metadata`, `common.pt` and every object in a
shard, which would call whatever the file names. Within `known_classes_only` the index is read by an
unpickler that admits the classes of an index, and everything else by torch's own (`weights_only`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from pa_npu.backends.shard_index import IndexReader, refusing
from pa_npu.errors import DataError

# NumPy's generator is among the RNG states. Its rebuilding function has a name per major release.
_ARRAY: Any = np.zeros(1, np.uint32).__reduce__()[0]
_ARRAYS: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (_ARRAY, "numpy.core.multiarray._reconstruct"),
    (_ARRAY, "numpy._core.multiarray._reconstruct"),
]


@contextmanager
def known_classes_only(directory: str) -> Iterator[None]:
    """Raises DataError in place of calling what a file of `directory` names."""
    load = torch.load

    def load_data(*arguments: Any, **options: Any) -> Any:
        with torch.serialization.safe_globals(_ARRAYS):
            return refusing(
                directory, lambda: load(*arguments, **{**options, "weights_only": True})
            )

    def load_index(stream: IO[bytes]) -> Any:
        return refusing(directory, lambda: IndexReader(stream).load())

    with open(f"{directory}/.metadata", "rb") as index:
        # what torch cannot read itself, it logs with a traceback and goes on without
        load_index(index)
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
