"""Weights from the trainers into a Hugging Face model, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pa_npu.families.wire_names import stored_tensors, wire_weights
from pa_npu.weight_transfer.receiver import Receiver
from pa_npu.weight_transfer.transport import WeightSyncError


class WeightReceiver:
    """The engine's end of publishes: the one worker of this engine."""

    def __init__(self, model: torch.nn.Module, device: torch.device, directory: str) -> None:
        self._model = model
        self._directory = directory
        self._device = device
        self._receiver: Receiver | None = None

    def join(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        stages: Sequence[Mapping[str, Any]],
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join the groups, after leaving those of before."""
        self.close()
        config: Any = self._model.config
        self._receiver = Receiver.join(
            (host, port),
            stages,
            rank=rank,
            world_size=world_size,
            backend=backend,
            device=self._device,
            timeout_s=timeout_s,
            model=config.get_text_config(),
            directory=self._directory,
        )

    @torch.no_grad()
    def load(self, version: int, begins_within_s: float | None = None) -> tuple[str, ...]:
        """Receive `version` and load it; returns the digests of what each stage sent. Raises WeightSyncError.

        begins_within_s: as Receiver.receive.

        On any error some weights may be new and others old: the model holds no version then.
        """
        receiver = self._connected()
        received = receiver.receive(version, begins_within_s=begins_within_s)
        self._take(version, receiver.whole(received), lambda p, t: p.copy_(t))
        return receiver.digests

    def prepare(self, version: int) -> None:
        """Begin to receive `version` beside what the model does. Raises WeightSyncError."""
        self._connected().prepare(version)

    def prepared(self, version: int) -> tuple[str, ...] | None:
        """The digests of what was received; None before. Raises what went wrong."""
        return self._connected().prepared(version)

    @torch.no_grad()
    def swap(self, version: int) -> tuple[str, ...]:
        """The model takes the memory that was received; returns the digests. Raises WeightSyncError."""
        received, digests = self._connected().take(version)

        def exchange(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
            if isinstance(parameter, torch.nn.Parameter):
                parameter.data = tensor.to(parameter.device, parameter.dtype)
            else:  # a part of one
                parameter.copy_(tensor)

        self._take(version, self._connected().whole(received), exchange)
        return digests

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise WeightSyncError("this engine has no connection to the trainer; it must join the groups first")
        return self._receiver

    def _take(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        put: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Every tensor of the checkpoint, each once."""
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
                found = "no such parameter" if parameter is None else f"shape {list(parameter.shape)}"
                raise WeightSyncError(
                    f"weight version {version}: the trainer sent {name} with shape {list(tensor.shape)}, but the engine has "
                    f"{found}; engine and trainer must be given the same model directory"
                )
            put(parameter, tensor)
            missing.discard(name)
        if missing:
            raise WeightSyncError(
                f"weight version {version}: the trainer sent no weights for {len(missing)} parameter(s) of the engine, the "
                f"first is {min(missing)!r}; engine and trainer must be given the same model directory"
            )

    def close(self) -> None:
        """Leave the groups, if any."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
