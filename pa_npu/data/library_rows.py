"""Rows that the library `datasets` loads (data.train=datasets:NAME[:CONFIGURATION]), from a hub or its cache.

The library is needed here only; a directory that it saved is read without it (rows.py). Where it
has no network, set HF_HUB_OFFLINE=1 so that it takes what its cache holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pa_npu.config.user_code import describe
from pa_npu.errors import DataError

SCHEME = "datasets:"
_BATCH_ROWS = 256


def are_of_library(path: str) -> bool:
    """Returns whether a dataset's path names a dataset of a hub instead of a file."""
    return path.startswith(SCHEME)


def library_batches(
    path: str, key: str, split: str | None, usual: Sequence[str]
) -> Iterator[list[dict[str, Any]]]:
    """Yields rows of a dataset, some hundred at a time. Raises DataError.

    Args:
        path: `datasets:NAME` or `datasets:NAME:CONFIGURATION`.
        key: the configuration key that names it, for messages.
        split: None takes the first of `usual` that is there, or the only one.
        usual: names of splits.
    """
    name, _, configuration = path.removeprefix(SCHEME).partition(":")
    if not name.strip():
        raise DataError(f"{key}: {path!r} names no dataset; write {SCHEME}OWNER/NAME")
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{key}: {path} needs the package datasets, which is not here ({describe(error)}); "
            "install it with pip install datasets, or name files that you have downloaded"
        ) from None
    try:
        loaded = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # of the network, of the hub, of the dataset's own files
        raise DataError(
            f"{key}: {path} cannot be loaded ({describe(error)}); check the name, and that its hub "
            "can be reached or its files are in the cache of datasets"
        ) from None
    splits = list(loaded)
    wanted = (split,) if split is not None else tuple(usual)
    chosen = next((name for name in wanted if name in splits), None)
    if chosen is None and split is None and len(splits) == 1:
        chosen = splits[0]
    if chosen is None:
        raise DataError(
            f"{key}: {path} has the splits {', '.join(splits)}, not {' or '.join(wanted)}; name "
            "one of them with split"
        )
    # as a table: images stay bytes
    for batch in loaded[chosen].with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield batch.to_pylist()
