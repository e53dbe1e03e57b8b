"""What the page shows of a run's chain: whether it is whole, its newest line, and since when other runs differ."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.errors import DataError
from pa_npu.telemetry.chain import CHAIN, Link, fault, read_chain
from pa_npu.telemetry.chain_comparison import compare_chains
from pa_npu.telemetry.chain_sentences import compared_iterations, sentences

MAX_SHARE = 0.05
"""Of a core's time, while a run is at work: a long chain takes seconds to read."""
_MAX_KEPT = 4


@dataclass(frozen=True)
class _Kept:
    """A view with the state of the files that it is of. made_s: when it was ready; took_s: to make
    it.
    """

    files: tuple[Any, ...]
    view: dict[str, Any]
    made_s: float
    took_s: float


class ChainViews:
    """Views of a run's chain beside other runs, made anew only if a chain has changed."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._kept: dict[tuple[Path, ...], _Kept] = {}

    def view(self, others: Sequence[Path], is_running: bool) -> dict[str, Any]:
        """The values of `chain_view`; of a run at work they may be those of a moment ago."""
        key = tuple(others)
        with self._lock:
            kept = self._kept.pop(key, None)
            files = tuple(_state(run / CHAIN) for run in (self._run, *others))
            if kept is None or self._is_due(kept, files, is_running):
                begun_s = time.monotonic()
                view = chain_view(self._run, others)
                made_s = time.monotonic()
                kept = _Kept(files, view, made_s, made_s - begun_s)
            self._kept[key] = kept  # the one that was used last is the last to go
            while len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            return kept.view

    @staticmethod
    def _is_due(kept: _Kept, files: tuple[Any, ...], is_running: bool) -> bool:
        if kept.files == files:
            return False
        return not is_running or time.monotonic() - kept.made_s >= kept.took_s / MAX_SHARE


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def chain_view(run: Path, others: Sequence[Path]) -> dict[str, Any]:
    """Plain values.

    first, last: the iterations of the lines that are whole. newest: the digest of the last of them.
    All three are None without a whole line. problem: why the chain is not whole, or empty.
    differences: from each other run, see `_difference`.
    """
    view: dict[str, Any] = {"first": None, "last": None, "newest": None, "problem": ""}
    view["differences"] = [_difference(run, other) for other in others]
    if not (run / CHAIN).exists():
        return view
    before: Link | None = None
    try:
        for link in read_chain(run):
            view["problem"] = fault(before, link)
            if view["problem"]:
                break
            if before is None:
                view["first"] = link.iteration
            before = link
    except DataError as error:
        view["problem"] = str(error)
    if before is not None:
        view["last"], view["newest"] = before.iteration, before.digest
    return view


def _difference(run: Path, other: Path) -> dict[str, Any]:
    """How a run compares with another one.

    name: the other run's. verdict: equal, rounding, undecided or different; None where they cannot
    be compared, and `problem` says why. iterations: those that were compared, in words. sentences:
    as `pa-npu diff` prints them. since: the first iteration in which something differs, or the one
    that decides. group: dispatch index of the group that differs first in it, None where it is
    none.
    """
    difference: dict[str, Any] = {"name": other.resolve().name, "verdict": None, "iterations": ""}
    difference |= {"sentences": [], "since": None, "group": None, "problem": ""}
    try:
        comparison = compare_chains(read_chain(run), read_chain(other))
    except DataError as error:
        difference["problem"] = str(error)
        return difference
    if not comparison.iterations:
        difference["problem"] = "the runs have no iteration in common"
        return difference
    difference["verdict"] = comparison.verdict
    difference["iterations"] = compared_iterations(comparison)
    difference["sentences"] = sentences(comparison)
    decisive = comparison.last or comparison.differences
    if decisive:
        difference["since"] = decisive[0].iteration
        if decisive[0].response is not None:
            difference["group"] = decisive[0].response[0]
    return difference
