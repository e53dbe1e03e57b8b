"""Ways to make a step or a loss another one than it claims: what invariant I7 must end.

    of the optimizer    what it does with a gradient that is right
    of the loss         what comes to the log-probs, or goes on behind them
    of the models       what log-probs are of

Each is put into a rank that trains, once in its second update or from the first one on, without
changing what the code says that it does: rates, names of weights and reports stay right.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pa_npu.algorithm import objective as objectives
from pa_npu.algorithm.model_outputs import Logprobs
from pa_npu.algorithm.policy_gradient import PolicyGradient
from pa_npu.trainer.learner import Learner

OPTIMIZER: dict[str, str] = {
    "the step skipped": r"the step made .* where AdamW makes",
    "the rate ten times as high": r"the step made .* where AdamW makes",
    "the rate of the update before": r"the step made .* where AdamW makes|times as much as AdamW "
    r"does",
    "the rate of the update before, told": r"has the learning rate .*, where update \d has",
    "norms decayed": r"the step made .* where AdamW makes",
    "norms decayed, by their group": r"the weight decay of .* is .* instead of 0",
    "nothing decayed": r"the step made .* where AdamW makes",
    "no clip": r"the step made .* where AdamW makes",
    "clipped twice": r"the step made .* where AdamW makes",
    "the gradient scaled after its division": r"the step made .* where AdamW makes",
    "the gradient scaled before its norm": r"the step made .* where AdamW makes",
    "moments zeroed in the step": r"the step made .* where AdamW makes",
    "moments zeroed between updates": r"of an element of .* is .* before the step, and was",
    "the square moment zeroed between updates": r"the square moment of an element of .* before the "
    r"step",
    "weights written between updates": r"the weight of an element of .* before the step",
    "the bias correction of another update": r"the step made .* where AdamW makes",
    "betas exchanged": r"the step made .* where AdamW makes",
    "one tensor not stepped": r"the step made .* where AdamW makes",
    "one tensor's gradient zero": r"the gradient of .* is exactly 0, while that of \d+ other "
    r"tensors is not",
    "gradients not zeroed": r"was there before the first backward",
}
COPIES = "the model's copies not written"  # bf16, of a backend with copies
LOSS: dict[str, str] = {
    "the gradient behind the log-probs doubled": r"behind the log-probs is (2|1\.9)\S* times",
    "the gradient behind the log-probs turned round": r"behind the log-probs is -(1|0\.9)\S* times",
    "the gradient behind the log-probs left out": r"behind the log-probs is 0 times|is exactly 0",
    "advantages negated inside the loss": r"the gradient of the log-prob of token",
    "weights of another aggregation": r"the gradient of the log-prob of token",
    "advantages moved within a response": r"the gradient of the log-prob of token",
    "a denominator that is off, rightly named": r"the gradient of the log-prob of token",
    "a response's last token without loss": r"the gradient of the log-prob of token",
    "a response's first token without loss": r"the gradient of the log-prob of token",
    "another clip": r"the gradient of the log-prob of token",
    "the KL doubled": r"the gradient of the log-prob of token",
    "the KL left out": r"the gradient of the log-prob of token",
    "the KL turned round": r"the gradient of the log-prob of token",
}
MODELS: dict[str, str] = {
    "the policy's log-probs given as the reference's": r"has a KL to the policy of version 0 after "
    r"1 updates",
    "the policy's values under the reference's name": r"the KL to the reference is exactly 0 "
    r"although",
    "the policy copied into the reference": r"the reference's weights have changed since it was "
    r"made",
    "an old policy that is off in the first update": r"the old policy's log-probs differ from the "
    r"policy's by",
}
FAULTS = {**OPTIMIZER, **LOSS, **MODELS}
"""By name, what the run's last line says after "I7 "."""

LOST = "60 elements of a replica lost in the reduction"
OF_REPLICAS = {LOST: r"the 2 replicas brought .* of which its reduction left"}

KEPT_FROM = "the step kept from a replica"
NOT_SHARED = "a gradient that copies of a norm do not share"
EMBEDDING = "the embedding's gradient not summed over stages"
OF_COPIES = {
    KEPT_FROM: r"an element of .* is between .* on the 2 replicas that hold copies of it",
    NOT_SHARED: r"an element of .*norm.* is between .* on the 2 (replicas|tensor-parallel ranks) "
    r"that hold copies of it",
    EMBEDDING: r"an element of .* is between .* on the 2 first and last stages that hold copies",
}
"""Faults after which ranks hold different values of a weight that they should share."""

ALL = {
    **FAULTS,
    COPIES: r"the model computes with .* in an element of",
    **OF_REPLICAS,
    **OF_COPIES,
}
EVERYWHERE = {
    "one tensor's gradient zero",
    "the policy copied into the reference",
    NOT_SHARED,  # of the last rank that holds a copy
    EMBEDDING,
}
"""Faults that show only where all replicas have them, or that are collective."""

KEYS: dict[str, dict[str, Any]] = {
    "optimizer": {
        "weight_decay": 0.5,
        "clip_grad": 0.05,
        "warmup_iterations": 3,
        "learning_rate": 1e-2,
    },
    "algorithm": {"kl_coef": 0.1, "clip_low": 0.3, "clip_high": 0.3, "entropy_coef": 0.0},
    "schedule": {"updates_per_iteration": 2, "iterations": 10},
}
"""Sections of a configuration in which every fault above makes a difference."""


def inject(name: str, learner: Learner) -> None:
    """Into this process, of the last replica: some faults are of modules."""
    place = learner.backend.place
    if place.replica != place.mesh.data - 1 and name not in EVERYWHERE:
        return
    if name in OPTIMIZER or name == COPIES:
        _into_optimizer(name, learner)
    elif name in LOSS:
        _into_loss(name)
    elif name == LOST:
        _lose_elements(learner)
    elif name in OF_COPIES:
        _into_copies(name, learner)
    else:
        _into_models(name, learner)


# Of the optimizer


def torch_optimizers(backend: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch that a backend steps."""
    own = backend._optimizer
    if hasattr(own, "adamw"):
        return [own.adamw]
    if isinstance(own, torch.optim.Optimizer):
        return [own]
    parts = getattr(own, "chained_optimizers", [own])
    return [part.optimizer for part in parts if part.optimizer is not None]


def _into_optimizer(name: str, learner: Learner) -> None:
    backend: Any = learner.backend
    if name == "gradients not zeroed":
        for owner, attribute in (
            (backend._optimizer, "zero_grad"),
            (getattr(backend, "_ddp", None), "zero_grad_buffer"),
        ):
            if owner is not None:
                setattr(owner, attribute, lambda *args, **kwargs: None)
        if hasattr(backend, "_gradient"):
            backend._gradient.__class__ = _NeverZeroed
    elif name == "the gradient scaled after its division":
        _before(backend, "step", lambda: backend.scale_gradients(2.0))
    elif name == "one tensor's gradient zero":
        _after(backend, "accumulate", lambda: _zero_gradient(backend))
    elif name in _BETWEEN:
        _before_second(backend, "accumulate", lambda: _BETWEEN[name](backend))
    elif name == "the rate of the update before, told":
        _one_update_behind()
    else:
        around = partial(_STEPS[name], backend) if name == COPIES else _STEPS[name]
        for optimizer in torch_optimizers(backend):
            optimizer.step = _within(optimizer, around)  # type: ignore[method-assign]


def _within(optimizer: torch.optim.Optimizer, around: Callable[..., Any]) -> Callable[..., Any]:
    step, calls = optimizer.step, [0]

    def changed(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        with around(optimizer, calls[0]) as runs:
            return step(*args, **kwargs) if runs is not False else None

    return changed


def _moments(
    optimizer: torch.optim.Optimizer, names: Iterable[str] = ("exp_avg", "exp_avg_sq")
) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in names if name in state]


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]


@contextmanager
def _skipped(optimizer: Any, call: int) -> Any:
    yield False


@contextmanager
def _with_settings(key: str, change: Callable[[Any, int], Any], optimizer: Any, call: int) -> Any:
    """Steps with another value of a group's setting, which is put back."""
    before = [group[key] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group[key] = change(group[key], call)
    try:
        yield
    finally:
        for group, value in zip(optimizer.param_groups, before, strict=True):
            group[key] = value


@contextmanager
def _with_gradients(factor: Callable[[torch.Tensor], Any], optimizer: Any, call: int) -> Any:
    with torch.no_grad():
        for gradient in _gradients(optimizer):
            gradient.mul_(factor(gradient))
    yield


@contextmanager
def _zeroed_moments(optimizer: Any, call: int) -> Any:
    if call == 2:
        for moment in _moments(optimizer):
            moment.zero_()
    yield


@contextmanager
def _another_step(optimizer: Any, call: int) -> Any:
    if call == 2:
        for group in optimizer.param_groups:
            group["step"] = group.get("step", 0) + 5
        for state in optimizer.state.values():
            state["step"] = state.get("step", 0) + 5
    yield


@contextmanager
def _one_left_out(optimizer: Any, call: int) -> Any:
    parameter = optimizer.param_groups[0]["params"][-1]
    gradient, parameter.grad = parameter.grad, None
    yield
    parameter.grad = gradient


@contextmanager
def _copies_kept(backend: Any, optimizer: Any, call: int) -> Any:
    kept = [
        (tensor.model, tensor.model.clone())
        for tensor in backend.stepped()
        if tensor.model is not None
    ]
    for part in getattr(backend._optimizer, "chained_optimizers", [backend._optimizer]):
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params = lambda: None
    yield
    for model, before in kept:
        model.copy_(before)


_STEPS: dict[str, Callable[..., Any]] = {
    "the step skipped": _skipped,
    "the rate ten times as high": partial(_with_settings, "lr", lambda rate, _: 10 * rate),
    "the rate of the update before": partial(
        _with_settings, "lr", lambda rate, call: rate * (call - 1) / call
    ),
    "norms decayed": partial(_with_settings, "weight_decay", lambda decay, _: 0.5),
    "nothing decayed": partial(_with_settings, "weight_decay", lambda decay, _: 0.0),
    "no clip": partial(_with_gradients, lambda gradient: 20.0),
    "clipped twice": partial(_with_gradients, lambda gradient: 0.05),
    "the gradient scaled before its norm": partial(_with_gradients, lambda gradient: 1.01),
    "moments zeroed in the step": _zeroed_moments,
    "the bias correction of another update": _another_step,
    "betas exchanged": partial(_with_settings, "betas", lambda betas, _: betas[::-1]),
    "one tensor not stepped": _one_left_out,
    COPIES: _copies_kept,
}


def _zero(names: Iterable[str], backend: Any) -> None:
    for optimizer in torch_optimizers(backend):
        for moment in _moments(optimizer, names):
            moment.zero_()


def _write_weights(backend: Any) -> None:
    with torch.no_grad():
        for tensor in backend.stepped():
            tensor.weights.add_(1e-6)


def decay_norms(backend: Any) -> None:
    for optimizer in torch_optimizers(backend):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5
            group["wd_mult"] = 1.0


_BETWEEN: dict[str, Callable[[Any], None]] = {
    "moments zeroed between updates": partial(_zero, ("exp_avg", "exp_avg_sq")),
    "the square moment zeroed between updates": partial(_zero, ("exp_avg_sq",)),
    "weights written between updates": _write_weights,
    "norms decayed, by their group": decay_norms,
}


def _zero_gradient(backend: Any) -> None:
    """Of a norm, or of a matrix where no norm is trained."""
    tensors = sorted(
        (t for t in backend.stepped() if t.gradient is not None),
        key=lambda tensor: tensor.dimensions,
    )
    chosen = (
        tensors[0]
        if tensors[0].dimensions == 1
        else next(t for t in tensors if ".lora_B." in t.name)
    )
    chosen.gradient.zero_()


class _NeverZeroed(torch.Tensor):
    def zero_(self) -> Any:
        return self


def _one_update_behind() -> None:
    for module in ("megatron.optimizer", "fsdp.optimizer"):
        owner = sys.modules.get(f"pa_npu.backends.{module}")
        if owner is not None:
            rate = owner.learning_rate
            vars(owner)["learning_rate"] = lambda config, update, rate=rate: rate(
                config, max(1, update - 1)
            )
    toy = sys.modules.get("tests.helpers.toy_backend.backend")
    if toy is not None:
        rate = toy.learning_rate
        vars(toy)["learning_rate"] = lambda config, update, rate=rate: rate(
            config, max(1, update - 1)
        )


def _before(owner: Any, method: str, act: Callable[[], Any]) -> None:
    run = getattr(owner, method)

    def changed(*args: Any, **kwargs: Any) -> Any:
        act()
        return run(*args, **kwargs)

    setattr(owner, method, changed)


def _before_second(owner: Any, method: str, act: Callable[[], Any]) -> None:
    calls = [0]

    def second() -> None:
        calls[0] += 1
        if calls[0] == 2:
            act()

    _before(owner, method, second)


def _after(owner: Any, method: str, act: Callable[[], Any]) -> None:
    run = getattr(owner, method)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        act()
        return result

    setattr(owner, method, changed)


# Of the loss


class _Scaled(torch.autograd.Function):
    """The same values, whose gradient goes on with a factor."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def _behind(factor: float) -> None:
    loss = objectives.Objective.loss

    def changed(self: Any, microbatch: Any, outputs: Any) -> torch.Tensor:
        policy = replace(outputs.policy, values=_Scaled.apply(outputs.policy.values, factor))
        return loss(self, microbatch, replace(outputs, policy=policy))

    objectives.Objective.loss = changed  # type: ignore[method-assign]


def _change_batch(
    change: Callable[[Any], Any], config: Callable[[Any], Any] = lambda config: config
) -> None:
    sums = PolicyGradient.loss_sums

    def changed(self: PolicyGradient, batch: Any) -> Any:
        another = copy.copy(self)
        another.keys = config(self.keys)
        return sums(another, change(batch))

    PolicyGradient.loss_sums = changed  # type: ignore[method-assign]


def _moved(batch: Any) -> Any:
    """The same sum of advantages of each response, all of it on its first token."""
    counts = batch.response_sum(torch.ones_like(batch.advantages))
    first = _first_tokens(batch)
    return replace(batch, advantages=batch.advantages * batch.per_token(counts) * first)


def _first_tokens(batch: Any) -> torch.Tensor:
    before = torch.cat([batch.response_index.new_full((1,), -1), batch.response_index[:-1]])
    return (batch.response_index != before).float()


def _last_tokens(batch: Any) -> torch.Tensor:
    after = torch.cat([batch.response_index[1:], batch.response_index.new_full((1,), -1)])
    return (batch.response_index != after).float()


def _another_aggregation(batch: Any) -> Any:
    return replace(
        batch, weights=1.0 / batch.per_token(batch.response_sum(torch.ones_like(batch.weights)))
    )


def _into_loss(name: str) -> None:
    behind = {"doubled": 2.0, "turned round": -1.0, "left out": 0.0}
    if name.startswith("the gradient behind"):
        _behind(next(factor for word, factor in behind.items() if name.endswith(word)))
    elif name == "a denominator that is off, rightly named":
        _change_denominator()
    else:
        changes: dict[str, Callable[[Any], Any]] = {
            "advantages negated inside the loss": lambda batch: replace(
                batch, advantages=-batch.advantages
            ),
            "weights of another aggregation": _another_aggregation,
            "advantages moved within a response": _moved,
            "a response's last token without loss": lambda batch: replace(
                batch, weights=batch.weights * (1 - _last_tokens(batch))
            ),
            "a response's first token without loss": lambda batch: replace(
                batch, weights=batch.weights * (1 - _first_tokens(batch))
            ),
        }
        settings: dict[str, dict[str, float]] = {
            "another clip": {"clip_low": 1e-5, "clip_high": 1e-5},
            "the KL doubled": {"kl_coef": 0.2},
            "the KL left out": {"kl_coef": 0.0},
            "the KL turned round": {"kl_coef": -0.1},
        }
        _change_batch(
            changes.get(name, lambda batch: batch),
            lambda config: config.model_copy(update=settings.get(name, {})),
        )


def _change_denominator() -> None:
    denominator = objectives.Objective._denominator

    def changed(self: Any, microbatch: Any, outputs: Any) -> Logprobs:
        right = denominator(self, microbatch, outputs)
        return replace(right, values=right.values + 0.05)

    objectives.Objective._denominator = changed  # type: ignore[method-assign]


# Of the models


def _into_models(name: str, learner: Learner) -> None:
    backend: Any = learner.backend
    if name == "the policy copied into the reference":
        kept: list[Any] = []

        def copy() -> None:
            name_policy = backend.name_policy
            backend.copy_policy("reference")
            name_policy(learner._reference_state(), "reference")
            kept.append(name)

        _before_second(backend, "accumulate", copy)
        return
    loss = objectives.Objective.loss

    def changed(self: Any, microbatch: Any, outputs: Any) -> torch.Tensor:
        return loss(self, microbatch, replace(outputs, frozen=_frozen(name, outputs)))

    objectives.Objective.loss = changed  # type: ignore[method-assign]


def _frozen(name: str, outputs: Any) -> dict[str, Logprobs]:
    frozen = dict(outputs.frozen)
    policy = replace(outputs.policy, values=outputs.policy.values.detach())
    if name == "the policy's log-probs given as the reference's":
        frozen["reference"] = policy
    elif name == "the policy's values under the reference's name":
        frozen["reference"] = replace(frozen["reference"], values=policy.values)
    else:
        frozen["old"] = replace(frozen["old"], values=frozen["old"].values + 0.2)
    return frozen


# Of replicas


def _into_copies(name: str, learner: Learner) -> None:
    backend: Any = learner.backend
    if name == KEPT_FROM:
        _keep_step_from(backend)
    elif name == EMBEDDING:
        module = sys.modules["megatron.core.distributed.finalize_model_grads"]
        summed = next(key for key in vars(module) if key.startswith("_allreduce_word_embedding"))
        vars(module)[summed] = lambda *args, **kwargs: None
    elif any(part.group.rank() == part.group.size() - 1 for part in backend.copied()):
        _after(backend, "accumulate", lambda: _scale_norms(backend))


def _scale_norms(backend: Any) -> None:
    for tensor in backend.stepped():
        if tensor.dimensions == 1 and "norm" in tensor.name:
            tensor.gradient.mul_(0.5)


def _keep_step_from(backend: Any) -> None:
    """What other ranks stepped does not reach this one."""
    step = backend.step

    @torch.no_grad()
    def changed() -> Any:
        (held,) = backend.copied()
        before = [tensor.weights.clone() for tensor in held.tensors]
        result = step()
        stepped = [
            tensor.weights if tensor.model is None else tensor.model for tensor in backend.stepped()
        ]
        own = [part.clone() for part in stepped]
        for tensor, weights in zip(held.tensors, before, strict=True):
            tensor.weights.copy_(weights)
        for part, values in zip(stepped, own, strict=True):
            part.copy_(values)
        return result

    backend.step = changed


def _lose_elements(learner: Learner) -> None:
    """Sixty neighbours of what this replica brings are 0 in the sum."""
    buffers = sys.modules.get("megatron.core.distributed.param_and_grad_buffer")
    if buffers is not None:
        reduce = vars(buffers)["dist_reduce_scatter_func"]

        def megatron(
            output: torch.Tensor, arguments: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            _blank(arguments)
            return reduce(output, arguments, *args, **kwargs)

        vars(buffers)["dist_reduce_scatter_func"] = megatron
    sharded = sys.modules.get("pa_npu.backends.fsdp.optimizer")
    if sharded is not None:
        scatter = sharded._reduce_scatter  # type: ignore[attr-defined]

        def fsdp(output: torch.Tensor, arguments: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return scatter(output, _blank(arguments.clone()), *args, **kwargs)

        sharded._reduce_scatter = fsdp  # type: ignore[attr-defined]


def _blank(arguments: torch.Tensor) -> torch.Tensor:
    """The sixty behind the largest element that a sample of every 61st from 0 on does not see."""
    flat = arguments.view(-1)
    start = int(flat.abs().argmax()) // 61 * 61 + 1
    flat[start : start + 60] = 0
    return arguments
