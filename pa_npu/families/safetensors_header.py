"""The header of a safetensors file, read with bounds: names, types and shapes of its tensors, and whether the file is whole.

Format (safetensors' README): 8 bytes, the header's length as a little-endian integer; the header, a JSON object from name to dtype,
shape and data_offsets; the tensors' bytes, without holes or overlaps.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.plain_file import open_plain, reason
from pa_npu.errors import DataError

# A header takes some 150 bytes per tensor.
LARGEST_HEADER_BYTES = 16 * 2**20
_PIECE_BYTES = 8192
BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
BYTES_OF |= {"U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}


@dataclass(frozen=True)
class StoredTensor:
    """dtype: as safetensors names it, such as BF16. begin, num_bytes: where its values are in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The file's tensors by name. Raises DataError for a file that is not whole; reads nothing but the header."""
    try:
        with open_plain(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if length > min(LARGEST_HEADER_BYTES, size - 8):
                raise ValueError(f"its header claims {length} bytes of a file of {size}")
            header = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_without_doubles)
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        return _tensors(header, 8 + length, size)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"model.path: {file} is damaged or incomplete ({reason(error)}); copy it again") from None


def sample_values(file: Path, tensor: StoredTensor) -> npt.NDArray[np.float64]:
    """Values at the beginning, at two places between, and at the end of a tensor; all of a small one. Raises DataError."""
    size = BYTES_OF[tensor.dtype]
    steps = {(tensor.num_bytes - _PIECE_BYTES) * part // 3 // size * size for part in range(4)}
    starts = sorted(steps) if tensor.num_bytes > 4 * _PIECE_BYTES else [0]
    try:
        with open_plain(file) as stream:
            pieces = []
            for start in starts:
                stream.seek(tensor.begin + start)
                pieces.append(stream.read(_PIECE_BYTES if len(starts) > 1 else tensor.num_bytes))
    except OSError as error:
        raise DataError(f"model.path: {file} cannot be read ({reason(error)}); copy it again") from None
    if tensor.dtype == "BF16":  # the upper half of a float
        return (np.frombuffer(b"".join(pieces), "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(b"".join(pieces), {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype(np.float64)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"its header names {next(name for name in names if names.count(name) > 1)!r:.100} twice")
    return found


def _tensors(header: dict[str, Any], begin: int, size: int) -> dict[str, StoredTensor]:
    """begin: where the tensors' bytes do in the file. size: of the file."""
    tensors, places = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name], place = _tensor(name, entry, begin)
        places.append((place, name))
    end = 0
    for (start, stop), name in sorted(places):
        if start != end:
            raise ValueError(f"tensor {name!r:.100} begins at byte {start}, where byte {end} follows the one before")
        end = stop
    if end != size - begin:
        raise ValueError(f"its tensors take {end} bytes, but {size - begin} follow the header")
    return tensors


def _tensor(name: str, entry: Any, begin: int) -> tuple[StoredTensor, tuple[int, int]]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, start, stop]
        known = all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63 for size in sizes)
        if not known or dtype not in BYTES_OF:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tensor {name!r:.100} has no proper dtype, shape and data_offsets") from None
    if len(shape) > 8 or stop - start != math.prod(shape) * BYTES_OF[dtype]:
        raise ValueError(f"tensor {name!r:.100} of shape {shape!r:.60} and type {dtype} has {stop - start} bytes")
    return StoredTensor(dtype, tuple(shape), begin + start, stop - start), (start, stop)
