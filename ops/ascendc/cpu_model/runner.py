"""Compiles kernels with g++ against the CPU model, caches the libraries, and calls lse_merge on torch tensors."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

MODEL = Path(__file__).resolve().parent
LSE_MERGE = MODEL.parent / "lse_merge"
INCLUDES = (MODEL / "include", MODEL, LSE_MERGE)
ELEMENT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MESSAGE_BYTES = 4096
COMPILE_TIMEOUT_S = 300
OPTIMISED = ("-O2", "-Wall", "-Wextra", "-Werror")


class RuleViolation(AssertionError):
    """The kernel broke a rule of the hardware; the message starts with the rule's name in brackets."""


def compile_library(sources: Sequence[Path], cache: Path, flags: Sequence[str] = OPTIMISED) -> Path:
    """Shared library of `sources`, from `cache` when neither a source, a header nor the compiler
    has changed.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: install g++ or set CXX")
    command = [
        compiler,
        "-std=c++17",
        "-shared",
        "-fPIC",
        *flags,
        *(f"-I{include}" for include in INCLUDES),
    ]
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, timeout=30
    ).stdout
    headers = sorted(
        path for include in INCLUDES for path in include.rglob("*") if path.suffix in (".h", ".cpp")
    )
    digest = hashlib.sha256(version + " ".join(command).encode())
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    library = cache / f"{sources[0].stem}-{digest.hexdigest()[:20]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}.tmp")
    built = subprocess.run(
        [*command, *map(str, sources), "-o", str(partial)],
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_S,
    )
    if built.returncode != 0:
        raise RuntimeError(f"{compiler} failed on {sources[0].name}:\n{built.stderr[-6000:]}")
    partial.replace(library)
    return library


@dataclass(frozen=True)
class Counters:
    """Counts of a launch: bytes over all cores, and costs in the model's arbitrary units."""

    read_bytes: int
    written_bytes: int
    ub_bytes: int
    busiest_pipe: int
    makespan: int


class LseMergeModel:
    """The lse_merge kernel and its host tiling, running on simulated vector cores."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.MakeLseMergeTable.restype = ctypes.c_int64

    @classmethod
    def build(cls, cache: Path) -> LseMergeModel:
        return cls(
            compile_library([MODEL / "harness.cpp", LSE_MERGE / "lse_merge_tiling.cpp"], cache)
        )

    def table(
        self,
        intervals: Sequence[tuple[int, int]],
        tokens: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        *,
        segments: Sequence[int] | None = None,
        part_segments: Sequence[int] | None = None,
        max_cores: int,
    ) -> torch.Tensor:
        """Table of a merge, int32 words; giving segments means that those statistics are in the NTD
        layout.
        """
        flat = [bound for interval in intervals for bound in interval]
        capacity = 1 << 16
        words = torch.zeros(capacity, dtype=torch.int32)
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        count = self._library.MakeLseMergeTable(
            _int64_array(flat),
            ctypes.c_int64(len(intervals)),
            _int64_array(segments or ()),
            ctypes.c_int64(len(segments or ())),
            _int64_array(part_segments or ()),
            ctypes.c_int64(len(part_segments or ())),
            *(ctypes.c_int64(value) for value in (tokens, heads, dim, ELEMENT_TYPES[dtype])),
            ctypes.c_int64(segments is not None),
            ctypes.c_int64(part_segments is not None),
            ctypes.c_int64(max_cores),
            ctypes.c_void_p(words.data_ptr()),
            ctypes.c_int64(capacity),
            message,
            ctypes.c_int64(MESSAGE_BYTES),
        )
        if count < 0:
            raise ValueError(message.value.decode())
        return words[:count].clone()

    def merge_(self, tensors: Sequence[torch.Tensor], table: torch.Tensor) -> Counters:
        """Merges in place as lse_merge_ does; see run_kernel."""
        return run_kernel(self._library.RunLseMerge, tensors, table)


def run_kernel(
    function: Callable[..., int],
    tensors: Sequence[torch.Tensor],
    table: torch.Tensor,
    *leading: int,
) -> Counters:
    """Calls a C entry point of the kind of RunLseMerge on out, max, sum, part_out, part_max,
    part_sum in host memory.

    Raises RuleViolation when the kernel breaks a rule. `leading`: arguments that come first.
    """
    assert all(tensor.is_contiguous() for tensor in (*tensors, table))
    counters = (ctypes.c_uint64 * 5)()
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    function.restype = ctypes.c_int64  # type: ignore[attr-defined]
    status = function(
        *(ctypes.c_int64(value) for value in leading),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, table)),
        ctypes.c_int64(table.numel()),
        counters,
        message,
        ctypes.c_int64(MESSAGE_BYTES),
    )
    if status != 0:
        raise RuleViolation(message.value.decode())
    return Counters(*(int(value) for value in counters))


def _int64_array(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(len(values), 1))(*values)
