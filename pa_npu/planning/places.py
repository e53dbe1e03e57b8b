"""Sizes of engines that were not given: rollout.max_num_seqs, and rollout.memory_fraction of engines that sleep.

max_num_seqs is as many as an engine's KV cache holds at their longest, if an iteration has them.

A group keeps its places until its longest response ends, so with lengths that vary an engine whose places all are taken decodes far
fewer sequences than it could; twice the places were worth up to a third of the iteration in simulations of such lengths.
"""

from __future__ import annotations

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import work
from pa_npu.planning.memory import cache_tokens, left_share

# Beyond it a decode step is arithmetic alone, and more sequences in it decode no faster.
_MOST = 1024


def with_places(config: Config, spec: ModelSpec, device_bytes: int | None, own_memory: bool) -> Config:
    """The configuration with max_num_seqs doubled while the cache holds it and an engine's share of an iteration needs it.

    device_bytes: memory of a device, None where unknown. own_memory: as for derived_lines. Not where engines run already
    (rollout.attach) or share a device with a trainer, which leaves their cache less.
    """
    rollout = config.rollout
    if "max_num_seqs" in rollout.model_fields_set or rollout.attach or config.num_shared_engines:
        return config
    if own_memory and device_bytes is None:
        return config
    share = -(-work(config).sequences // rollout.engines)
    while rollout.max_num_seqs < share:
        other = rollout.model_copy(update={"max_num_seqs": 2 * rollout.max_num_seqs})
        grown = config.model_copy(update={"rollout": other})
        if other.max_num_seqs > _MOST or not _holds(grown, spec, device_bytes if own_memory else None):
            break
        config, rollout = grown, other
    return config


def with_share(config: Config, spec: ModelSpec, device_bytes: int | None, own_memory: bool) -> Config:
    """The configuration in which an engine that sleeps has what its trainer leaves as the device decodes; arguments as above."""
    if config.rollout.memory_fraction is not None or not config.engines_sleep:
        return config
    if device_bytes is None or not own_memory or (share := left_share(config, spec, device_bytes)) <= 0:
        return config
    rollout = config.rollout.model_copy(update={"memory_fraction": share})
    return config.model_copy(update={"rollout": rollout})


def _holds(config: Config, spec: ModelSpec, device_bytes: int | None) -> bool:
    rollout = config.rollout
    prompts = -(-rollout.max_num_seqs // rollout.responses_per_prompt)
    wanted = rollout.max_num_seqs * rollout.max_response_tokens + prompts * config.data.max_prompt_tokens
    return wanted <= cache_tokens(config, spec, device_bytes) and rollout.max_num_seqs <= rollout.max_num_batched_tokens
