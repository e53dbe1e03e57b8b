"""The replay of a step is AdamW in fp64: torch's own stays within its limits, and anything else does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.algorithm.adamw import Elements, clip_factor, scheduled_rate, step
from pa_npu.algorithm.update_sums import SAMPLED_EVERY, Reductions
from pa_npu.backends.optimizer import learning_rate
from pa_npu.backends.protocol import Step, SteppedTensor
from pa_npu.config.schema import Config
from pa_npu.errors import InvariantViolation
from pa_npu.trainer.step_replay import StepReplay

CPU = torch.device("cpu")


def config_of(updates: int = 1, iterations: int = 20, **optimizer: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "schedule": {
                "iterations": iterations,
                "updates_per_iteration": updates,
                "prompts_per_iteration": 8,
            },
            "optimizer": optimizer,
        }
    )


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 19])
@pytest.mark.parametrize("updates", [1, 4])
def test_the_second_schedule_of_the_rate_is_the_first(
    decay: str, warmup: int, updates: int
) -> None:
    least = {} if decay == "constant" else {"min_learning_rate": 1e-5}
    config = config_of(updates, decay=decay, warmup_iterations=warmup, learning_rate=3e-4, **least)
    for update in range(1, 25 * updates):
        assert scheduled_rate(config, update) == pytest.approx(
            learning_rate(config, update), rel=1e-12, abs=1e-18
        )


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 1e6])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9)])
def test_torchs_adamw_in_fp32_stays_within_the_limits(
    scale: float, betas: tuple[float, float]
) -> None:
    config = config_of(
        learning_rate=3e-4, weight_decay=0.1, betas=betas, epsilon=1e-8, clip_grad=0.5
    )
    random = torch.Generator().manual_seed(1)
    weights = torch.nn.Parameter(torch.randn(3000, generator=random))
    optimizer = torch.optim.AdamW([weights], lr=3e-4, betas=betas, eps=1e-8, weight_decay=0.1)
    mean = square = np.zeros(3000)
    for update in range(1, 40):
        rate = scheduled_rate(config, update)
        gradient = torch.randn(3000, generator=random) * scale * (0.1 if update % 7 else 30.0)
        gradient[::11] = 0
        norm = float(gradient.norm())
        before = Elements(weights.detach().double().numpy().copy(), mean, square)
        weights.grad = gradient * min(1.0, 0.5 / (norm + 1e-6))
        optimizer.step()
        state = optimizer.state[weights]
        after = [
            value.detach().double().numpy().copy()
            for value in (weights, state["exp_avg"], state["exp_avg_sq"])
        ]
        replayed = step(
            before,
            gradient.double().numpy(),
            np.full(3000, 0.1),
            np.full(3000, float(update)),
            config=config,
            rate=rate,
            clip=clip_factor(config, norm),
        )
        for name, values in zip(("weights", "mean", "square"), after, strict=True):
            expected, limit = getattr(replayed.expected, name), getattr(replayed.limit, name)
            assert (np.abs(values - expected) <= limit).all(), f"{name}, update {update}"
        largest = 1e-6 * np.abs(before.weights) + 1e-3 * rate
        assert (replayed.limit.weights <= largest).all(), "limits are rounding's"
        _, mean, square = after


class Toy:
    """Two tensors that torch's AdamW steps, as a backend gives them."""

    def __init__(self, config: Config) -> None:
        self.config, self.updates = config, 0
        random = torch.Generator().manual_seed(2)
        self.parameters = {
            "matrix.weight": torch.nn.Parameter(torch.randn(40, 30, generator=random)),
            "norm.weight": torch.nn.Parameter(torch.ones(30)),
        }
        options = config.optimizer
        groups = [
            {"params": [self.parameters["matrix.weight"]], "weight_decay": options.weight_decay},
            {"params": [self.parameters["norm.weight"]], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=options.learning_rate, betas=options.betas, eps=options.epsilon
        )

    def stepped(self) -> list[SteppedTensor]:
        tensors = []
        for (name, parameter), group in zip(
            self.parameters.items(), self.adamw.param_groups, strict=True
        ):
            state = self.adamw.state.get(parameter, {})
            gradient = None if parameter.grad is None else parameter.grad.flatten()
            moments = [
                state[key].view(-1) if key in state else None for key in ("exp_avg", "exp_avg_sq")
            ]
            flat = parameter.detach().view(-1)
            tensors.append(
                SteppedTensor(
                    name,
                    parameter.dim(),
                    flat,
                    None,
                    gradient,
                    *moments,
                    settings=group,
                )
            )
        return tensors

    def give_gradients(self, without: str | None = None) -> None:
        random = torch.Generator().manual_seed(self.updates)
        for name, parameter in self.parameters.items():
            parameter.grad = torch.randn(parameter.shape, generator=random)
            if name == without:
                parameter.grad = None

    def step(self) -> Step:
        self.updates += 1
        norm = float(
            torch.stack(
                [p.grad.norm() for p in self.parameters.values() if p.grad is not None]
            ).norm()
        )
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad *= clip_factor(self.config, norm)
        rate = learning_rate(self.config, self.updates)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        return Step(norm, rate)


def judged(toy: Toy, replay: StepReplay, without: str | None = None) -> None:
    toy.give_gradients(without)
    begun = replay.before("update", toy.stepped(), Reductions(), CPU)
    result = toy.step()
    replay.after(begun, toy.stepped(), result)


CONFIG = config_of(learning_rate=1e-3, warmup_iterations=5, weight_decay=0.1)


def test_a_parameter_to_which_nothing_comes_in_some_updates_is_stepped_by_its_own_count() -> None:
    toy, replay = Toy(CONFIG), StepReplay(CONFIG, 0)
    for update in range(8):
        judged(toy, replay, "norm.weight" if update in (0, 3) else None)


def test_other_elements_are_looked_at_in_every_update_and_on_every_rank() -> None:
    toy = Toy(CONFIG)
    chosen, samples = [], []
    for rank in range(2):
        replay = StepReplay(CONFIG, rank)
        for _ in range(4):
            samples.append(replay.first_sampled % SAMPLED_EVERY)
            toy.give_gradients()
            begun = replay.before("update", toy.stepped(), Reductions(), CPU)
            chosen.append(begun.chosen.slices[0])
            replay._updates += 1
            replay._choose(toy.stepped())
    assert len(set(chosen)) == 8
    assert samples[:4] == samples[4:] and len(set(samples[:4])) > 1, (
        "replicas look at the same elements of a sum"
    )


def test_a_resume_is_compared_with_what_was_saved() -> None:
    toy, replay = Toy(CONFIG), StepReplay(CONFIG, 1)
    for _ in range(3):
        judged(toy, replay)
    saved = replay.saved(toy.stepped())
    again = StepReplay(CONFIG, 1)
    assert again.load(3, toy.stepped(), saved, seed=CONFIG.run.seed) == ""
    judged(toy, again)

    for moment in toy.stepped():
        assert moment.mean is not None and moment.square is not None
        moment.mean.zero_(), moment.square.zero_()
    assert "is not the one that was saved" in again.load(
        3, toy.stepped(), saved, seed=CONFIG.run.seed
    )
    moved = {**saved, "shape": "that of other ranks"}
    assert "moments of AdamW are all 0" in again.load(3, toy.stepped(), moved, seed=CONFIG.run.seed)
    assert again.load(3, toy.stepped(), None, seed=CONFIG.run.seed) == "", (
        "of a release that saved none"
    )


def test_a_tensor_without_gradient_is_named_unless_it_may_have_none_or_nobody_has_one() -> None:
    toy, replay = Toy(CONFIG), StepReplay(CONFIG, 0)
    toy.give_gradients()
    matrix, norm = toy.stepped()
    assert norm.gradient is not None and matrix.gradient is not None
    norm.gradient.zero_()
    with pytest.raises(
        InvariantViolation, match=r"I7 step: update: the gradient of norm.weight is exactly 0"
    ):
        replay.before("update", [matrix, norm], Reductions(), CPU)
    replay.before("update", [matrix, replace(norm, may_be_zero=True)], Reductions(), CPU)
    matrix.gradient.zero_()
    replay.before("update", [matrix, norm], Reductions(), CPU)


@pytest.mark.parametrize("part", ["gradient", "mean", "weights"])
def test_what_is_added_up_in_a_narrow_type_is_named(part: str) -> None:
    toy, replay = Toy(CONFIG), StepReplay(CONFIG, 0)
    judged(toy, replay)
    toy.give_gradients()
    matrix, norm = toy.stepped()
    narrow = replace(norm, **{part: getattr(norm, part).bfloat16()})
    with pytest.raises(InvariantViolation, match=r"of norm.weight is kept in bfloat16"):
        replay.before("update", [matrix, narrow], Reductions(), CPU)


def test_a_of_an_adapter_has_no_gradient_as_long_as_b_is_zero() -> None:
    values = torch.ones(8)

    def tensor(name: str, weights: torch.Tensor, gradient: torch.Tensor) -> SteppedTensor:
        settings = {"lr": 1.0, "weight_decay": 0.0}
        return SteppedTensor(name, 2, weights, None, gradient, None, None, settings)

    replay = StepReplay(CONFIG, 0)
    for b, passes in ((torch.zeros(8), True), (values, False)):
        adapter = [
            tensor("x.lora_A.weight", values, torch.zeros(8)),
            tensor("x.lora_B.weight", b, values),
        ]
        replay._next = None
        if passes:
            replay.before("update", adapter, Reductions(), CPU)
        else:
            with pytest.raises(
                InvariantViolation, match=r"gradient of x.lora_A.weight is exactly 0"
            ):
                replay.before("update", adapter, Reductions(), CPU)
