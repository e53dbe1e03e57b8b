"""One GPT of a pipeline stage: Megatron's modules, our forward from tokens to hidden states and to log-probs."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from pa_npu.backends.logprob import vocab_parallel_logprobs
from pa_npu.backends.megatron.layers import AttentionContext, block_spec
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import padded_vocab
from pa_npu.platform.base import FusedOps


class GPT(GPTModel):
    """Megatron's GPTModel (its parameter names, its checkpoints) without its rotary embedding, mask and loss.

    The stage calls `hidden_states` and, where the LM head lives, `logprobs`; Megatron's own forward is not used.
    """

    def __init__(self, config: TransformerConfig, spec: ModelSpec, ops: FusedOps, implementation: str) -> None:
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
        """tokens int64 [1, T] -> hidden states [T, 1, hidden_size] (T / TP with SP), normed on the last stage."""
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
        entropy: bool,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob [N], entropy [N]) of `targets` predicted from `rows` of `hidden`, which alone meet the LM head."""
        is_sharded = self.config.sequence_parallel
        if is_sharded:
            # the gather's backward sums the partial gradients of the TP ranks and scatters them in one collective
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        picked = hidden.squeeze(1).index_select(0, rows)
        return vocab_parallel_logprobs(
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
        )

    def head_weight(self) -> torch.Tensor:
        """This rank's rows of the LM head, [vocab / TP, hidden_size]; the embedding's where the model ties them."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
