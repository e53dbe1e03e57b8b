"""What a configuration means in numbers: devices per role, work per iteration, and memory per device.

The memory figures are estimates for choosing sizes before a run, in bytes of one device. What they count is said at each
part; allocator overhead, kernels' workspaces and communication buffers are not in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pa_npu.config.model_spec import ModelSpec
from pa_npu.config.schema import Config

GIB = 2**30
_BYTES = {"fp32": 4, "bf16": 2}
_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one device of a role, by purpose."""

    role: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def line(self) -> str:
        parts = " + ".join(f"{name} {_size(size)}" for name, size in self.parts if size)
        return f"{_size(self.total)} = {parts}"


@dataclass(frozen=True)
class Work:
    """Upper bounds of one iteration's work: every prompt and response at its longest."""

    sequences: int
    microbatches_per_replica: int
    microbatch_tokens: int
    prompt_tokens: int
    response_tokens: int
    computed_tokens: int


def work(config: Config) -> Work:
    """Tokens of an iteration as TPSPD counts them (the prompt once per response) and as they are computed."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    group_size, shared = config.rollout.responses_per_prompt, config.attention.shared_prompt
    sequences = config.schedule.prompts_per_iteration * group_size
    pieces = config.groups_per_replica * config.microbatches_per_group
    responses = config.microbatch_responses
    piece = prompt * (1 if shared else responses) + response * responses
    piece = -(-piece // config.pad_multiple) * config.pad_multiple
    return Work(
        sequences=sequences,
        microbatches_per_replica=pieces,
        # packing fills a microbatch up to max_tokens, unless one piece is larger or all together are smaller
        microbatch_tokens=min(max(piece, config.microbatch.max_tokens or 0), piece * pieces),
        prompt_tokens=sequences * prompt,
        response_tokens=sequences * response,
        computed_tokens=piece * pieces * config.data_parallel,
    )


def trainer_memory(config: Config, spec: ModelSpec) -> Memory:
    """The fullest rank of a replica."""
    trainer, element = config.trainer, _BYTES[config.model.dtype]
    weights = max(_stage_parameters(config, spec))
    master = 0 if config.model.dtype == "fp32" else _FP32
    shards = config.data_parallel if trainer.distributed_optimizer else 1
    return Memory(
        "trainer",
        (
            ("weights", weights * element),
            ("gradients", weights * _FP32),
            ("optimizer", weights * (2 * _FP32 + master) // shards),
            ("frozen models", weights * _BYTES[config.frozen_dtype] * len(config.frozen_models)),
            ("activations", _activation_bytes(config, spec)),
            ("logits chunk", _logits_bytes(config, spec)),
            ("publish buckets", 2 * min(int(config.publish.bucket_mib * 2**20), weights * element)),
        ),
    )


def engine_memory(config: Config, spec: ModelSpec, device_bytes: int | None) -> Memory:
    """Weights and KV cache: its configured size on host memory (device_bytes None), else what memory_fraction leaves."""
    size = config.rollout.tensor_parallel
    weights = spec.num_parameters * _BYTES[config.model.dtype] // size
    if device_bytes is None:
        return Memory("engine", (("weights", weights), ("KV cache", int(config.rollout.kv_cache_gib * GIB))))
    cache = max(0, int(device_bytes * config.rollout.memory_fraction) - weights)
    return Memory("engine", (("weights", weights), ("KV cache", cache)))


def kv_bytes_per_token(config: Config, spec: ModelSpec) -> int:
    """Keys and values of all layers on one device of an engine; heads are replicated where there are too few."""
    heads = -(-spec.num_kv_heads // config.rollout.tensor_parallel)
    return 2 * spec.num_layers * heads * spec.head_dim * _BYTES[config.model.dtype]


def derived_lines(config: Config, spec: ModelSpec | None, device_bytes: int | None, own_memory: bool) -> list[str]:
    """The arithmetic as text. device_bytes: memory of a device, None where unknown.

    own_memory: devices have memory of their own; otherwise (cpu) all share the host's.
    """
    trainer, rollout, amount = config.trainer, config.rollout, work(config)
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    lines = [
        f"devices               {config.num_devices} = {rollout.engines} engines x {rollout.tensor_parallel} "
        f"+ {trainer.devices} trainer ranks",
        f"trainer ranks         TP {trainer.tensor_parallel} x PP {trainer.pipeline_parallel} x DP {config.data_parallel}"
        + (", sequence parallel" if trainer.sequence_parallel else ""),
        f"groups per iteration  {config.schedule.prompts_per_iteration} (x {rollout.responses_per_prompt} responses = "
        f"{amount.sequences} sequences), {config.groups_per_replica} per replica",
        f"microbatches          {_microbatches(config, amount)}",
        f"tokens per iteration  at most {amount.prompt_tokens + amount.response_tokens} = {amount.prompt_tokens} prompt + "
        f"{amount.response_tokens} response; computed at most {amount.computed_tokens}",
        f"iterations            {config.schedule.iterations}, {_schedule(config)}, order {config.schedule.order}",
    ]
    if spec is None:
        return [*lines, "memory                not known: the model cannot be read here"]
    engine_bytes = device_bytes if own_memory else None
    trainers = trainer_memory(config, spec)
    lines.append(f"model                 {spec.family}, {spec.num_parameters / 1e6:.1f} M parameters")
    lines.append(f"trainer memory        {trainers.line()}")
    if own_memory and device_bytes is None:
        engines = Memory("engine", engine_memory(config, spec, 0).parts[:1])
        lines.append(
            f"engine memory         {engines.line()} + KV cache, up to {rollout.memory_fraction:.0%} of the device"
        )
    else:
        engines = engine_memory(config, spec, engine_bytes)
        capacity = dict(engines.parts)["KV cache"] // kv_bytes_per_token(config, spec)
        lines.append(
            f"engine memory         {engines.line()} ({capacity} tokens, {capacity // longest} longest sequences)"
        )
    if device_bytes is not None:
        lines.append(_device_line(config, trainers, engines, device_bytes, own_memory))
    return lines


def _schedule(config: Config) -> str:
    if config.schedule.stream == "alternate":
        return "synchronous and periodic in turn"
    return "periodic" if config.schedule.stream else "synchronous"


def _microbatches(config: Config, amount: Work) -> str:
    number, responses, tokens = amount.microbatches_per_replica, config.microbatch_responses, amount.microbatch_tokens
    if config.microbatch.max_tokens is None:
        return f"{number} per replica, {responses} responses and at most {tokens} tokens each"
    return (
        f"at most {number} per replica, {responses} responses or several times so many in at most {tokens} tokens each"
    )


def _device_line(config: Config, trainers: Memory, engines: Memory, device_bytes: int, own_memory: bool) -> str:
    if own_memory:
        share = f"trainers use {trainers.total / device_bytes:.0%}, engines {engines.total / device_bytes:.0%} of it"
        return f"device memory         {_size(device_bytes)}; {share}"
    together = trainers.total * config.trainer.devices
    together += engines.total * config.rollout.engines * config.rollout.tensor_parallel
    return f"host memory           {_size(device_bytes)}; all together use {together / device_bytes:.0%} of it"


def _stage_parameters(config: Config, spec: ModelSpec) -> Iterable[int]:
    """Parameters of each pipeline stage on one rank. Norms and biases of the layers are counted as if divided by TP."""
    tensor, pipeline = config.trainer.tensor_parallel, config.trainer.pipeline_parallel
    vocabulary = spec.vocab_size * spec.hidden_size
    outside = vocabulary * (1 if spec.tied else 2) + spec.hidden_size
    layers = (spec.num_parameters - outside) // pipeline
    for stage in range(pipeline):
        embedding = stage == 0
        head = stage == pipeline - 1 and not (spec.tied and embedding)  # a tied head on another stage is a copy
        yield (layers + vocabulary * (embedding + head)) // tensor


def _activation_bytes(config: Config, spec: ModelSpec) -> int:
    """What the backward of the microbatches in flight needs on the first stage, which holds most of them under 1F1B.

    Per token and layer: norm inputs and outputs and residuals (4 hidden sizes, divided by TP only under sequence
    parallelism); queries, keys, values, attention's output; both halves of the gated layer and its product. Attention
    itself keeps only a log-sum-exp. Full recomputation keeps each layer's input, and one layer at a time in full.
    """
    trainer, element = config.trainer, _BYTES[config.model.dtype]
    amount = work(config)
    tensor = trainer.tensor_parallel
    sequence_shards = tensor if trainer.sequence_parallel else 1
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    inside = (heads + 3 * spec.ffn_size) // tensor
    per_layer = 4 * spec.hidden_size // sequence_shards + inside
    layers = spec.num_layers // trainer.pipeline_parallel
    in_flight = min(trainer.pipeline_parallel, amount.microbatches_per_replica // config.schedule.updates_per_iteration)
    if trainer.recompute == "full":
        elements = in_flight * layers * spec.hidden_size // sequence_shards + per_layer
    else:
        kept = per_layer - (spec.num_heads * spec.head_dim // tensor if trainer.recompute == "selective" else 0)
        elements = in_flight * layers * kept
    return amount.microbatch_tokens * elements * element


def _logits_bytes(config: Config, spec: ModelSpec) -> int:
    """One chunk of the LM head in fp32: logits, their exponentials, their gradient."""
    rows = config.microbatch_responses * config.rollout.max_response_tokens
    if config.microbatch.max_tokens is not None:
        rows = work(config).microbatch_tokens
    rows = min(rows, config.model.head_chunk_tokens)
    return 3 * rows * (spec.vocab_size // config.trainer.tensor_parallel) * _FP32


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
