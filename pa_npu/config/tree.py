"""The tree of the configuration: all sections together, and what follows from several keys.

Its rules are checked by Config.
"""

from __future__ import annotations

from dataclasses import replace

from pa_npu.config.mesh import Mesh
from pa_npu.config.sections import Section
from pa_npu.config.sections.inputs import DataConfig, Dataset, ModelConfig, RunConfig
from pa_npu.config.sections.learning import (
    AlgorithmConfig,
    AttentionConfig,
    LoraConfig,
    MicrobatchConfig,
    OptimizerConfig,
    TrainerConfig,
)
from pa_npu.config.sections.operation import (
    BufferConfig,
    CheckpointConfig,
    EvaluateConfig,
    PlacementConfig,
    PublishConfig,
    ScheduleConfig,
    TelemetryConfig,
)
from pa_npu.config.sections.rollout import (
    COMPARED_CPU_S,
    JUDGE_ATTEMPTS,
    LONGEST_JUDGE_PAUSE_S,
    MAX_COMPARISONS,
    MOST_TESTS,
    RESPONSE_CPU_S,
    SLOWEST_TOKEN_S,
    STARVED_FACTOR,
    AgentConfig,
    EnvironmentConfig,
    RewardConfig,
    RolloutConfig,
)

WAIT_TIMEOUT_S = 1800.0
TURN_TIMEOUT_S = 10.0
SESSION_TIMEOUT_S = 600.0
# The rest of a device is for graphs, communication and weights on their way in.
MEMORY_FRACTION = 0.85
# Of an engine beside a trainer that keeps its memory as the device decodes.
SHARED_MEMORY_FRACTION = 0.3
# How much later a backend's own timeout comes than the wait that it stands behind.
COLLECTIVE_MARGIN_S = 120.0


class ConfigTree(Section):
    """The whole tree. Sections in the order of a run's life."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    lora: LoraConfig = LoraConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    microbatch: MicrobatchConfig = MicrobatchConfig()
    attention: AttentionConfig = AttentionConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    buffer: BufferConfig = BufferConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    publish: PublishConfig = PublishConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    placement: PlacementConfig = PlacementConfig()

    @property
    def evaluation_sets(self) -> dict[str, Dataset]:
        """Held-out questions by name: data.test as `test`, then evaluate.sets."""
        given = ({"test": self.data.test} if self.data.test else {}) | self.evaluate.sets
        return {
            name: Dataset(path=found) if isinstance(found, str) else found
            for name, found in given.items()
        }

    def key_of_set(self, name: str) -> str:
        """The key that names the file of a held-out set."""
        return f"evaluate.sets.{name}" if name in self.evaluate.sets else "data.test"

    @property
    def needs_answers(self) -> bool:
        """Whether every row of the data has to have a reference answer: not where agents may give
        the rewards.
        """
        return self.rewards_read_answers and self.environment.name not in ("agents", "remote")

    @property
    def rewards_read_answers(self) -> bool:
        """Whether a reward may compare responses with a reference answer."""
        judged = "{answer}" in self.reward.judge.template
        return any(
            function.name == "math" or ":" in function.name or (function.name == "judge" and judged)
            for function in self.reward.functions
        )

    @property
    def mesh(self) -> Mesh:
        """How trainer ranks are laid out."""
        trainer = self.trainer
        mesh = Mesh.of(
            trainer.devices,
            trainer.tensor_parallel,
            trainer.pipeline_parallel,
            trainer.expert_parallel,
        )
        if trainer.backend != "fsdp":
            return mesh
        shards = trainer.shards or mesh.data
        return replace(mesh, shards=mesh.data if mesh.data % shards else shards)

    @property
    def microbatch_responses(self) -> int:
        """Responses per microbatch, resolved."""
        return self.microbatch.responses or self.rollout.responses_per_prompt

    @property
    def pad_multiple(self) -> int:
        """Packed lengths are multiples of this."""
        return self.trainer.tensor_parallel

    @property
    def groups_per_replica(self) -> int:
        return self.mesh.per_replica(self.schedule.prompts_per_iteration)

    def updates(self, iterations: int) -> int:
        """Optimizer steps of so many iterations."""
        return iterations * self.schedule.updates_per_iteration

    @property
    def reduces_in_buckets(self) -> bool:
        """Whether gradients are reduced beside the last backward, where it is known beforehand
        which one that is.
        """
        return self.trained_groups is not None and not self.unequal_groups

    @property
    def trained_groups(self) -> int | None:
        """Groups that every iteration trains; None where that follows from their tokens, and the
        coordinator tells it.
        """
        return (
            None
            if self.schedule.tokens_per_update is not None
            else self.schedule.prompts_per_iteration
        )

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained (LoRA), and the model's weights stay as they are."""
        return bool(self.lora.rank or self.model.adapter)

    @property
    def has_shards(self) -> bool:
        """Whether groups lie on the nodes of the replicas that train them, instead of in the store
        on the head.
        """
        return self.buffer.shards == "node" or (
            self.buffer.shards == "auto" and self.placement.nnodes > 1
        )

    @property
    def iterations_ahead(self) -> int:
        """How many iterations producing runs ahead of training: max_staleness, unless a part of
        that is for something else.

        One is enough for engines never to wait for trainers. The rest, at least one, is how many
        publishes in a row may be skipped (publish.divergence), or for how many updates a group may
        be carried (schedule.tokens_per_update).
        """
        staleness = self.schedule.max_staleness
        shared = self.publish.divergence is not None or self.schedule.tokens_per_update is not None
        return min(1, max(0, staleness - 1)) if shared else staleness

    @property
    def request_limit_s(self) -> float:
        """The longest that a request is waited for on an engine that works."""
        return self.rollout.request_timeout_s + SLOWEST_TOKEN_S * self.rollout.max_response_tokens

    @property
    def reward_limit_s(self) -> float:
        """The longest that the rewards of a group may take, from when no earlier group is waited
        for.

        Functions that compute are called one after another: a user's ends at STARVED_FACTOR times
        its time, and `math` and `format` have processor time for each response. Judge and programs
        wait beside them. Of requests that take t each, c at once, each response needs up to k one
        after another. A turn is free after t at most, so a group that has no more than c of them at
        once takes 2 k t, and one that has more also what it needs of all turns (Graham 1966, list
        scheduling).
        """
        reward, responses = self.reward, self.rollout.responses_per_prompt
        names = [function.name for function in reward.functions]
        computing_s = 0.0
        for name in names:
            if ":" in name:
                computing_s += STARVED_FACTOR * reward.timeout_s
            elif name == "math":
                computing_s += responses * (RESPONSE_CPU_S + MAX_COMPARISONS * COMPARED_CPU_S)
            elif name == "format":
                computing_s += responses * RESPONSE_CPU_S
        limits = [computing_s]
        if "judge" in names:
            pauses_s = LONGEST_JUDGE_PAUSE_S * (JUDGE_ATTEMPTS - 1)
            rounds = _rounds(responses, reward.judge.concurrency)
            limits.append(JUDGE_ATTEMPTS * reward.judge.timeout_s * rounds + pauses_s)
        if "code" in names:
            limits.append(MOST_TESTS * reward.code.timeout_s * _rounds(responses, reward.programs))
        return max(limits)

    @property
    def group_limit_s(self) -> float:
        """The longest that a group is written: its request, or the sessions of its agents."""
        if self.environment.name != "agents":
            return self.request_limit_s
        return self.environment_timeout_s * _rounds(
            self.rollout.responses_per_prompt, self.agent.concurrent
        )

    @property
    def environment_timeout_s(self) -> float:
        """environment.timeout_s, resolved: of a turn's own work, or of an agent's session."""
        usual = SESSION_TIMEOUT_S if self.environment.name == "agents" else TURN_TIMEOUT_S
        return usual if self.environment.timeout_s is None else self.environment.timeout_s

    @property
    def wait_timeout_s(self) -> float:
        """trainer.wait_timeout_s, resolved."""
        given = self.trainer.wait_timeout_s
        return (
            max(WAIT_TIMEOUT_S, self.group_limit_s + self.reward_limit_s)
            if given is None
            else given
        )

    @property
    def engine_wait_s(self) -> float:
        """Deadline of the wait for room on an engine: what is in flight ends by then, and what died
        has been replaced.
        """
        return self.group_limit_s + self.run.startup_timeout_s + self.publish.timeout_s

    @property
    def border_timeout_s(self) -> float:
        """Deadline of an iteration border: a publish that fails, an engine that starts, and a
        publish that succeeds.

        With max_staleness trainers may come to it before the iteration that is produced meanwhile
        is complete.
        """
        produce_s = self.wait_timeout_s if self.schedule.max_staleness else 0.0
        return produce_s + self.run.startup_timeout_s + 2 * self.publish.timeout_s

    @property
    def collective_timeout_s(self) -> float:
        """Deadline of a trainer's collective: later than our own waits, so that the first error
        names what was awaited.

        A stage that waits for rollouts makes its neighbours wait in a collective, and a leader that
        publishes its TP peers.
        """
        return self.wait_timeout_s + COLLECTIVE_MARGIN_S

    @property
    def longest_collective_s(self) -> float:
        """How long any collective may take before a device ends it by itself; equal on engines and
        trainers, which share groups.
        """
        return max(self.collective_timeout_s, self.publish.timeout_s + COLLECTIVE_MARGIN_S)

    @property
    def deterministic_collectives(self) -> bool:
        """Whether reductions are done in one order; equal on engines and trainers."""
        return self.run.deterministic or self.rollout.batch_invariant

    @property
    def microbatches_per_group(self) -> int:
        return self.rollout.responses_per_prompt // self.microbatch_responses

    def streams(self, iteration: int) -> bool:
        """Whether the groups of this iteration are handed over as they finish."""
        schedule = self.schedule
        compared = iteration >= schedule.iterations - schedule.compare_iterations
        return schedule.stream and (iteration % 2 == 1 or not compared)

    @property
    def num_shared_engines(self) -> int:
        """Engines on the trainers' devices: all of them with placement.colocate."""
        return self.rollout.engines if self.placement.colocate else 0

    @property
    def follows_work(self) -> bool:
        """Whether devices decode and train inside one iteration."""
        return self.placement.colocate and self.schedule.stream

    @property
    def engines_sleep(self) -> bool:
        """Whether engines on the trainers' devices give their memory back while these train
        (rollout.sleep).
        """
        rollout, on_device = self.rollout, self.run.device in ("npu", "cuda")
        can = (
            rollout.backend == "vllm" and not rollout.attach
            if rollout.sleep is None
            else rollout.sleep
        )
        return self.placement.colocate and on_device and can

    @property
    def memory_fraction(self) -> float:
        """rollout.memory_fraction, resolved for a device of known use alone: of an engine's own, or
        shared with a trainer.
        """
        usual = SHARED_MEMORY_FRACTION if self.placement.colocate else MEMORY_FRACTION
        return usual if self.rollout.memory_fraction is None else self.rollout.memory_fraction

    @property
    def unequal_groups(self) -> bool:
        """Whether replicas may train different numbers of an iteration's groups."""
        together = (
            self.mesh.pipeline > 1
            or self.mesh.shards > 1
            or self.schedule.updates_per_iteration > 1
        )
        return self.follows_work and self.schedule.order == "completion" and not together

    def ranks_beside(self, index: int) -> tuple[int, ...]:
        """The trainer ranks on whose devices a shared engine is: replica after replica."""
        first = index * self.rollout.tensor_parallel
        ranks = [rank for replica in range(self.mesh.data) for rank in self.mesh.replica(replica)]
        return tuple(ranks[first : first + self.rollout.tensor_parallel])

    def is_shared(self, index: int) -> bool:
        """Whether engine `index` is on a trainer's device; engines that join the run have devices
        of their own.
        """
        return index < self.num_shared_engines

    @property
    def num_devices(self) -> int:
        """All devices, engines and trainers, one that both share once: the denominator of TPSPD."""
        return (
            self.trainer.devices
            + (self.rollout.engines - self.num_shared_engines) * self.rollout.tensor_parallel
        )

    @property
    def engine_devices(self) -> tuple[int, ...] | None:
        """Engines' part of placement.devices: none with placement.colocate."""
        given = self.placement.devices
        return None if given is None else given[: len(given) - self.trainer.devices]

    @property
    def trainer_devices(self) -> tuple[int, ...] | None:
        """Trainer ranks' part of placement.devices."""
        given = self.placement.devices
        return None if given is None else given[len(given) - self.trainer.devices :]

    @property
    def devices_per_node(self) -> int:
        """placement.devices_per_node, resolved."""
        return self.placement.devices_per_node or self.num_devices // self.placement.nnodes


def _rounds(requests: int, at_once: int) -> int:
    """The most that a group waits for, in times of one request: as reward_limit_s says."""
    return 2 + (-(-requests // at_once) if requests > at_once else 0)
