"""Ways to make an update's gradient another sum than it claims, put into a rank that trains: what invariant I7 must end.

Each is what a mistake in a backend, in the objective or on a group's way would do, once, in the
first iteration or from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pa_npu.algorithm import objective as objectives
from pa_npu.config.mesh import Mesh
from pa_npu.samples import iterator
from pa_npu.samples.microbatch import Microbatch
from pa_npu.trainer.learner import Learner
from tests.helpers import step_faults

IN_BUFFER = "advantages of one group in the buffer negated"
REPLICAS = "reduction over replicas skipped"
EXPERTS = "reduction of experts over their copies skipped"
RATIOS = (
    "ratios against the current policy",
    "the current policy's log-probs given as the old one's",
)

FAULTS: dict[str, str] = {
    "a backward dropped": r"update 0, replica \d: response .* gradient passed backward 0 times",
    "a backward run twice": r"update 0, replica \d: response .* gradient passed backward 2 times",
    "a loss divided before its backward": r"a loss got a gradient that differs from 1 by 0.5",
    "the normaliser divided by the microbatches": r"its updates were divided by .* which should "
    r"add up to",
    "the gradient divided by another number": r"was divided by .* instead of by the normaliser",
    "advantages negated on one replica": r"has the advantage .* in the loss, where its group's "
    r"rewards give",
    IN_BUFFER: r"group 1 of iteration 0 .*: advantages .* should be",
    RATIOS[
        0
    ]: r"has ratios against the policy of version 0 after 1 updates, where algorithm.ratio = "
    r"proximal takes",
    RATIOS[1]: r"all ratios to the old policy are 1 although its weights are not the policy's",
    REPLICAS: r"the 2 replicas brought .* of which its reduction left",
    EXPERTS: r"the 4 replicas brought .* of which its reduction left",
}
"""By name, what the run's last line says after "I7 gradient: iteration 0"."""


def put_advantages(name: str | None, number: int, advantages: Any) -> Any:
    """Returns the advantages that the coordinator puts into group `number` with this fault."""
    return -advantages if name == IN_BUFFER and number == 1 else advantages


# What reduces gradients over replicas in each backend: the attribute of a module.
_REDUCTIONS = {
    "megatron.core.distributed.param_and_grad_buffer": "dist_reduce_scatter_func",
    "pa_npu.backends.fsdp.optimizer": "_reduce_scatter",
    "tests.helpers.toy_backend.backend": "sum_over_replicas",
}


def inject(name: str, learner: Learner) -> None:
    """Into this process: most faults are of modules."""
    place = learner.backend.place
    if name in step_faults.ALL:
        step_faults.inject(name, learner)
        return
    if name == EXPERTS:
        buffers = sys.modules["megatron.core.distributed.param_and_grad_buffer"]
        vars(buffers)["dist_reduce_scatter_func"] = partial(
            _but_of_experts, buffers.dist_reduce_scatter_func, place.mesh
        )
    elif name == REPLICAS:
        for module, attribute in _REDUCTIONS.items():
            if module in sys.modules:
                setattr(sys.modules[module], attribute, _own_part)
        unsharded = sys.modules.get("megatron.core.distributed.param_and_grad_buffer")
        if unsharded is not None:
            vars(unsharded)["torch"] = _With(
                torch, distributed=_With(torch.distributed, all_reduce=_own_part)
            )
    elif name == "the normaliser divided by the microbatches":
        normaliser = objectives.Objective.normaliser
        objectives.Objective.normaliser = lambda self, *args: normaliser(self, *args) / 4  # type: ignore[method-assign]
    elif name == "the gradient divided by another number":
        scale = learner.backend.scale_gradients
        learner.backend.scale_gradients = lambda factor: scale(4 * factor)  # type: ignore[method-assign]
    elif name == RATIOS[0]:
        objectives.Objective._denominator = _current  # type: ignore[method-assign]
    elif name == RATIOS[1]:
        _instead_of_loss(lambda loss, microbatch, outputs: loss(microbatch, _as_old(outputs)))
    elif place.is_last_stage and (
        place.replica == place.mesh.data - 1 or _waits_for_others(name, learner)
    ):
        _on_one_rank(name, learner)


def _waits_for_others(name: str, learner: Learner) -> bool:
    """Returns whether a backward more or less on one rank alone would never end: shards are
    gathered and reduced by all in it, or tokens go to experts of other ranks.
    """
    is_collective = (
        "fsdp" in type(learner.backend).__module__ or learner.backend.place.mesh.expert > 1
    )
    return "backward " in name and is_collective


class _With:
    """A module with some of its functions replaced, for the one that imports it."""

    def __init__(self, module: Any, **instead: Any) -> None:
        self._module = module
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _but_of_experts(
    reduce: Callable[..., Any], mesh: Mesh, output: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Reduces what is not an expert's: copies of experts are fewer than replicas."""
    return (_own_part if kwargs["group"].size() == mesh.expert_data else reduce)(
        output, *args, **kwargs
    )


def _own_part(output: torch.Tensor, arguments: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Leaves of a reduction what this rank brings to its part of it."""
    if (
        arguments is not None
        and arguments.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()
    ):
        output.copy_(arguments.flatten()[: output.numel()].view_as(output))


def _on_one_rank(name: str, learner: Learner) -> None:
    if name == "a backward dropped":
        _at_second_backward(lambda run: _leave_out(learner))
    elif name == "a backward run twice":
        _at_second_backward(_run_twice)
    elif name == "a loss divided before its backward":
        _instead_of_loss(lambda loss, microbatch, outputs: loss(microbatch, outputs) / 2)
    elif name == "advantages negated on one replica":
        pack = iterator.pack
        iterator.pack = lambda *args: negated(pack(*args))


def negated(microbatch: Microbatch) -> Microbatch:
    return replace(microbatch, columns={**microbatch.columns, "advantages": -microbatch.advantages})


def _at_second_backward(instead: Callable[[Callable[..., None]], None]) -> None:
    """Calls `instead` for the second backward of an iteration's first update."""
    calls = 0

    def counted(
        backward: Callable[..., None],
        tensors: Any,
        gradients: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            instead(lambda **more: backward(tensors, kwargs.get("grad_tensors", gradients), **more))
        else:
            backward(tensors, gradients, *args, **kwargs)

    torch.autograd.backward = partial(counted, torch.autograd.backward)
    schedules = sys.modules.get("megatron.core.pipeline_parallel.schedules")
    if schedules is not None:
        vars(schedules)["custom_backward"] = partial(counted, _of_engine)


def _of_engine(
    output: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool = False
) -> None:
    """Megatron's backward of an output whose data it has let go."""
    gradient = torch.ones_like(output) if gradient is None else gradient
    torch.autograd.Variable._execution_engine.run_backward(
        (output,), (gradient,), retain_graph, False, (), True, True
    )


def _leave_out(learner: Learner) -> None:
    """The stage before is sent a gradient of zero."""
    stage = getattr(learner.backend, "_stage", None)
    if stage is not None and stage.input_tensor is not None:
        stage.input_tensor.grad = torch.zeros_like(stage.input_tensor)


def _run_twice(run: Callable[..., None]) -> None:
    run(retain_graph=True)
    run()


def _instead_of_loss(
    another: Callable[[Callable[..., torch.Tensor], Any, Any], torch.Tensor],
) -> None:
    loss = objectives.Objective.loss
    objectives.Objective.loss = (  # type: ignore[method-assign]
        lambda self, microbatch, outputs: another(
            lambda *args: loss(self, *args), microbatch, outputs
        )
    )


def _current(self: Any, microbatch: Any, outputs: Any) -> Any:
    return replace(outputs.policy, values=outputs.policy.values.detach())


def _as_old(outputs: Any) -> Any:
    old = replace(outputs.frozen["old"], values=outputs.policy.values.detach())
    return replace(outputs, frozen={**outputs.frozen, "old": old})


def faults_of(updates: int, replicas: int) -> Sequence[str]:
    """Those that a run of a dense model with so many updates and replicas can have."""
    impossible = {EXPERTS, *(() if updates > 1 else RATIOS), *(() if replicas > 1 else [REPLICAS])}
    return [name for name in FAULTS if name not in impossible]
