"""A checkpoint's index is read without running what it names."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    StorageMeta,
)

from pa_npu.backends.shard_index import IndexReader

MEMBER = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


class Attribute:
    """Pickled as getattr(owner, name)."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def read(value: Any, protocol: int) -> Any:
    return IndexReader(io.BytesIO(pickle.dumps(value, protocol))).load()


@pytest.mark.parametrize("protocol", range(4, pickle.HIGHEST_PROTOCOL + 1))
def test_a_member_of_an_enumeration_is_read_as_every_python_writes_it(protocol: int) -> None:
    assert read(MEMBER, protocol) is MEMBER
    by_attribute = Attribute(_MEM_FORMAT_ENCODING, MEMBER.name)
    assert read(by_attribute, protocol) is MEMBER


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_MEM_FORMAT_ENCODING, "__init__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (MEMBER, "name"),
        (StorageMeta, "__init__"),
        (BytesStorageMetadata, "__class__"),
    ],
)
def test_no_other_attribute_is_reached(owner: Any, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.getattr"):
        read(Attribute(owner, name), pickle.HIGHEST_PROTOCOL)
