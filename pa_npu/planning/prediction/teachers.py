"""The seconds of teachers that have engines, from published figures of a device."""

from __future__ import annotations

import statistics

from pa_npu.config.schema import Config
from pa_npu.planning.prediction.costs import typical_engine
from pa_npu.planning.prediction.workload import assumed_workload
from pa_npu.planning.teachers import engine_teacher_specs, teacher_engine_config
from pa_npu.platform.typical import typical_speed


def teacher_seconds(config: Config, name: str) -> float:
    """Returns the seconds in which the engines of teacher `name` score an iteration's sequences, if
    they never wait for one and several teachers have equally many rows.

    Each sequence is computed whole, its prompt included.
    """
    spec = engine_teacher_specs(config)[name]
    own = teacher_engine_config(config, name)
    cost = typical_engine(own, spec, typical_speed(config.run.device))
    tokens = statistics.mean(shape.tokens for shape in assumed_workload(config).shapes)
    groups = config.schedule.prompts_per_iteration / len(config.teacher)
    return groups * tokens * cost.prompt_token_s / config.teacher[name].engines
