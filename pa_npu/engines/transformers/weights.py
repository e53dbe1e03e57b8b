"""Weights from the trainers into a Hugging Face model, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from pa_npu.engines.live_weights import LiveTensor
from pa_npu.engines.weight_calls import WeightCalls
from pa_npu.families.wire_names import stored_tensors, wire_weights
from pa_npu.weight_transfer.transport import WeightSyncError


class ModelWorker(WeightCalls):
    """The one worker of this engine. records_routes: whether it can say which experts tokens took."""

    rank = 0

    def __init__(
        self, model: torch.nn.Module, device: torch.device, directory: str, records_routes: bool
    ) -> None:
        self.device = device
        self._model = model
        self._directory = directory
        self._records_routes = records_routes

    def pa_version(self) -> dict[str, Any]:
        return super().pa_version() | {
            "continues": True,
            "sleeps": False,
            "routes": self._records_routes,
        }

    def _pa_model(self) -> tuple[object, str]:
        config: Any = self._model.config
        return config.get_text_config(), self._directory

    def _pa_live(self, names: Sequence[str]) -> Iterable[LiveTensor]:
        tensors = stored_tensors(self._model)
        places = wire_weights(self._model)
        for name in names:
            memory = tensors[places[name].source].detach().reshape(-1)
            yield LiveTensor(
                name, (name,), memory[places[name].start : places[name].start + places[name].size]
            )

    def _pa_modules(self) -> Iterable[torch.nn.Module]:
        return self._model.modules()

    def _pa_take(
        self, version: int, weights: Iterator[tuple[str, torch.Tensor]], kept: bool
    ) -> list[str]:
        whole = stored_tensors(self._model)
        parameters = {
            name: whole[weight.source]
            if weight.shape == whole[weight.source].shape
            else weight.of(whole[weight.source])
            for name, weight in wire_weights(self._model).items()
        }
        missing = set(parameters)
        for name, tensor in weights:
            parameter = parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                found = (
                    "no such parameter" if parameter is None else f"shape {list(parameter.shape)}"
                )
                raise WeightSyncError(
                    f"weight version {version}: the trainer sent {name} with shape "
                    f"{list(tensor.shape)}, but the engine has {found}; engine and trainer must be "
                    "given the same model directory"
                )
            if kept and isinstance(parameter, torch.nn.Parameter):
                parameter.data = tensor.to(parameter.device, parameter.dtype)
            else:  # a part of one, too
                parameter.copy_(tensor)
            missing.discard(name)
        return list(missing)
