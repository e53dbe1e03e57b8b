"""One GPT of a pipeline stage: its TransformerConfig, Megatron's modules, our forward from tokens to log-probs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from pa_npu.algorithm.loss_gradient import HeadGradient
from pa_npu.backends.logprob import MostLikely, RowScores, score_rows
from pa_npu.backends.megatron.layers import AttentionContext, block_spec
from pa_npu.backends.protocol import DTYPES
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_division, padded_vocab
from pa_npu.platform.base import FusedOps, Platform

# The device kinds that this backend runs on, and whether TransformerConfig.deterministic_mode
# follows run.deterministic there: the embedding's backward then uses an indexed sum instead of
# atomics. The CPU's kernels are deterministic anyway.
_HAS_DETERMINISTIC_MODE = {"npu": True, "cuda": True, "cpu": False}


class GPT(GPTModel):
    """Megatron's GPTModel (its parameter names, its checkpoints) without its rotary embedding, mask
    and loss.

    The stage calls `hidden_states` and, where the LM head lives, `logprobs`; Megatron's own forward
    is not used.
    """

    def __init__(
        self, config: TransformerConfig, spec: ModelSpec, ops: FusedOps, implementation: str
    ) -> None:
        super().__init__(
            config,
            block_spec(config, spec, ops, implementation),
            vocab_size=padded_vocab(spec, config.tensor_model_parallel_size),
            max_sequence_length=spec.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="none",
        )
        self.vocab_size_unpadded = spec.vocab_size

    def forward(self, tokens: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """tokens int64 [1, T] -> hidden states [T, 1, hidden_size] (T / TP with SP), normed on the
        last stage.
        """
        embedded = self.embedding(input_ids=tokens, position_ids=None) if self.pre_process else None
        return self.decoder(hidden_states=embedded, attention_mask=None, attention_bias=context)

    def logprobs(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        chunk: int,
        entropy: bool = False,
        entropy_grad: bool = False,
        head: HeadGradient | None = None,
        choices: torch.Tensor | None = None,
        most_likely: MostLikely | None = None,
    ) -> RowScores:
        """Scores of `targets`, and of further tokens, predicted from `rows` of `hidden`, which alone
        meet the LM head; see score_rows.

        head: watches the gradient of these rows.
        """
        is_sharded = self.config.sequence_parallel
        if is_sharded:
            # the gather's backward sums the partial gradients of the TP ranks and scatters them in
            # one collective
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        picked = hidden.squeeze(1).index_select(0, rows)
        if head is not None:
            head.offer(picked, is_partial=is_sharded)
        return score_rows(
            picked,
            self.head_weight().to(hidden.dtype),  # of a pass in a wider type
            targets,
            vocab_size=self.vocab_size_unpadded,
            temperature=temperature,
            chunk=chunk,
            group=parallel_state.get_tensor_model_parallel_group(),
            entropy=entropy,
            entropy_grad=entropy_grad,
            reduce_hidden_grad=not is_sharded,
            choices=choices,
            most_likely=most_likely,
        )

    def head_weight(self) -> torch.Tensor:
        """This rank's rows of the LM head, [vocab / TP, hidden_size]; the embedding's where the
        model ties them.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def transformer_config(spec: ModelSpec, config: Config, platform: Platform) -> TransformerConfig:
    """Megatron's view of the model and its parallel layout, whose weights must be loaded.

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
        "perform_initialization": False,
        "params_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "tensor_model_parallel_size": trainer.tensor_parallel,
        "pipeline_model_parallel_size": trainer.pipeline_parallel,
        "sequence_parallel": trainer.tensor_parallel > 1,
        "pipeline_dtype": params_dtype,
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": True,
        # the default refuses variable lengths even without experts
        "moe_token_dispatcher_type": "alltoall",
        # gradients stay sums; the normaliser is applied at the step
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_model_grads,
        "bias_activation_fusion": False,  # our MLP calls the platform's SwiGLU itself
        "bias_dropout_fusion": False,  # without bias and dropout it is one addition
        "masked_softmax_fusion": False,
        # needs apex; on NPU it would compile kernels at run time
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        **_experts(spec, trainer.expert_parallel),
        **_recompute(trainer.recompute),
        "deterministic_mode": config.run.deterministic and _HAS_DETERMINISTIC_MODE[platform.name],
    }
    with warnings.catch_warnings():
        # advice about TransformerEngine's fused attention and CUDA graphs, which are not used
        warnings.filterwarnings(
            "ignore", message=".*(core_attn recompute is really needed|full scope is deprecated).*"
        )
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
        # layers that differ are saved one by one
        "moe_layer_freq": pattern if spec.num_dense_layers else 1,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def _recompute(kind: str) -> dict[str, Any]:
    """selective recomputes core attention alone, full each whole layer."""
    if kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if kind == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return {}


class CompiledSwiglu:
    """The platform's operations with Megatron's compiled SwiGLU, which fuses what torch runs as two
    kernels.
    """

    def __init__(self, ops: FusedOps) -> None:
        self.rms_norm, self.rotary, self.grouped_linear = (
            ops.rms_norm,
            ops.rotary,
            ops.grouped_linear,
        )

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = bias_swiglu_impl(x, None)
        return activated


def fused_ops(platform: Platform) -> FusedOps:
    """Returns the platform's operations as the layers call them.

    Raises UserError for a platform that this backend does not run on.
    """
    if platform.name not in _HAS_DETERMINISTIC_MODE:
        known = ", ".join(_HAS_DETERMINISTIC_MODE)
        raise UserError(
            f"trainer.backend: megatron does not run on {platform.name}; set run.device to one of "
            f"{known}"
        )
    return CompiledSwiglu(platform.ops) if platform.name == "cuda" else platform.ops
