"""The experts that a mixture's routers choose in a forward pass of a transformers model, taken by hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

NO_ROUTES = np.zeros((0, 0, 0), np.uint16)


class RouteRecorder:
    """num_routers: how many layers have one that says what it chooses."""

    def __init__(self, model: torch.nn.Module) -> None:
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        self.num_routers = len(routers)
        self._chosen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._note)

    def take(self) -> npt.NDArray[np.uint16]:
        """The routes of the pass since the last call, uint16 [tokens, layers, experts per token]; [0, 0, 0] of a dense model."""
        chosen, self._chosen = self._chosen, []
        return torch.stack(chosen, 1).cpu().numpy().astype(np.uint16) if chosen else NO_ROUTES

    def _note(self, router: torch.nn.Module, given: Any, output: Any) -> None:
        """output: with the indices of the experts, [tokens, experts per token], behind scores and weights."""
        self._chosen.append(output[-1])
