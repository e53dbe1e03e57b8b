"""Damages a checkpoint as a disk may, or someone who forges it, for tests that read it afterwards."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from pa_npu.checkpoints import directories as store
from pa_npu.checkpoints.directories import digest_of

SHARD, INDEX, COMMON = "__0_0.distcp", ".metadata", "common.pt"


def older(checkpoint: Path) -> Path:
    return checkpoint.with_name(store.directory_name(1))


def flip_a_bit(checkpoint: Path, shard: str = SHARD) -> None:
    file = checkpoint / shard
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def zero_a_page(checkpoint: Path) -> None:
    file = checkpoint / SHARD
    content = bytearray(file.read_bytes())
    page = next(at for at in range(0, len(content), 4096) if any(content[at : at + 4096]))
    content[page : page + 4096] = bytes(4096)
    file.write_bytes(content)


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / SHARD, (checkpoint / SHARD).stat().st_size - 4096)


def take_the_shard_of_another_version(checkpoint: Path, shard: str = SHARD) -> None:
    shutil.copy(older(checkpoint) / shard, checkpoint / shard)


def lose_a_digest(checkpoint: Path) -> None:
    meta = store.read_meta(checkpoint)
    rewrite(
        checkpoint,
        replace(meta, digests={name: d for name, d in meta.digests.items() if name != SHARD}),
    )


def change_the_data_position(checkpoint: Path) -> None:
    file = checkpoint / store.META_FILE
    file.write_text(file.read_text().replace('"position": 8', '"position": 4'))


class Payload:
    """Unpickled by an unpickler that trusts what it reads, it makes a directory."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.made),)


def forge_the_index(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_bytes(pickle.dumps(Payload(checkpoint.parent / "made")))


def forge_the_common_part(checkpoint: Path) -> None:
    torch.save(Payload(checkpoint.parent / "made"), checkpoint / COMMON)


def rewrite(checkpoint: Path, meta: store.CheckpointMeta) -> None:
    (checkpoint / store.META_FILE).write_text(meta.dump())


def sign_anew(checkpoint: Path) -> None:
    """As someone would who forges the whole directory."""
    meta, files = (
        json.loads((checkpoint / store.META_FILE).read_text()),
        store.list_files(checkpoint),
    )
    del meta["digest"]
    meta |= {"files": files, "digests": {name: digest_of(checkpoint / name) for name in files}}
    rewrite(checkpoint, store.CheckpointMeta(**meta))
