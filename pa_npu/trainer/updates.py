"""One report of an iteration out of those of its updates."""

from __future__ import annotations

_ADDED = frozenset({"tokens_response", "tokens_computed", "microbatches", "wait_s", "train_s", "step_s"})
_LARGEST = frozenset({"logprob_diff_max", "memory_peak_bytes"})


def merge_updates(reports: list[dict[str, float]]) -> dict[str, float]:
    """One report of an iteration's updates: work and seconds added, extremes kept, the last learning rate, means of the rest."""
    if len(reports) == 1:
        return reports[0]
    merged: dict[str, float] = {}
    for name in reports[0]:
        values = [report[name] for report in reports]
        if name == "learning_rate":
            merged[name] = values[-1]
        elif name in _LARGEST:
            merged[name] = max(values)
        else:
            merged[name] = sum(values) if name in _ADDED else sum(values) / len(values)
    return merged
