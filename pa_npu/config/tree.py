"""The tree of the configuration: all sections together, and what follows from several keys.

Its rules are checked by Config.
"""

from __future__ import annotations

from pydantic import Field

from pa_npu.config.deadlines import Deadlines
from pa_npu.config.devices import Devices
from pa_npu.config.mesh import Mesh
from pa_npu.config.sections import Section
from pa_npu.config.sections.inputs import DataConfig, ModelConfig, RunConfig
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
from pa_npu.config.sections.reward import RewardConfig
from pa_npu.config.sections.rollout import AgentConfig, EnvironmentConfig, RolloutConfig
from pa_npu.config.sections.service import ServiceConfig


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
        description="The teachers of algorithm.distill_coef, by names of yours.",
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
    service: ServiceConfig = ServiceConfig()

    @property
    def mesh(self) -> Mesh:
        """Returns the layout of the trainer ranks."""
        return Mesh.of_trainer(self.trainer)

    @property
    def scored_teachers(self) -> dict[str, TeacherConfig]:
        """The teachers whose log-probs come with the groups, by name."""
        return {name: teacher for name, teacher in self.teacher.items() if teacher.is_scored}

    @property
    def teacher_engines(self) -> tuple[str, ...]:
        """Returns the teacher's name for each engine that the run starts for a teacher, in order."""
        names: list[str] = []
        for name, teacher in self.teacher.items():
            if teacher.place == "engines":
                names += [name] * teacher.engines
        return tuple(names)

    @property
    def scored_choices(self) -> int:
        """Returns how many most likely tokens the teachers' engines give for each position."""
        if not self.scored_teachers or self.algorithm.distill_divergence == "sampled":
            return 0
        return self.algorithm.distill_top_k

    def hinted_prompt_tokens(self, teacher: TeacherConfig) -> int:
        """Returns the longest prompt of a teacher that is the policy with a hint."""
        return teacher.max_prompt_tokens or 2 * self.data.max_prompt_tokens

    @property
    def engine_tokens(self) -> int:
        """Tokens of the longest sequence that the policy's engines take."""
        written = self.rollout.max_response_tokens
        longest = self.data.max_prompt_tokens + written
        for teacher in self.teacher.values():
            if teacher.place == "policy":  # a request that scores also writes one token
                longest = max(longest, self.hinted_prompt_tokens(teacher) + written + 1)
        return longest

    @property
    def microbatch_responses(self) -> int:
        """Responses per microbatch, resolved."""
        return self.microbatch.responses or self.rollout.responses_per_prompt

    @property
    def demonstration_groups(self) -> int:
        """Groups of data.demonstrations that every iteration trains."""
        demonstrations = self.data.demonstrated
        if demonstrations is None:
            return 0
        return max(1, round(demonstrations.share * self.schedule.prompts_per_iteration))

    @property
    def groups_per_replica(self) -> int:
        groups = self.schedule.prompts_per_iteration + self.demonstration_groups
        return self.mesh.per_replica(groups)

    @property
    def has_adapters(self) -> bool:
        """Returns whether adapters are trained (LoRA), and the model's weights stay as they are."""
        return bool(self.lora.rank or self.model.adapter)

    @property
    def deadlines(self) -> Deadlines:
        """Returns the deadlines by which the run's processes wait for each other."""
        return Deadlines(
            run=self.run,
            rollout=self.rollout,
            environment=self.environment,
            agent=self.agent,
            reward=self.reward,
            trainer=self.trainer,
            schedule=self.schedule,
            publish=self.publish,
            has_scored_teachers=bool(self.scored_teachers),
        )

    @property
    def microbatches_per_group(self) -> int:
        return self.rollout.responses_per_prompt // self.microbatch_responses

    @property
    def depth_first_obstacle(self) -> str:
        """Why the pieces of a group compute the prompt that they share each for itself, in words;
        empty if it may be computed once (samples.stems).
        """
        trainer = self.trainer
        attention = self.attention
        obstacles = {
            "microbatch.depth_first=false": not self.microbatch.depth_first,
            "attention.shared_prompt=false": not attention.shared_prompt,
            f"attention.implementation={attention.implementation}": attention.implementation
            in ("sdpa", "eager"),
            f"trainer.pipeline_parallel={trainer.pipeline_parallel}": trainer.pipeline_parallel > 1,
            f"trainer.context_parallel={trainer.context_parallel}": trainer.context_parallel > 1,
            # the balance of a prompt's tokens would be weighted by no response
            "algorithm.router_aux_coef": self.algorithm.router_aux_coef > 0,
            # a microbatch asks for the teachers of its own targets
            "several teachers": len(self.teacher) > 1,
        }
        return next((name for name, is_there in obstacles.items() if is_there), "")

    @property
    def devices(self) -> Devices:
        """Returns the roles of devices: which decode, which train, which do both."""
        return Devices(
            run=self.run,
            rollout=self.rollout,
            trainer=self.trainer,
            schedule=self.schedule,
            placement=self.placement,
            teacher_sizes=tuple(
                self.teacher[name].tensor_parallel for name in self.teacher_engines
            ),
        )
