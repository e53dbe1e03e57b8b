"""Names the tensors in which checkpoints of two runs differ, one tensor at a time, as HF exports."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pa_npu.checkpoints import directories
from pa_npu.checkpoints.directories import CHECKPOINTS, version_of


@dataclass(frozen=True)
class TensorDifference:
    """name: HF's. apart, norm, moved: norms of the difference, of the tensor, and of its way since
    the base; largest: of an element of the difference. moved is None without a base."""

    name: str
    apart: float
    norm: float
    moved: float | None
    largest: float


@dataclass(frozen=True)
class CheckpointDifference:
    """Two checkpoints of one version, tensor by tensor."""

    version: int
    tensors: Sequence[TensorDifference]

    @property
    def of_update(self) -> float | None:
        """The norm of the difference of all weights over that of their way since the base; None
        without one.
        """
        moved = [tensor.moved for tensor in self.tensors if tensor.moved is not None]
        apart = math.hypot(*(tensor.apart for tensor in self.tensors))
        return apart / (math.hypot(*moved) or 1.0) if moved else None

    @property
    def line(self) -> str:
        changed = [tensor for tensor in self.tensors if tensor.largest]
        if not changed:
            return (
                f"checkpoints of version {self.version}: all {len(self.tensors)} tensors are equal"
            )
        most_changed = max(changed, key=lambda tensor: tensor.largest)
        share = (
            ""
            if self.of_update is None
            else f"; all weights, by {self.of_update:.2g} of their way since the beginning"
        )
        return (
            f"checkpoints of version {self.version}: {len(changed)} of {len(self.tensors)} tensors "
            f"differ, first {changed[0].name}, most {most_changed.name}, by up to "
            f"{most_changed.largest:.2g}{share}"
        )


def compare_checkpoints(
    first: Path, second: Path, behind: int, *, begin: int | None = None, last: bool = False
) -> CheckpointDifference | None:
    """Compares the checkpoints of a version behind iteration `behind` that both runs have, the next
    or the last one.

    begin: the version of the first run's checkpoint, if it has that, from which weights have moved.
    None where the runs have no such version in common.
    """
    versions = [_versions(run) for run in (first, second)]
    common = sorted(version for version in versions[0] & versions[1] if version > behind)
    if not common:
        return None
    version = common[-1 if last else 0]
    checkpoints = [_checkpoint(first, version), _checkpoint(second, version)]
    if begin is not None and begin in versions[0] and begin < version:
        checkpoints.append(_checkpoint(first, begin))
    return CheckpointDifference(version, list(_differences(checkpoints)))


def _differences(checkpoints: Sequence[Path]) -> Iterator[TensorDifference]:
    """checkpoints: two, and the base where there is one.

    Raises UserError where one cannot be exported.
    """
    from safetensors import safe_open

    from pa_npu.backends.registry import export_checkpoint

    with tempfile.TemporaryDirectory(prefix="pa_npu_compare_") as work:
        places = [Path(work) / str(number) for number in range(len(checkpoints))]
        for checkpoint, place in zip(checkpoints, places, strict=True):
            export_checkpoint(checkpoint, place)
        for file in sorted(places[0].glob("*.safetensors")):
            with ExitStack() as opened:
                files = [
                    opened.enter_context(safe_open(str(place / file.name), "pt"))
                    for place in places
                ]
                for name in files[0].keys():  # noqa: SIM118 (it is no dictionary)
                    tensors = [file.get_tensor(name).double() for file in files]
                    apart = tensors[0] - tensors[1]
                    moved = float((tensors[0] - tensors[2]).norm()) if len(tensors) == 3 else None
                    yield TensorDifference(
                        name=name,
                        apart=float(apart.norm()),
                        norm=float(tensors[0].norm()),
                        moved=moved,
                        largest=float(apart.abs().max()),
                    )


def _versions(run: Path) -> set[int]:
    versions = (version_of(path) for path in directories.complete(run / CHECKPOINTS))
    return {version for version in versions if version is not None}


def _checkpoint(run: Path, version: int) -> Path:
    return run / CHECKPOINTS / directories.directory_name(version)
