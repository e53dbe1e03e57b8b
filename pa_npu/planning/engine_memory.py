"""Bytes that an engine needs on a device, by purpose, before anything runs, and what its KV cache holds."""

from __future__ import annotations

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import work
from pa_npu.planning.memory import BYTES, FP32, GIB, Memory, adapter_parameters
from pa_npu.planning.teachers import engine_teacher_specs, teacher_engine_config


def engine_memory(
    config: Config, spec: ModelSpec, device_bytes: int | None, *, shared: bool = False
) -> Memory:
    """Returns an engine's weights, working set and KV cache on one device.

    In host memory (`device_bytes` None) the cache has its configured size and no working set is
    counted. On a device the cache is what the engine's share of the device leaves.

    The working set is what vLLM reserves for a step of rollout.max_num_batched_tokens (the gated
    layer and the residuals of all tokens) and for sampling rollout.max_num_seqs sequences (logits
    in fp32, sorted or normalised copies of them).

    shared: whether the engine is on a trainer's device.
    """
    rollout = config.rollout
    element = BYTES[config.model.dtype]
    weights = spec.num_parameters * element // rollout.tensor_parallel
    # A publish that arrives during generation lies outside the share that the engine takes.
    if config.publish.mode == "blocking":
        second = 0
    elif config.publish.lora == "adapter":
        second = FP32 * adapter_parameters(config, spec)
    else:
        second = weights
    if device_bytes is None:
        cache = int(rollout.kv_cache_gib * GIB)
        return Memory(
            "engine", (("weights", weights), ("second buffer", second), ("KV cache", cache))
        )
    per_token = (3 * spec.ffn_size // rollout.tensor_parallel + 3 * spec.hidden_size) * element
    step = rollout.max_num_batched_tokens * per_token
    sampling = 3 * rollout.max_num_seqs * spec.vocab_size * FP32
    cache = max(0, int(device_bytes * config.devices.memory_fraction) - weights - step - sampling)
    return Memory(
        "shared engine" if shared else "engine",
        (
            ("weights", weights),
            ("second buffer", second),
            ("working set", step + sampling),
            ("KV cache", cache),
        ),
    )


def teacher_memories(config: Config, device_bytes: int | None) -> dict[str, Memory]:
    """Returns the memory of an engine of each teacher that has engines, on one device, by name."""
    memories = {}
    for name, spec in engine_teacher_specs(config).items():
        memories[name] = engine_memory(teacher_engine_config(config, name), spec, device_bytes)
    return memories


def kv_bytes_per_token(config: Config, spec: ModelSpec) -> int:
    """Returns the bytes of a token's keys and values, of all layers, on one device of an engine.

    An engine of more devices than there are heads has a head on several of them.
    """
    heads = -(-spec.num_kv_heads // config.rollout.tensor_parallel)
    return 2 * spec.num_layers * heads * spec.head_dim * BYTES[config.model.dtype]


def cache_tokens(
    config: Config, spec: ModelSpec, device_bytes: int | None, *, shared: bool = False
) -> int:
    """Returns the tokens that an engine's KV cache holds; arguments as for engine_memory."""
    cache = dict(engine_memory(config, spec, device_bytes, shared=shared).parts)["KV cache"]
    return cache // kv_bytes_per_token(config, spec)


def wanted_sequences(config: Config) -> int:
    """Returns the sequences that an engine may have in flight at once: its window or vLLM's limit,
    and no more than its share of an iteration.
    """
    rollout = config.rollout
    limit = rollout.max_num_seqs
    if rollout.window != "auto":
        limit = min(limit, rollout.window)
    return min(limit, -(-work(config).sequences // rollout.engines))


def wanted_tokens(config: Config, sequences: int | None = None) -> int:
    """Returns the tokens of KV cache that `sequences` need at their longest; `wanted_sequences` of
    them where the number is not given.

    Prefix caching holds the prompt of a group once.
    """
    sequences = sequences or wanted_sequences(config)
    prompts = -(-sequences // config.rollout.responses_per_prompt)
    responses_tokens = sequences * config.rollout.max_response_tokens
    return responses_tokens + prompts * config.data.max_prompt_tokens
