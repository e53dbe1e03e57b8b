"""Reading slices of named tensors from an HF model directory (model.safetensors, or its index and several files)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pa_npu.errors import DataError
from pa_npu.families.model_directory import weight_files


class HfCheckpoint:
    """The tensors of one HF directory; a context manager that closes the files. Reads only the slices asked for."""

    def __init__(self, path: str | Path) -> None:
        self._directory = Path(path)
        self._file_of = weight_files(self._directory)
        self._open_files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> HfCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.clear()
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def check_names(self, expected: set[str], optional: set[str]) -> None:
        """Raises DataError unless the checkpoint holds exactly `expected`, apart from `optional` and rotary buffers."""
        missing = sorted(expected - self.names)
        if missing:
            raise DataError(
                f"model.path: {self._directory} lacks {len(missing)} tensor(s) of the model, the first is "
                f"{missing[0]!r}; "
                f"use a complete checkpoint whose config.json belongs to it"
            )
        # old conversions store the rotary frequencies, which follow from config.json
        unknown = sorted(name for name in self.names - expected - optional if not name.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise DataError(
                f"model.path: {self._directory} has {len(unknown)} tensor(s) this model does not use, the first is "
                f"{unknown[0]!r}; use a checkpoint whose config.json belongs to it"
            )

    def read(
        self, name: str, shape: tuple[int, ...], dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Tensor `name`, or its [start, stop) along `dim` (0 or 1), on the CPU. `shape` is the full one, checked."""
        file = self._file_of[name]
        try:
            if file not in self._open_files:
                self._open_files[file] = self._stack.enter_context(safe_open(self._directory / file, framework="pt"))
            piece = self._open_files[file].get_slice(name)
            found = tuple(piece.get_shape())
            if found != shape:
                raise DataError(
                    f"model.path: {self._directory / file}: tensor {name} has shape {found}, but config.json says "
                    f"{shape}; "
                    f"use a checkpoint whose config.json belongs to it"
                )
            values: torch.Tensor = piece[:] if dim is None else piece[start:stop] if dim == 0 else piece[:, start:stop]
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"model.path: {self._directory / file}: cannot read tensor {name} ({error}); restore the file from its "
                "source"
            ) from error
        if values.is_floating_point() and not torch.isfinite(values).all():
            raise DataError(
                f"model.path: {self._directory / file}: tensor {name} holds values that are no finite numbers; restore the file "
                f"from its source"
            )
        return values
