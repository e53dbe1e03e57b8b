"""Keys of how samples are learned from: adapters, algorithm, optimizer, trainers, microbatches, attention."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pa_npu.config.presets import PresetName
from pa_npu.config.sections import Section, Several

REWARDS = ("math", "format", "overlong", "judge", "code")


class LoraConfig(Section):
    """A small trained product beside each chosen weight, which itself stays as it is."""

    rank: int = Field(
        0,
        ge=0,
        le=4096,
        description="Rank of the adapters that are trained in place of the weights; 0 trains the "
        "weights.",
    )
    alpha: float = Field(
        32.0, gt=0, description="The adapters' product is added with the factor alpha / rank."
    )
    targets: Literal["all-linear"] | Annotated[Several[str], Field(min_length=1)] = Field(
        "all-linear",
        description="Layers that get an adapter, by the last parts of their names, such as "
        "[q_proj, v_proj]; all-linear: all projections of attention and MLP, whatever "
        "a model calls them.",
    )


OwnName = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
"""module:Class."""


class AlgorithmConfig(Section):
    name: PresetName | OwnName | None = Field(
        None,
        description="Preset: the values below for the keys that are not set; null sets nothing. Or "
        "module:Class, an Algorithm of your own.",
    )
    loss: str = Field(
        "clip",
        description="Policy loss: clip, gspo, cispo, reinforce, dpo, or module:function of your "
        "own; or cross-entropy, on rows of data.",
    )
    advantage: str = Field(
        "group-std",
        description="group-std, centred, batch-std: rewards minus the group's mean, divided by the "
        "group's deviation, by nothing, by the batch's deviation; leave-one-out: minus "
        "the mean of the group's others; or module:function of your own.",
    )
    clip_low: float = Field(
        0.2, gt=0, le=1, description="Ratio is clipped from below at 1 - clip_low; 1 never clips."
    )
    clip_high: float = Field(0.2, gt=0, description="Ratio is clipped from above at 1 + clip_high.")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Bound of the loss of a token with a negative advantage, in units of it (clip, "
        "gspo), as verl's clip_ratio_c; null bounds nothing.",
    )
    delta: float | None = Field(
        None,
        gt=1,
        description="Bound of the ratio that is not clipped, which matters for negative advantages "
        "(clip, gspo), as TRL's delta; null bounds nothing.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the KL divergence to the reference, and beta of loss=dpo; 0 "
        "builds no reference.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimator of the KL term; in the loss k1 has an expected gradient of zero, so "
        "use it in the reward.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the KL term goes: into the loss of each token, or, summed over the "
        "response, off its reward.",
    )
    reference_refresh_every: int = Field(
        0,
        ge=0,
        description="Make the reference equal to the policy every n iterations; 0 keeps the first "
        "model.",
    )
    ratio: Literal["auto", "proximal", "sampling"] = Field(
        "auto",
        description="The policy that the loss takes ratios against: proximal is that of the "
        "iteration's beginning, sampling what engines reported for each token; auto is "
        "sampling with schedule.max_staleness where importance_sampling is none.",
    )
    importance_sampling: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Weights of the proximal over the sampling policy, of each token or of the "
        "whole response: they correct for what engines compute differently, and with "
        "schedule.max_staleness for older weights.",
    )
    importance_cap: float = Field(
        2.0, ge=1, description="Importance weights are truncated, or masked, above this."
    )
    importance_floor: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="None cuts importance weights above the cap to it (TIS). With a floor, tokens "
        "whose weights are below it or above the cap are left out: 0 is MIS, more "
        "IcePop.",
    )
    age_exponent: float = Field(
        0.0,
        ge=0,
        description="a: tokens weigh (1 + age)^-a, age being how many versions their weights are "
        "behind those they train; 0 weighs all alike.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus.")
    router_aux_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the auxiliary loss by which a mixture's routers spread tokens "
        "over experts, in every layer; 0: none.",
    )
    router_replay: Literal["none", "rollout"] = Field(
        "none",
        description="rollout: for each token the trainers' routers take the experts that the "
        "engine's took, with gate weights of their own; none: they choose.",
    )
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"] = Field(
        "token-mean",
        description="Token weights and normaliser: 1 over tokens, 1/length over sequences, 1 over "
        "sequences, 1 over B*G*max length.",
    )

    @property
    def is_users_own(self) -> bool:
        """Whether `name` names a class of the user's own."""
        return self.name is not None and ":" in self.name

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs the reference's log-probs."""
        return self.kl_coef > 0


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    min_learning_rate: float = Field(
        0.0, ge=0, description="Learning rate at the end of the decay."
    )
    warmup_iterations: int = Field(0, ge=0, description="Iterations of linear warm-up.")
    warmup_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="The same as a share of schedule.iterations, in place of warmup_iterations.",
    )
    decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the decay after warm-up."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay; norms and biases are exempt."
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95),
        strict=False,
        description="AdamW's decay of the mean gradient, and of its square.",
    )
    epsilon: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    offload: bool = Field(
        False,
        description="Keep the optimizer's state in host memory but for the step, so that devices "
        "decode and train in its bytes (npu, cuda; nothing changes on cpu).",
    )
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 never clips.")


class TrainerConfig(Section):
    backend: str = Field(
        "megatron",
        min_length=1,
        description="What trains the model: megatron; fsdp, the model of transformers sharded over "
        "all trainer devices; or module:NAME, a BackendModule of your own.",
    )
    devices: int = Field(
        1,
        ge=1,
        le=2**17,
        description="Trainer ranks in all nodes; must be tensor x pipeline x data parallel. auto "
        "goes by prediction.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=1024, description="Tensor-parallel size (TP); auto goes by prediction."
    )
    pipeline_parallel: int = Field(1, ge=1, le=1024, description="Pipeline-parallel size (PP).")
    shards: int | None = Field(
        None,
        ge=1,
        le=2**17,
        description="With backend=fsdp: devices over which a copy of the weights is sharded, for "
        "one those of a node; copies are replicas (HSDP). None shards over all "
        "devices.",
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="Expert-parallel size (EP): ranks of a stage, over tensor-parallel ones and "
        "replicas, that share a mixture's experts; each holds whole ones.",
    )
    distributed_optimizer: bool = Field(
        True, description="Shard the optimizer state over data-parallel ranks."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="Activation recomputation."
    )
    frozen_pass: Literal["together", "separate"] = Field(
        "together",
        description="together: old policy and reference go through the policy's pass, each "
        "microbatch as it arrives. separate, a baseline with the same update: each has "
        "a pass over all of an update's microbatches before the policy's begins.",
    )
    wait_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Deadline of every wait of a trainer (rollouts, publish, collectives, writing "
        "a checkpoint); none: 1800, or as long as a request, or agents' sessions, may "
        "take, and then a judge, or programs that are tested.",
    )


class MicrobatchConfig(Section):
    responses: int | None = Field(
        None,
        ge=1,
        description="Responses per microbatch, at most; must divide rollout.responses_per_prompt, "
        "which none means. A group of more or fewer samples is cut into pieces of at "
        "most so many.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Pack microbatches of responses, also of several groups, together up to so "
        "many tokens, padding included; a larger one goes alone. Only without pipeline "
        "parallelism; none packs nothing.",
    )


class AttentionConfig(Section):
    shared_prompt: bool = Field(
        True,
        description="Compute a group's prompt once; false packs separate sequences (baseline).",
    )
    implementation: Literal["auto", "dense", "merge", "gather", "sdpa", "eager"] = Field(
        "auto",
        description="Kernel form of shared-prompt attention; sdpa and eager are transformers' own "
        "attention, for models with trainer.backend=fsdp that cannot share prompts, "
        "and chosen for them.",
    )
