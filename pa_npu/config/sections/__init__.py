"""The keys of the configuration: one class per section, one sentence per key, with default and bounds.

Unknown keys are refused. Rules between keys are in `pa_npu.config.rules`.
"""

from pa_npu.config.sections.agent import AgentConfig
from pa_npu.config.sections.base import Index, Section
from pa_npu.config.sections.data import DataConfig, Dataset, TrainingDataset
from pa_npu.config.sections.inputs import ModelConfig, RunConfig
from pa_npu.config.sections.iteration import CheckpointConfig, EvaluateConfig, PublishConfig, ScheduleConfig
from pa_npu.config.sections.learning import (
    ADVANTAGES,
    LOSSES,
    REWARDS,
    AlgorithmConfig,
    AttentionConfig,
    LoraConfig,
    MicrobatchConfig,
    OptimizerConfig,
    TrainerConfig,
)
from pa_npu.config.sections.operation import LOOPBACK, TRACKERS, BufferConfig, PlacementConfig, TelemetryConfig
from pa_npu.config.sections.rollout import (
    CUT_SHARE,
    JUDGE_ATTEMPTS,
    JUDGE_KEY_VARIABLE,
    LONGEST_JUDGE_PAUSE_S,
    MOST_TESTS,
    SLOWEST_TOKEN_S,
    CodeConfig,
    EngineSettings,
    EnvironmentConfig,
    JudgeConfig,
    RewardConfig,
    RewardFunction,
    RolloutConfig,
)

__all__ = [
    "ADVANTAGES",
    "CUT_SHARE",
    "JUDGE_ATTEMPTS",
    "JUDGE_KEY_VARIABLE",
    "LONGEST_JUDGE_PAUSE_S",
    "LOOPBACK",
    "LOSSES",
    "MOST_TESTS",
    "REWARDS",
    "SLOWEST_TOKEN_S",
    "TRACKERS",
    "AgentConfig",
    "AlgorithmConfig",
    "AttentionConfig",
    "BufferConfig",
    "CheckpointConfig",
    "CodeConfig",
    "DataConfig",
    "Dataset",
    "EngineSettings",
    "EnvironmentConfig",
    "EvaluateConfig",
    "Index",
    "JudgeConfig",
    "LoraConfig",
    "MicrobatchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PublishConfig",
    "RewardConfig",
    "RewardFunction",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "TelemetryConfig",
    "TrainerConfig",
    "TrainingDataset",
]
