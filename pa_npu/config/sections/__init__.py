"""The keys of the configuration: one class per section, one sentence per key, with default and bounds.

Unknown keys are refused. Rules between keys are in `pa_npu.config.rules`.
"""

from pa_npu.config.sections.agent import AgentConfig as AgentConfig
from pa_npu.config.sections.base import Index as Index
from pa_npu.config.sections.base import Section as Section
from pa_npu.config.sections.data import DataConfig as DataConfig
from pa_npu.config.sections.data import Dataset as Dataset
from pa_npu.config.sections.data import TrainingDataset as TrainingDataset
from pa_npu.config.sections.inputs import ModelConfig as ModelConfig
from pa_npu.config.sections.inputs import RunConfig as RunConfig
from pa_npu.config.sections.iteration import CheckpointConfig as CheckpointConfig
from pa_npu.config.sections.iteration import EvaluateConfig as EvaluateConfig
from pa_npu.config.sections.iteration import PublishConfig as PublishConfig
from pa_npu.config.sections.iteration import ScheduleConfig as ScheduleConfig
from pa_npu.config.sections.learning import ADVANTAGES as ADVANTAGES
from pa_npu.config.sections.learning import LOSSES as LOSSES
from pa_npu.config.sections.learning import REWARDS as REWARDS
from pa_npu.config.sections.learning import AlgorithmConfig as AlgorithmConfig
from pa_npu.config.sections.learning import AttentionConfig as AttentionConfig
from pa_npu.config.sections.learning import LoraConfig as LoraConfig
from pa_npu.config.sections.learning import MicrobatchConfig as MicrobatchConfig
from pa_npu.config.sections.learning import OptimizerConfig as OptimizerConfig
from pa_npu.config.sections.learning import TrainerConfig as TrainerConfig
from pa_npu.config.sections.operation import LOOPBACK as LOOPBACK
from pa_npu.config.sections.operation import TRACKERS as TRACKERS
from pa_npu.config.sections.operation import BufferConfig as BufferConfig
from pa_npu.config.sections.operation import PlacementConfig as PlacementConfig
from pa_npu.config.sections.operation import TelemetryConfig as TelemetryConfig
from pa_npu.config.sections.rollout import JUDGE_ATTEMPTS as JUDGE_ATTEMPTS
from pa_npu.config.sections.rollout import JUDGE_KEY_VARIABLE as JUDGE_KEY_VARIABLE
from pa_npu.config.sections.rollout import LONGEST_JUDGE_PAUSE_S as LONGEST_JUDGE_PAUSE_S
from pa_npu.config.sections.rollout import MOST_TESTS as MOST_TESTS
from pa_npu.config.sections.rollout import SLOWEST_TOKEN_S as SLOWEST_TOKEN_S
from pa_npu.config.sections.rollout import CodeConfig as CodeConfig
from pa_npu.config.sections.rollout import EngineSettings as EngineSettings
from pa_npu.config.sections.rollout import EnvironmentConfig as EnvironmentConfig
from pa_npu.config.sections.rollout import JudgeConfig as JudgeConfig
from pa_npu.config.sections.rollout import RewardConfig as RewardConfig
from pa_npu.config.sections.rollout import RewardFunction as RewardFunction
from pa_npu.config.sections.rollout import RolloutConfig as RolloutConfig
