"""The header of a safetensors file: names, types, shapes and places of its tensors. Whether the file is whole the library says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pa_npu.config.plain_file import open_plain, reason
from pa_npu.errors import DataError

_PIECE_BYTES = 8192
_BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


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
        open_plain(file).close()
        with safe_open(str(file), "np"):
            pass
        with open_plain(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"model.path: {file} is damaged or incomplete ({reason(error)}); copy it again") from None
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            found[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + length + start, stop - start)
    return found


def sample_values(file: Path, tensor: StoredTensor) -> npt.NDArray[np.float64]:
    """Values at the beginning, at two places between, and at the end of a tensor; all of a small one. Raises DataError."""
    size = _BYTES_OF[tensor.dtype]
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
