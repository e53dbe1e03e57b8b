"""Checkpoint directories on disk: names, meta data, digests; which is complete, newest, superfluous.

    RUN/checkpoints/iteration_000004/                 complete: META_FILE is there and names every
                                                      file, size and digest
    RUN/checkpoints/.iteration_000006.incomplete/     being written; gets its name when complete,
                                                      else the next run removes it
    RUN/checkpoints/.iteration_000004.replaced/       the earlier one of a version that is saved
                                                      again, until that is in place
    RUN/checkpoints/.iteration_000002.deleted/        being deleted

Launcher, coordinator and trainers all read checkpoints and may not import each other, so this is
below them; it needs neither torch nor Megatron. Only trainer rank 0 writes, or the launcher while
no trainer runs.

The rank that wrote a file computes its digest, in the background, and digests are compared before
anything is read. They are SHA-256, because processors of trainers compute it in hardware (x86
SHA-NI, Armv8 SHA2), it needs no package, and `sha256sum` checks a file by hand. On load ranks share
the files, so that each is read once, however many ranks there are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from pa_npu.checkpoints.whole_files import sync_directory
from pa_npu.config.plain_file import read_plain
from pa_npu.config.words import counted
from pa_npu.errors import DataError, UserError

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
META_FILE = "pa_npu.json"
_PREFIX = "iteration_"
_MAX_DIGITS = 10  # of a version, above what a run can count
_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"
_DELETED = ".deleted"

_SEAL = "digest"  # of the other values of META_FILE
_LARGEST_META_BYTES = 64 << 20  # a line per file, of thousands of ranks
_CHUNK_BYTES = 8 << 20
_THREADS = 4  # hashing releases the interpreter's lock


@dataclass(frozen=True, config=ConfigDict(strict=True))
class CheckpointMeta:
    """The content of META_FILE. In the file it is sealed by a digest of its own.

    version: of the weights, which is also the next iteration.
    updates: optimizer steps so far.
    data: TrainingStream.state() before that iteration.
    seed: run.seed.
    layout: number of trainer ranks, and their TP and PP sizes.
    model: path and fingerprint of the HF model that the run began with; fingerprints of teachers,
    by name.
    reference: version of the reference (0: the HF model), and whether it is in the checkpoint; null
        without one.
    config, config_digest: the run's resolved tree, with digests in place of secrets.
    files: every other file of the directory with its size in bytes.
    digests: of these files; none in checkpoints of releases before it.
    base: digest of the weights that adapters are trained beside; null if the weights themselves are
        trained.
    chat_template: text of the file that data.chat_template names; null if it names none.
    optimizer: by rank, values by which a resume recognises the optimizer's state
        (StepReplay.saved); null in checkpoints of releases before it.
    """

    version: int
    updates: int
    data: dict[str, Any]
    seed: int
    layout: dict[str, int]
    model: dict[str, str]
    reference: dict[str, Any] | None
    config: dict[str, Any]
    config_digest: str
    files: dict[str, int]
    digests: dict[str, str]
    base: str | None = None
    chat_template: str | None = None
    optimizer: list[dict[str, Any]] | None = None

    @property
    def digest(self) -> str:
        """The digest of all values, and through `digests` of all files."""
        return _seal(asdict(self))

    def dump(self) -> str:
        return json.dumps({**asdict(self), _SEAL: self.digest}, indent=1)


def directory_name(version: int) -> str:
    return f"{_PREFIX}{version:06d}"


def version_of(directory: Path) -> int | None:
    """Returns the version in a checkpoint directory's name; None for any other name."""
    if not directory.name.startswith(_PREFIX):
        return None
    digits = directory.name.removeprefix(_PREFIX)
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS
    return int(digits) if is_number else None


def read_meta(directory: Path) -> CheckpointMeta:
    """Returns the meta data; raises UserError unless `directory` is a complete checkpoint."""
    meta = _read(directory)
    if isinstance(meta, CheckpointMeta):
        return meta
    where = f"checkpoint.load: {directory} is not a complete checkpoint: "
    if not directory.is_dir():
        raise UserError(f"{where}there is no such directory; give an iteration_NNNNNN directory")
    # a run, or its folder of checkpoints
    if inside := complete(directory) or complete(directory / "checkpoints"):
        raise UserError(
            f"{where}it holds {counted(len(inside), 'checkpoint')}; give the newest, {inside[-1]}"
        )
    raise UserError(
        f"{where}{meta}; give another iteration_NNNNNN directory ({next_older(directory)})"
    )


def problem(directory: Path) -> str | None:
    """Returns why `directory` cannot be used as a checkpoint; None for a complete one."""
    meta = _read(directory)
    return None if isinstance(meta, CheckpointMeta) else meta


def complete(parent: Path) -> list[Path]:
    """Returns the complete checkpoints in `parent`, oldest first."""
    return [path for path in _named(parent) if problem(path) is None]


def newest(parent: Path, damaged: Mapping[Path, str] | None = None) -> tuple[Path | None, str]:
    """Returns the newest complete checkpoint in `parent`, and why newer ones are skipped.

    `damaged`: problems of checkpoints whose content was checked.
    """
    skipped = ""
    for path in reversed(_named(parent)):
        reason = problem(path) or (damaged or {}).get(path)
        if reason is None:
            return path, skipped
        skipped += f"checkpoint {path} is skipped: {reason}; "
    return None, skipped


def next_older(directory: Path) -> str:
    """Returns a sentence about the next older complete checkpoint beside `directory`."""
    version = version_of(directory)
    older = []
    if version is not None:
        older = [path for path in complete(directory.parent) if (version_of(path) or 0) < version]
    if not older:
        return "there is no older one beside it"
    return f"the next older one is {older[-1]}"


def incomplete(parent: Path, version: int) -> Path:
    """Returns the directory in which the checkpoint of `version` is written."""
    return _hidden(parent, version, _INCOMPLETE)


def start(parent: Path, version: int) -> Path:
    """Returns an empty directory to write the checkpoint of `version` into."""
    temporary = incomplete(parent, version)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, meta: CheckpointMeta) -> Path:
    """Writes META_FILE and gives the directory its name.

    An earlier checkpoint of that version is removed only then.
    """
    parent = temporary.parent
    final = parent / directory_name(meta.version)
    file_of_owner = os.open(temporary / META_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(file_of_owner, "w", encoding="utf-8") as file:
        file.write(meta.dump())
        file.flush()
        os.fsync(file.fileno())
    sync_directory(temporary)
    replaced = _hidden(parent, meta.version, _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    sync_directory(parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def abandon(parent: Path, version: int) -> None:
    """Removes the files of a checkpoint that will not be completed."""
    shutil.rmtree(incomplete(parent, version), ignore_errors=True)


def clean(parent: Path) -> list[str]:
    """Finishes what a killed run left half done; returns it in words. No trainer may be writing."""
    if not parent.is_dir():
        return []
    lines = []
    for path in sorted(parent.glob(f".{_PREFIX}*")):
        final = parent / path.stem.removeprefix(".")
        if path.suffix == _REPLACED and problem(final) is not None and problem(path) is None:
            shutil.rmtree(final, ignore_errors=True)
            path.rename(final)
            lines.append(f"checkpoint {final} is put back: its replacement was not completed")
        elif path.suffix in (_INCOMPLETE, _REPLACED, _DELETED):
            shutil.rmtree(path, ignore_errors=True)
            if path.suffix == _INCOMPLETE:
                lines.append(f"checkpoint {final}: its incomplete files are removed")
    return lines


def delete(directory: Path) -> None:
    """Deletes a checkpoint in two steps, so that a kill leaves no directory that looks like one."""
    hidden = directory.with_name(f".{directory.name}{_DELETED}")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def superfluous(
    parent: Path, keep_last: int, keep_best: int, accuracy: Mapping[int, float]
) -> list[Path]:
    """Returns the complete checkpoints that retention deletes, oldest first.

    Never returns the newest, and none with keep_last = 0. `accuracy`: by version, of those that
    were evaluated; among equals the newer one is better.
    """
    if not keep_last:
        return []
    paths = {version_of(path): path for path in complete(parent)}
    versions = sorted(version for version in paths if version is not None)
    kept = set(versions[-keep_last:])
    if keep_best:
        evaluated = [version for version in versions if version in accuracy]
        evaluated.sort(key=lambda version: (accuracy[version], version))
        kept.update(evaluated[-keep_best:])
    return [paths[version] for version in versions if version not in kept]


def list_files(directory: Path) -> dict[str, int]:
    """Returns the size of every file below `directory` by name, META_FILE excepted."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in files
        if path.name != META_FILE
    }


def digest_of(file: Path) -> str:
    """Returns the SHA-256 of the file's bytes, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def note_digests(directory: Path, rank: int, names: Iterable[str]) -> None:
    """Writes the digests of the files that this rank has written, for `collect_digests`.

    Raises OSError.
    """
    digests = {name: digest_of(directory / name) for name in names}
    _note_of(directory, rank).write_text(json.dumps(digests))


def collect_digests(directory: Path, ranks: int) -> dict[str, str]:
    """Returns the digests of all files, by name, and removes the ranks' notes of them.

    Digests of the few small files that no rank noted are computed.
    """
    noted: dict[str, str] = {}
    for note_file in [_note_of(directory, rank) for rank in range(ranks)]:
        noted |= json.loads(note_file.read_text())
        note_file.unlink()
    return {name: noted.get(name) or digest_of(directory / name) for name in list_files(directory)}


def check_files(directory: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compares this rank's share of a checkpoint's files with their digests.

    A checkpoint of an earlier release has no digests; rank 0 says so. Raises UserError if the
    checkpoint is not complete. Raises DataError that names the first file that is not what was
    written, and the next older checkpoint.
    """
    if wrong := content_problem(directory, rank, ranks):
        raise damaged(directory, wrong)


def content_problem(directory: Path, rank: int = 0, ranks: int = 1) -> str:
    """Returns the first file of this rank's share that is not what was written; empty if none."""
    meta = read_meta(directory)
    if not meta.digests and rank == 0:
        logger.warning(
            "checkpoint %s is of a release without digests: its files are checked by their sizes "
            "alone",
            directory,
        )
    largest_first = sorted(meta.digests, key=lambda name: (-meta.files[name], name))
    mine = largest_first[rank::ranks]
    with ThreadPoolExecutor(_THREADS, "checkpoint digests") as threads:
        problems = threads.map(lambda name: _wrong(directory / name, meta.digests[name]), mine)
        for name, wrong in zip(mine, problems, strict=True):
            if wrong:
                return f"{name} {wrong}"
    return ""


def damaged(directory: Path, problem: str) -> DataError:
    """Returns the error that states a checkpoint's damage, and where to continue."""
    return DataError(
        f"checkpoint {directory} is damaged: {problem}; remove it or name another (checkpoint.load, "
        f"--checkpoint): {next_older(directory)}"
    )


def _wrong(file: Path, expected: str) -> str:
    """Returns what is wrong with a file; empty if its digest is the expected one."""
    try:
        digest = digest_of(file)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if digest == expected:
        return ""
    return f"is not what was written (sha256 {digest:.12}..., not {expected:.12}...)"


def _note_of(directory: Path, rank: int) -> Path:
    return directory / f".digests_{rank}.json"


def _read(directory: Path) -> CheckpointMeta | str:
    """Returns the meta data of a complete checkpoint, or what is wrong with it."""
    try:
        values = json.loads(read_plain(directory / META_FILE, _LARGEST_META_BYTES).decode("utf-8"))
    except OSError as error:
        return f"{META_FILE} cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        return f"{META_FILE} is damaged ({error})"
    if not isinstance(values, dict):
        return f"{META_FILE} is damaged (not an object)"
    seal = values.pop(_SEAL, None)
    is_older = seal is None and "digests" not in values
    is_whole = is_older or seal == _seal(values)
    names = [field.name for field in fields(CheckpointMeta)]
    known = {name: values[name] for name in names if name in values}
    try:
        meta = CheckpointMeta(**{"digests": {}, **known})
    except ValidationError as error:
        return (
            f"{META_FILE} is damaged or of another release (no valid "
            f"{error.errors()[0]['loc'][0]!r})"
        )
    if not {"path", "fingerprint"} <= meta.model.keys():
        return (
            f"{META_FILE} is damaged or of another release (its model has no path or no "
            "fingerprint)"
        )
    if not is_whole:
        return f"{META_FILE} is damaged (its own digest is that of other values)"
    if not is_older and (unknown := sorted(meta.files.keys() ^ meta.digests.keys())):
        return f"{META_FILE} is damaged (no file and digest of {unknown[0]!r:.60})"
    for name, size in meta.files.items():
        path = directory / name
        if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{META_FILE} is damaged (its file {name!r:.60} of {size!r:.20} bytes)"
        try:
            actual_size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            return f"{META_FILE} is damaged (its file {name!r:.60}: {error.strerror})"
        if actual_size is None:
            return f"{name:.200} is missing"
        if actual_size != size:
            return f"{name} has {actual_size} bytes instead of {size}"
    return meta


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _named(parent: Path) -> list[Path]:
    """Returns the directories that are named like checkpoints, by version."""
    if not parent.is_dir():
        return []
    directories = {version_of(path): path for path in parent.iterdir() if path.is_dir()}
    versions = sorted(version for version in directories if version is not None)
    return [directories[version] for version in versions]


def _hidden(parent: Path, version: int, suffix: str) -> Path:
    return parent / f".{directory_name(version)}{suffix}"
