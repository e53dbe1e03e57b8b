"""Compares the chains of two runs: since when they differ, in what first, and by how much.

What an iteration computes follows from what stands before it in this order, so that the first
difference is the cause of the others:

    configuration, model, weights before (first iteration) ─> data ─> prompts ─> responses
    ─> engines' log-probs ─> rewards ─> advantages ─> places ─> gradient ─> weights after

Where nothing that `rounding_causes` lists differs, bits must be equal. Otherwise log-probs,
gradients and weights may differ by rounding (ROUNDING). Data, rewards and advantages have no
rounding. Once a response has other tokens, as samples of nearly equal weights may, what follows
cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pa_npu.config.words import counted
from pa_npu.errors import DataError
from pa_npu.telemetry.chain import CHAIN, ChainLink, Responses

Verdict = Literal["equal", "rounding", "undecided", "different"]

# Keys of the arrangement that decide which share of the weights a rank has.
_LAYOUT = (
    "model.dtype",
    "trainer.backend",
    "trainer.devices",
    "trainer.shards",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.expert_parallel",
    "trainer.context_parallel",
)
# Of versions and devices, what computes nothing.
_NO_ARITHMETIC = ("pa_npu", "python")


@dataclass(frozen=True)
class Rounding:
    """The largest differences that numbers of two honest runs may have.

    logprob: an engine's log-probs of a response, mean difference a token, in nats. gradient: its
    norm, relative. weights: norm of the difference of all weights over that of their way since the
    checkpoint from which both runs went on.
    """

    logprob: float
    gradient: float
    weights: float


ROUNDING = {"fp32": Rounding(1e-4, 1e-3, 0.05), "bf16": Rounding(5e-2, 1e-1, 0.5)}
"""By model.dtype. Adam divides a gradient by its own size, so that elements whose true gradient is
0, such as biases of keys, move by their rounding: hence the large share for weights."""


@dataclass(frozen=True)
class Difference:
    """The difference of two runs in an iteration.

    aspect: in a word or two. text: where, and by how much. within: whether rounding explains it.
    response: dispatch index and number of the response, where it is one.
    """

    iteration: int
    aspect: str
    text: str
    within: bool = False
    response: tuple[int, int] | None = None


@dataclass(frozen=True)
class Comparison:
    """Two chains over the iterations that both have.

    iterations: how many were compared. begin: the first of them. causes: why bits may differ.
    differences: those of the first iteration that has any, in the order of cause and effect.
    last: those of the iteration in which the comparison ended, if they are not mere rounding.
    rounding: the limits in force, None where bits must be equal.
    """

    begin: int
    iterations: int
    causes: tuple[str, ...]
    differences: tuple[Difference, ...]
    last: tuple[Difference, ...]
    rounding: Rounding | None = None

    @property
    def verdict(self) -> Verdict:
        if not self.differences:
            return "equal"
        if not self.last:
            return "rounding"
        return "undecided" if self.causes and self.last[0].aspect == "responses" else "different"


def compare_chains(
    first: Iterable[ChainLink], second: Iterable[ChainLink], begin: int = 0, end: int | None = None
) -> Comparison:
    """Compares iterations from `begin` to before `end` that both have, up to the first that
    differs.

    Raises DataError where a line is damaged.
    """
    causes: dict[str, None] = {}
    count = 0
    start = begin
    rounding: Rounding | None = None
    differences: tuple[Difference, ...] = ()
    for link, peer in _pairs(first, second, begin, end):
        causes.update(dict.fromkeys(rounding_causes(link, peer)))
        rounding = ROUNDING.get(str(link.arrangement.get("model.dtype"))) if causes else None
        if not count:
            start = link.iteration
        of_iteration = tuple(compare_links(link, peer, rounding, is_first=not count))
        count += 1
        differences = differences or of_iteration
        decisive = tuple(difference for difference in of_iteration if not difference.within)
        if decisive:
            return Comparison(start, count, tuple(causes), differences, decisive, rounding)
    return Comparison(start, count, tuple(causes), differences, (), rounding)


def _pairs(
    first: Iterable[ChainLink], second: Iterable[ChainLink], begin: int, end: int | None
) -> Iterator[tuple[ChainLink, ChainLink]]:
    """Yields lines of equal iterations. Both chains are in order, and only a line of each is held."""
    left = iter(first)
    right = iter(second)
    link = next(left, None)
    peer = next(right, None)
    while link is not None and peer is not None:
        if link.iteration < peer.iteration:
            link = next(left, None)
        elif link.iteration > peer.iteration:
            peer = next(right, None)
        else:
            if end is not None and link.iteration >= end:
                return
            if link.iteration >= begin:
                yield link, peer
            link = next(left, None)
            peer = next(right, None)


def rounding_causes(link: ChainLink, peer: ChainLink) -> list[str]:
    """Returns in words what lets the bits of two runs differ; nothing where they must be equal."""
    causes = []
    for key in sorted(link.arrangement.keys() | peer.arrangement.keys()):
        values = link.arrangement.get(key), peer.arrangement.get(key)
        if values[0] != values[1]:
            causes.append(f"{key} is {values[0]} and {values[1]}")
    for name in sorted((link.software.keys() | peer.software.keys()) - {*_NO_ARITHMETIC}):
        texts = link.software.get(name), peer.software.get(name)
        if texts[0] != texts[1]:
            causes.append(f"{name}: {texts[0]} and {texts[1]}")
    for arrangement in (link.arrangement, peer.arrangement):
        causes += _own_causes(arrangement)
    return list(dict.fromkeys(causes))


def _own_causes(arrangement: dict[str, Any]) -> list[str]:
    """Causes that make a run differ from its own repetition."""
    causes = []
    if arrangement.get("schedule.order") != "prompt":
        causes.append("schedule.order=completion, so that gradients are summed as groups arrive")
    if not arrangement.get("run.deterministic"):
        causes.append("run.deterministic=false")
    if not _engines_are_functions(arrangement):
        causes.append(
            "rollout.batch_invariant=false, so that a response depends on those beside it"
        )
    return causes


def _engines_are_functions(arrangement: dict[str, Any]) -> bool:
    """Returns whether a response depends on weights, prompt and seed alone."""
    if arrangement.get("rollout.backend") == "transformers":
        return True  # each of its passes has a batch of one
    is_exact = arrangement.get("run.device") == "cpu" and arrangement.get("model.dtype") == "fp32"
    return is_exact or bool(arrangement.get("rollout.batch_invariant"))


def compare_links(
    link: ChainLink, peer: ChainLink, rounding: Rounding | None, is_first: bool = False
) -> Iterator[Difference]:
    """Yields the differences of an iteration, causes first. rounding: None where bits must be
    equal.
    """
    iteration = link.iteration
    same_layout = all(link.arrangement.get(key) == peer.arrangement.get(key) for key in _LAYOUT)
    if link.configuration != peer.configuration:
        yield Difference(iteration, "configuration", "keys that make a run another run differ")
    if link.model != peer.model:
        yield Difference(iteration, "model", "the runs began with other models")
    if is_first and same_layout and link.weights_before != peer.weights_before:
        text = (
            f"the weights before it have the digests {link.weights_before} and "
            f"{peer.weights_before}"
        )
        yield Difference(iteration, "weights before", text)
    if link.data != peer.data:
        yield Difference(
            iteration, "data", "it begins at another position of the data, or with other data"
        )
    if link.prompts != peer.prompts:
        yield _prompts(link, peer)
        return
    mine = link.table()
    theirs = peer.table()
    yield from _responses(link, peer, mine, theirs)
    yield from _logprobs(link, peer, mine, theirs, rounding)
    for aspect in ("reward", "advantage"):
        yield from _values(iteration, aspect, mine, theirs)
    if link.places != peer.places:
        text = "groups went to other replicas or places, so that they are summed in another order"
        yield Difference(iteration, "places", text, within=rounding is not None)
    yield from _gradient(link, peer, rounding)
    if same_layout and link.weights_after != peer.weights_after:
        text = (
            f"the weights after it have the digests {link.weights_after} and {peer.weights_after}"
        )
        yield Difference(iteration, "weights", text, within=rounding is not None)


def _prompts(link: ChainLink, peer: ChainLink) -> Difference:
    mine = link.table()
    theirs = peer.table()
    text = f"it has {link.groups} and {peer.groups} groups"
    sizes = [np.diff(np.append(table.starts, table.size)) for table in (mine, theirs)]
    for place in range(min(link.groups, peer.groups)):
        number = int(mine.indices[place])
        if mine.prompts[place] != theirs.prompts[place]:
            text = (
                f"group {number} is of prompt {mine.prompts[place]} and of prompt "
                f"{theirs.prompts[place]}"
            )
            break
        if sizes[0][place] != sizes[1][place]:
            text = f"group {number} has {sizes[0][place]} and {sizes[1][place]} responses"
            break
    return Difference(link.iteration, "prompts", text)


def _responses(
    link: ChainLink, peer: ChainLink, mine: Responses, theirs: Responses
) -> Iterator[Difference]:
    if link.tokens != peer.tokens:
        differs = mine.rows["tokens"] != theirs.rows["tokens"]
        differs |= mine.rows["length"] != theirs.rows["length"]
        row = int(differs.argmax())
        place = mine.where(row)
        lengths = f"{mine.rows['length'][row]} and {theirs.rows['length'][row]} of them"
        text = (
            f"{_named(place)} has other tokens, {lengths}; {np.count_nonzero(differs)} of "
            f"{len(differs)} responses do"
        )
        yield Difference(link.iteration, "responses", text, response=place)
    elif link.context != peer.context:
        text = (
            "prompts, which tokens are trained, the versions that wrote them, or further "
            "columns differ"
        )
        yield Difference(link.iteration, "context", text)


def _logprobs(
    link: ChainLink, peer: ChainLink, mine: Responses, theirs: Responses, rounding: Rounding | None
) -> Iterator[Difference]:
    if link.logprobs == peer.logprobs:
        return
    differs = mine.rows["logprobs"] != theirs.rows["logprobs"]
    row = int(differs.argmax())
    sums = (
        mine.rows["logprob_sum"].astype(np.float64),
        theirs.rows["logprob_sum"].astype(np.float64),
    )
    apart = np.abs(sums[0] - sums[1]) / np.maximum(mine.rows["length"], 1)
    responses = _named(mine.where(row))
    others = int(np.count_nonzero(differs)) - 1
    if others:
        responses += f" and of {counted(others, 'other')}"
    text = (
        f"engines' log-probs of {responses} differ; by {apart.max():.2g} a token on average "
        "where they do most"
    )
    within = (
        rounding is not None
        and link.tokens == peer.tokens
        and bool(apart.max() <= rounding.logprob)
    )
    yield Difference(link.iteration, "log-probs", text, within, mine.where(row))


def _values(
    iteration: int, aspect: str, mine: Responses, theirs: Responses
) -> Iterator[Difference]:
    """Rewards or advantages, which have no rounding."""
    values = mine.rows[aspect]
    others = theirs.rows[aspect]
    differs = values.view("<u4") != others.view("<u4")
    if not differs.any():
        return
    row = int(differs.argmax())
    bits = int(values.view("<u4")[row] ^ others.view("<u4")[row])
    text = (
        f"the {aspect} of {_named(mine.where(row))} is {values[row]!s} and {others[row]!s}, "
        f"{bits.bit_count()} bit{'s' if bits.bit_count() > 1 else ''} apart; "
        f"{np.count_nonzero(differs)} of {len(differs)} differ"
    )
    yield Difference(iteration, f"{aspect}s", text, response=mine.where(row))


def _gradient(link: ChainLink, peer: ChainLink, rounding: Rounding | None) -> Iterator[Difference]:
    if link.gradient_norms == peer.gradient_norms:
        return
    if len(link.gradient_norms) != len(peer.gradient_norms):
        text = f"it has {len(link.gradient_norms)} and {len(peer.gradient_norms)} updates"
        yield Difference(link.iteration, "gradient", text)
        return
    pairs = zip(link.gradient_norms, peer.gradient_norms, strict=True)
    norms = [(_norm(mine, link), _norm(theirs, peer)) for mine, theirs in pairs]
    update = next(number for number, (mine, theirs) in enumerate(norms) if mine != theirs)
    relative = max(
        abs(mine - theirs) / max(abs(mine), abs(theirs)) for mine, theirs in norms if mine != theirs
    )
    text = (
        f"the gradient's norm in update {update} is {norms[update][0]!r} and {norms[update][1]!r}, "
        f"{relative:.2g} apart, relatively"
    )
    within = rounding is not None and relative <= rounding.gradient
    yield Difference(link.iteration, "gradient", text, within)


def _norm(text: str, link: ChainLink) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):
        raise DataError(
            f"{CHAIN}: iteration {link.iteration}: {text!r:.40} is no gradient norm; the line is "
            "damaged"
        ) from None


def _named(place: tuple[int, int]) -> str:
    return f"response {place[1]} of group {place[0]}"
