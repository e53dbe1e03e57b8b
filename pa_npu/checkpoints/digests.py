"""Digests of a checkpoint's files: taken by the rank that wrote a file, beside training; compared before anything is read.

SHA-256, because processors of trainers compute it in hardware (x86 SHA-NI, Armv8 SHA2), it needs no package, and `sha256sum` checks
a file by hand. On load ranks take turns with the files, so that each is read once, however many ranks there are.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pa_npu.checkpoints import directories as store
from pa_npu.errors import DataError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
_THREADS = 4  # hashing releases the interpreter's lock


def digest_of(file: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal. Raises OSError."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def note(directory: Path, rank: int, names: Iterable[str]) -> None:
    """Leave the digests of the files that this rank has written for `collect`. Raises OSError."""
    _note_of(directory, rank).write_text(json.dumps({name: digest_of(directory / name) for name in names}))


def collect(directory: Path, ranks: int) -> dict[str, str]:
    """By file: what all ranks have noted, whose notes go, and the digests of the few small files that nobody noted."""
    noted: dict[str, str] = {}
    for note_file in [_note_of(directory, rank) for rank in range(ranks)]:
        noted |= json.loads(note_file.read_text())
        note_file.unlink()
    return {name: noted.get(name) or digest_of(directory / name) for name in store.list_files(directory)}


def check_files(directory: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare this rank's share of a checkpoint's files with their digests.

    A checkpoint of an earlier release has none; rank 0 says so. Raises UserError where the checkpoint is not complete, DataError
    naming the first file that is not what was written and the next older checkpoint.
    """
    if wrong := content_problem(directory, rank, ranks):
        raise damaged(directory, wrong)


def content_problem(directory: Path, rank: int = 0, ranks: int = 1) -> str:
    """The first file of this rank's share that is not what was written, and how; empty where all are."""
    meta = store.read_meta(directory)
    if not meta.digests and rank == 0:
        logger.warning(
            "checkpoint %s is of a release without digests: its files are checked by their sizes alone", directory
        )
    largest_first = sorted(meta.digests, key=lambda name: (-meta.files[name], name))
    mine = largest_first[rank::ranks]
    with ThreadPoolExecutor(_THREADS, "checkpoint digests") as threads:
        for name, wrong in zip(
            mine, threads.map(lambda name: _wrong(directory / name, meta.digests[name]), mine), strict=True
        ):
            if wrong:
                return f"{name} {wrong}"
    return ""


def damaged(directory: Path, what: str) -> DataError:
    """The error that says what is wrong with a checkpoint, and where to go on."""
    return DataError(
        f"checkpoint {directory} is damaged: {what}; remove it or name another (checkpoint.load, --checkpoint): "
        f"{store.next_older(directory)}"
    )


def _wrong(file: Path, expected: str) -> str:
    try:
        found = digest_of(file)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if found == expected else f"is not what was written (sha256 {found:.12}..., not {expected:.12}...)"


def _note_of(directory: Path, rank: int) -> Path:
    return directory / f".digests_{rank}.json"
