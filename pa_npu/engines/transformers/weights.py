"""Loads weights from the trainers into a Hugging Face model, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from pa_npu.engines.live_weights import LiveTensor
from pa_npu.engines.weight_calls import WeightCalls
from pa_npu.families.wire_names import stored_tensors, wire_weights
from pa_npu.weight_transfer.transport import WeightSyncError


class ModelWorker(WeightCalls):
    """The one worker of this engine.

    records_expert_choices: whether it can report experts of tokens. reads_images: whether it takes
    images.
    """

    rank = 0

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        directory: str,
        records_expert_choices: bool,
        reads_images: bool = False,
    ) -> None:
        self.device = device
        self._model = model
        self._directory = directory
        self._records_expert_choices = records_expert_choices
        self._reads_images = reads_images

    def pa_version(self) -> dict[str, Any]:
        return super().pa_version() | {
            "continues": True,
            "sleeps": False,
            "expert_choices": self._records_expert_choices,
            "scores_at_temperature": True,
            "images": self._reads_images,
        }

    def _pa_model(self) -> tuple[object, str]:
        config: Any = self._model.config
        return config.get_text_config(), self._directory

    def _pa_live(self, names: Sequence[str]) -> Iterable[LiveTensor]:
        tensors = stored_tensors(self._model)
        places = wire_weights(self._model)
        for name in names:
            weight = places[name]
            memory = tensors[weight.source].detach().reshape(-1)
            memory = memory[weight.start : weight.start + weight.size]
            yield LiveTensor(name=name, sources=(name,), memory=memory)

    def _pa_modules(self) -> Iterable[torch.nn.Module]:
        return self._model.modules()

    def _pa_load_weights(
        self, version: int, weights: Iterator[tuple[str, torch.Tensor]], kept: bool
    ) -> list[str]:
        stored = stored_tensors(self._model)
        parameters: dict[str, torch.Tensor] = {}
        for name, weight in wire_weights(self._model).items():
            source = stored[weight.source]
            parameters[name] = source if weight.shape == source.shape else weight.view_of(source)
        missing = set(parameters)
        for name, tensor in weights:
            parameter = parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                form = "no such parameter"
                if parameter is not None:
                    form = f"shape {list(parameter.shape)}"
                raise WeightSyncError(
                    f"weight version {version}: the trainer sent {name} with shape "
                    f"{list(tensor.shape)}, but the engine has {form}; engine and trainer must be "
                    "given the same model directory"
                )
            if kept and isinstance(parameter, torch.nn.Parameter):
                parameter.data = tensor.to(parameter.device, parameter.dtype)
            else:  # a part of a parameter, too
                parameter.copy_(tensor)
            missing.discard(name)
        return list(missing)
