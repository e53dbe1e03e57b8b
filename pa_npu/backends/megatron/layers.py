"""The modules of ours inside Megatron's transformer layer, and the layer spec that names them.

Positions and the packed layout travel with the microbatch as an AttentionContext in Megatron's
`attention_bias` argument, the only one that reaches core attention unchanged under 1F1B and under
recomputation. Queries and keys are rotated in core attention, so that cos and sin are computed once
per microbatch and Megatron's rotary code is not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.attention.context import RankRows
from pa_npu.attention.stems import PathRows
from pa_npu.backends.megatron.experts import MixtureMLP
from pa_npu.backends.megatron.routing import Replay
from pa_npu.families.shape import Rope
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import FusedOps


@dataclass(frozen=True)
class AttentionContext:
    """A microbatch's part in one model's layers. cos, sin: [tokens, 1, head_dim] at the tokens'
    positions. balance: factor of the routers' auxiliary loss; None where nothing is trained.
    replay: expert choices that routers take; None leaves the choice to them."""

    layout: PrefixLayout | RankRows | PathRows
    cos: torch.Tensor
    sin: torch.Tensor
    balance: float | None = None
    replay: Replay | None = None


class RMSNorm(torch.nn.Module):
    """RMSNorm that works on a sharded sequence, which Megatron's torch norm refuses: its gradient
    is summed over TP.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, ops: FusedOps, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        # redirected to the platform's device by prepare_megatron
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class CoreAttention(MegatronModule):
    """Rotary positions and shared-prompt attention over one packed sequence; the seat of
    `shared_prompt_attention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        ops: FusedOps,
        implementation: str,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.ops = ops
        self.implementation = implementation

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: AttentionContext | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [T, 1, heads, head_dim], key and value [T, 1, kv_heads, head_dim] -> [T, 1, heads *
        head_dim].
        """
        context = attention_bias
        if context is None:
            raise ValueError(
                "attention_bias: core attention needs the microbatch's AttentionContext, got None"
            )
        rotated_query = self.ops.rotary(query.squeeze(1), context.cos, context.sin)
        rotated_key = self.ops.rotary(key.squeeze(1), context.cos, context.sin)
        out = shared_prompt_attention(
            rotated_query,
            rotated_key,
            value.squeeze(1),
            context.layout,
            impl=self.implementation,
            layer=self.layer_number,
        )
        return out.reshape(out.shape[0], 1, -1)


class ColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel linear; without TP a plain linear, which spares a Python autograd
    function per call.
    """

    def forward(
        self, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.config.tensor_model_parallel_size > 1:
            return super().forward(input_, *args, **kwargs)
        return _plain_linear(self, input_)


class RowLinear(RowParallelLinear):
    """Megatron's row-parallel linear; without TP a plain linear."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.config.tensor_model_parallel_size > 1:
            return super().forward(input_)
        return _plain_linear(self, input_)


def _plain_linear(linear: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, 1, in] -> [T, 1, out] as one matrix product.

    On three dimensions torch chooses its kernel by grad mode, and a frozen model would not compute
    bit for bit what the policy does.
    """
    rows, transposed = x.squeeze(1), linear.weight.t()
    if linear.bias is None or linear.skip_bias_add:
        return torch.mm(rows, transposed).unsqueeze(1), linear.bias
    return torch.addmm(linear.bias, rows, transposed).unsqueeze(1), None


class GatedMLP(MLP):
    """Megatron's MLP (its parameters and checkpoints) with the platform's SwiGLU between the two
    linears.
    """

    def __init__(self, *args: Any, ops: FusedOps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ops = ops

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        gate_and_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(self.ops.swiglu(gate_and_up))


class SparseLayer(TransformerLayer):
    """A layer with experts.

    Its router knows the microbatch as core attention does: in every forward, also a recomputed one.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.context = kwargs["attention_bias"]
        return super().forward(*args, **kwargs)


def block_spec(
    config: TransformerConfig, spec: ModelSpec, ops: FusedOps, implementation: str
) -> TransformerBlockSubmodules:
    """Spec of this stage's transformer layers and of the final norm, which Megatron builds on the
    last stage only.
    """
    norm = ModuleSpec(module=RMSNorm, params={"ops": ops})
    head_norm = norm if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnLinear,
        core_attention=ModuleSpec(
            module=CoreAttention, params={"ops": ops, "implementation": implementation}
        ),
        linear_proj=RowLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )

    def layer(
        feed_forward: ModuleSpec, module: type[TransformerLayer] = TransformerLayer
    ) -> ModuleSpec:
        return ModuleSpec(
            module=module,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=ModuleSpec(
                    module=SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=attention,
                ),
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=norm,
                mlp=feed_forward,
                mlp_bda=get_bias_dropout_add,
            ),
        )

    linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    dense = layer(ModuleSpec(module=GatedMLP, params={"ops": ops}, submodules=linears))

    def sparse(number: int) -> ModuleSpec:
        assert spec.experts is not None, "only a mixture has sparse layers"
        place = {"experts": spec.experts, "number": spec.experts.layers.index(number)}
        return layer(ModuleSpec(module=MixtureMLP, params={**place, "ops": ops}), SparseLayer)

    first = get_transformer_layer_offset(config)
    numbers = range(first, first + get_num_layers_to_build(config))
    return TransformerBlockSubmodules(
        layer_specs=[sparse(number) if spec.has_experts(number) else dense for number in numbers],
        layer_norm=norm,
    )


class RotaryTable:
    """cos and sin of every position, grown on demand and kept per device and dtype; rows are picked
    by position.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.inverse_frequencies = inverse_frequencies(spec.rope, spec.head_dim)
        self.scale = spec.rope.attention_factor
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(
        self, positions: torch.Tensor, num_positions: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [tokens, 1, head_dim] in `dtype`, both halves equal.

        positions: int64 [tokens] on the device, all below `num_positions` (a host number, so that
        nothing waits for the device).
        """
        cos, sin = self._table(positions.device, dtype, num_positions)
        return cos[positions], sin[positions]

    def _table(
        self, device: torch.device, dtype: torch.dtype, num_positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._tables.get((device, dtype))
        if table is None or table[0].shape[0] < num_positions:
            length = 1 << max(num_positions - 1, 255).bit_length()
            angles = torch.outer(
                torch.arange(length, dtype=torch.float32), self.inverse_frequencies
            )
            angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
            cos = angles.cos() * self.scale
            sin = angles.sin() * self.scale
            table = (cos.to(device, dtype), sin.to(device, dtype))
            self._tables[device, dtype] = table
        return table


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2], as transformers' modeling_rope_utils computes them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies


def _yarn(rope: Rope, head_dim: int) -> torch.Tensor:
    """Frequencies that turn seldom are divided by `factor`, those that turn often are kept, and those
    between are interpolated by their number (YaRN).
    """

    def number_of(turns: float) -> float:
        """The number of the frequency that turns so often in the original positions."""
        positions_per_radian = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low = number_of(rope.beta_fast)
    high = number_of(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    numbers = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((numbers - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama
    3.1).
    """
    low, high, original = (
        rope.low_freq_factor,
        rope.high_freq_factor,
        float(rope.original_positions),
    )
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, scaled)
