"""TransformerConfig of Megatron from a ModelSpec and the run's Config."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig

from pa_npu.backends.megatron.devices import device_of
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_division
from pa_npu.platform.base import Platform

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(
    spec: ModelSpec,
    config: Config,
    platform: Platform,
    *,
    initialise: bool = False,
) -> TransformerConfig:
    """Megatron's view of the model and its parallel layout.

    initialise: give weights their random initial values; otherwise they must be loaded.
    Raises ConfigError when the model's sizes do not divide by the parallel sizes.
    """
    check_division(config, spec)
    trainer = config.trainer
    params_dtype = DTYPES[config.model.dtype]
    fields: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "layernorm_epsilon": spec.norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": spec.qk_norm,
        "add_qkv_bias": spec.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": initialise,
        "params_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "tensor_model_parallel_size": trainer.tensor_parallel,
        "pipeline_model_parallel_size": trainer.pipeline_parallel,
        "sequence_parallel": trainer.tensor_parallel > 1,
        "pipeline_dtype": params_dtype,
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": True,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths even without experts
        "calculate_per_token_loss": True,  # gradients stay sums; the normaliser is applied at the step
        "finalize_model_grads_func": finalize_model_grads,
        "bias_activation_fusion": False,  # our MLP calls the platform's SwiGLU itself
        "bias_dropout_fusion": False,  # without bias and dropout it is one addition
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,  # needs apex; on NPU it would compile kernels at run time
        "apply_rope_fusion": False,
        **_experts(spec, trainer.expert_parallel),
        **_recompute(trainer.recompute),
        "deterministic_mode": config.run.deterministic and device_of(platform).has_deterministic_mode,
    }
    with warnings.catch_warnings():
        # advice about TransformerEngine's fused attention and CUDA graphs, which are not used
        warnings.filterwarnings("ignore", message=".*(core_attn recompute is really needed|full scope is deprecated).*")
        return TransformerConfig(**fields)


def _experts(spec: ModelSpec, expert_parallel: int) -> dict[str, Any]:
    """Return the settings that Megatron asks of a mixture beside its layers, which are ours."""
    if spec.experts is None:
        return {}
    pattern = [int(spec.has_experts(layer)) for layer in range(spec.num_layers)]
    return {
        "num_moe_experts": spec.experts.count,
        "moe_ffn_hidden_size": spec.experts.ffn_size,
        "moe_router_topk": spec.experts.per_token,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_layer_freq": pattern if spec.num_dense_layers else 1,  # layers that differ are saved one by one
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def _recompute(kind: str) -> dict[str, Any]:
    """selective recomputes core attention alone, full each whole layer."""
    if kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if kind == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}
