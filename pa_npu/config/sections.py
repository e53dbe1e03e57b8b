"""The keys of the configuration: one class per section, one sentence per key, with default and bounds.

Unknown keys are refused. Rules between keys are in `pa_npu.config.rules`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pa_npu.config.presets import PresetName


class Section(BaseModel):
    """Base of all sections: immutable, and no key is accepted and ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    short_forms: ClassVar[dict[str, str]] = {}
    """Keys that also take a text, of this pattern, which the section takes apart itself."""


Index = Annotated[int, Field(ge=0)]


class RunConfig(Section):
    dir: str = Field("runs/default", min_length=1, description="Run directory; everything the run writes goes there.")
    seed: int = Field(1, ge=0, lt=2**31, description="Seed of data order, sampling and initialisation.")
    device: Literal["auto", "npu", "cuda", "cpu"] = Field(
        "auto", description="Device kind of trainers and engines; auto takes npu, then cuda, then cpu."
    )
    restarts: int = Field(
        3,
        ge=0,
        description="How often coordinator and trainers are started again, from the newest checkpoint, when one of them ends; "
        "counted within restart_window_s, and as long as no newer checkpoint has been written.",
    )
    restart_window_s: float = Field(
        3600.0, gt=0, description="Starts longer ago than this no longer count towards run.restarts."
    )
    deterministic: bool = Field(True, description="Use deterministic kernels where the platform has a choice.")


class ModelConfig(Section):
    path: str = Field(..., min_length=1, description="HF model directory (config.json, safetensors, tokenizer).")
    dtype: Literal["fp32", "bf16"] = Field(
        "bf16", description="Type of weights and activations; master weights are fp32."
    )
    frozen_dtype: Literal["same", "bf16"] = Field(
        "same",
        description="Type in which old policy and reference are kept and computed: model.dtype, or bf16 also beside an fp32 "
        "policy, for half their memory and pipeline traffic.",
    )
    head_chunk_tokens: int = Field(
        2048, ge=1, description="Rows per chunk of the LM head's log-prob, so that full logits never exist at once."
    )


class DataConfig(Section):
    train: str = Field(
        ...,
        min_length=1,
        description="Training prompts: JSONL or parquet (question/answer, prompt/answer or messages).",
    )
    test: str | None = Field(None, description="Held-out prompts in the same formats; none disables evaluation.")
    chat_template: Literal["auto", "always", "never"] = Field(
        "auto", description="Render prompts with the tokenizer's chat template; auto does where the tokenizer has one."
    )
    system_prompt: str | None = Field(None, description="System message put before each prompt.")
    instruction: str | None = Field(None, description="Text appended to each question, on a line of its own.")
    max_prompt_tokens: int = Field(512, ge=1, description="Longest prompt in tokens, template included.")
    overlong_prompt: Literal["refuse", "truncate", "skip"] = Field(
        "refuse", description="What happens to longer prompts: refuse the run, keep the last tokens, or skip; counted."
    )
    shuffle: bool = Field(True, description="Shuffle the training prompts anew in every epoch, seeded by run.seed.")


SLOWEST_TOKEN_S = 0.25
"""An engine that takes longer per token of a response than this, on top of its deadline, is not worth waiting for."""
CUT_SHARE = 4
"""A group that is cut is generated again with the configured length divided by this (rollout.too_long)."""


class RolloutConfig(Section):
    short_forms: ClassVar[dict[str, str]] = {"engines": r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*"}

    backend: str = Field(
        "vllm",
        min_length=1,
        description="Kind of engine: vllm; transformers (slow, exact, for debugging); or module:NAME, an EngineKind of your own.",
    )
    engines: int = Field(
        1,
        ge=1,
        le=2**14,
        description="Number of engines (servers). MIN..MAX starts MIN, and up to MAX where a cluster's nodes have free "
        "devices (placement.cluster=ray); it is short for engines=MIN and max_engines=MAX.",
    )
    max_engines: int | None = Field(
        None,
        ge=1,
        description="Engines that the run grows to as nodes with free devices appear; none stays at engines.",
    )
    shared_engines: int = Field(
        0,
        ge=0,
        le=2**14,
        description="Further engines, on the trainers' devices: they generate while trainers would wait for rollouts. One for each "
        "replica, or none.",
    )
    attach: tuple[str, ...] = Field(
        (),
        description="URLs of running engines (see `pa-npu engines`) to use instead of starting any; they must serve "
        "this model.path, one for each of rollout.engines, then one for each of rollout.shared_engines.",
    )
    key_file: str | None = Field(
        None,
        min_length=1,
        description="File with the API key of attached engines, which `pa-npu engines` names; none means VLLM_API_KEY of "
        "the environment.",
    )
    tensor_parallel: int = Field(1, ge=1, le=1024, description="Devices per engine.")
    python: str | None = Field(None, description="Interpreter of the engines' own environment; none means this one.")
    responses_per_prompt: int = Field(8, ge=2, description="G, the number of responses per prompt (one group).")
    max_response_tokens: int = Field(256, ge=1, description="Longest response in tokens.")
    temperature: float = Field(1.0, gt=0.0, le=10.0, description="Sampling temperature; the trainer applies the same.")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Nucleus sampling; only 1.0, which the trainer can match exactly."
    )
    top_k: int = Field(-1, description="Top-k sampling; only -1 (off), which the trainer can match exactly.")
    ignore_eos: bool = Field(False, description="Always generate max_response_tokens (benchmarks with fixed work).")
    window: Literal["auto"] | int = Field(
        "auto",
        description="Sequences in flight per engine; auto chooses them for each iteration, with turns and order of dispatch, by "
        "simulating it with what was learned of engines, trainers and lengths.",
    )
    max_num_batched_tokens: int = Field(
        32768, ge=1, description="vLLM's token budget per step; no prompt may be chunked."
    )
    max_num_seqs: int = Field(
        256,
        ge=1,
        description="Most sequences that an engine decodes together. Where it is not given, the run doubles it to 512 or 1024 if "
        "the KV cache holds so many at their longest and an iteration has them.",
    )
    memory_fraction: float = Field(
        0.85, gt=0.0, le=1.0, description="Share of device memory an engine may take (npu, cuda)."
    )
    shared_memory_fraction: float = Field(
        0.3,
        gt=0.0,
        le=1.0,
        description="Share of device memory that an engine on a trainer's device may take beside it (npu, cuda).",
    )
    kv_cache_gib: float = Field(1.0, gt=0.0, le=1e6, description="KV cache of an engine in GiB (cpu).")
    graph_mode: bool | None = Field(
        None,
        description="Let engines compile and capture graphs; false computes eagerly; none goes by the engine: graphs of "
        "decode steps with vllm-ascend 0.23, else eagerly.",
    )
    prefix_caching: bool = Field(
        True, description="Keep prompts' keys and values for the other responses of their group."
    )
    batch_invariant: bool = Field(
        False, description="Engine kernels whose results do not depend on what else is in the batch; slower."
    )
    expandable_segments: bool | None = Field(
        None, description="Allocator of engines that grows its segments (npu, cuda); none leaves it to the engine."
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline of one group's generation. An engine that works is given 0.25 s more per token of "
        "rollout.max_response_tokens; one that does not is replaced.",
    )
    too_long: Literal["end", "cut"] = Field(
        "end",
        description="A group that an engine which works does not finish in its time: end ends the run; cut generates it again with "
        "a quarter of the tokens. Which groups are cut depends on the clock, so not with schedule.order=prompt.",
    )
    startup_timeout_s: float = Field(600.0, gt=0, description="Deadline for an engine to become ready.")
    probe_every_s: float = Field(
        30.0, gt=0, description="Time between two probes of a serving engine: a token that it must generate."
    )
    probe_timeout_s: float = Field(
        60.0, gt=0, description="Deadline of a probe; an engine that does not answer is taken for hung and replaced."
    )
    restarts: int = Field(
        3,
        ge=0,
        description="How often each engine that ends or hangs is started again within restart_window_s; beyond that the run goes "
        "on without it where others serve.",
    )
    restart_window_s: float = Field(
        3600.0, gt=0, description="Starts longer ago than this no longer count towards rollout.restarts."
    )
    extra_args: tuple[str, ...] = Field((), description="Further arguments for the vLLM server.")
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables for the engines.")

    @model_validator(mode="before")
    @classmethod
    def split_range(cls, section: Any) -> Any:
        """engines=MIN..MAX as the two keys that it is short for."""
        if not isinstance(section, dict) or not isinstance(section.get("engines"), str):
            return section
        if not (found := re.fullmatch(cls.short_forms["engines"], section["engines"])):
            return section
        if section.get("max_engines") is not None:
            raise ValueError(f"engines: {section['engines']} names the maximum; remove max_engines")
        return {**section, "engines": int(found[1]), "max_engines": int(found[2])}


class EnvironmentConfig(Section):
    name: str = Field(
        "single_turn",
        min_length=1,
        description="How a prompt becomes samples: single_turn, tools (several turns with a tool), or a class of your own, "
        "module:Class.",
    )
    max_turns: int = Field(4, ge=1, le=1000, description="Most turns of the policy in one sample.")
    timeout_s: float = Field(
        10.0, gt=0, description="Time limit of the environment's own work in one turn, such as a tool's."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="What the environment reads itself; see its docstring, e.g. pa_npu.environments.tools.",
    )


class RewardFunction(Section):
    name: str = Field(..., min_length=1, description="math, format, overlong, or module:function of your own.")
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    pattern: str | None = Field(None, description="Regular expression a response must match (format only).")
    max_tokens: int | None = Field(
        None, ge=1, description="Length with reward -1 (overlong only); null means rollout.max_response_tokens."
    )
    buffer_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens before max_tokens over which the reward falls from 0 to -1 (overlong only); null means a fifth.",
    )


class RewardConfig(Section):
    functions: tuple[RewardFunction, ...] = Field(
        (RewardFunction(name="math"),),
        min_length=1,
        description="Reward functions; a response's reward is their weighted sum.",
    )
    timeout_s: float = Field(
        10.0, gt=0, description="Time limit for rewarding one group; then its reward is zero, logged."
    )
    max_failing_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="End the run when one function failed for more than this share of the last 64 groups; 1 never ends it.",
    )
    workers: int = Field(1, ge=1, le=256, description="Processes that compute rewards.")


LOSSES = ("clip", "gspo", "cispo", "reinforce")
ADVANTAGES = ("group-std", "centred", "leave-one-out", "batch-std")
REWARDS = ("math", "format", "overlong")


class AlgorithmConfig(Section):
    name: PresetName | None = Field(
        None, description="Preset: the values below for the keys that are not set; null sets nothing."
    )
    loss: str = Field("clip", description="Policy loss: clip, gspo, cispo, reinforce, or module:function of your own.")
    advantage: str = Field(
        "group-std",
        description="group-std, centred, batch-std: rewards minus the group's mean, divided by the group's deviation, by nothing, "
        "by the batch's deviation; leave-one-out: minus the mean of the group's others; or module:function of your own.",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="Ratio is clipped from below at 1 - clip_low; 1 never clips.")
    clip_high: float = Field(0.2, gt=0, description="Ratio is clipped from above at 1 + clip_high.")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Bound of the loss of a token with a negative advantage, in units of it (clip, gspo), as verl's clip_ratio_c; "
        "null bounds nothing.",
    )
    delta: float | None = Field(
        None,
        gt=1,
        description="Bound of the ratio that is not clipped, which matters for negative advantages (clip, gspo), as TRL's delta; "
        "null bounds nothing.",
    )
    kl_coef: float = Field(
        0.0, ge=0, description="Coefficient of the KL divergence to the reference; 0 builds no reference."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimator of the KL term; in the loss k1 has an expected gradient of zero, so use it in the reward.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the KL term goes: into the loss of each token, or, summed over the response, off its reward.",
    )
    reference_refresh_every: int = Field(
        0, ge=0, description="Make the reference equal to the policy every n iterations; 0 keeps the first model."
    )
    ratio: Literal["auto", "proximal", "sampling"] = Field(
        "auto",
        description="The policy that the loss takes ratios against: proximal is that of the iteration's beginning, sampling what "
        "engines reported for each token; auto is sampling with schedule.max_staleness where importance_sampling is none.",
    )
    importance_sampling: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Weights of the proximal over the sampling policy, of each token or of the whole response: they correct for "
        "what engines compute differently, and with schedule.max_staleness for older weights.",
    )
    importance_rule: Literal["truncate", "mask"] = Field(
        "truncate",
        description="What becomes of importance weights beyond importance_cap: cut to it (TIS), or the tokens left out (MIS).",
    )
    importance_cap: float = Field(2.0, ge=1, description="Importance weights are truncated, or masked, above this.")
    importance_floor: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Importance weights below this are masked too (importance_rule=mask); IcePop has both.",
    )
    age_exponent: float = Field(
        0.0,
        ge=0,
        description="a: tokens weigh (1 + age)^-a, age being how many versions their weights are behind those they train; 0 weighs "
        "all alike.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus.")
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"] = Field(
        "token-mean",
        description="Token weights and normaliser: 1 over tokens, 1/length over sequences, 1 over sequences, 1 over "
        "B*G*max length.",
    )


class OptimizerConfig(Section):
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    min_learning_rate: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    warmup_iterations: int = Field(0, ge=0, description="Iterations of linear warm-up.")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape of the decay after warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay; norms and biases are exempt.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2.")
    epsilon: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 never clips.")


class TrainerConfig(Section):
    backend: Literal["megatron"] = Field("megatron", description="What trains the model.")
    devices: int = Field(
        1, ge=1, le=2**17, description="Trainer ranks in all nodes; must be tensor x pipeline x data parallel."
    )
    tensor_parallel: int = Field(1, ge=1, le=1024, description="Tensor-parallel size (TP).")
    pipeline_parallel: int = Field(1, ge=1, le=1024, description="Pipeline-parallel size (PP).")
    sequence_parallel: bool = Field(False, description="Shard norms and residuals over TP along the sequence (SP).")
    distributed_optimizer: bool = Field(True, description="Shard the optimizer state over data-parallel ranks.")
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activation recomputation.")
    gradient_bucket_mib: float = Field(
        160.0,
        ge=0,
        le=1e6,
        description="Gradients are reduced over data-parallel ranks in buckets of this size, each as soon as the last backward "
        "of an update has made it; 0 reduces all at once after that.",
    )
    wait_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Deadline of every wait of a trainer (rollouts, publish, collectives); where it is left out, at least as long "
        "as a request may take.",
    )
    startup_timeout_s: float = Field(600.0, gt=0, description="Deadline for the trainer ranks to become ready.")


class MicrobatchConfig(Section):
    responses: int | None = Field(
        None, ge=1, description="Responses per microbatch; must divide rollout.responses_per_prompt; none means all."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Pack microbatches of responses, also of several groups, together up to so many tokens, padding included; "
        "a larger one goes alone. Only without pipeline parallelism; none packs nothing.",
    )
    pad_to_multiple_of: int | None = Field(
        None,
        ge=1,
        description="Pad packed lengths to a multiple; none means trainer.tensor_parallel with sequence parallelism, else 1.",
    )


class AttentionConfig(Section):
    shared_prompt: bool = Field(
        True, description="Compute a group's prompt once; false packs separate sequences (baseline)."
    )
    implementation: Literal["auto", "dense", "merge", "gather"] = Field(
        "auto", description="Kernel form of shared-prompt attention."
    )


class ScheduleConfig(Section):
    iterations: int = Field(10, ge=1, description="Iterations of the run (weight versions published).")
    updates_per_iteration: int = Field(
        1,
        ge=1,
        description="Optimizer steps per iteration, on equal shares of its groups in schedule.order (completion: which groups "
        "share a step depends on arrival); more than 1 keeps an old policy to take ratios against.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Versions that engines may be ahead of training, and so a token's weights older than those it trains (I1); 0 "
        "is strictly on-policy.",
    )
    on_publish: Literal["finish", "continue"] = Field(
        "finish",
        description="Responses that are not complete when newer weights come: finish lets a publish wait for them; continue lets "
        "them go on under the new weights (max_staleness of at least 1).",
    )
    tokens_per_version: int | None = Field(
        None,
        ge=1,
        description="With on_publish=continue, the most tokens of a response that a version writes before the one that trains it; "
        "none means rollout.max_response_tokens / (max_staleness + 1).",
    )
    prompts_per_iteration: int = Field(16, ge=1, description="B, the number of groups per iteration.")
    stream: bool | Literal["alternate"] = Field(
        True,
        description="Train while engines generate (periodic); false waits for the whole batch (sync); alternate does one "
        "and the other in turn, sync first, to measure them against each other.",
    )
    compare_iterations: int = Field(
        0,
        ge=0,
        description="So many of the last iterations are synchronous and periodic in turn (with stream=true), so that the run's "
        "summary says what each takes; the update is the same either way.",
    )
    order: Literal["prompt", "completion"] = Field(
        "completion", description="Order in which groups are trained; prompt makes the update bit-identical to sync."
    )
    dispatch: Literal["auto", "longest-first", "in-order"] = Field(
        "auto",
        description="Order in which prompts go to engines, by the length that earlier responses let expect; it changes no sample. "
        "auto takes the order that lets the iteration end first, in a simulation of it.",
    )
    dynamic_sampling: bool = Field(
        False,
        description="Replace groups whose responses are all right or all wrong by further prompts, until an iteration has "
        "prompts_per_iteration others (DAPO).",
    )
    dynamic_sampling_limit: int = Field(
        8, ge=1, description="Stop the run when dynamic sampling needs more than this many times prompts_per_iteration."
    )
    evaluate_every: int = Field(
        0, ge=0, description="Evaluate every n iterations; 0 only before the first and after the last."
    )


class EvaluateConfig(Section):
    sets: dict[str, str] = Field(
        default_factory=dict,
        description="Further held-out sets beside data.test, by name: files in its formats, and those of published benchmarks.",
    )
    greedy: bool = Field(True, description="Answer every question greedily.")
    samples: int = Field(
        0, ge=0, le=4096, description="Sampled answers per question, for avg@n, pass@k and maj@k; 0 samples none."
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Temperature of the sampled answers.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the sampled answers.")
    max_response_tokens: int | None = Field(
        None, ge=1, description="Longest answer in tokens; none means rollout.max_response_tokens, which is the most."
    )
    overlap: bool = Field(
        False,
        description="Evaluate while trainers work on the iteration, after it has been generated; what is not complete when they "
        "are ready is left out, so that training never waits. The last version is evaluated in full.",
    )
    metric: str | None = Field(
        None,
        min_length=1,
        description="What checkpoint.keep_best goes by, SET/NAME such as test/greedy or aime/pass@8; none means "
        "the first set's first number.",
    )


class PublishConfig(Section):
    bucket_mib: Literal["auto"] | Annotated[float, Field(gt=0, le=1e6)] = Field(
        "auto", description="Size of one bucket of the weight broadcast; auto goes by the device's free memory."
    )
    timeout_s: float = Field(300.0, gt=0, description="Deadline of one weight publish.")
    probe_tokens: int = Field(
        16,
        ge=0,
        description="Tokens per engine of the log-prob probe after the first and the last publish; between them an iteration's "
        "first groups are the probe. 0 turns both off.",
    )
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="Absolute limit of every |engine - trainer| log-prob of the probe, beside noise_margin; none sets none.",
    )
    noise_margin: float | None = Field(
        4.0,
        ge=1.0,
        description="Stop where engine and trainer log-probs differ on average by more than so many times the noise of the run's "
        "first iteration (K3: its square), over a probe or an iteration's tokens (I5); none only records.",
    )
    false_stop_rate: float = Field(
        1e-7,
        gt=0,
        le=0.01,
        description="Chance per iteration that chance alone exceeds the limits of noise_margin = 1; they are the wider the fewer "
        "responses are compared.",
    )


class CheckpointConfig(Section):
    every: int = Field(0, ge=0, description="Save every n iterations; 0 only after the last one.")
    load: str | None = Field(None, description="Checkpoint directory (.../iteration_000010) to continue from.")
    resume: Literal["auto"] | None = Field(
        None,
        description="auto: continue from the newest complete checkpoint of run.dir; where there is none, start from "
        "checkpoint.load or from the beginning.",
    )
    asynchronous: bool = Field(True, description="Write checkpoints in the background, while training goes on.")
    timeout_s: float = Field(600.0, gt=0, description="Deadline of writing a checkpoint.")
    keep_last: int = Field(0, ge=0, description="Keep the newest n checkpoints and delete older ones; 0 keeps all.")
    keep_best: int = Field(
        0, ge=0, description="Keep, beside keep_last, the n checkpoints with the best evaluation accuracy."
    )
    export_hf: bool = Field(True, description="Write the final weights as an HF directory.")


class TelemetryConfig(Section):
    samples_per_iteration: int = Field(2, ge=0, description="Groups written to samples.jsonl per iteration.")
    samples: Literal["all"] | Annotated[int, Field(ge=0)] = Field(
        4,
        description="Groups of each iteration kept in RUN/samples (parquet) with rewards, advantages, tokens and log-probs; "
        "all keeps every one, 0 none.",
    )
    tensorboard: bool = Field(True, description="Write TensorBoard events.")
    timeline: bool = Field(True, description="Write timeline.json (Chrome trace format).")
    warmup_iterations: int = Field(1, ge=0, description="Iterations at the start that throughput summaries leave out.")
    profile_iterations: tuple[int, ...] = Field(
        (), description="Iterations whose training is profiled into RUN/profile, which slows them; none by default."
    )
    profile_ranks: tuple[int, ...] = Field((0,), description="Trainer ranks that profile_iterations is about.")


LOOPBACK = "127.0.0.1"


class PlacementConfig(Section):
    cluster: Literal["local", "ray"] = Field(
        "local", description="What runs engines and trainers: this machine, or the nodes of a Ray cluster."
    )
    ray_address: str = Field(
        "auto", min_length=1, description="The Ray cluster, HOST:PORT; auto is the one that this machine belongs to."
    )
    nnodes: int = Field(1, ge=1, description="Number of nodes; several need placement.cluster=ray.")
    devices_per_node: int | None = Field(
        None, ge=1, description="Devices (cpu: cores) of each node that the run uses; none divides them evenly."
    )
    join_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline of the cluster to give the run its nodes at the start, and to replace nodes that were lost.",
    )
    node_timeout_s: float = Field(
        60.0, ge=4, description="A node whose processes are not heard of for this long is lost, if Ray has not said so."
    )
    host: str | None = Field(
        None,
        min_length=1,
        description="Address of this machine that the store listens on, and with cluster=local engines and trainers too; none is "
        "loopback, and on a Ray cluster the address that this node has there. Other nodes use theirs.",
    )
    store_port: int = Field(0, ge=0, le=65535, description="Port of the c10d store; 0 is a free one.")
    engine_port: int = Field(
        0, ge=0, le=65535, description="Port of the first engine, the others follow; 0 takes free ones."
    )
    engine_devices: tuple[Index, ...] | None = Field(
        None, description="Device indices of the engines; none takes the first ones."
    )
    trainer_devices: tuple[Index, ...] | None = Field(
        None, description="Device indices of the trainer ranks; none takes the next ones."
    )
    pin_cores: bool = Field(
        True, description="On cpu, pin each engine and trainer rank to its core where there are enough."
    )

    @property
    def address(self) -> str:
        """placement.host, resolved; on a cluster the launcher has put it there."""
        return self.host or LOOPBACK
