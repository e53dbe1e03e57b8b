"""Names the tensors in which checkpoints of two runs differ, one tensor at a time, as HF exports."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pa_npu.checkpoints import directories
from pa_npu.checkpoints.directories import CHECKPOINTS, version_of


@dataclass(frozen=True)
class TensorDifference:
    """name: HF's. relative: norm of the difference over the norm; largest: of an element."""

    name: str
    relative: float
    largest: float


def tensor_lines(first: Path, second: Path, iteration: int) -> list[str]:
    """Compares the checkpoints of the next version behind `iteration` that both runs have, in
    words."""
    version = _common_version(first, second, iteration)
    if version is None:
        return ["which tensor differs is not known: the runs have no checkpoint of one version behind it"]
    compared = list(differences(_checkpoint(first, version), _checkpoint(second, version)))
    changed = [tensor for tensor in compared if tensor.largest]
    if not changed:
        return [f"checkpoints of version {version}: all {len(compared)} tensors are equal"]
    worst = max(changed, key=lambda tensor: tensor.relative)
    return [
        f"checkpoints of version {version}: {len(changed)} of {len(compared)} tensors differ, first {changed[0].name}, "
        f"most {worst.name}, by {worst.relative:.2g} of its norm and {worst.largest:.2g} in an element"
    ]


def differences(first: Path, second: Path) -> Iterator[TensorDifference]:
    """Every tensor of two checkpoints, in the order of their files. Raises UserError where one
    cannot be exported."""
    from safetensors import safe_open

    from pa_npu.backends.registry import export_checkpoint

    with tempfile.TemporaryDirectory(prefix="pa_npu_compare_") as work:
        places = Path(work) / "first", Path(work) / "second"
        for checkpoint, place in zip((first, second), places, strict=True):
            export_checkpoint(checkpoint, place)
        files = sorted(places[0].glob("*.safetensors"))
        for file in files:
            with safe_open(str(file), "pt") as one, safe_open(str(places[1] / file.name), "pt") as other:
                for name in one.keys():  # noqa: SIM118 (it is no dictionary)
                    mine, theirs = one.get_tensor(name).double(), other.get_tensor(name).double()
                    apart = mine - theirs
                    norm = float(mine.norm()) or 1.0
                    yield TensorDifference(name, float(apart.norm()) / norm, float(apart.abs().max()))


def _common_version(first: Path, second: Path, iteration: int) -> int | None:
    """The first version behind `iteration` of which both runs have a complete checkpoint."""
    versions = [{version_of(path) for path in directories.complete(run / CHECKPOINTS)} for run in (first, second)]
    return min((v for v in versions[0] & versions[1] if v is not None and v > iteration), default=None)


def _checkpoint(run: Path, version: int) -> Path:
    return run / CHECKPOINTS / directories.directory_name(version)
