"""Keys of training: adapters, algorithm, optimizer, trainers, microbatches, attention."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from pa_npu.config.presets import PresetName
from pa_npu.config.sections import FilePath, Section, Several

REWARDS = ("math", "format", "overlong", "judge", "code", "reasoning_gym")


class LoraConfig(Section):
    """LoRA: a trained low-rank product is added to each chosen weight, which stays frozen."""

    rank: int = Field(
        0,
        ge=0,
        le=4096,
        description="Rank of the adapters that are trained in place of the weights. 0 trains the "
        "weights themselves.",
    )
    alpha: float = Field(
        32.0,
        gt=0,
        description="Scale of the adapters: their product is multiplied by alpha / rank.",
    )
    targets: Literal["all-linear"] | Annotated[Several[str], Field(min_length=1)] = Field(
        "all-linear",
        description="Layers that get an adapter, by the last part of their names, such as [q_proj, "
        "v_proj]. all-linear chooses every projection of attention and MLP, whatever "
        "the model calls it.",
    )


OwnName = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
"""module:Class."""


class AlgorithmConfig(Section):
    name: PresetName | OwnName | None = Field(
        None,
        description="Preset, which sets every key of this section that you leave unset, or "
        "module:Class, an Algorithm of your own. null sets nothing.",
    )
    loss: str = Field(
        "clip",
        description="Policy loss: clip, gspo, cispo, reinforce, dpo, or module:function of your "
        "own; or, on rows of data, cross-entropy, and preference on pairs of them.",
    )
    preference_loss: Literal["sigmoid", "robust", "sigmoid-norm", "ipo"] = Field(
        "sigmoid",
        description="With loss=preference, a pair's loss as a function of its margin. sigmoid: "
        "-log sigmoid of it (DPO). robust: the same, unbiased where a share label_smoothing of "
        "the pairs is the wrong way round. sigmoid-norm: of log-probs per token. ipo: squared "
        "distance of that difference per token from 1 / (2 kl_coef).",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="With loss=preference, the share of pairs that are taken to be the wrong way "
        "round (sigmoid, sigmoid-norm and robust).",
    )
    advantage: str = Field(
        "group-std",
        description="How rewards become advantages. group-std: minus the group's mean, divided by "
        "its standard deviation. centred: minus the group's mean. batch-std: minus the "
        "group's mean, divided by the batch's standard deviation. leave-one-out: minus "
        "the mean of the other responses of the group. no-reward: no advantage, where "
        "distillation alone trains. module:function: your own.",
    )
    clip_low: float = Field(
        0.2,
        gt=0,
        le=1,
        description="The ratio is clipped from below at 1 - clip_low. 1 never clips from below.",
    )
    clip_high: float = Field(
        0.2, gt=0, description="The ratio is clipped from above at 1 + clip_high."
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Bound of a token's loss where its advantage is negative, as a multiple of "
        "that advantage's size (clip and gspo; verl's clip_ratio_c). null sets no "
        "bound.",
    )
    delta: float | None = Field(
        None,
        gt=1,
        description="Bound of the unclipped ratio, which matters where the advantage is negative "
        "(clip and gspo; TRL's delta). null sets no bound.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the KL divergence to the reference model; with loss=dpo and "
        "preference, its beta. 0 loads no reference model.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimator of the KL term. Inside the loss, k1 has an expected gradient of "
        "zero; use it with kl_in=reward.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the KL term acts. loss adds it to the loss of each token. reward "
        "subtracts its sum over a response from the response's reward.",
    )
    reference_refresh_every: int = Field(
        0,
        ge=0,
        description="Copy the policy into the reference model every n iterations. 0 keeps the "
        "initial model.",
    )
    ratio: Literal["auto", "proximal", "sampling"] = Field(
        "auto",
        description="Denominator of the ratio in the loss. proximal: the policy at the beginning "
        "of the iteration. sampling: the log-prob that the engine reported for the "
        "token. auto: sampling if schedule.max_staleness is set and "
        "importance_sampling is none, otherwise proximal.",
    )
    importance_sampling: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Weight each token, or each response, by the ratio of the proximal to the "
        "sampling policy. This corrects for the rounding of engines and, with "
        "schedule.max_staleness, for older weights.",
    )
    importance_cap: float = Field(
        2.0,
        ge=1,
        description="Importance weights above this value are truncated to it, or masked if "
        "importance_floor is set.",
    )
    importance_floor: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="null truncates importance weights at the cap (TIS). A number masks tokens "
        "whose weight is below it or above the cap: 0 is MIS, a larger value is "
        "IcePop.",
    )
    age_exponent: float = Field(
        0.0,
        ge=0,
        description="Exponent a of the weight (1 + age)^-a of a token. Its age is the number of "
        "versions between the weights that sampled it and the weights that it trains. "
        "0 weighs all tokens alike.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus.")
    router_aux_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the auxiliary loss that spreads tokens evenly over the experts "
        "of a mixture, in every layer. 0 adds none.",
    )
    router_replay: Literal["none", "rollout"] = Field(
        "none",
        description="rollout sends each token through the experts that the engine chose for it, "
        "with the trainer's own gate weights. none lets the trainer's routers choose.",
    )
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"] = Field(
        "token-mean",
        description="Token weights and normaliser. token-mean: 1 over tokens. sequence-mean: "
        "1/length over sequences. sequence-sum: 1 over sequences. dr-grpo: 1 over B * "
        "G * the maximum length.",
    )

    distill_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of distillation from the model of `teacher` on the policy's own "
        "responses, beside the reward's advantages. 0 loads no teacher.",
    )
    distill_divergence: Literal["sampled", "forward", "reverse", "js"] = Field(
        "sampled",
        description="How policy and teacher are compared at each token. sampled: by the log-ratio "
        "of the token that was written, an advantage. forward, reverse, js: by a divergence over "
        "the teacher's most likely tokens, which is differentiated itself.",
    )
    distill_top_k: int = Field(
        32,
        ge=1,
        description="Number of the teacher's most likely tokens that a divergence tells apart. All "
        "others count together as one further outcome.",
    )
    distill_beta: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of the teacher in the mixture to which distill_divergence=js compares "
        "both. Near 0 it is like forward, near 1 like reverse.",
    )
    distill_clip: float | None = Field(
        None,
        gt=0,
        description="Bound of |log p_teacher - log p_policy| of a token, in nats, before "
        "distill_coef. null sets no bound.",
    )
    distill_discount: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Factor per token by which the log-ratios of later tokens of the response "
        "count for a token. 0 trains each token by its own alone.",
    )

    @property
    def is_users_own(self) -> bool:
        """True if `name` is module:Class, a class of the user's."""
        return self.name is not None and ":" in self.name

    @property
    def has_reference(self) -> bool:
        """True if the loss needs log-probs of the reference model."""
        return self.kl_coef > 0


TEACHER_KEY_VARIABLE = "TEACHER_API_KEY"
"""Environment variable with the key of teachers' servers. Without it requests carry no key."""

TeacherPlace = Literal["trainers", "engines", "server", "policy"]


class TeacherConfig(Section):
    """A model whose log-probs of the policy's responses teach the policy."""

    model: FilePath | None = Field(
        None,
        min_length=1,
        description="HF directory of the teacher, of the policy's or another shape, with the "
        "policy's vocabulary. With engines=0 trainers hold it and compute it in the policy's pass.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        description="Factor of this teacher's part of the loss, beside algorithm.distill_coef.",
    )
    engines: int = Field(
        0,
        ge=0,
        le=2**14,
        description="Number of engines that the run starts for this teacher, on devices of their "
        "own. They score each group as soon as its responses are there. 0 lets trainers hold it.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=1024, description="Number of devices of each of these engines."
    )
    backend: str | None = Field(
        None,
        min_length=1,
        description="Kind of these engines, as rollout.backend. null takes that one.",
    )
    url: str | None = Field(
        None,
        min_length=1,
        description="Base URL of a running server with vLLM's interface that serves the teacher, "
        "such as http://HOST:PORT, in place of `model`. Its key is read from the environment "
        "variable TEACHER_API_KEY.",
    )
    hint_column: str | None = Field(
        None,
        min_length=1,
        description="Column of a row with what the policy is shown to be its own teacher, such as "
        "a solution, in place of `model`. The run's engines score each response behind the prompt "
        "with this text, by the version that wrote it.",
    )
    hint_text: str = Field(
        "{hint}",
        description="Text with {hint} in it that is appended to the question, on a line of its "
        "own, for the policy as its own teacher.",
    )
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest prompt with its hint in tokens. null means twice "
        "data.max_prompt_tokens.",
    )
    concurrent: int = Field(
        32,
        ge=1,
        le=2**14,
        description="Sequences that each engine or server is asked to score at once.",
    )

    @property
    def place(self) -> TeacherPlace:
        """Returns who computes the teacher: trainers, engines of its own, a server, or the run's
        engines.
        """
        if self.url is not None:
            return "server"
        if self.hint_column is not None:
            return "policy"
        return "engines" if self.engines else "trainers"

    @property
    def is_scored(self) -> bool:
        """Returns whether its log-probs come with the groups, rather than from the trainers."""
        return self.place != "trainers"


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
        "constant", description="Shape of the learning rate after warm-up."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay. Norms and biases are exempt."
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95),
        strict=False,
        description="Decay rates of AdamW's moving averages of the gradient and of its square.",
    )
    epsilon: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    offload: bool = Field(
        False,
        description="Keep the optimizer's state in host memory except during the step, which frees "
        "device memory for decoding and training (npu and cuda; no effect on cpu).",
    )
    clip_grad: float = Field(
        1.0, ge=0, description="Maximum norm of the whole gradient. 0 never clips."
    )

    def warmup_of(self, iterations: int) -> int:
        """Returns the iterations of linear warm-up in a run of so many iterations."""
        return math.ceil(self.warmup_share * iterations) or self.warmup_iterations


class TrainerConfig(Section):
    backend: str = Field(
        "megatron",
        min_length=1,
        description="What trains the model: megatron; fsdp, which shards transformers' own model "
        "over all trainer devices; or module:NAME, a BackendModule of your own.",
    )
    devices: int = Field(
        1,
        ge=1,
        le=2**17,
        description="Number of trainer ranks over all nodes: tensor x pipeline x context x data "
        "parallel size. auto chooses by prediction.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=1024, description="Tensor-parallel size (TP). auto chooses by prediction."
    )
    pipeline_parallel: int = Field(1, ge=1, le=1024, description="Pipeline-parallel size (PP).")
    shards: int | None = Field(
        None,
        ge=1,
        le=2**17,
        description="Number of devices that share one copy of the weights with backend=fsdp, such "
        "as those of a node; several copies are replicas (HSDP). null shards over all "
        "devices.",
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="Expert-parallel size (EP): the number of ranks of a pipeline stage, over its "
        "tensor-parallel ranks and replicas, that divide a mixture's experts among "
        "them. Each expert is whole on its rank.",
    )
    context_parallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="Context-parallel size (C): the number of ranks that share each sequence. Every "
        "one of them computes a part of a microbatch's rows against the keys and values of all, "
        "so that it holds 1/C of the activations. For sequences that do not fit otherwise.",
    )
    distributed_optimizer: bool = Field(
        True, description="Shard the optimizer's state over data-parallel ranks."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Which activations are recomputed in the backward pass instead of being kept.",
    )
    frozen_pass: Literal["together", "separate"] = Field(
        "together",
        description="together: the old policy and the reference model share the policy's pass over "
        "each microbatch as it arrives. separate: each has a pass of its own over all "
        "microbatches of an update before the policy begins. Both give the same "
        "update; separate is a baseline for comparison.",
    )
    wait_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Deadline of every wait of a trainer: for rollouts, a publish, a collective, "
        "or a checkpoint being written. null means 1800, or longer if a request, an "
        "agent's session, a judge or tested programs may take longer.",
    )

    @property
    def pad_multiple(self) -> int:
        """Packed lengths are multiples of this."""
        return self.tensor_parallel


class MicrobatchConfig(Section):
    responses: int | None = Field(
        None,
        ge=1,
        description="Maximum number of responses per microbatch, a divisor of "
        "rollout.responses_per_prompt. null takes whole groups. A group with another "
        "number of samples is cut into pieces of at most this size.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Pack microbatches, also of several groups, together up to this number of "
        "tokens, padding included. A larger microbatch stays alone. Needs "
        "pipeline_parallel=1. null packs nothing.",
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="Bound of a microbatch in packed tokens, padding included: it takes as many "
        "responses of a group as fit, up to `responses`, and further groups while there is room. A "
        "prompt with one response that is longer goes alone. Needs pipeline_parallel=1. null cuts "
        "groups by `responses` alone.",
    )
    depth_first: bool = Field(
        True,
        description="Where a group is cut into several microbatches, compute the prompt that they "
        "share once, if that saves 1,024 tokens or more: its keys are kept while they run one after "
        "another, and its backward comes last. Without pipeline_parallel and context_parallel, "
        "router_aux_coef and several teachers. false computes the prompt again in each.",
    )

    @property
    def budget(self) -> int | None:
        """Packed tokens up to which microbatches are filled; None where nothing is packed."""
        return self.max_tokens if self.tokens is None else self.tokens


class AttentionConfig(Section):
    shared_prompt: bool = Field(
        True,
        description="Compute the prompt of a group once. false packs separate sequences, as a "
        "baseline.",
    )
    implementation: Literal["auto", "dense", "merge", "gather", "sdpa", "eager"] = Field(
        "auto",
        description="Kernel form of shared-prompt attention. sdpa and eager are transformers' own "
        "attention: they are chosen for models that cannot share prompts with "
        "trainer.backend=fsdp.",
    )
