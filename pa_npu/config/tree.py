"""The tree of the configuration: all sections together, and what follows from several keys.

Its rules are checked by Config.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pydantic import Field

from pa_npu.config.deadlines import Deadlines
from pa_npu.config.mesh import Mesh
from pa_npu.config.sections import Section
from pa_npu.config.sections.inputs import DataConfig, Dataset, ModelConfig, RunConfig
from pa_npu.config.sections.learning import (
    AlgorithmConfig,
    AttentionConfig,
    LoraConfig,
    MicrobatchConfig,
    OptimizerConfig,
    TeacherConfig,
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
    AgentConfig,
    EnvironmentConfig,
    RewardConfig,
    RolloutConfig,
)

# The rest of a device is for graphs, communication and weights on their way in.
MEMORY_FRACTION = 0.85
# Of an engine beside a trainer that keeps its memory as the device decodes.
SHARED_MEMORY_FRACTION = 0.3


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
    teacher: dict[str, TeacherConfig] = Field(
        default_factory=dict,
        description="The teacher of algorithm.distill_coef, by a name of yours.",
    )
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
    def has_engines(self) -> bool:
        """Whether anything writes tokens for the run: without engines none is started, planned,
        published to or waited for, and samples are rows of data.
        """
        return self.rollout.engines > 0

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
    def max_row_tokens(self) -> int:
        """The longest sequence, prompt and response together; the longest row of data."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def groups_per_replica(self) -> int:
        return self.mesh.per_replica(self.schedule.prompts_per_iteration)

    @property
    def warmup_iterations(self) -> int:
        """Iterations of linear warm-up, resolved."""
        share = math.ceil(self.optimizer.warmup_share * self.schedule.iterations)
        return share or self.optimizer.warmup_iterations

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
    def deadlines(self) -> Deadlines:
        """How long the run's processes wait for each other."""
        return Deadlines(
            run=self.run,
            rollout=self.rollout,
            environment=self.environment,
            agent=self.agent,
            reward=self.reward,
            trainer=self.trainer,
            schedule=self.schedule,
            publish=self.publish,
        )

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
