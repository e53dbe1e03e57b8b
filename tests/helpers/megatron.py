"""Megatron prepared for the test process: a world of one rank, loaded stages, gradients compared with an HF model's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.backends.megatron.patches.table import prepare
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec

PLATFORM = platforms.get("cpu")
prepare(PLATFORM.name)

# these import megatron, which must come after its preparation: tests take them from here
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

from pa_npu.backends.megatron import parallel  # noqa: E402
from pa_npu.backends.megatron.parallel import initialise_parallel  # noqa: E402
from pa_npu.backends.megatron.stage import TriModel, build_stage  # noqa: E402
from pa_npu.backends.megatron.weights.hf_map import load_hf, part_view, sources  # noqa: E402


def model_config(model: Path, /, **sections: dict[str, Any]) -> Config:
    """A Config for `model` in fp32 with the given sections on top."""
    tree: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "unused.jsonl"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


def shutdown_parallel() -> None:
    """Undoes initialise_parallel, and what Megatron forgets: a second layout in this process would
    inherit these ranks.
    """
    parallel.shutdown_parallel()
    for name in ("_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS"):
        setattr(parallel_state, name, None)


@contextmanager
def single_process(config: Config) -> Iterator[None]:
    """Parallel state of a world of one rank, undone afterwards."""
    initialise_parallel(config, PLATFORM, dist.HashStore(), rank=0)
    try:
        yield
    finally:
        shutdown_parallel()
        _let_go()


def _let_go() -> None:
    """Frees what Megatron keeps of a world that has ended: sockets of groups stay open as long as
    anything has the groups.
    """
    # core 0.12
    tracker = (
        moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
    )
    tracker.get_moe_layer_wise_logging_tracker().clear()
    for name in (
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    ):
        setattr(parallel_state, name, None)
    # The distributed optimizer's fp32 shards are views with a graph: view, accumulator of the
    # gradient, the wrapper's hook, the wrapper, its configuration, the backend, the optimizer. The
    # collector does not see the part of that cycle which is torch's.
    for wrapped in gc.get_objects():
        if type(wrapped) is DistributedDataParallel:
            vars(wrapped).clear()
    gc.collect()


def loaded_stage(
    model: Path, frozen: dict[str, Path] | None = None, /, **sections: dict[str, Any]
) -> TriModel:
    """A stage with the weights of `model`, and each frozen model with those of its own directory."""
    frozen = frozen or {}
    stage = build_stage(
        ModelSpec.read(str(model)), model_config(model, **sections), PLATFORM, frozen=tuple(frozen)
    )
    load_hf(stage.policy, ModelSpec.read(str(model)))
    for name, directory in frozen.items():
        load_hf(stage.frozen[name], ModelSpec.read(str(directory)))
    return stage


def hf_gradients(hf_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names of the checkpoint, where each expert has tensors of its own; transformers
    computes with them stacked.
    """
    actual: dict[str, torch.Tensor] = {}
    for name, parameter in hf_model.named_parameters():
        base, _, stacked = name.rpartition(".")
        for expert, gradient in enumerate(parameter.grad) if base.endswith(".experts") else ():
            parts = (
                {"gate_proj": gradient, "up_proj": gradient}
                if stacked == "gate_up_proj"
                else {"down_proj": gradient}
            )
            halves = gradient.chunk(2) if len(parts) == 2 else [gradient]
            actual |= {
                f"{base}.{expert}.{part}.weight": half
                for part, half in zip(parts, halves, strict=True)
            }
        if not base.endswith(".experts"):
            actual[name] = parameter.grad
    return actual


def relative_gradient_errors(
    stage: TriModel, hf_model: torch.nn.Module, spec: ModelSpec
) -> dict[str, float]:
    """Per HF parameter: largest difference of the two gradients over the largest HF gradient."""
    gradients = {name: parameter.grad for name, parameter in stage.policy.named_parameters()}
    return {
        name: ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for name, (ours, theirs) in gradient_pairs(gradients, hf_model, spec).items()
    }


def gradient_pairs(
    gradients: dict[str, Any], hf_model: torch.nn.Module, spec: ModelSpec
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns by HF parameter our gradient and the HF model's. gradients: by Megatron's names."""
    expected = hf_gradients(hf_model)
    pairs = {}
    for name, gradient in gradients.items():
        for tensor in sources(name, spec, 0):
            ours = part_view(gradient, tensor, spec).reshape(tensor.shape)
            pairs[tensor.name] = (ours, expected.pop(tensor.name))
    assert not expected, f"HF parameters without a counterpart: {sorted(expected)}"
    return pairs
