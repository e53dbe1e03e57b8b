"""The tri-model pipeline stage: policy, old policy and reference pass through the pipeline together, in one forward.

    stage = build_stage(spec, config, platform, frozen=("old", "reference"))
    stage.policy                   the trained GPT (registered; what DDP, optimizer and checkpoints
                                   see)
    stage.frozen                   {"old" | "reference": GPT}, outside the module tree, never trained
    stage.gpts()                   {"policy": ..., **stage.frozen}, for loading weights
    stage.copy_policy_to("old")
    ddp = data_parallel(stage, distributed_optimizer=True)
    output = ddp(tokens, layout, rows, targets, temperature, chunk, entropy_grad=False)
    scores = stage.pass_alone("old", tokens, layout, rows, targets, temperature, chunk)       trainer.frozen_pass=separate
        tokens int64 [1, T], layout PrefixLayout of T tokens, rows int64 [N], targets int64 [N]
        -> ModelOutput on the last stage; before it hidden states [T, 1, width] for Megatron's
        schedule to send

`rows` are packed rows whose hidden state predicts `targets` (PrefixLayout.predictor_rows); only
they meet the LM head. With sequence parallelism T must be a multiple of TP (PrefixLayout.pad). In
bf16 the parameters themselves are bf16, so Megatron's Float16Module is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from pa_npu.algorithm.loss_gradient import HeadGradient
from pa_npu.algorithm.model_outputs import Weights
from pa_npu.attention import PrefixLayout
from pa_npu.attention.context import RankRows
from pa_npu.attention.stems import PathRows, of_model
from pa_npu.backends.logprob import MostLikely, RowScores
from pa_npu.backends.megatron import parallel
from pa_npu.backends.megatron.gpt import GPT, fused_ops, transformer_config
from pa_npu.backends.megatron.layers import AttentionContext, RotaryTable
from pa_npu.backends.megatron.routing import Replay
from pa_npu.backends.widened import widened
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.weight_transfer.computation import Computation, computation_of, rotations_of

_GRADIENT_BYTES = 4  # fp32


@dataclass(frozen=True)
class ModelOutput:
    """Outputs of the last stage for N target tokens. Gradients flow through those of `policy`, its
    entropy if asked. head: as Outputs."""

    policy: RowScores
    frozen_scores: dict[str, RowScores]
    head: HeadGradient | None = None

    @property
    def logprobs(self) -> torch.Tensor:
        return self.policy.logprobs

    @property
    def entropy(self) -> torch.Tensor:
        return self.policy.entropy

    @property
    def frozen(self) -> dict[str, torch.Tensor]:
        """The frozen models' log-probs of the targets."""
        return {name: scores.logprobs for name, scores in self.frozen_scores.items()}


Choose = Callable[[Mapping[str, RowScores]], torch.Tensor | None]
"""Makes of the frozen models' scores the tokens whose log-probs the policy gives too, [N, k]."""


def no_choices(frozen: Mapping[str, RowScores]) -> None:
    """A Choose that wants none."""


class TriModel(MegatronModule):
    """One pipeline stage of the policy and of frozen models: copies of its shape, and teachers,
    whose shape may be another.

    Between stages the hidden states of all models travel side by side in one tensor [tokens, 1,
    width], so that one 1F1B pass serves all models and the schedule needs to know nothing of it.
    The frozen parts carry no gradient.
    """

    def __init__(
        self,
        config: TransformerConfig,
        policy: GPT,
        frozen: dict[str, GPT],
        rotary: RotaryTable,
        published: GPT | None = None,
        together: bool = True,
        other_rotaries: Mapping[str, RotaryTable] | None = None,
    ) -> None:
        """
        Args:
            other_rotaries: of the models that are no copies of the policy, by name.
            published: memory for a copy of the weights that engines have been given, which is never
            computed with.
            together: frozen models go through the policy's pass; otherwise each has passes of its
            own.
        """
        super().__init__(config)
        self.policy = policy
        # plain dicts keep them out of the module tree: DDP, optimizer and checkpoints must see the
        # policy only
        self.frozen = dict(frozen)
        self._beside = self.frozen if together else {}
        self._other_rotaries = dict(other_rotaries or {})
        self._copies = {**frozen} if published is None else {**frozen, "published": published}
        for model in self._copies.values():
            model.eval().requires_grad_(False)
        self.weights: dict[str, Weights] = {}
        """Which weights each model holds, where that has been said."""
        self.rotary = rotary
        self.input_tensor: torch.Tensor | None = None
        self.pre_process, self.post_process = policy.pre_process, policy.post_process
        self.model_type = policy.model_type

    # What Megatron's schedule and gradient finalisation look for on a model

    @property
    def decoder(self) -> torch.nn.Module:
        return self.policy.decoder

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        return self.policy.share_embeddings_and_output_weights

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        return self.policy.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Hidden states from the previous stage, [tokens, 1, width], or None on the first."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the policy's, under its own names: a checkpoint does not depend on which frozen
        models a run keeps.
        """
        return self.policy.sharded_state_dict(prefix, sharded_offsets, metadata)

    # What the package uses

    def gpts(self) -> dict[str, GPT]:
        """Returns all models of this stage by name."""
        return {"policy": self.policy, **self.frozen}

    @torch.no_grad()
    def copy_policy_to(self, name: str) -> None:
        """Make the frozen model `name`, or "published", equal to the policy as it is now."""
        for target, source in zip(
            self._copies[name].parameters(), self.policy.parameters(), strict=True
        ):
            target.copy_(source)
        if "policy" in self.weights:
            self.weights[name] = self.weights["policy"]

    def model(self, name: str) -> GPT:
        """Returns the policy, or the copy of this name."""
        return self.policy if name == "policy" else self._copies[name]

    def computation(self) -> Computation:
        """Returns what the policy's modules and the rotary table compute with."""
        computation = computation_of(self.policy.modules())
        config = self.policy.config
        return msgspec.structs.replace(
            computation,
            rotations=rotations_of(self.rotary.inverse_frequencies, self.rotary.scale),
            attention_scales=[config.kv_channels**-0.5],
            experts_per_token=[] if config.num_moe_experts is None else [config.moe_router_topk],
        )

    def forward(
        self,
        tokens: torch.Tensor,
        layout: PrefixLayout | RankRows | PathRows,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        entropy_grad: bool = False,
        balance: float | None = None,
        replay: Replay | None = None,
        most_likely: Mapping[str, MostLikely] | None = None,
        choose: Choose = no_choices,
        asked: Collection[str] | None = None,
        own_targets: torch.Tensor | None = None,
    ) -> ModelOutput | torch.Tensor:
        """One microbatch through this stage; see the module's docstring for shapes,
        AttentionContext for `balance` and `replay`.

        most_likely: of the frozen models, by name, of which the last stage wants further tokens.
        choose: called on the last stage with the scores of those that pass beside the policy.
        asked: the frozen models that the microbatch asks for; None: all.
        own_targets: int64 [N], which of the microbatch's targets these are; None: all (HeadGradient).
        """
        if tokens.shape != (1, layout.total):
            raise ValueError(
                f"tokens: shape {tuple(tokens.shape)} does not match the layout; it must be (1, "
                f"{layout.total})"
            )
        rotation = self._rotation("policy", layout, tokens.device, self.config.params_dtype)
        beside = {
            name: model for name, model in self._beside.items() if asked is None or name in asked
        }
        inputs = self._unpack(beside)

        frozen_hidden: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, model in beside.items():
                model.set_input_tensor(inputs.get(name))
                model_rotation = rotation
                if name in self._other_rotaries:
                    model_rotation = self._rotation(
                        name, layout, tokens.device, self.config.params_dtype
                    )
                context = AttentionContext(of_model(layout, name), *model_rotation, replay=replay)
                frozen_hidden[name] = model(tokens, context)
        self.policy.set_input_tensor(inputs.get("policy"))
        hidden = self.policy(tokens, AttentionContext(layout, *rotation, balance, replay))
        if not self.post_process:
            return torch.cat([hidden, *frozen_hidden.values()], dim=-1) if frozen_hidden else hidden

        frozen: dict[str, RowScores] = {}
        with torch.no_grad():
            for name, states in frozen_hidden.items():
                frozen[name] = self.frozen[name].logprobs(
                    states,
                    rows,
                    targets,
                    temperature=temperature,
                    chunk=chunk,
                    most_likely=(most_likely or {}).get(name),
                )
        choices = choose(frozen)
        head = None if entropy_grad or choices is not None else HeadGradient(own_targets)
        policy = self.policy.logprobs(
            hidden,
            rows,
            targets,
            temperature=temperature,
            chunk=chunk,
            entropy=True,
            entropy_grad=entropy_grad,
            head=head,
            choices=choices,
        )
        return ModelOutput(policy, frozen, head)

    @torch.no_grad()
    def pass_alone(
        self,
        name: str,
        tokens: torch.Tensor,
        layout: PrefixLayout | RankRows | PathRows,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        dtype: torch.dtype | None = None,
        replay: Replay | None = None,
        most_likely: MostLikely | None = None,
    ) -> RowScores | torch.Tensor:
        """One microbatch through this stage of one model of gpts(): scores on the last stage,
        before it what travels.

        dtype: a wider type to compute in; None: the model's own.
        """
        model = self.gpts()[name]
        own_dtype = model.config.params_dtype
        dtype = dtype or own_dtype
        model.set_input_tensor(None if self.input_tensor is None else self.input_tensor.view(dtype))
        with nullcontext() if dtype == own_dtype else widened(model, dtype):
            rotation = self._rotation(name, layout, tokens.device, dtype)
            context = AttentionContext(of_model(layout, name), *rotation, replay=replay)
            hidden = model(tokens, context)
        if not self.post_process:
            return hidden.view(self.config.params_dtype)
        return model.logprobs(
            hidden, rows, targets, temperature=temperature, chunk=chunk, most_likely=most_likely
        )

    def _unpack(self, beside: Mapping[str, GPT]) -> dict[str, torch.Tensor]:
        """Returns each model's hidden states out of what the previous stage packed; nothing on the
        first stage. beside: the frozen models that pass with the policy.
        """
        if self.input_tensor is None:
            return {}
        if not beside:
            return {"policy": self.input_tensor}
        widths = [model.config.hidden_size for model in (self.policy, *beside.values())]
        policy, *frozen = self.input_tensor.split(widths, dim=-1)
        return {
            "policy": policy,
            **dict(zip(beside, (part.detach() for part in frozen), strict=True)),
        }

    def _rotation(
        self,
        name: str,
        layout: PrefixLayout | RankRows | PathRows,
        device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rotation that the model `name` computes with."""
        rotary = self._other_rotaries.get(name, self.rotary)
        return rotary.rows(layout.position_ids(device), layout.longest, dtype)


def build_stage(
    spec: ModelSpec,
    config: Config,
    platform: Platform,
    *,
    frozen: tuple[str, ...] = (),
    keeps_published: bool = False,
    other_specs: Mapping[str, ModelSpec] | None = None,
) -> TriModel:
    """This rank's pipeline stage. `initialise_parallel` must have run. Weights are NaN until
    loaded: none is forgotten unnoticed.

    frozen: names of the models to build beside the policy.
    other_specs: the shape of those that are no copies of the policy, by name.
    keeps_published: a place for a copy of what was published last.
    Raises ConfigError when the model does not divide by the parallel sizes, DataError for an
    unsupported rope scaling.
    """
    ops = fused_ops(platform)
    megatron_config = transformer_config(spec, config, platform)
    others = dict(other_specs or {})

    def build(shape: ModelSpec = spec) -> GPT:
        settings = megatron_config
        if shape is not spec:
            settings = transformer_config(shape, config, platform)
        model = GPT(settings, shape, ops, config.attention.implementation)
        _mark_tensor_parallel(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        return model

    policy = build()
    models = {name: build(others.get(name, spec)) for name in frozen}
    published = build() if keeps_published else None
    together = config.trainer.frozen_pass == "together"
    return TriModel(
        megatron_config,
        policy,
        models,
        RotaryTable(spec),
        published,
        together,
        other_rotaries={name: RotaryTable(shape) for name, shape in others.items()},
    )


def _mark_tensor_parallel(model: GPT) -> None:
    """Say which weights are sharded over TP: Megatron does so while initialising them, and its
    gradient norm counts by it.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear):
            partition_dim = 1 if isinstance(module, RowParallelLinear) else 0
            if module.weight is not None and not getattr(
                module.weight, "tensor_model_parallel", False
            ):
                set_tensor_model_parallel_attributes(module.weight, True, partition_dim, 1)


def data_parallel(
    stage: TriModel, *, distributed_optimizer: bool, bucket_mib: float = 0.0
) -> DistributedDataParallel:
    """Megatron's DDP around the stage: contiguous fp32 gradient buffers, reduced once per update,
    as sums.

    bucket_mib: with several replicas or a context group, begin to reduce each bucket of this size inside the backward
    that runs outside of no_sync, which the schedule must make the last one; 0: all at once after
    it. Stages behind the first have one bucket (Megatron's rule).
    """
    mesh = parallel.place().mesh
    overlaps = bucket_mib > 0 and mesh.data * mesh.context > 1
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps,
        bucket_size=max(1, int(bucket_mib * 2**20 / _GRADIENT_BYTES)) if overlaps else None,
        check_for_nan_in_grad=False,
    )
    return DistributedDataParallel(stage.config, settings, stage)
