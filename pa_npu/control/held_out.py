"""Held-out rows from the coordinator to the trainers, and their loss back, in runs whose samples are rows of data."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.control.channel import StoreChannel
from pa_npu.control.typed import Topic


@dataclass(frozen=True)
class HeldOutSet:
    """A set of held-out rows. microbatches: how many groups (get_group) each of them has, in their
    order. rows, tokens: of the set; tokens are those with a loss.
    """

    name: str
    microbatches: tuple[int, ...]
    rows: int
    tokens: int


@dataclass(frozen=True)
class HeldOutSets:
    """All held-out sets of the run, in the configuration's order; their groups are there too."""

    sets: tuple[HeldOutSet, ...]


HELD_OUT_SETS = Topic("held_out/sets", HeldOutSets, "the coordinator to read the held-out sets")


@dataclass(frozen=True)
class HeldOutLoss:
    """The means of each set under a weight version, by set and by name: "loss", of sequences the
    cross-entropy of their trained tokens in nats, and what else the algorithm measures
    (Algorithm.held_out_sums).
    """

    means: dict[str, dict[str, float]]
    seconds: float


HELD_OUT_LOSS = Topic(
    "held_out/{version}/loss",
    HeldOutLoss,
    "trainers: the loss of held-out rows under version {version}",
)


def put_group(channel: StoreChannel, name: str, number: int, data: bytes) -> None:
    """Puts group `number` of set `name`, in the wire format of samples."""
    channel.put_bytes(_group_key(name, number), data)


def get_group(channel: StoreChannel, name: str, number: int) -> bytes:
    """Returns what `put_group` put. Raises StoreError where there is nothing."""
    return channel.get_bytes(_group_key(name, number))


def _group_key(name: str, number: int) -> str:
    return f"held_out/groups/{name}/{number}"
