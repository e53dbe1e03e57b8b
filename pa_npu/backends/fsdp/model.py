"""A causal language model of transformers, sharded by FSDP2, whose forward gives log-probs of packed responses.

    model = load_model(path, dtype=torch.float32)          on the host, as the files have it
    sharded = shard(ScoredModel(model), mesh, ...)         each layer a group of its own, the rest the root's
    logprobs, entropy = sharded(tokens, layout, rows, targets, temperature, chunk)

Parameters are held sharded, the policy's in fp32; a layer's are gathered, in the type that is computed with, while it computes.
The LM head is applied inside the root's forward, where its weight is gathered, and to the rows that predict targets alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pa_npu.attention import PrefixLayout
from pa_npu.attention.huggingface import use_shared_prompt_attention
from pa_npu.backends.fsdp.reduction import CountedReduceScatter
from pa_npu.backends.logprob import vocab_parallel_logprobs
from pa_npu.errors import DataError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ScoredModel(torch.nn.Module):
    """The model with the log-probs of targets as its output."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.causal = causal
        use_shared_prompt_attention(causal)

    def forward(
        self,
        tokens: torch.Tensor,
        layout: PrefixLayout,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        entropy: bool = True,
        entropy_grad: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [N], entropy [N]) fp32. tokens: int64 [T], packed by layout; rows, targets: int64 [N], see Microbatch."""
        positions = layout.position_ids().to(tokens.device)[None]
        hidden = self.causal.base_model(
            input_ids=tokens[None], position_ids=positions, layout=layout, use_cache=False
        ).last_hidden_state[0]
        head = self.causal.get_output_embeddings().weight.to(
            hidden.dtype
        )  # another one only where the model is widened
        return vocab_parallel_logprobs(
            hidden.index_select(0, rows),
            head,
            targets,
            vocab_size=head.shape[0],
            temperature=temperature,
            chunk=chunk,
            entropy=entropy,
            entropy_grad=entropy_grad,
        )

    def named_weights(self) -> Iterator[tuple[str, DTensor]]:
        """Every weight once under its HF name, with this rank's shard of it."""
        yield from self.causal.named_parameters()


def load_model(path: str, dtype: torch.dtype) -> Any:
    """The model of an HF directory on the host. Raises DataError where transformers cannot load it."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"model.path: {path} cannot be loaded by transformers ({reason}); use a causal language model"
        ) from error
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise DataError(f"model.path: {path}: its LM head has a bias, which trainer.backend=fsdp does not support")
    return model


def shard(model: ScoredModel, mesh: DeviceMesh, *, compute: torch.dtype, trained: bool, recompute: bool) -> ScoredModel:
    """The same model, sharded in place over `mesh`: [ranks], or [replicas, ranks] for shards that are replicated.

    compute: type of the gathered weights and of what is computed; gradients are summed in fp32, undivided.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    model.requires_grad_(trained)
    model.train(trained)
    if recompute and trained:
        model.causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.causal.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # gathered again for its backward: an evaluation or a frozen pass has none, and a copy must not find stale weights
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo and HCCL have no sum that divides first
            module.set_gradient_divide_factor(1.0)
    return model


def count_reductions(model: ScoredModel) -> list[CountedReduceScatter]:
    """Let every group of a sharded model count what it reduces."""
    counted = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            counted.append(CountedReduceScatter())
            module.set_custom_reduce_scatter(counted[-1])  # type: ignore[arg-type]  # its interface, of an unnamed module
    return counted
