"""The page's view of a run's chain: whether it is whole, and since when other runs differ."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.errors import DataError
from pa_npu.telemetry.chain import CHAIN, ChainLink, fault, read_chain
from pa_npu.telemetry.chain_comparison import compare_chains
from pa_npu.telemetry.chain_sentences import compared_iterations, sentences

MAX_SHARE = 0.05
"""The share of a core's time that reading chains may take while a run is at work; a long chain
takes seconds.
"""
_MAX_KEPT = 4


@dataclass(frozen=True)
class _KeptView:
    """A view, and the state of the files that it was made from.

    made_s: when it was made.
    took_s: how long that took.
    """

    files: tuple[Any, ...]
    view: dict[str, Any]
    made_s: float
    took_s: float


class ChainViews:
    """Keeps views of a run's chain beside other runs, and makes one anew when a chain has changed."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._kept: dict[tuple[Path, ...], _KeptView] = {}

    def view(self, others: Sequence[Path], is_running: bool) -> dict[str, Any]:
        """Returns the values of `chain_view`; they may be a moment old while the run is at work."""
        key = tuple(others)
        with self._lock:
            kept = self._kept.pop(key, None)
            files = tuple(_state(run / CHAIN) for run in (self._run, *others))
            if kept is None or self._is_due(kept, files, is_running):
                begun_s = time.monotonic()
                view = chain_view(self._run, others)
                made_s = time.monotonic()
                kept = _KeptView(files, view, made_s=made_s, took_s=made_s - begun_s)
            self._kept[key] = kept  # behind all others: the view used longest ago goes first
            while len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            return kept.view

    @staticmethod
    def _is_due(kept: _KeptView, files: tuple[Any, ...], is_running: bool) -> bool:
        if kept.files == files:
            return False
        return not is_running or time.monotonic() - kept.made_s >= kept.took_s / MAX_SHARE


def _state(path: Path) -> tuple[int, int, int] | None:
    """Returns values that change whenever the file does; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def chain_view(run: Path, others: Sequence[Path]) -> dict[str, Any]:
    """Returns the view as plain values.

    first, last: the iterations of the first and the last line that are whole; None without one.
    newest: the digest of the last whole line; None without one.
    problem: why the chain is not whole, or empty.
    differences: from each other run, see `_difference`.
    """
    view: dict[str, Any] = {
        "first": None,
        "last": None,
        "newest": None,
        "problem": "",
        "differences": [_difference(run, peer) for peer in others],
    }
    if not (run / CHAIN).exists():
        return view
    before: ChainLink | None = None
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
        view["last"] = before.iteration
        view["newest"] = before.digest
    return view


def _difference(run: Path, peer: Path) -> dict[str, Any]:
    """Compares a run with another one, `peer`, and returns plain values.

    name: the peer's name.
    verdict: equal, rounding, undecided or different; None where the runs cannot be compared.
    problem: why they cannot be compared, or empty.
    iterations: those that were compared, in words.
    sentences: the sentences that `pa-npu diff` prints.
    since: the first iteration in which something differs, or the one that decides.
    group: dispatch index of the group that differs first in that iteration; None where none does.
    """
    difference: dict[str, Any] = {
        "name": peer.resolve().name,
        "verdict": None,
        "iterations": "",
        "sentences": [],
        "since": None,
        "group": None,
        "problem": "",
    }
    try:
        comparison = compare_chains(read_chain(run), read_chain(peer))
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
