"""The worker extension of vLLM engines: their part in training. Imports torch and vllm only.

    VLLM_SERVER_DEV_MODE=1 vllm serve ... --worker-extension-cls
    pa_npu.engines.vllm.worker.WorkerExtension

Its calls, by collective_rpc, are those of pa_npu.engines.weight_calls, and pa_expert_choices: the
experts that the tokens of an answered request took, on the first worker.

Call them without collective_rpc's own `timeout`: once one fires, vLLM gives every later reply to
the wrong caller. The deadlines are `timeout_s` of pa_connect and the client's own. The server's
guard resets the prefix cache, which still holds keys and values of the old weights after a load.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pa_npu.engines.live_weights import LiveTensor
from pa_npu.engines.vllm import expert_choices, scores
from pa_npu.engines.vllm.live import live_tensors
from pa_npu.engines.vllm.streams import follow_streams
from pa_npu.engines.weight_calls import WeightCalls
from pa_npu.weight_transfer.gloo_device import share_device
from pa_npu.weight_transfer.receiver import HEAD, is_embedding, is_head

_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
_NO_WEIGHTS = "Failed to load weights"

share_device()  # vLLM imports this before it makes its groups


class WorkerExtension(WeightCalls):
    """Mixed into vLLM's worker class."""

    def _pa_model(self) -> tuple[object, str]:
        worker: Any = self
        return worker.model_config.hf_config.get_text_config(), str(worker.model_config.model)

    def pa_connect(self, groups: dict[str, Any]) -> dict[str, Any]:
        apply_logprobs_mode(self)
        follow_streams(self)
        undo_waking(self)
        return super().pa_connect(groups)

    def _pa_load_weights(
        self, version: int, weights: Iterator[tuple[str, torch.Tensor]], kept: bool
    ) -> list[str]:
        with _keeping(bool(self._pa_kept)), _reloading(self) as model:
            wanted = {name for name, _ in model.named_parameters()}
            if self._pa_get().is_tied and any(is_head(name) for name in wanted):
                weights = with_tied_head(weights)
            loaded: set[str] | None = model.load_weights(weights)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if (recorder := expert_choices.recorder_of(self)) is not None:
            recorder.forget()
        return [] if loaded is None else [name for name in wanted if name not in loaded]

    def _pa_live(self, names: Sequence[str]) -> Iterable[LiveTensor]:
        worker: Any = self
        return live_tensors(worker.model_runner.model, names)

    def _pa_modules(self) -> Iterable[torch.nn.Module]:
        worker: Any = self
        model: torch.nn.Module = worker.model_runner.model
        return model.modules()

    def pa_version(self) -> dict[str, Any]:
        """Returns the weight version and the worker's abilities.

        continues: requests can begin at any place of their random streams. sleeps: it was started
        with --enable-sleep-mode. expert_choices: the engine reports which experts tokens took.
        scores_at_temperature: prompt log-probs follow a temperature that the request names. images:
        its model reads images.
        """
        worker: Any = self
        return super().pa_version() | {
            "continues": follow_streams(self),
            "sleeps": bool(getattr(worker.model_config, "enable_sleep_mode", False)),
            "expert_choices": expert_choices.records_expert_choices(self),
            "scores_at_temperature": scores.follow_temperatures(self),
            "images": bool(getattr(worker.model_config, "is_multimodal_model", False)),
        }

    def pa_expert_choices(self, request: str, n: int, given: int) -> dict[str, Any]:
        """Returns the expert choices of a request (VllmExpertChoiceRecorder.pop_expert_choices).

        Returns {} if the engine records expert choices by itself. Also on all workers but the
        first, which has the same.
        """
        recorder = expert_choices.recorder_of(self) if self.rank == 0 else None
        return {} if recorder is None else recorder.pop_expert_choices(request, n, given)


def with_tied_head(
    weights: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the embedding a second time, as the LM head.

    vLLM's layerwise reload unties the two for its duration and would leave a tied head as it was.
    On CPU that keeps a packed copy of the old weights: the engine would generate from new layers
    and an old head.
    """
    for name, tensor in weights:
        yield name, tensor
        if is_embedding(name):
            yield HEAD, tensor


def apply_logprobs_mode(worker: Any) -> None:
    """Lets the sampler report the log-probs that --logprobs-mode asks for.

    vllm-ascend 0.23 to 0.25 builds its sampler without the mode, and would report raw log-probs.
    These are of another distribution than the sampled one unless the temperature is 1.
    """

    mode = worker.model_config.logprobs_mode
    sampler = getattr(worker.model_runner, "sampler", None)
    for part in (sampler, getattr(sampler, "topk_topp_sampler", None)):
        if part is not None and getattr(part, "logprobs_mode", mode) != mode:
            part.logprobs_mode = mode


@contextmanager
def _reloading(worker: Any) -> Iterator[Any]:
    """Yields the worker's model in a state in which load_weights takes HF tensors.

    vLLM packs weights for its kernels after loading (on CPU always). After that only its layerwise
    reload can load again: it puts each layer back to its HF form, loads it, packs it anew once
    complete, and copies the result into the old memory. Meanwhile torch's default device is the
    worker's. The reload is also finished on failure, else the engine would keep tensors without
    memory.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    undo_waking(worker)
    model = worker.model_runner.model
    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        initialize_layerwise_reload(model)
        try:
            yield model
        finally:
            finalize_layerwise_reload(model, worker.model_config)
        pack_again(model)


@contextmanager
def _keeping(keeps: bool) -> Iterator[None]:
    """Leaves out vLLM's warning of each layer that got no weights, if some keep what they have.

    Which parameters got none is checked anyway.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return not (keeps and str(record.msg).endswith(_NO_WEIGHTS))

    reload_logger = logging.getLogger(_RELOAD)
    reload_logger.addFilter(is_other)
    try:
        yield
    finally:
        reload_logger.removeFilter(is_other)


def undo_waking(worker: Any) -> None:
    """Gives parameters the layout that they had at the first call: a reload needs it.

    vllm-ascend (0.23) transposes experts as a worker wakes, for weights that are loaded without a
    reload.
    """
    model = worker.model_runner.model
    layouts = {name: _layout(parameter) for name, parameter in model.named_parameters()}
    before = worker.__dict__.setdefault("_pa_layouts", layouts)
    for name, layout in layouts.items():
        parameter = model.get_parameter(name)
        if parameter.dim() != 3:
            continue
        is_transposed = layout != before.get(name) == _layout(parameter.transpose(1, 2))
        if is_transposed:
            as_before = torch.nn.Parameter(parameter.data.transpose(1, 2), requires_grad=False)
            module_name, _, parameter_name = name.rpartition(".")
            setattr(model.get_submodule(module_name), parameter_name, as_before)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def pack_again(model: torch.nn.Module) -> None:
    """Brings experts into the layout of their kernel.

    vLLM's CPU experts are packed for their kernel when it is made, and never again by a reload
    (0.32). Log-probs are then off by 0.06 after a reload of equal weights, by 3 after one of new
    ones. The reload itself gives kernels of devices their layout.
    """
    for experts, kernel in _cpu_experts(model):
        kernel.process_weights_after_loading(experts)


def _cpu_experts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        weight = getattr(module, "w13_weight", None)
        if kernel is not None and weight is not None and weight.device.type == "cpu":
            yield module, kernel.fused_experts
