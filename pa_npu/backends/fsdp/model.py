"""A causal language model of transformers, sharded by FSDP2, whose forward gives log-probs of packed responses.

    model = load_model(path, dtype=torch.float32)          on the host, as the files have it,
                                                           without dropout
    sharded = shard(ScoredModel(model, "auto"), mesh, ...) each layer a group of its own, the rest
    the root's
    scores = sharded(tokens, layout, rows, targets, temperature, chunk)
                                                           images=... for a model that reads them

Parameters are held sharded, the policy's in fp32; a layer's are gathered, in the type that is
computed with, while it computes. The LM head is applied inside the root's forward, where its weight
is gathered, and to the rows that predict targets alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pa_npu.algorithm.loss_gradient import HeadGradient
from pa_npu.attention import PrefixLayout
from pa_npu.attention.context import RankRows
from pa_npu.attention.huggingface import use_shared_prompt_attention
from pa_npu.attention.stems import PathRows
from pa_npu.backends.fsdp.optimizer import CountedReduceScatter
from pa_npu.backends.fsdp.vision import (
    PackedImages,
    freeze_tower,
    image_states,
    set_attention,
    text_only,
)
from pa_npu.backends.fsdp.weights import Weights
from pa_npu.backends.logprob import MostLikely, RowScores, score_rows
from pa_npu.errors import DataError
from pa_npu.families.any_model import auto_class, config_of, decoder_layers
from pa_npu.families.wire_names import WireWeight, stored_tensors, use_dtype, wire_weights
from pa_npu.vision.family import TOWER

OWN_ATTENTION = ("sdpa", "eager")  # transformers'


class ScoredModel(torch.nn.Module, Weights):
    """The model with the log-probs of targets as its output. attention: as
    attention.implementation.

    causal: transformers' model; what stands in its place has its base_model and
    get_output_embeddings.
    """

    def __init__(self, causal: Any, attention: str = "auto") -> None:
        super().__init__()
        self.causal = causal
        self._shares = attention not in OWN_ATTENTION
        name = use_shared_prompt_attention(causal, attention) if self._shares else attention
        set_attention(causal, name)
        self.reads_images = hasattr(causal.base_model, TOWER)
        text = causal.config.get_text_config()
        # Granite divides its logits, Cohere multiplies them, Gemma bends them
        self._scale = getattr(text, "logit_scale", None) or 1.0 / (
            getattr(text, "logits_scaling", None) or 1.0
        )
        self._cap: float | None = getattr(text, "final_logit_softcapping", None)

    def forward(
        self,
        tokens: torch.Tensor,
        layout: PrefixLayout | RankRows | PathRows,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        entropy: bool = True,
        entropy_grad: bool = False,
        head_gradient: HeadGradient | None = None,
        choices: torch.Tensor | None = None,
        most_likely: MostLikely | None = None,
        images: PackedImages | None = None,
    ) -> RowScores:
        """Scores of N targets, and of further tokens. tokens: int64 [T], packed by layout; rows,
        targets: int64 [N], see Microbatch; choices, most_likely: see score_rows.

        head_gradient: watches the gradient of what meets the LM head. images: of these tokens, for
        a model that reads images.
        """
        known = {"layout": layout} if self._shares else {}
        if self.reads_images:
            if images is None:
                assert isinstance(layout, PrefixLayout), "context_parallel is 1 with such a model"
                images = text_only(layout, tokens.device)
            states = image_states(self.causal, tokens, images, known)
        else:
            positions = layout.position_ids().to(tokens.device)[None]
            states = self.causal.base_model(
                input_ids=tokens[None], position_ids=positions, use_cache=False, **known
            )
        hidden = states.last_hidden_state[0].index_select(0, rows)
        head = self.causal.get_output_embeddings()
        weight = head.weight.to(hidden.dtype)  # another one only where the model is widened
        if getattr(head, "bias", None) is not None:
            hidden = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1)
            weight = torch.cat([weight, head.bias.to(hidden.dtype)[:, None]], dim=1)
        if self._cap is not None:
            hidden, temperature = hidden * self._scale, temperature * self._scale
        if head_gradient is not None and self._cap is None:
            head_gradient.offer(hidden)
        return score_rows(
            hidden,
            weight,
            targets,
            vocab_size=weight.shape[0],
            temperature=temperature / self._scale,
            cap=self._cap,
            chunk=chunk,
            entropy=entropy,
            entropy_grad=entropy_grad,
            choices=choices,
            most_likely=most_likely,
        )

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Returns every parameter once under transformers' name, with this rank's shard of it."""
        return dict(self.causal.named_parameters())

    def wire_weights(self) -> list[tuple[str, WireWeight, torch.Tensor]]:
        """Returns every tensor of an HF checkpoint: its name, which elements it is, and of which
        parameter or buffer.
        """
        tensors = stored_tensors(self.causal)
        return [
            (name, weight, tensors[weight.source])
            for name, weight in wire_weights(self.causal).items()
        ]


@contextmanager
def plain_experts(causal: Any) -> Iterator[None]:
    """Inside, a mixture's experts are computed one by one: transformers' grouped product of matrices
    takes no fp64.
    """
    if not hasattr(causal, "set_experts_implementation"):
        yield
        return
    before = causal.get_experts_implementation()
    causal.set_experts_implementation("eager")
    try:
        yield
    finally:
        causal.set_experts_implementation(before)


def load_model(path: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """Returns the model of an HF directory on the host.

    Raises DataError where transformers cannot load it, or a weight is missing.
    """
    config = config_of(path, trust_remote_code)
    without_dropout(config)
    loaded: Any
    try:
        loaded = auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"model.path: {path} cannot be loaded by transformers ({reason}); use a causal "
            "language model"
        ) from error
    model, loading_info = loaded
    wrong = sorted(map(str, (*loading_info["missing_keys"], *loading_info["mismatched_keys"])))
    if wrong:
        raise DataError(
            f"model.path: {path} lacks {len(wrong)} tensor(s) of the model, or has them in another "
            f"shape, the first is {wrong[0]}; use a complete checkpoint whose config.json belongs "
            "to it"
        )
    use_dtype(model, dtype)
    return model


def without_dropout(config: Any) -> None:
    """Make a configuration's model deterministic: with dropout, or noise in a router, two passes
    would differ in every ratio.
    """
    for part in {
        id(part_config): part_config for part_config in (config, config.get_text_config())
    }.values():
        for name, value in part.to_dict().items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float) and value:
                setattr(part, name, 0.0)


def shard(
    model: ScoredModel,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype,
    trained: bool,
    recompute: bool,
    trains_tower: bool = False,
) -> ScoredModel:
    """Returns the same model, sharded in place over `mesh`: [ranks], or [replicas, ranks] for
    shards that are replicated.

    compute: type of the gathered weights and of what is computed; gradients are summed in fp32,
    undivided. trained: whether weights are that require gradients. trains_tower: whether those of
    a tower for images are among them; the tower is in the root's group, so that a microbatch
    without images takes part in the same collectives as one with images.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if not trained:
        model.requires_grad_(False)
    if not trains_tower:
        freeze_tower(model.causal)
    model.train(trained)
    if recompute and trained:
        model.causal.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    for layer in decoder_layers(model.causal):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # gathered again for its backward: an evaluation or a frozen pass has none, and a copy must not
    # find stale weights
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo and HCCL have no sum that divides first
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


def count_reductions(
    model: ScoredModel, copies: int, summed_in: torch.dtype
) -> list[CountedReduceScatter]:
    """Let every group of a sharded model that has trained weights count what it reduces. copies: of
    the shards.
    """
    counted, below = [], set[torch.nn.Parameter]()
    for module in reversed(list(model.modules())):  # from the layers to the root
        if isinstance(module, FSDPModule):
            parameters = set(module.parameters()) - below
            below |= parameters
            if not any(parameter.requires_grad for parameter in parameters):
                continue
            counted.append(CountedReduceScatter(copies, summed_in))
            module.set_custom_reduce_scatter(counted[-1])  # type: ignore[arg-type]  # its interface, of an unnamed module
            module.set_all_reduce_hook(counted[-1].on_reduced)
    return counted
