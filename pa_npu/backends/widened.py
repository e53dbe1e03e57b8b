"""A model in a wider type for a forward pass or two, one module's copy of its weights at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def widened(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, each module of `model` computes with its own weights in `dtype`: converted when it is
    called, dropped after it.

    The parameters themselves are not touched: another type would take Megatron's gradient hooks off
    them. Activations follow, because they take the type of the embedding's rows, or of what the
    previous stage sent. Without gradients only.
    """
    narrow: dict[torch.nn.Module, dict[str, Any]] = {}

    def widen(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        narrow[module] = dict(module._parameters)
        for name, parameter in narrow[module].items():
            module._parameters[name] = None if parameter is None else parameter.detach().to(dtype)
        return tuple(map(follow, inputs))

    def follow(value: Any) -> Any:
        """Returns an input in the wider type: an image's patches are no embedding's rows."""
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_number else value

    def restore(module: torch.nn.Module, *_: Any) -> None:
        module._parameters.update(narrow.pop(module))

    owners = [module for module in model.modules() if module._parameters]
    hooks = [owner.register_forward_pre_hook(widen) for owner in owners]
    hooks += [owner.register_forward_hook(restore) for owner in owners]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(narrow):  # whose forward raised
            restore(module)
