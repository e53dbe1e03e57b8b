"""Stand-ins on a CPU for what TRL has for CUDA only: weights to vLLM over gloo instead of NCCL, attention over packed sequences.

Everything else is TRL's and vLLM's own code. Weights go the same way (one packed broadcast into
vLLM's layerwise reload), over the transport that this project's own publish takes on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

TIMEOUT = timedelta(seconds=120)


class GlooGroup:
    """The trainer, rank 0, and the engine's worker."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
        self._group: Any = ProcessGroupGloo(
            PrefixStore("weights", store), rank, world_size, TIMEOUT
        )
        self.group = SimpleNamespace(store=store, socket=None)  # TRL empties both when it closes

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()

    def destroy(self) -> None:
        self._group = None


def trainer_end(init_info: dict[str, Any], rank: int = 0) -> GlooGroup:
    return GlooGroup(
        init_info["master_address"], init_info["master_port"], rank, init_info["world_size"]
    )


def worker_end(init_info: Any, parallel_config: Any) -> GlooGroup:
    rank = init_info.rank_offset + parallel_config.rank
    return GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)


def send(
    iterator: Iterable[Any],
    group: GlooGroup,
    src: int,
    post_iter_func: Callable[[Any], torch.Tensor],
    **_: Any,
) -> None:
    parts = [
        post_iter_func(item).detach().contiguous().view(torch.uint8).flatten() for item in iterator
    ]
    group.broadcast(torch.cat(parts))


def receive(
    iterator: Iterable[tuple[str, tuple[list[int], torch.dtype]]],
    group: GlooGroup,
    src: int,
    post_unpack_func: Callable[[list[tuple[str, torch.Tensor]]], Any],
    **_: Any,
) -> None:
    announced = [
        (name, shape, dtype, math.prod(shape) * dtype.itemsize) for name, (shape, dtype) in iterator
    ]
    buffer = torch.empty(sum(size for *_, size in announced), dtype=torch.uint8)
    group.broadcast(buffer)
    parts = buffer.split([size for *_, size in announced])
    post_unpack_func(
        [
            (name, part.clone().view(dtype).view(shape))
            for (name, shape, dtype, _), part in zip(announced, parts, strict=True)
        ]
    )


def use_in_engine() -> None:
    """In this process, which has the engine's worker or forks it."""
    from vllm.distributed.weight_transfer import nccl_engine

    module: Any = nccl_engine
    module.worker_init_process_group = worker_end
    module.packed_nccl_broadcast_consumer = receive


def reload_packed(sync_weights: Callable[[Any], None]) -> Callable[[Any], None]:
    """TRL's VLLMGeneration.sync_weights for an engine in the same process, whose linear layers a
    CPU keeps packed.

    vLLM's layerwise reload packs again what was loaded; it is what a server does too.
    """

    def sync(self: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        with set_current_vllm_config(runner.vllm_config):
            initialize_layerwise_reload(runner.model)
            sync_weights(self)
            finalize_layerwise_reload(runner.model, runner.model_config)

    return sync


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """FlashAttention's varlen function: segments whose queries are the last ones of their keys.
    [tokens, heads, head_dim].

    Segments of equal lengths are computed together, which is what makes it as fast as a batch.
    """
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
    starts_q = cu_seqlens_q.tolist()
    starts_k = cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        lengths = (starts_q[i + 1] - starts_q[i], starts_k[i + 1] - starts_k[i])
        alike.setdefault(lengths, []).append((starts_q[i], starts_k[i]))
    parts = []
    places = []
    for (rows, columns), starts in alike.items():
        q_index = torch.tensor([start for start, _ in starts])[:, None] + torch.arange(rows)
        k_index = torch.tensor([start for _, start in starts])[:, None] + torch.arange(columns)
        mask = (
            None
            if rows == columns
            else torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query[q_index].transpose(1, 2),
            key[k_index].transpose(1, 2),
            value[k_index].transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=softmax_scale,
            enable_gqa=True,
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
        places.append(q_index.flatten())
    return torch.cat(parts)[torch.cat(places).argsort()]
