"""Invariant I7 end to end: weights that move along the gradient change log-probs as it predicts.

    microbatches ──accumulate──> gradient G of the weights
    w+, w-       ──evaluate────> log-probs
    predicted    G · (w+ - w-)
    measured     sum over tokens of g (log p(w+) - log p(w-))

w+ and w- lie on both sides of the weights w, so that the difference is exact to the second order; g
is the gradient at the log-probs that the algorithm's formula gives for the groups' rewards
(algorithm/loss_gradient.py). So nothing that the gradient went through is taken on trust: the
objective, the backward, the sum over microbatches and replicas. The weights are put back to the
bit. The check takes some passes, and is made in some iterations only.

Elements move by a share of their size, in the direction of their own gradient's sign, in another
half of the tensors every time. So many of them move that the change is far above the rounding of
log-probs, and still small enough to be a straight line.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.component_sums import all_gradients
from pa_npu.algorithm.loss_gradient import Values
from pa_npu.algorithm.model_outputs import Outputs, Targets
from pa_npu.algorithm.objective import Objective
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.backends.protocol import DTYPES, SteppedTensor, TrainBackend
from pa_npu.config.schema import Config
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.replica_feed import Traffic
from pa_npu.trainer.invariants import GradientSum
from pa_npu.trainer.loss_checks import (
    arrived_gradients,
    batch_with_credit,
    expected_choice_gradient,
)

# By model.dtype: the rounding of a token's log-prob, in nats; the smallest change to aim at, as the
# root of the summed squares of tokens' changes; the share of its size by which an element moves,
# which in bf16 is some units of its last place.
_ROUNDING = {"fp32": 1e-5, "bf16": 0.05}
_CHANGE = {"fp32": 0.05, "bf16": 2.0}
_SHARE = {"fp32": 2.0**-8, "bf16": 2.0**-5}
_MAX_SHARE = 0.25
# What is left of the third order, and in bf16 of rounding that tokens have in common, as a share of
# the change.
_TOLERANCE = {"fp32": 0.02, "bf16": 0.3}
_DEVIATIONS = 8.0
# Added to an element's size, so that biases and the B of adapters move from 0.
_SIZE_OF_ZERO = 0.01
# A change that differs more between its two sides is no straight line; then another try moves fewer
# elements.
_BENT = 0.3
_TRIES = 4
_FEWER = 4


@dataclass(frozen=True)
class FiniteDifference:
    """The change of the objective when weights are moved.

    predicted: by their gradient. measured: by two passes.
    limit: of the difference between the two; None if rounding or a bend hides too much to judge.
    tensors: number of tensors that moved.
    """

    predicted: float
    measured: float
    limit: float | None
    tensors: int

    def __str__(self) -> str:
        verdict = "which is too little to tell"
        if self.limit is not None:
            verdict = f"they may differ by {self.limit:.3g}"
        return (
            f"{self.tensors} tensors moved along their gradient change the objective by "
            f"{self.measured:.6g}, where it says {self.predicted:.6g}; {verdict}"
        )


class _ListedMicrobatches:
    """A MicrobatchSource of a list of microbatches."""

    waited_s = 0.0
    traffic = Traffic()
    by_rule = ()

    def __init__(self, microbatches: Sequence[Microbatch], groups: int) -> None:
        self._remaining = list(microbatches)
        self._groups = groups
        self.advantages: Mapping[int, Sequence[np.ndarray]] = {}

    @property
    def is_last(self) -> bool:
        return not self._remaining

    def settle(self) -> int:
        return self._groups

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        if not self._remaining:
            raise StopIteration
        return self._remaining.pop(0)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """The N tokens of this rank for which it computes the loss; none on other ranks.

    gradient, entropy_gradient: fp64 [N], of the objective at their log-probs and entropies.
    choice_gradient: fp64 [N, k + 1], at those of a teacher's most likely tokens, or no rows.
    logprobs: fp64 [N], before any weight has moved.
    """

    gradient: Values
    entropy_gradient: Values
    choice_gradient: Values
    logprobs: Values

    @classmethod
    def from_objective(
        cls,
        objective: Objective,
        algorithm: Algorithm,
        advantages: Mapping[int, Sequence[np.ndarray]],
    ) -> _Tokens:
        """Returns the tokens that the objective was given, with the gradient that the algorithm's
        formula gives for them.
        """
        losses = objective.given
        if not losses:
            return cls(np.zeros(0), np.zeros(0), np.zeros((0, 1)), np.zeros(0))
        batch, _, _ = batch_with_credit(losses, advantages)
        expected = all_gradients(algorithm, batch)
        # close to a bound of a ratio the slopes of both sides are right
        gradient = np.where(expected.is_sure, expected.values, arrived_gradients(losses))
        # entropy belongs to the leading component's loss alone
        weights = batch.weights.double().numpy()
        component = batch.columns.get("component")
        if component is not None:
            weights = np.where(component.numpy() == 1, weights, 0.0)
        entropy_gradient = -algorithm.keys.entropy_coef * weights
        choices = [loss.choices for loss in losses if loss.choices is not None]
        choice_gradient = np.zeros((0, 1))
        if choices:
            choice_gradient = expected_choice_gradient(algorithm, choices).values
        logprobs = batch.logprobs.double().numpy()
        return cls(gradient, entropy_gradient, choice_gradient, logprobs)

    def change(self, first: _Scores, second: _Scores) -> float:
        """Returns by how much the objective changes from the first scores to the second, along its
        gradient at the log-probs.
        """
        by_logprobs = np.sum(self.gradient * (second.logprobs - first.logprobs))
        by_entropy = np.sum(self.entropy_gradient * (second.entropy - first.entropy))
        by_choices = np.sum(self.choice_gradient * (second.choices - first.choices))
        return float(by_logprobs + by_entropy + by_choices)

    @property
    def size_squared(self) -> float:
        return float(np.sum(self.gradient**2) + np.sum(self.choice_gradient**2))


@dataclass(frozen=True, eq=False)
class _Scores:
    """Log-probs and entropies of tokens, fp64 [N] each. choices: fp64 [N, k + 1], or no rows."""

    logprobs: Values
    entropy: Values
    choices: Values


@dataclass(frozen=True, eq=False)
class _Moving:
    """The elements of a tensor that move, at equal distances, as far as this rank has them.

    memory: a view of the elements that the model computes with. original: a copy of them.
    step: fp32, by how much each moves. gradient: fp32.
    share: see SteppedTensor.
    """

    memory: torch.Tensor
    original: torch.Tensor
    step: torch.Tensor
    gradient: torch.Tensor
    share: float

    def at(self, direction: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the elements after a move, rounded to the model's type; fp32. direction: 1 or -1."""
        return (self.original.float() + direction * self.step).to(dtype).float()


class WeightMoves:
    """Moves a rank's weights along the gradient that `backend` holds, to both sides, and back."""

    def __init__(self, backend: TrainBackend, config: Config, seed: int) -> None:
        self._backend = backend
        self._dtype = DTYPES[config.model.dtype]
        self._seed = seed
        with_gradient = [
            tensor for tensor in backend.stepped() if tensor.share and tensor.gradient is not None
        ]
        half = [tensor for tensor in with_gradient if _digest(seed, tensor.name) % 2]
        self.reach = self._over_ranks(_reach(half))
        self._tensors = half
        if not self.reach:  # the half without a gradient
            self._tensors, self.reach = with_gradient, self._over_ranks(_reach(with_gradient))

    def __len__(self) -> int:
        return len(self._tensors)

    @contextmanager
    def chosen(self, share: float, distance: int) -> Iterator[list[_Moving]]:
        """Yields the elements that move by a `share` of their size, one in `distance` of each
        tensor, and puts them back to the bit afterwards.
        """
        moving = [
            self._moving(tensor, share, distance)
            for tensor in self._tensors
            if tensor.weights.numel()
        ]
        try:
            yield moving
        finally:
            for tensor_part in moving:
                tensor_part.memory.copy_(tensor_part.original)
            self._backend.share_weights()

    def move(self, moving: Sequence[_Moving], side: int) -> None:
        """Moves the elements to one side, 1 or -1, of their original weights. Collective."""
        for tensor_part in moving:
            tensor_part.memory.copy_(tensor_part.at(side, self._dtype))
        self._backend.share_weights()

    def predicted(self, moving: Sequence[_Moving]) -> float:
        """Returns by how much the objective changes from one side to the other according to this
        rank's gradient.
        """
        changes = [
            tensor_part.share
            * torch.sum(
                tensor_part.gradient
                * (tensor_part.at(1, self._dtype) - tensor_part.at(-1, self._dtype))
            )
            for tensor_part in moving
        ]
        return float(torch.stack(changes).sum()) if changes else 0.0

    def _moving(self, tensor: SteppedTensor, share: float, distance: int) -> _Moving:
        memory = tensor.weights if tensor.model is None else tensor.model
        assert tensor.gradient is not None, "tensors without one were left out"
        start = _digest(self._seed, tensor.name) % min(distance, memory.numel())
        memory = memory[start::distance]
        gradient = tensor.gradient[start::distance].float()
        original = memory.clone()
        step = share * (original.float().abs() + _SIZE_OF_ZERO) * gradient.sign()
        return _Moving(memory, original, step, gradient, tensor.share)

    def _over_ranks(self, value: float) -> float:
        return over_ranks(self._backend, [value])[0]


def _digest(seed: int, name: str) -> int:
    """Returns a number for a tensor that is the same on all ranks and differs with the seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "big")


def _reach(tensors: Sequence[SteppedTensor]) -> float:
    """Returns by how much the objective changes, to the first order, if all elements of this rank
    move by their size.
    """
    changes = []
    for tensor in tensors:
        if tensor.gradient is not None and tensor.weights.numel():
            size = tensor.weights.float().abs() + _SIZE_OF_ZERO
            changes.append(tensor.share * torch.sum(tensor.gradient.float().abs() * size))
    return float(torch.stack(changes).sum()) if changes else 0.0


def over_ranks(backend: TrainBackend, values: Sequence[float]) -> list[float]:
    """Adds numbers up over all ranks. Collective."""
    sums: list[float] = backend.reductions.ranks(
        torch.tensor(values, dtype=torch.float32, device=backend.device)
    ).tolist()
    return sums


@torch.no_grad()
def finite_difference(
    backend: TrainBackend,
    config: Config,
    microbatches: Sequence[Microbatch],
    update: GradientSum,
    advantages: Mapping[int, Sequence[np.ndarray]],
    seed: int,
) -> FiniteDifference | None:
    """Moves weights along the gradient of `microbatches` and compares the change of the objective
    with the one that the gradient predicts. Collective; changes nothing but the gradient.

    Args:
        backend: holds the policy that the microbatches are about to train.
        config: the run's.
        microbatches: this replica's; with pipeline stages, the pieces of one group.
        update: which update, for messages.
        advantages: as in LossGradient.check.
        seed: another seed chooses other weights.

    Returns None if no token has a gradient.

    Raises:
        InvariantViolation: the two differ by more than rounding and the third order make.
    """
    place, dtype = backend.place, config.model.dtype
    # the routers' auxiliary loss is no function of log-probs
    keys = config.algorithm.model_copy(update={"router_aux_coef": 0.0})
    config = config.model_copy(update={"algorithm": keys})
    algorithm = build_algorithm(config)
    objective = Objective(config, backend.device, algorithm=algorithm, watch_all=True)
    with torch.enable_grad():
        backend.accumulate(_ListedMicrobatches(microbatches, 1), objective)
    objective.finish()
    tokens = _Tokens.from_objective(objective, algorithm, advantages)
    counts = float(place.is_last_stage and place.speaks_for_stage)
    (squares,) = over_ranks(backend, [counts * tokens.size_squared])
    size = math.sqrt(squares)
    if not size:
        return None  # rewards that are all equal train nothing
    moves = WeightMoves(backend, config, seed)
    if not moves.reach:
        raise update.broken(
            "the gradient of every weight is exactly 0, while that of the log-probs has the norm "
            f"{size:.6g}"
        )
    start = _evaluated(backend, microbatches)
    # the share of their size by which all elements would move
    full_share = _CHANGE[dtype] * size / moves.reach
    for _ in range(_TRIES):
        distance = max(1, int(_SHARE[dtype] / full_share)) | 1
        share = min(_MAX_SHARE, full_share * distance)
        with moves.chosen(share, distance) as moving:
            predicted = moves.predicted(moving)
            sides = []
            for side in (1, -1):
                moves.move(moving, side)
                sides.append(_evaluated(backend, microbatches))
        plus, minus = sides
        measured = tokens.change(minus, plus)
        bend = tokens.change(start, plus) + tokens.change(start, minus)
        predicted, measured, bend = over_ranks(
            backend, [predicted, counts * measured, counts * bend]
        )
        if abs(bend) <= _BENT * max(abs(predicted), abs(measured)):
            break
        full_share /= _FEWER
    rounding = _DEVIATIONS * math.sqrt(2.0) * _ROUNDING[dtype] * size
    limit = _TOLERANCE[dtype] * min(abs(predicted), abs(measured)) + rounding
    is_bent = abs(bend) > _BENT * max(abs(predicted), abs(measured))
    is_hidden = rounding > _TOLERANCE[dtype] * abs(predicted)
    if is_bent or is_hidden:
        return FiniteDifference(predicted, measured, None, len(moves))
    if not abs(measured - predicted) <= limit:
        raise update.broken(
            f"weights that moved along the gradient in {len(moves)} tensors changed the objective "
            f"by {measured:.6g}, where the gradient says {predicted:.6g}; they may differ by "
            f"{limit:.3g} (schedule.finite_difference_every)"
        )
    return FiniteDifference(predicted, measured, limit, len(moves))


def _evaluated(backend: TrainBackend, microbatches: Sequence[Microbatch]) -> _Scores:
    """Returns log-probs and entropies of the policy as it is now, in the order of the microbatches.
    Collective.
    """
    logprobs = [np.zeros(0)]
    entropies = [np.zeros(0)]
    choices: list[Values] = []

    def keep(microbatch: Targets, outputs: Outputs) -> None:
        logprobs.append(outputs.policy.values.detach().cpu().double().numpy())
        entropies.append(outputs.entropy.detach().cpu().double().numpy())
        if outputs.policy.choices is not None:
            choices.append(outputs.policy.choices.detach().cpu().double().numpy())

    backend.evaluate(list(microbatches), keep)
    of_choices = np.concatenate(choices) if choices else np.zeros((0, 1))
    return _Scores(np.concatenate(logprobs), np.concatenate(entropies), of_choices)
