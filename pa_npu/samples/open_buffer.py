"""open_buffer: the run's rollout buffer as buffer.shards says, for the process that fills it and for those that read it."""

from __future__ import annotations

from typing import Any

from pa_npu.algorithm.advantages import find_group_advantage
from pa_npu.algorithm.policy_losses import find_policy_loss
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.samples.columns import LOGPROBS, RunColumns
from pa_npu.samples.rollout_buffer import Payloads, RolloutBuffer, StoreRolloutBuffer
from pa_npu.samples.routes import routes_of
from pa_npu.samples.shards import OwnShard, ShardPayloads

# Its keys are those of one attempt of the run, which the channel's prefix is.
_NAME = "run"
# Of a shard to take or give one group, and to start.
_SHARD_TIMEOUT_S = 120.0


def open_buffer(
    config: Config,
    channel: StoreChannel,
    *,
    readers: int = 1,
    ahead: int = 0,
    trains: bool = False,
    own: OwnShard | None = None,
) -> RolloutBuffer:
    """Opens the buffer as this process uses it.

    Args:
        readers, ahead: as StoreRolloutBuffer.
        trains: whether groups are read for the loss, and no columns that it does not read.
        own: the shard that this process hosts.
    """
    place = payloads(config, channel, own)
    columns = trained_columns(config) if trains else run_columns(config)
    return StoreRolloutBuffer(channel, _NAME, readers, ahead, place, columns)


def run_columns(config: Config) -> RunColumns:
    """The run's routes, and the columns that loss and advantage declare. Raises ConfigError for those that no run can have."""
    features: list[Any] = [find_policy_loss(config.algorithm.loss)]
    if config.algorithm.advantage != "batch-std":  # which is of no group
        features.append(find_group_advantage(config.algorithm.advantage))
    return RunColumns.of_features([*features, routes_of(config)])


def trained_columns(config: Config) -> RunColumns:
    """The same for trainers: of columns that only the advantage reads nothing travels to them, unless they make some column."""
    columns = run_columns(config)
    if any(column.filled_by == "trainers" for column in columns.declared):
        return columns
    loss = RunColumns.of_features([find_policy_loss(config.algorithm.loss), routes_of(config)])
    return columns.reading([LOGPROBS.name, *(column.name for column in loss.declared)])


def payloads(config: Config, channel: StoreChannel, own: OwnShard | None = None) -> Payloads | None:
    """Opens the place that groups lie in; None is the store itself."""
    return ShardPayloads(channel, _SHARD_TIMEOUT_S, own) if config.has_shards else None
