"""Groups that stand ready: a rollout buffer of one iteration, and the iterator that trainers take microbatches from."""

from __future__ import annotations

from pa_npu.control.freshness import Freshness
from pa_npu.samples.columns import NONE, RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.wire import to_bytes


class Shelf:
    """A rollout buffer that holds one iteration's groups."""

    readers, head_bytes = 1, 0

    def __init__(self, groups: list[Group], columns: RunColumns = NONE) -> None:
        self._groups, self.columns = groups, columns

    def wait(self, iteration: int, replica: int, slot: int, timeout_s: float) -> float:
        return 0.0

    def ready(self, iteration: int, replica: int, slot: int) -> bool:
        return True

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        return to_bytes(self._groups[slot], self.columns)

    def done(self, iteration: int, replica: int, slot: int) -> None:
        pass


def shelf_iterator(
    groups: list[Group],
    iteration: int = 0,
    *,
    responses: int,
    max_tokens: int | None = None,
    pad_multiple: int = 1,
    freshness: Freshness | None = None,
    columns: RunColumns = NONE,
) -> MicrobatchIterator:
    """All groups as one replica's iteration, in microbatches of so many responses with shared
    prompts.
    """
    return MicrobatchIterator(
        Shelf(groups, columns),  # type: ignore[arg-type]
        replica=0,
        num_replicas=1,
        iteration=iteration,
        groups=len(groups),
        order="prompt",
        responses_per_microbatch=responses,
        shared_prompt=True,
        pad_multiple=pad_multiple,
        timeout_s=30.0,
        max_tokens=max_tokens,
        freshness=freshness or Freshness(0),
    )
