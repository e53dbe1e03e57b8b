"""The gradient at the log-probs a second time, from the algorithm's formulas in numpy and fp64.

    backend: hidden states ──LM head──> log-probs ──objective──> loss
             dL/dh         <──────────  g          <── backward    g compared with `expected_gradient`, token by token
             h · dL/dh  =  g (log p + H)                           by `HeadGradient`, over all tokens of an update

The first sees what the loss makes of advantages, weights and ratios. The second sees what stands
between the log-probs and the hidden states: logits are linear in h, so that h · dL/dh = sum over j
of logit_j dL/dlogit_j = g (logit_t - E[logit]) = g (log p_t + H), H being the entropy, whatever the
weights of the head are. It needs a head without soft cap, and no gradient through the entropy or
through log-probs of further tokens (choices.py), whose gradient is compared as the first is.

What an update's loss was given is kept on the device until the update ends, so that nothing waits
for it in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pa_npu.algorithm.policy_losses import TokenBatch

Values = npt.NDArray[np.float64]

# of a microbatch, at least, whose gradient is watched; all where it has fewer than twice as many
_ROWS = 64
# microbatches of an update, at least, whose head is watched; always fewer than twice as many
_HEADS = 8


class HeadGradient:
    """Watches the gradient of one microbatch's hidden states, [N, hidden_size], as they meet the LM
    head.

    products: h · dL/dh, fp32, of one row in `every`; sizes: |h| |dL/dh|. None until the backward,
    and where nothing is watched. is_partial: the gradient is a sum over tensor-parallel ranks that
    is made later. own: int64 [N], which of the microbatch's targets the rows belong to; None: all
    of them, in order.
    """

    def __init__(self, own: torch.Tensor | None = None) -> None:
        self.own = own
        self.products: torch.Tensor | None = None
        self.sizes: torch.Tensor | None = None
        self.is_partial = False
        self.every = 1
        self.is_watched = False
        self._hidden: torch.Tensor | None = None

    def offer(self, hidden: torch.Tensor, *, is_partial: bool = False) -> None:
        """Called by the model with the rows that meet the head; `watch` decides."""
        self.is_partial = is_partial
        self._hidden = hidden

    def watch(self) -> None:
        """Watches what was offered, if it has a gradient. Called before the backward."""
        hidden, self._hidden = self._hidden, None
        self.is_watched = hidden is not None and hidden.requires_grad
        if hidden is not None and self.is_watched:
            self.every = max(1, len(hidden) // _ROWS)
            hidden.register_hook(partial(self._arrived, hidden.detach()[:: self.every]))

    def _arrived(self, states: torch.Tensor, gradient: torch.Tensor) -> None:
        states, gradient = states.float(), gradient[:: self.every].float()
        self.products = torch.linalg.vecdot(states, gradient)
        self.sizes = torch.linalg.vector_norm(states, dim=-1) * torch.linalg.vector_norm(
            gradient, dim=-1
        )


class GivenChoices:
    """A teacher's most likely tokens as a microbatch's loss got them, on the device, and the
    gradient that came back to the policy's log-probs of them.

    rows: int64 [M], a sample of the targets. choices: theirs, detached. weights: [M], 0 of targets
    that are not the leading component's. gradient: [M, k + 1]; None until the backward.
    """

    def __init__(self, batch: TokenBatch, weights: torch.Tensor, *, every_target: bool) -> None:
        """batch: with choices. weights: Algorithm.choice_weights. every_target: keep all, not a
        sample.
        """
        assert batch.choices is not None, "there are choices to watch"
        num_targets = len(batch.logprobs)
        every = 1 if every_target else max(1, num_targets // _ROWS)
        self._every = every
        self.choices = batch.choices.map(lambda values: values[::every].detach())
        if (component := batch.columns.get("component")) is not None:
            weights = weights * (component == 1)
        self.weights = weights[::every]
        self.gradient: torch.Tensor | None = None
        policy = batch.choices.policy
        if policy.requires_grad:
            policy.register_hook(self._arrived)

    def _arrived(self, gradient: torch.Tensor) -> None:
        sampled = gradient[:: self._every].detach()
        self.gradient = sampled.clone() if self.gradient is None else self.gradient + sampled


@dataclass(eq=False, slots=True)
class GivenLoss:
    """The inputs of a microbatch's loss, on the device, and the gradient that came back to its
    log-probs.

    batch: with the denominators that the algorithm names and the advantages of the group's rewards,
    where these are known; its log-probs are detached. sources, lengths: as Targets'. head: None
    where nobody looks at it. gradient: [N], None until the backward.
    denominators, advantages: [N], with which the loss was in fact computed. factor: the gradient
    that came to the loss itself, which nothing but a sum may be made of; None until the backward.
    """

    batch: TokenBatch
    sources: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    head: HeadGradient | None
    gradient: torch.Tensor | None = field(default=None, init=False)
    factor: torch.Tensor | None = field(default=None, init=False)
    choices: GivenChoices | None = field(default=None, kw_only=True)
    denominators: torch.Tensor = field(kw_only=True)
    advantages: torch.Tensor = field(kw_only=True)

    def watch(self, logprobs: torch.Tensor) -> None:
        # a hook, because whoever waits for `logprobs.grad` keeps the microbatch's graph until then
        if logprobs.requires_grad:
            logprobs.register_hook(self._arrived)

    def _arrived(self, gradient: torch.Tensor) -> None:
        self.gradient = (
            gradient.detach() if self.gradient is None else self.gradient + gradient.detach()
        )


class WatchedHeads:
    """Chooses the microbatches of an update whose LM head is watched, while nobody knows how many
    there will be: at first all of them, then ever fewer, so that those that remain lie at equal
    distances and are at least _HEADS where there are as many.

    What is judged is one factor over all rows of the update, of which these are a sample.
    """

    def __init__(self, first: int, expected: int = 0) -> None:
        """first: moves the sample; another one in every update. expected: the microbatches of the
        update before. If as many come, at least _HEADS are watched; if half as many, half of that.
        """
        self._first = first
        self._distance = 1
        while expected >= 2 * _HEADS * self._distance:
            self._distance *= 2
        self._num_given = 0
        self._watched: list[tuple[int, GivenLoss]] = []

    def add(self, loss: GivenLoss) -> None:
        """Watches the head of the next microbatch, or lets go of it."""
        number = self._num_given
        self._num_given += 1
        head = loss.head
        if head is None:
            return
        if not self._is_chosen(number):
            loss.head = None
            return
        head.watch()
        self._watched.append((number, loss))
        if len(self._watched) < 2 * _HEADS:
            return
        self._distance *= 2
        kept = []
        for other_number, other in self._watched:
            if self._is_chosen(other_number):
                kept.append((other_number, other))
            else:
                other.head = None
        self._watched = kept

    def _is_chosen(self, number: int) -> bool:
        return (number + self._first) % self._distance == 0


@dataclass(frozen=True, eq=False)
class ExpectedGradient:
    """[N], or [N, k + 1], each: the gradient, how far rounding may take it, and where it can be told (not beside a
    bound of a ratio).
    """

    values: Values
    limit: Values
    is_sure: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Slope:
    """The factor between two series, and its error, estimated from the spread of the tokens."""

    value: float
    error: float


def slope_of(products: Values, expected: Values, sizes: Values, noise: float) -> Slope | None:
    """Returns the factor of h · dL/dh over g (log p + H), over tokens of which rounding cannot hide
    it.

    noise: the share of |h| |dL/dh| below which a token's value is not looked at. None where that is
    all of them.
    """
    clear = np.abs(expected) > noise * sizes
    products, expected = products[clear], expected[clear]
    size = float(np.sum(expected**2))
    if not size:
        return None
    value = float(np.sum(products * expected)) / size
    spread = np.sqrt(np.sum(((products - value * expected) * expected) ** 2))
    return Slope(value, float(spread) / size)


def on_host(batch: TokenBatch) -> TokenBatch:
    """Returns the batch with its tensors on the host."""
    moved: dict[str, Any] = {}
    for name, values in vars(batch).items():
        if isinstance(values, torch.Tensor):
            moved[name] = values.detach().cpu()
    columns = {name: column.cpu() for name, column in batch.columns.items()}
    choices = batch.choices
    if choices is not None:
        choices = choices.map(lambda values: values.detach().cpu())
    return replace(batch, **moved, columns=columns, choices=choices)


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Batches one after another, so that all are looked at together."""
    first = batches[0]
    starts = [0, *accumulate(batch.num_responses for batch in batches)]
    lengths = [len(batch.logprobs) for batch in batches]
    index = torch.cat([batch.response_index for batch in batches])
    shift = torch.repeat_interleave(torch.tensor(starts[:-1]), torch.tensor(lengths))

    def column(name: str) -> torch.Tensor | None:
        values = [getattr(batch, name) for batch in batches]
        return None if values[0] is None else torch.cat(values)

    names = ("logprobs", "entropy", "old_logprobs", "reference_logprobs", "engine_logprobs")
    columns: dict[str, Any] = {
        name: column(name) for name in (*names, "advantages", "weights", "ages")
    }
    declared = {}
    for name in dict.fromkeys(chain.from_iterable(batch.columns for batch in batches)):
        declared[name] = torch.cat([_column(batch, name) for batch in batches])
    return replace(
        first,
        **columns,
        response_index=index + shift.to(index.device),
        num_responses=starts[-1],
        columns=declared,
    )


# What a batch says by leaving a column out.
_LEFT_OUT = {
    "component": (1, torch.uint8),
    "weight": (1.0, torch.float32),
    "written": (True, torch.bool),
}


def _column(batch: TokenBatch, name: str) -> torch.Tensor:
    if name in batch.columns or name not in _LEFT_OUT:
        return batch.columns[name]
    value, dtype = _LEFT_OUT[name]
    return torch.full((len(batch.logprobs),), value, dtype=dtype, device=batch.logprobs.device)
