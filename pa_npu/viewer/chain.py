"""What the page shows of a run's chain: how far it reaches, and since when other runs differ from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pa_npu.errors import DataError
from pa_npu.telemetry.chain import CHAIN, Link, read_chain
from pa_npu.telemetry.chain_comparison import compare_chains


def chain_view(run: Path, others: Sequence[Path]) -> dict[str, Any]:
    """Plain values, computed anew when they are asked for.

    first, last: iterations; newest: the last line's digest; None without a whole line. problem: why
    the chain is not whole, or empty. weights: by iteration, the digest of the weights after it.
    differences: of each other run, see `_difference`.
    """
    view: dict[str, Any] = {"first": None, "last": None, "newest": None, "problem": "", "weights": {}}
    view["differences"] = [_difference(run, other) for other in others]
    if not (run / CHAIN).exists():
        return view
    before: Link | None = None
    try:
        for link in read_chain(run):
            if link.digest != link.actual or link.before != ("" if before is None else before.digest):
                view["problem"] = f"the line of iteration {link.iteration} is not the one that was written"
                break
            if before is None:
                view["first"] = link.iteration
            view["last"], view["newest"] = link.iteration, link.digest
            view["weights"][str(link.iteration)] = link.weights_after
            before = link
    except DataError as error:
        view["problem"] = str(error)
    return view


def _difference(run: Path, other: Path) -> dict[str, Any]:
    """verdict: equal, rounding, undecided or different; None where they cannot be compared.

    begin, iterations: what was compared. causes: why bits may differ. since: the first iteration in
    which something does; found: of that iteration, or of the one that decides, each aspect and text.
    """
    empty: dict[str, Any] = {
        "run": str(other),
        "verdict": None,
        "begin": None,
        "iterations": 0,
        "causes": [],
        "since": None,
    }
    try:
        comparison = compare_chains(read_chain(run), read_chain(other))
    except DataError as error:
        return {**empty, "found": [], "problem": str(error)}
    if not comparison.iterations:
        return {**empty, "found": [], "problem": "the runs have no iteration in common"}
    shown = comparison.last or comparison.differences
    return {
        "run": str(other),
        "verdict": comparison.verdict,
        "begin": comparison.begin,
        "iterations": comparison.iterations,
        "causes": list(comparison.causes),
        "since": shown[0].iteration if shown else None,
        "found": [{"aspect": difference.aspect, "text": difference.text} for difference in shown],
        "problem": "",
    }
