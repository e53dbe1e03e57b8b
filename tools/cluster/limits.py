"""Limits of the parts that a cluster has once, in seconds of an iteration: which would break first as devices are added.

Costs of a group, a response and a token are measured (docs/results/control_path.md), as is the
choice of a schedule, on a core of a 2-core virtual machine; a server has faster ones. What a
dispatch and a border cost per engine, and the store's speed, are assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pa_npu.config.schema import Config
from pa_npu.planning.prediction.virtual_run import Predicted
from pa_npu.platform.typical import TypicalSpeed

# The coordinator's processor time: per group, per response and per response token; per group and
# engine when a group is dispatched; per engine at a border (a request to load, its answer,
# digests).
_GROUP_S = 4e-4
_RESPONSE_S = 3e-5
_TOKEN_S = 2.35e-7
_ENGINE_CHOICE_S = 2.5e-7
_ENGINE_BORDER_S = 1.5e-3
# Choosing the schedule of an iteration, beside training, and learning from the one before, per
# group; measured with 16,384 groups on 512 engines.
_SCHEDULE_GROUP_S = 2e-4
# Bytes of a token in the rollout buffer: its id, mask, log-prob, version and advantage.
_TOKEN_BYTES = 17
# Of the store's host: bytes per second through one thread, and connections that a process may have
# open by default.
_STORE_BYTES_PER_S = 1e9
_CONNECTIONS = 65536
_CONNECTIONS_PER_RANK = 4


@dataclass(frozen=True)
class Limit:
    """seconds: of the one resource per iteration, while it goes on (beside) or in its border, where
    everything waits for it.
    """

    name: str
    seconds: float
    in_border: bool

    def share(self, iteration_s: float) -> float:
        """Returns the share of an iteration that it takes."""
        return self.seconds / iteration_s


def limits(
    config: Config, predicted: Predicted, response_tokens: float, typical: TypicalSpeed
) -> list[Limit]:
    """List the limits of an iteration of this size; response_tokens: mean of a response."""
    groups = config.schedule.prompts_per_iteration
    responses = config.rollout.responses_per_prompt
    engines = config.rollout.engines
    replicas = config.mesh.data
    tokens = groups * responses * response_tokens
    group_s = _GROUP_S + responses * _RESPONSE_S + engines * _ENGINE_CHOICE_S
    ranks = config.trainer.devices
    bytes_read = predicted.tokens * _TOKEN_BYTES * (1 + config.trainer.pipeline_parallel)
    choice_s = groups * _SCHEDULE_GROUP_S
    return [
        # one process, whose threads take turns
        Limit(
            "coordinator: groups, and the next schedule",
            groups * group_s + tokens * _TOKEN_S + choice_s,
            False,
        ),
        Limit(
            "rollout buffer: bytes through the store's host", bytes_read / _STORE_BYTES_PER_S, False
        ),
        Limit("publish: a request and an answer per engine", engines * _ENGINE_BORDER_S, True),
        Limit(
            "publish: latency of the broadcast",
            1e-4 * math.log2(1 + engines * config.rollout.tensor_parallel),
            True,
        ),
        Limit("gradients: latency of the reduction", 1e-4 * math.log2(1 + replicas), True),
        Limit(
            "store: connections",
            predicted.iteration_s * (ranks * _CONNECTIONS_PER_RANK + engines) / _CONNECTIONS,
            False,
        ),
    ]


def limited_s(predicted_s: float, limits: list[Limit]) -> float:
    """Returns an iteration with what is added in its border, and no shorter than the busiest
    resource.
    """
    border_s = sum(limit.seconds for limit in limits if limit.in_border)
    return max(predicted_s + border_s, *(limit.seconds for limit in limits if not limit.in_border))
