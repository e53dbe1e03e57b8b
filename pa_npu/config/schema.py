"""The typed configuration tree: all sections together, what follows from several keys, and the rules between keys.

The keys themselves are in `pa_npu.config.sections`. Rules that involve several keys live in `Config.check_rules`; rules that need
the model, the disk or devices live in `pa_npu.launcher.run_checks`. Neither imports anything heavier than pydantic, so that the
tree loads quickly in every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import model_validator

from pa_npu.config.presets import PRESETS, fill_overlong, fill_preset, set_keys
from pa_npu.config.sections import (
    ADVANTAGES,
    CUT_SHARE,
    LOSSES,
    REWARDS,
    SLOWEST_TOKEN_S,
    AlgorithmConfig,
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    EvaluateConfig,
    MicrobatchConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    PublishConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    Section,
    TelemetryConfig,
    TrainerConfig,
)
from pa_npu.config.texts import broken_texts


class Config(Section):
    """The whole tree. Sections in the order of a run's life."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    microbatch: MicrobatchConfig = MicrobatchConfig()
    attention: AttentionConfig = AttentionConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    publish: PublishConfig = PublishConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    placement: PlacementConfig = PlacementConfig()

    @property
    def evaluation_sets(self) -> dict[str, str]:
        """Files of held-out questions by name: data.test as `test`, then evaluate.sets."""
        return ({"test": self.data.test} if self.data.test else {}) | self.evaluate.sets

    def key_of_set(self, name: str) -> str:
        """The key that names the file of a held-out set."""
        return f"evaluate.sets.{name}" if name in self.evaluate.sets else "data.test"

    @property
    def data_parallel(self) -> int:
        """Number of replicas (DP)."""
        return self.trainer.devices // (self.trainer.tensor_parallel * self.trainer.pipeline_parallel)

    @property
    def microbatch_responses(self) -> int:
        """Responses per microbatch, resolved."""
        return self.microbatch.responses or self.rollout.responses_per_prompt

    @property
    def pad_multiple(self) -> int:
        """Packed lengths are multiples of this, resolved."""
        default = self.trainer.tensor_parallel if self.trainer.sequence_parallel else 1
        return self.microbatch.pad_to_multiple_of or default

    @property
    def groups_per_replica(self) -> int:
        return self.schedule.prompts_per_iteration // self.data_parallel

    @property
    def probe_rides(self) -> bool:
        """Whether an iteration's first groups are its probe: they are of the version just published, and so is what trains them."""
        return bool(self.publish.probe_tokens) and self.schedule.max_staleness == 0

    @property
    def frozen_models(self) -> tuple[str, ...]:
        """Models that the trainers keep beside the policy, and compute for every microbatch."""
        old = ("old",) if self.schedule.updates_per_iteration > 1 and self.ratio == "proximal" else ()
        return (*old, "reference") if self.algorithm.kl_coef else old

    @property
    def ratio(self) -> Literal["proximal", "sampling"]:
        """algorithm.ratio, resolved: with max_staleness, and no weights between the two, against the policy that sampled."""
        if self.algorithm.ratio != "auto":
            return self.algorithm.ratio
        uncorrected = self.schedule.max_staleness and self.algorithm.importance_sampling == "none"
        return "sampling" if uncorrected else "proximal"

    @property
    def interrupts(self) -> bool:
        """Whether responses go on under newer weights."""
        return self.schedule.on_publish == "continue"

    @property
    def tokens_per_version(self) -> int:
        """schedule.tokens_per_version, resolved."""
        even = -(-self.rollout.max_response_tokens // (self.schedule.max_staleness + 1))
        return self.schedule.tokens_per_version or even

    @property
    def keeps_published(self) -> bool:
        """Whether trainers keep a copy of the published weights: with max_staleness they change while engines still need them."""
        is_old = "old" in self.frozen_models and self.frozen_dtype == self.model.dtype
        return self.schedule.max_staleness > 0 and not is_old

    @property
    def frozen_dtype(self) -> Literal["fp32", "bf16"]:
        """Type of the frozen models, resolved."""
        return self.model.dtype if self.model.frozen_dtype == "same" else self.model.frozen_dtype

    @property
    def request_limit_s(self) -> float:
        """The longest that a request is waited for on an engine that works, and where groups are cut, a second one."""
        return _request_limit_s(self.rollout.request_timeout_s, self.rollout.max_response_tokens, self.rollout.too_long)

    @property
    def engine_wait_s(self) -> float:
        """Deadline of the wait for room on an engine: what is in flight ends by then, and what died has been replaced."""
        return self.request_limit_s + self.rollout.startup_timeout_s + self.publish.timeout_s

    @property
    def border_timeout_s(self) -> float:
        """Deadline of an iteration border: a publish that fails, an engine that starts, and a publish that succeeds.

        With max_staleness trainers may come to it before the iteration that is produced meanwhile is complete.
        """
        produce_s = self.trainer.wait_timeout_s if self.schedule.max_staleness else 0.0
        return produce_s + self.rollout.startup_timeout_s + 2 * self.publish.timeout_s

    @property
    def collective_timeout_s(self) -> float:
        """Deadline of a trainer's collective: later than our own waits, so that the first error names what was awaited.

        A stage that waits for rollouts makes its neighbours wait in a collective, and a leader that publishes its TP peers.
        """
        return self.trainer.wait_timeout_s + COLLECTIVE_MARGIN_S

    @property
    def publish_collective_timeout_s(self) -> float:
        """How long a broadcast of a publish may take on either end before a device ends it by itself."""
        return self.publish.timeout_s + COLLECTIVE_MARGIN_S

    @property
    def longest_collective_s(self) -> float:
        """How long any collective may take before a device ends it by itself; equal on engines and trainers, which share groups."""
        return max(self.collective_timeout_s, self.publish_collective_timeout_s)

    @property
    def deterministic_collectives(self) -> bool:
        """Whether reductions are done in one order; equal on engines and trainers."""
        return self.run.deterministic or self.rollout.batch_invariant

    @property
    def publish_peer_timeout_s(self) -> float:
        """The longest that a leader's TP peers wait for it in a publish: it joins, then sends."""
        return 2 * self.publish.timeout_s

    @property
    def microbatches_per_group(self) -> int:
        return self.rollout.responses_per_prompt // self.microbatch_responses

    def streams(self, iteration: int) -> bool:
        """Whether the groups of this iteration are handed over as they finish."""
        schedule = self.schedule
        compared = schedule.stream and iteration >= schedule.iterations - schedule.compare_iterations
        if schedule.stream == "alternate" or compared:
            return iteration % 2 == 1
        return schedule.stream

    @property
    def num_engines(self) -> int:
        """Engines that the run starts with: those with devices of their own first, then those on the trainers' devices."""
        return self.rollout.engines + self.rollout.shared_engines

    def is_shared(self, index: int) -> bool:
        """Whether engine `index` is on a trainer's device; engines that join the run have devices of their own."""
        return self.rollout.engines <= index < self.num_engines

    @property
    def num_devices(self) -> int:
        """All devices, engines and trainers, one that both share once: the denominator of TPSPD."""
        return self.trainer.devices + self.rollout.engines * self.rollout.tensor_parallel

    @property
    def devices_per_node(self) -> int:
        """placement.devices_per_node, resolved."""
        return self.placement.devices_per_node or self.num_devices // self.placement.nnodes

    @model_validator(mode="before")
    @classmethod
    def fill_preset(cls, tree: Any) -> Any:
        """The keys of algorithm.name's preset that the user left unset, and the lengths of overlong rewards."""
        default = RolloutConfig.model_fields["max_response_tokens"].default
        return _fill_wait(fill_overlong(fill_preset(tree), default))

    @model_validator(mode="after")
    def check_rules(self) -> Config:
        """Rules between keys. Each message names the keys, their values, the rule and the remedy."""
        for broken in _broken_rules(self):
            raise ValueError(broken)
        return self


# Log-probs of a model in bf16 against the same one in fp32: differences of 0.005 to 0.01 (tests/unit/test_backends_frozen.py).
_FROZEN_ROUNDING = 0.01


_LEAST_TEMPERATURE = 0.01  # what vLLM raises smaller ones to, but for 0
_LONGEST_WAIT_S = 10_000_000  # four months; the clocks of some libraries overflow above


# How much later a backend's own timeout comes than the wait that it stands behind.
COLLECTIVE_MARGIN_S = 120.0


def _request_limit_s(request_timeout_s: float, max_response_tokens: int, too_long: str) -> float:
    limit_s = request_timeout_s + SLOWEST_TOKEN_S * max_response_tokens
    if too_long != "cut":
        return limit_s
    return limit_s + request_timeout_s + SLOWEST_TOKEN_S * (max_response_tokens // CUT_SHARE)


def _fill_wait(tree: Any) -> Any:
    """The tree with trainer.wait_timeout_s where the user left it out and a request may take longer than the default."""
    if not isinstance(tree, dict) or not isinstance(tree.get("trainer", {}), dict | TrainerConfig):
        return tree  # the sections' own checks say what is wrong
    trainer = set_keys(tree.get("trainer"))
    if "wait_timeout_s" in trainer:
        return tree
    given = set_keys(tree.get("rollout"))
    values = [
        given.get(key, RolloutConfig.model_fields[key].default)
        for key in ("request_timeout_s", "max_response_tokens", "too_long")
    ]
    if not all(type(value) in (int, float) for value in values[:2]):
        return tree
    needed_s = _request_limit_s(*values)
    if not TrainerConfig.model_fields["wait_timeout_s"].default < needed_s <= _LONGEST_WAIT_S:
        return tree
    return {**tree, "trainer": {**trainer, "wait_timeout_s": needed_s}}


def _broken_deadlines(c: Config) -> Iterator[str]:
    """What waits for something ends after what it waits for: otherwise the error names the wrong party."""
    for section, values in c:
        for key, value in values:
            if key.endswith("_s") and value is not None and value > _LONGEST_WAIT_S:
                yield f"{section}.{key}: {value:g} s is longer than any run; set it to {_LONGEST_WAIT_S} or less"
    wait_s = c.trainer.wait_timeout_s
    if wait_s < c.request_limit_s:
        cut = ", once more for a group that is cut" if c.rollout.too_long == "cut" else ""
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than the {c.request_limit_s:g} s that a request may take "
            f"(rollout.request_timeout_s = {c.rollout.request_timeout_s:g} and {SLOWEST_TOKEN_S:g} s for each of "
            f"rollout.max_response_tokens = {c.rollout.max_response_tokens}{cut}), so that trainers would give up on a group that "
            f"still has time; set it to at least that, or remove it"
        )
    if c.rollout.too_long == "cut" and c.schedule.order == "prompt":
        yield (
            "rollout.too_long: cut with schedule.order=prompt: which groups are cut depends on the clock, and the run would not be "
            "bit for bit the synchronous one; set too_long to end, or order to completion"
        )
    if c.collective_timeout_s < c.publish_peer_timeout_s + COLLECTIVE_MARGIN_S:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than twice publish.timeout_s = {c.publish.timeout_s:g} s, for which "
            f"the tensor-parallel peers of a rank that joins engines and sends to them may wait in a collective; set it to at "
            f"least {c.publish_peer_timeout_s:g}, or lower publish.timeout_s"
        )


def _broken_rules(c: Config) -> Iterator[str]:
    yield from broken_texts(c)
    yield from _broken_deadlines(c)
    t, r, s = c.trainer, c.rollout, c.schedule
    shard = t.tensor_parallel * t.pipeline_parallel
    if t.devices % shard:
        yield (
            f"trainer.devices: {t.devices} is not a multiple of tensor_parallel x pipeline_parallel = {shard}; "
            f"set trainer.devices to a multiple of {shard}"
        )
        return
    if s.prompts_per_iteration % c.data_parallel:
        yield (
            f"schedule.prompts_per_iteration: {s.prompts_per_iteration} groups cannot be divided evenly among "
            f"{c.data_parallel} replicas; set it to a multiple of {c.data_parallel}"
        )
    if c.groups_per_replica % s.updates_per_iteration:
        yield (
            f"schedule.updates_per_iteration: {s.updates_per_iteration} does not divide the {c.groups_per_replica} groups per "
            f"replica (schedule.prompts_per_iteration / data parallel size); set it to a divisor"
        )
    yield from _broken_staleness(c)
    uncorrected = c.algorithm.importance_sampling == "none"
    if s.updates_per_iteration > 1 and c.algorithm.loss == "reinforce":
        yield (
            f"schedule.updates_per_iteration: {s.updates_per_iteration}: algorithm.loss=reinforce has no ratio to the policy "
            f"that sampled, so that it is exact for one update only; set it to 1, or algorithm.loss=clip"
        )
    if c.algorithm.ratio == "sampling" and not uncorrected:
        yield (
            f"algorithm.ratio: sampling with algorithm.importance_sampling={c.algorithm.importance_sampling}, which counts the "
            f"sampling policy twice; set ratio to proximal, or importance_sampling to none"
        )
    narrowest = min(c.algorithm.clip_low, c.algorithm.clip_high)
    if "old" in c.frozen_models and c.frozen_dtype != c.model.dtype and narrowest < _FROZEN_ROUNDING:
        yield (
            f"model.frozen_dtype: bf16 rounds the old policy's log-probs by about {_FROZEN_ROUNDING}, more than the clip range "
            f"{narrowest} of algorithm.clip_low and clip_high, so that rounding would be clipped instead of the update; set "
            f"frozen_dtype to same, or schedule.updates_per_iteration to 1"
        )
    if (
        c.algorithm.kl_in == "reward"
        and c.algorithm.kl_coef
        and c.algorithm.advantage not in ("centred", "leave-one-out")
    ):
        yield (
            f"algorithm.kl_in: reward with algorithm.advantage={c.algorithm.advantage}: the trainer knows the KL only after the "
            f"coordinator has divided rewards by their deviation; set advantage to centred or leave-one-out, or kl_in to loss"
        )
    if c.algorithm.kl_in == "reward" and c.algorithm.kl_coef and c.microbatch_responses != r.responses_per_prompt:
        yield (
            f"algorithm.kl_in: reward needs all responses of a group in one microbatch, but microbatch.responses = "
            f"{c.microbatch_responses} of {r.responses_per_prompt}; remove microbatch.responses, or set kl_in to loss"
        )
    yield from _unread_keys(c.algorithm)
    if c.algorithm.dual_clip is not None and c.algorithm.delta is not None:
        yield (
            f"algorithm.delta: {c.algorithm.delta} with algorithm.dual_clip = {c.algorithm.dual_clip}: both bound the loss of "
            f"tokens with a negative advantage; remove one"
        )
    if c.algorithm.delta is not None and c.algorithm.delta <= 1 + c.algorithm.clip_high:
        yield (
            f"algorithm.delta: {c.algorithm.delta} is not above 1 + algorithm.clip_high = {1 + c.algorithm.clip_high:g}, where "
            f"ratios are clipped already; raise it, or remove the key"
        )
    refresh = c.algorithm.reference_refresh_every
    if refresh and not c.algorithm.kl_coef:
        yield (
            f"algorithm.reference_refresh_every: {refresh}: there is no reference with algorithm.kl_coef = 0; set kl_coef, or "
            f"remove the key"
        )
    if c.checkpoint.keep_best and not c.checkpoint.keep_last:
        yield (
            f"checkpoint.keep_best: {c.checkpoint.keep_best} has no effect with checkpoint.keep_last = 0, which keeps all; set "
            f"keep_last, or remove the key"
        )
    yield from _evaluation_rules(c)
    if c.checkpoint.keep_best and not (c.evaluation_sets and s.evaluate_every):
        yield (
            f"checkpoint.keep_best: {c.checkpoint.keep_best}: without evaluations in between no checkpoint is better than "
            f"another; set data.test and schedule.evaluate_every, or remove the key"
        )
    if r.responses_per_prompt % c.microbatch_responses:
        yield (
            f"microbatch.responses: {c.microbatch.responses} does not divide rollout.responses_per_prompt = "
            f"{r.responses_per_prompt}; set it to a divisor"
        )
    if t.sequence_parallel and c.pad_multiple % t.tensor_parallel:
        yield (
            f"microbatch.pad_to_multiple_of: {c.microbatch.pad_to_multiple_of}: sequence parallelism needs lengths that are "
            f"multiples of trainer.tensor_parallel = {t.tensor_parallel}; remove the key or set it to a multiple"
        )
    if c.microbatch.max_tokens is not None and t.pipeline_parallel > 1:
        yield (
            f"microbatch.max_tokens: {c.microbatch.max_tokens}: packing does not know the number of microbatches in advance, "
            f"which trainer.pipeline_parallel = {t.pipeline_parallel} needs; remove the key or set pipeline_parallel to 1"
        )
    profile = c.telemetry
    for key, values, end in (
        ("profile_iterations", profile.profile_iterations, s.iterations),
        ("profile_ranks", profile.profile_ranks, t.devices),
    ):
        if any(not 0 <= value < end for value in values):
            yield f"telemetry.{key}: {list(values)}: the run has 0 to {end - 1}; leave out the others"
    if t.sequence_parallel and t.tensor_parallel == 1:
        yield "trainer.sequence_parallel: needs trainer.tensor_parallel > 1; set it to false or raise tensor_parallel"
    if r.temperature < _LEAST_TEMPERATURE:
        yield (
            f"rollout.temperature: {r.temperature}: engines sample at {_LEAST_TEMPERATURE} instead of less, and the trainer's "
            f"log-probs would not match; set it to {_LEAST_TEMPERATURE} or more"
        )
    if r.top_p != 1.0:
        yield f"rollout.top_p: {r.top_p}: the trainer's log-probs would not match a truncated distribution; set it to 1.0"
    if r.top_k != -1:
        yield f"rollout.top_k: {r.top_k}: the trainer's log-probs would not match a truncated distribution; set it to -1"
    if r.attach and len(r.attach) != c.num_engines:
        beside = f" + rollout.shared_engines = {r.shared_engines}" if r.shared_engines else ""
        yield f"rollout.attach: {len(r.attach)} URLs for rollout.engines = {r.engines}{beside}; list one URL per engine"
    if r.shared_engines and s.max_staleness:
        yield (
            f"rollout.shared_engines: {r.shared_engines} with schedule.max_staleness = {s.max_staleness}: trainers that are behind "
            f"never wait for rollouts, which is when engines on their devices work; set one of them to 0"
        )
    if r.shared_engines * r.tensor_parallel > t.devices:
        yield (
            f"rollout.shared_engines: {r.shared_engines} engines of {r.tensor_parallel} devices (rollout.tensor_parallel) are more "
            f"than the {t.devices} trainer devices; set it to at most {t.devices // r.tensor_parallel}"
        )
    if r.key_file and not r.attach:
        yield "rollout.key_file: only attached engines have a key already (rollout.attach); remove the key"
    if r.window != "auto" and r.window < r.responses_per_prompt:
        yield (
            f"rollout.window: {r.window} sequences cannot hold one group of rollout.responses_per_prompt = "
            f"{r.responses_per_prompt}; set it to at least {r.responses_per_prompt} or to auto"
        )
    longest = c.data.max_prompt_tokens + r.max_response_tokens
    if longest > r.max_num_batched_tokens:
        yield (
            f"rollout.max_num_batched_tokens: {r.max_num_batched_tokens} is less than data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {c.data.max_prompt_tokens} + {r.max_response_tokens}, so that a sequence would be "
            f"prefilled in chunks, which seeded sampling does not allow; raise it to at least {longest}"
        )
    if r.max_num_seqs > r.max_num_batched_tokens:
        yield (
            f"rollout.max_num_seqs: {r.max_num_seqs} exceeds rollout.max_num_batched_tokens = {r.max_num_batched_tokens}; "
            f"lower it, a step has one token per sequence at least"
        )
    if s.stream and c.algorithm.advantage == "batch-std":
        yield (
            f"algorithm.advantage: batch-std{_of_preset(c, 'advantage')} needs the whole batch before the first update, but "
            f"schedule.stream={str(s.stream).lower()} trains while groups arrive; set schedule.stream=false or "
            f"algorithm.advantage=group-std"
        )
    if c.optimizer.min_learning_rate > c.optimizer.learning_rate:
        yield (
            f"optimizer.min_learning_rate: {c.optimizer.min_learning_rate} exceeds optimizer.learning_rate = "
            f"{c.optimizer.learning_rate}; lower it"
        )
    if c.placement.nnodes > 1 and c.placement.cluster == "local":
        yield (
            f"placement.nnodes: {c.placement.nnodes} with placement.cluster=local, which is this machine alone; set "
            f"placement.cluster=ray, or nnodes to 1"
        )
    if r.max_engines is not None and r.max_engines < r.engines:
        yield f"rollout.engines: {r.engines} is above rollout.max_engines = {r.max_engines}; lower it, or raise the maximum"
    if (r.max_engines or r.engines) > r.engines and (c.placement.cluster == "local" or r.attach):
        yield (
            f"rollout.max_engines: {r.max_engines}: more than rollout.engines = {r.engines} come with nodes of a Ray cluster only, "
            f"and not beside rollout.attach; set placement.cluster=ray, or one number of engines"
        )
    if c.placement.nnodes > 1 and c.placement.devices_per_node is None and c.num_devices % c.placement.nnodes:
        yield (
            f"placement.nnodes: {c.num_devices} devices of engines and trainers cannot be divided evenly among "
            f"{c.placement.nnodes} nodes; change rollout.engines, trainer.devices or placement.nnodes, or set "
            f"placement.devices_per_node to what each node has"
        )
    if c.num_devices > c.placement.nnodes * (c.placement.devices_per_node or c.num_devices):
        yield (
            f"placement.devices_per_node: {c.num_devices} devices of engines and trainers are more than "
            f"{c.placement.nnodes} nodes of {c.placement.devices_per_node}; lower rollout.engines or trainer.devices, or raise "
            f"placement.nnodes"
        )
    first, last = c.placement.engine_port, c.placement.engine_port + c.num_engines - 1
    if first and not r.attach and last > 65535:
        yield (
            f"placement.engine_port: {first} and the ports of {c.num_engines} engines run past 65535; set it to at most "
            f"{65536 - c.num_engines}, or 0 for free ones"
        )
    if first and not r.attach and first <= c.placement.store_port <= last:
        yield (
            f"placement.engine_port: the engines take ports {first} to {last}, among them {c.placement.store_port} of "
            f"the store (placement.store_port); choose another"
        )
    for key, devices, wanted in (
        ("engine_devices", c.placement.engine_devices, r.engines * r.tensor_parallel),
        ("trainer_devices", c.placement.trainer_devices, t.devices),
    ):
        if devices is not None and len(devices) != wanted:
            yield f"placement.{key}: {len(devices)} indices for {wanted} devices; list exactly {wanted} or remove the key"
    yield from _unknown_names(c)
    for function in c.reward.functions:
        if function.name == "format" and not function.pattern:
            yield "reward.functions: format needs a pattern; add pattern=REGEX to it"
        if function.name == "overlong" and (function.buffer_tokens or 0) > (function.max_tokens or 0):
            yield (
                f"reward.functions: overlong has buffer_tokens = {function.buffer_tokens}, more than its max_tokens = "
                f"{function.max_tokens}; lower buffer_tokens"
            )


def _broken_staleness(c: Config) -> Iterator[str]:
    """What cannot be exact, or makes no sense, with or without tokens of older weights."""
    s, a = c.schedule, c.algorithm
    if s.tokens_per_version is not None and not c.interrupts:
        yield (
            f"schedule.tokens_per_version: {s.tokens_per_version} would be read by nothing; set schedule.on_publish=continue, or "
            f"remove the key"
        )
    if c.interrupts and not s.max_staleness:
        yield (
            "schedule.on_publish: continue with schedule.max_staleness = 0, where a response has one version; set max_staleness "
            "to 1 or more, or on_publish to finish"
        )
    if c.interrupts and c.environment.name != "single_turn":
        yield (
            f"schedule.on_publish: continue with environment.name={c.environment.name}: only a single turn can go on under newer "
            f"weights; set on_publish to finish"
        )
    if c.interrupts and s.dynamic_sampling:
        yield (
            f"schedule.on_publish: continue with schedule.dynamic_sampling{_of_preset(c, 'dynamic_sampling', 'schedule')}: which "
            f"groups are replaced is known only when all are complete; set on_publish to finish, or dynamic_sampling to false"
        )
    if not s.max_staleness:
        if a.age_exponent:
            yield (
                f"algorithm.age_exponent: {a.age_exponent}: with schedule.max_staleness = 0 every token has the age 0; set "
                f"max_staleness, or remove the key"
            )
        return
    ahead = f"schedule.max_staleness = {s.max_staleness}"
    if s.max_staleness >= s.iterations:
        yield (
            f"schedule.max_staleness: {s.max_staleness} versions ahead in a run of schedule.iterations = {s.iterations}: the last "
            f"iteration would be sampled by the first model; lower max_staleness"
        )
    if a.advantage == "batch-std":
        yield (
            f"algorithm.advantage: batch-std{_of_preset(c, 'advantage')} with {ahead}: it divides by the deviation of rewards that "
            f"other weights than the trained ones have earned; set advantage to group-std, or max_staleness to 0"
        )
    if s.stream == "alternate" or s.compare_iterations:
        key = "stream: alternate" if s.stream == "alternate" else f"compare_iterations: {s.compare_iterations}"
        yield (
            f"schedule.{key} with {ahead}: it measures streamed against synchronous iterations, and neither is what runs ahead; "
            f"set stream to true and compare_iterations to 0, or max_staleness to 0"
        )
    if a.loss == "reinforce" and a.importance_sampling == "none":
        yield (
            f"algorithm.loss: reinforce{_of_preset(c, 'loss')} with {ahead}: it has no ratio to the older policy that sampled; set "
            f"algorithm.importance_sampling to token or sequence, or algorithm.loss to clip"
        )


def _unknown_names(c: Config) -> Iterator[str]:
    """Values that name a function: one of ours, or module:function of the user's (imported by the checks before a run)."""
    named: list[tuple[str, str, tuple[str, ...]]] = [
        ("algorithm.loss", c.algorithm.loss, LOSSES),
        ("algorithm.advantage", c.algorithm.advantage, ADVANTAGES),
        *(("reward.functions", function.name, REWARDS) for function in c.reward.functions),
    ]
    for key, name, known in named:
        module, separator, function = name.partition(":")
        if name not in known and not (separator and module.strip() and function.strip()):
            yield f"{key}: {name!r} is not {', '.join(known)} or module:function; use one of these"


def _unread_keys(a: AlgorithmConfig) -> Iterator[str]:
    """Keys that were changed and do nothing with the others as they are; a preset's own values stand for when they do."""
    preset = PRESETS[a.name].algorithm if a.name else {}
    has_ratio = a.loss != "reinforce"
    weighs = a.importance_sampling != "none"
    two_sided = a.loss not in ("cispo", "reinforce")
    for key, is_read, remedy in (
        ("kl_in", a.kl_coef > 0, "set algorithm.kl_coef"),
        ("kl_estimator", a.kl_coef > 0, "set algorithm.kl_coef"),
        ("importance_cap", weighs, "set algorithm.importance_sampling to token or sequence"),
        ("importance_rule", weighs, "set algorithm.importance_sampling to token or sequence"),
        ("importance_floor", weighs and a.importance_rule == "mask", "set algorithm.importance_rule to mask"),
        ("ratio", has_ratio, "take an algorithm.loss with a ratio"),
        ("clip_low", has_ratio, "take an algorithm.loss with a ratio to clip"),
        ("clip_high", has_ratio, "take an algorithm.loss with a ratio to clip"),
        ("dual_clip", two_sided, "set algorithm.loss to clip or gspo"),
        ("delta", two_sided, "set algorithm.loss to clip or gspo"),
    ):
        value = getattr(a, key)
        if not is_read and value not in (AlgorithmConfig.model_fields[key].default, preset.get(key)):
            yield f"algorithm.{key}: {value} would be read by nothing; {remedy}, or remove the key"


def _of_preset(c: Config, key: str, section: str = "algorithm") -> str:
    """Says so where a key's value may be a preset's, which the user has not written."""
    preset = PRESETS.get(c.algorithm.name) if c.algorithm.name else None
    known = preset.sections()[section] if preset else ()
    return f" (of algorithm.name={c.algorithm.name})" if key in known else ""


def _evaluation_rules(c: Config) -> Iterator[str]:
    e = c.evaluate
    if "test" in e.sets and c.data.test:
        yield "evaluate.sets: test is the name of data.test; choose another"
    for name in e.sets:
        if not _SET_NAME.fullmatch(name):
            yield f"evaluate.sets: {name!r} is no name of a set; use letters, digits, dots, dashes and underlines"
    if c.evaluation_sets and not e.greedy and not e.samples:
        yield "evaluate.greedy: without greedy answers evaluate.samples must be at least 1; set one of them"
    name, _, metric = (e.metric or "").partition("/")
    names = metric_names(e.greedy, e.samples)
    if e.metric is not None and (name not in c.evaluation_sets or metric not in names):
        yield (
            f"evaluate.metric: {e.metric} is none of {', '.join(c.evaluation_sets) or 'no sets'} with one of {', '.join(names)}; "
            f"write SET/NAME"
        )
    if (e.max_response_tokens or 0) > c.rollout.max_response_tokens:
        yield (
            f"evaluate.max_response_tokens: {e.max_response_tokens} is more than rollout.max_response_tokens = "
            f"{c.rollout.max_response_tokens}, which engines are started for; lower it, or raise that"
        )
    if e.overlap and c.interrupts:
        yield "evaluate.overlap: engines that go on with responses under newer weights are never free; remove it"
    if e.overlap and any(c.is_shared(index) for index in range(c.num_engines)):
        yield "evaluate.overlap: engines on the trainers' devices have no time beside training; remove it, or give them devices"


_SET_NAME = re.compile(r"[\w.-]{1,64}")


def metric_names(greedy: bool, samples: int) -> list[str]:
    """What an evaluation yields for each set: greedy, avg@n, and pass@k and maj@k for the powers of two up to n, and n."""
    if not samples:
        return ["greedy"] if greedy else []
    ks = [2**exponent for exponent in range(1, samples.bit_length()) if 2**exponent < samples]
    ks += [samples] if samples > 1 else []
    return [
        *(["greedy"] if greedy else []),
        f"avg@{samples}",
        *(f"pass@{k}" for k in ks),
        *(f"maj@{k}" for k in ks if k > 2),
    ]
