"""Invariant I7 behind the gradient: a step changes the weights as AdamW does.

    end of step u - 1    choose elements for step u, remember their weights and moments
    before step u        the same elements hold the same bits, and the model's copies are those
                         weights; tensors whose gradient is exactly 0 are named
    step u               the backend clips and applies
    after step u         replay in fp64 from gradient, moments, schedule, decay, clip and bias
                         correction ──> compare

Every update chooses other elements, some hundred on each rank and some of every tensor, so that a
tensor which is left out is met sooner or later. A checkpoint holds a digest of the elements that
the next step is judged by, so that moments which a resume lost show before anything is trained.
Every rank judges its own part of the optimizer; the only sum over ranks says which tensors have no
gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pa_npu.algorithm.adamw import Elements, Values, clip_factor, scheduled_rate, step
from pa_npu.algorithm.update_sums import Reductions
from pa_npu.backends.protocol import Step, SteppedTensor
from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.trainer.missing_gradients import gradients_present, waits_for_its_partner
from pa_npu.trainer.step_elements import ChosenElements, Memory, memory_of, read_elements, views_of

_NAMED = 4
# Limit of the mean change of all elements, in deviations of its rounding. Limits of single elements
# are some three deviations.
_DEVIATIONS = 4.0
_RATE_ROUNDING = 1e-6


def _state(weights: Values, mean: Values, square: Values) -> dict[str, Values]:
    """Returns weights and moments by name. Moments that no step has made yet are 0."""
    return {
        "weights": weights,
        "mean": np.nan_to_num(mean, nan=0.0),
        "square": np.nan_to_num(square, nan=0.0),
    }


class StepReplay:
    """Judges one rank's steps. Every method is called on all ranks, in the same order."""

    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._updates = 0
        self._next: ChosenElements | None = None
        self._remembered: dict[str, Values] = {}
        self._left_out: dict[str, int] = {}  # by tensor, in how many updates it got no gradient

    @property
    def updates(self) -> int:
        """Returns how many steps were taken, those before a resume too."""
        return self._updates

    @property
    def first_sampled(self) -> int:
        """A number that differs in every update; samples at equal distances begin there."""
        return int(
            np.random.default_rng((self._config.run.seed, self._updates + 1)).integers(0, 2**31)
        )

    def before(
        self,
        where: str,
        tensors: Sequence[SteppedTensor],
        reductions: Reductions,
        device: torch.device,
    ) -> BeforeStep:
        """Checks and remembers what the step is about to change.

        where: which update, for messages. Collective over replicas. Raises InvariantViolation.
        """
        if self._next is None:
            self._choose(tensors)
        chosen, remembered = self._next, self._remembered
        assert chosen is not None, "it has just been chosen"
        memory = {name: memory_of(tensors, name) for name in ("gradient", *_STATE)}
        _check_types(where, tensors, memory)
        columns = [(chosen, views_of(values, chosen)) for values in memory.values()]
        columns.append((chosen, views_of(memory_of(tensors, "model"), chosen)))
        gradient, weights, mean, square, model = read_elements(columns)
        has_gradient = chosen.tensors_with_any(np.nan_to_num(gradient))
        self._check_gradients(where, tensors, has_gradient, reductions, device)
        state = _state(weights, mean, square)
        for name, values in state.items():
            differs = values != remembered[name]
            if differs.any():
                place = int(differs.argmax())
                raise _broken(
                    where,
                    f"{_NAMES[name]} of an element of {tensors[chosen.owner[place]].name} is "
                    f"{values[place]:.9g} before the step, and was {remembered[name][place]:.9g} "
                    f"after the last one; {int(differs.sum())} of {len(differs)} elements have "
                    "changed in between, when nothing may write them",
                )
        self._check_copies(where, chosen, tensors, state["weights"], model)
        before = Elements(state["weights"], state["mean"], state["square"])
        return BeforeStep(where, chosen, before, gradient, tensors, memory)

    def after(self, begun: BeforeStep, tensors: Sequence[SteppedTensor], result: Step) -> None:
        """Compares the stepped weights with the replay, and chooses the next elements.

        tensors: those that `before` was given, whose memory the step has written.

        Raises InvariantViolation.
        """
        where = begun.where
        chosen = begun.chosen
        before = begun.state
        self._updates += 1
        rate = scheduled_rate(self._config, self._updates)
        self._check_settings(where, tensors, result, rate)
        decays = chosen.spread([self._decay(tensor) for tensor in tensors])
        left_out = chosen.spread([self._left_out.get(tensor.name, 0) for tensor in tensors])
        replayed = step(
            before,
            begun.gradient,
            decays,
            self._updates - left_out,
            config=self._config,
            rate=rate,
            clip=clip_factor(self._config, result.grad_norm),
        )
        following = ChosenElements.choose(
            tensors, self._config.run.seed, self._updates + 1, self._rank
        )
        # if the step has written the same memory, it need not be looked up again
        memory = begun.memory
        if tensors is not begun.tensors:
            memory = {name: memory_of(tensors, name) for name in _STATE}
        columns = []
        for elements in (chosen, following):
            for name in _STATE:
                columns.append((elements, views_of(memory[name], elements)))
        columns.append((chosen, views_of(memory_of(tensors, "model"), chosen)))
        *states, model = read_elements(columns)  # one copy from the device for all
        state = _state(*states[: len(_STATE)])
        next_state = _state(*states[len(_STATE) :])
        for name, values in state.items():
            expected = getattr(replayed.expected, name)
            limit = getattr(replayed.limit, name)
            wrong = ~(np.abs(values - expected) <= limit)
            if wrong.any():
                place = int((np.abs(values - expected) / np.maximum(limit, 1e-300)).argmax())
                raise _broken(
                    where,
                    f"the step made {values[place]:.9g} of {_NAMES[name]} of an element of "
                    f"{tensors[chosen.owner[place]].name}, where AdamW makes {expected[place]:.9g} "
                    f"with the rate {rate:.6g}; {int(wrong.sum())} of {len(wrong)} elements differ "
                    f"(the weight was {before.weights[place]:.9g}, its gradient "
                    f"{begun.gradient[place]:.6g}, its moments {before.mean[place]:.6g} and "
                    f"{before.square[place]:.6g}, the gradient's norm {result.grad_norm:.6g})",
                )
        self._check_mean_change(
            where,
            before.weights,
            state["weights"],
            replayed.expected.weights,
            replayed.limit.weights,
        )
        self._check_copies(where, chosen, tensors, state["weights"], model)
        self._next = following
        self._remembered = next_state

    def saved(self, tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        """Returns this rank's part of a checkpoint's `optimizer`, which a resume compares with."""
        if self._next is None:
            self._choose(tensors)
        return self._description(tensors)

    def load(
        self,
        updates: int,
        tensors: Sequence[SteppedTensor],
        saved: dict[str, Any] | None,
        seed: int,
    ) -> str:
        """Continues after `updates` updates; returns what is wrong with the loaded state, or an
        empty text.

        saved: what `saved` returned on this rank; on any rank if the number of ranks has changed.
        seed: of the run that saved it.
        """
        self._updates = updates
        self._left_out = {}
        self._choose(tensors, seed)
        problem = ""
        if saved is not None:
            loaded = self._description(tensors)
            if saved["shape"] == loaded["shape"] and saved["rank"] == loaded["rank"]:
                if saved["digest"] != loaded["digest"]:
                    problem = (
                        f"the optimizer's state of rank {self._rank} is not the one that was saved "
                        "(the digest of a sample differs)"
                    )
            elif saved["moving"] > 0.1 and loaded["moving"] == 0.0:
                share = saved["moving"]
                problem = (
                    f"the moments of AdamW are all 0 in a sample, where {share:.0%} of those "
                    "that were saved are not"
                )
        self._choose(tensors)
        return problem

    def _description(self, tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        shape = hashlib.blake2b(digest_size=8)
        for tensor in tensors:
            shape.update(f"{tensor.name} {tensor.weights.numel()} ".encode())
        digest = hashlib.blake2b(digest_size=8)
        for values in self._remembered.values():
            digest.update(values.tobytes())
        squares = self._remembered["square"]
        moving = float(np.mean(squares != 0)) if len(squares) else 0.0
        return {
            "rank": self._rank,
            "shape": shape.hexdigest(),
            "digest": digest.hexdigest(),
            "moving": moving,
        }

    def _choose(self, tensors: Sequence[SteppedTensor], seed: int | None = None) -> None:
        """Chooses the elements of the next step and remembers their state. seed: None means this
        run's.
        """
        if seed is None:
            seed = self._config.run.seed
        self._next = ChosenElements.choose(tensors, seed, self._updates + 1, self._rank)
        columns = []
        for name in _STATE:
            columns.append((self._next, views_of(memory_of(tensors, name), self._next)))
        weights, mean, square = read_elements(columns)
        self._remembered = _state(weights, mean, square)

    def _decay(self, tensor: SteppedTensor) -> float:
        """Returns the tensor's weight decay; norms and biases have none."""
        is_bias = tensor.dimensions <= 1 or tensor.name.endswith(".bias")
        return 0.0 if is_bias else self._config.optimizer.weight_decay

    def _check_settings(
        self, where: str, tensors: Sequence[SteppedTensor], result: Step, rate: float
    ) -> None:
        named = [("the step", result.learning_rate)]
        for tensor in tensors:
            if not tensor.weights.numel():
                continue
            named.append((tensor.name, tensor.rate))
            limit = _RATE_ROUNDING * self._config.optimizer.weight_decay
            if abs(tensor.decay - self._decay(tensor)) > limit:
                raise _broken(
                    where,
                    f"the weight decay of {tensor.name}, of {tensor.dimensions} dimensions, is "
                    f"{tensor.decay:g} instead of {self._decay(tensor):g}",
                )
        for name, used in named:
            if not abs(used - rate) <= _RATE_ROUNDING * rate:
                raise _broken(
                    where,
                    f"{name} has the learning rate {used:.9g}, where update {self._updates} has "
                    f"{rate:.9g}",
                )

    def _check_mean_change(
        self, where: str, before: Values, after: Values, expected: Values, limit: Values
    ) -> None:
        """Detects a wrong factor that is too small to exceed any single element's limit."""
        change = expected - before
        size = float(np.sum(change**2))
        if not size:
            return
        error = float(np.sum((after - expected) * change)) / size
        rounding = float(np.sqrt(np.sum((limit * change) ** 2))) / size
        if abs(error) > _DEVIATIONS * rounding + 1e-5:
            raise _broken(
                where,
                f"the step changed its weights by {1 + error:.6g} times as much as AdamW does",
            )

    def _check_copies(
        self,
        where: str,
        chosen: ChosenElements,
        tensors: Sequence[SteppedTensor],
        weights: Values,
        model: Values,
    ) -> None:
        """Checks that the model computes with the weights that were stepped, in its own type."""
        narrow = [tensor.model is not None for tensor in tensors]
        if not any(narrow):
            return
        dtype = next(tensor.model.dtype for tensor in tensors if tensor.model is not None)
        stepped = torch.from_numpy(weights).float().to(dtype).float().numpy()
        wrong = np.array(narrow)[chosen.owner] & (stepped != model)
        if wrong.any():
            place = int(wrong.argmax())
            raise _broken(
                where,
                f"the model computes with {model[place]:.9g} in an element of "
                f"{tensors[chosen.owner[place]].name}, whose weight in fp32 is "
                f"{stepped[place]:.9g} in its type; {int(wrong.sum())} of {len(wrong)} elements "
                "differ",
            )

    def _check_gradients(
        self,
        where: str,
        tensors: Sequence[SteppedTensor],
        sampled: npt.NDArray[np.bool_],
        reductions: Reductions,
        device: torch.device,
    ) -> None:
        """Raises InvariantViolation for tensors whose gradient is exactly 0 on all ranks that hold
        a part of them, while that of others is not.

        sampled: for each tensor, whether any chosen element of its gradient is not 0.
        """
        present = gradients_present(tensors, sampled)
        moving = torch.from_numpy(np.array(present, np.float32)).to(device)
        arrived, nonzero, weights = reductions.sharing(moving, largest=True).cpu().numpy()
        for tensor in tensors:
            if tensor.gradient is None:
                self._left_out[tensor.name] = self._left_out.get(tensor.name, 0) + 1
        if not nonzero.any():
            return  # rewards that are all equal train nothing
        by_name = dict(zip((tensor.name for tensor in tensors), weights, strict=True))
        missing = []
        for tensor, has_come, is_nonzero in zip(tensors, arrived, nonzero, strict=True):
            if not has_come or is_nonzero or tensor.may_be_zero:
                continue
            if not waits_for_its_partner(tensor.name, by_name):
                missing.append(tensor.name)
        if missing:
            more = f" and of {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise _broken(
                where,
                f"the gradient of {', '.join(missing[:_NAMED])}{more} is exactly 0, while that of "
                f"{int(nonzero.sum())} other tensors is not",
            )


@dataclass(frozen=True, eq=False)
class BeforeStep:
    """The values that StepReplay.before has read.

    where: which update, for messages. chosen: the n elements that the step is judged by.
    state: their weights and moments. gradient: fp64 [n], divided but not yet clipped.
    memory: gradients, weights and moments of `tensors`, by name.
    """

    where: str
    chosen: ChosenElements
    state: Elements
    gradient: Values
    tensors: Sequence[SteppedTensor]
    memory: dict[str, Memory]


_STATE = ("weights", "mean", "square")
_NAMES = {"weights": "the weight", "mean": "the mean moment", "square": "the square moment"}


def _check_types(where: str, tensors: Sequence[SteppedTensor], memory: dict[str, Memory]) -> None:
    """Raises InvariantViolation unless gradients are summed, and weights stepped, in fp32."""
    for name, values in memory.items():
        for tensor, part in zip(tensors, values, strict=True):
            if isinstance(part, torch.Tensor) and part.dtype not in (torch.float32, torch.float64):
                kind = str(part.dtype).removeprefix("torch.")
                raise _broken(
                    where,
                    f"{_NAMES.get(name, 'the gradient')} of {tensor.name} is kept in {kind}, which "
                    "drops small terms of a sum; it must be fp32",
                )


def _broken(where: str, reason: str) -> InvariantViolation:
    return InvariantViolation(f"I7 step: {where}: {reason}")
