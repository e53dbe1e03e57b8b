"""Bytes that a trainer rank and an engine need on a device, by purpose, before anything runs.

The figures are for choosing sizes before a run. Weights, gradients, optimizer and frozen models are
exact; activations and working set are counts of the tensors that are alive at the peak of a
backward pass. What the allocator measures on a CPU (docs/results/memory_cpu.md) is within 3% of the
total and 15% of the counted parts (fsdp: 7% and 32%). Allocator overhead, attention kernels'
workspaces, the buffers of training's own process groups and the device's context are not in them:
`shortages` keeps a tenth of a device for these. The groups over which a replica's reader passes
rollouts on come on top, and are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import Work, work
from pa_npu.platform.typical import LARGEST_BUCKET_BYTES, group_buffer_bytes

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2}
FP32 = 4
_STATE = ("weights", "gradients", "optimizer", "frozen models", "published weights")
_BACKWARD = ("activations", "gathered layers")
USABLE = 0.9
"""Share of a device that a plan fills; the figures leave out the rest."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device of a role, by purpose. offloaded: the optimizer's part is in host memory
    but for the step.
    """

    role: str
    parts: tuple[tuple[str, int], ...]
    offloaded: bool = False

    @property
    def total(self) -> int:
        everything = sum(size for _, size in self.parts)
        return everything - min(
            self.on_host, sum(size for name, size in self.parts if name in _BACKWARD)
        )

    @property
    def at_rest(self) -> int:
        """While the device decodes: nothing of a backward pass, and of the working set as much as a
        probe takes at most.
        """
        return sum(size for name, size in self.parts if name not in _BACKWARD) - self.on_host

    @property
    def on_host(self) -> int:
        """Bytes that wait in host memory for the step."""
        return dict(self.parts)["optimizer"] if self.offloaded else 0

    @property
    def state(self) -> int:
        """Bytes that are held all the time and known exactly: weights, gradients, optimizer, frozen
        models.
        """
        return sum(size for name, size in self.parts if name in _STATE)

    def line(self) -> str:
        parts = [(name, size) for name, size in self.parts if size]
        if not self.offloaded:
            return f"{format_bytes(self.total)} = {_sum(parts)}"
        either = [part for part in parts if part[0] in _BACKWARD]
        always = [part for part in parts if part not in either and part[0] != "optimizer"]
        step = f"optimizer {format_bytes(self.on_host)} in a step"
        return (
            f"{format_bytes(self.total)} = {_sum(always)} + the larger of {step}, "
            f"{_sum(either)} before it"
        )


def _sum(parts: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{name} {format_bytes(size)}" for name, size in parts)


def trainer_memory(config: Config, spec: ModelSpec) -> Memory:
    """The fullest rank of a replica."""
    stages = range(config.trainer.pipeline_parallel)
    fullest = max(
        (_stage_memory(config, spec, stage) for stage in stages), key=lambda memory: memory.total
    )
    if config.trainer.backend != "fsdp":
        return fullest
    element = BYTES[config.model.dtype]
    held = (_adapter_parts if config.has_adapters else _sharded_parts)(config, spec, element)
    parts = [(name, held.get(name, size)) for name, size in fullest.parts]
    gathered = ("gathered layers", _gathered_bytes(config, spec, element))
    return Memory(fullest.role, (*parts, gathered), fullest.offloaded)


def beside_engine(config: Config, spec: ModelSpec) -> int:
    """Bytes of the fullest rank while the engine on its device has its memory: where that sleeps,
    those that are kept at rest.
    """
    memory = trainer_memory(config, spec)
    return memory.at_rest if config.engines_sleep else memory.total


def left_share(config: Config, spec: ModelSpec, device_bytes: int) -> float:
    """The share of a device, in steps of a twentieth, that a trainer leaves to the engine beside
    it; not above 0: none.
    """
    return math.floor(20 * (USABLE - beside_engine(config, spec) / device_bytes)) / 20


def _sharded_parts(config: Config, spec: ModelSpec, element: int) -> dict[str, int]:
    """Bytes that a rank of fsdp holds all the time, by purpose: trained weights, gradients and
    moments in fp32, all of it sharded.

    element: bytes of a weight in model.dtype.
    """
    weights, models = spec.num_parameters, trainer_models(config)
    held = {
        "weights": weights * FP32,
        "gradients": weights * FP32,
        "optimizer": 2 * weights * FP32,
        "frozen models": weights * element * len(models.computed),
        "published weights": weights * element * models.keeps_published,
    }
    return {name: size // config.mesh.shards for name, size in held.items()}


def _adapter_parts(config: Config, spec: ModelSpec, element: int) -> dict[str, int]:
    """The same of a rank that trains adapters (LoRA): the weights once, and little beside them."""
    own = FP32 * adapter_parameters(config, spec)
    copies = trainer_models(config).with_weights
    published = copies.count("published")
    held = {
        "weights": spec.num_parameters * element + own,
        "gradients": own,
        "optimizer": 2 * own,
        "frozen models": (len(copies) - published) * own,
        "published weights": published * own,
    }
    return {name: size // config.mesh.shards for name, size in held.items()}


def adapter_parameters(config: Config, spec: ModelSpec) -> int:
    """Parameters of one set of adapters: rank x (inputs + outputs) of every layer that gets one."""
    shape, layers = AdapterShape.from_config(config), spec.definition.linear_layers(spec)
    return shape.rank * sum(sum(size) for name, size in layers.items() if shape.chooses(name))


def without_adapters(config: Config, spec: ModelSpec) -> list[str]:
    """A line where the most of a model gets none, though lora.targets may say all."""
    if not (config.has_adapters and spec.definition.fuses_experts(spec)):
        return []
    return ["lora.targets: the experts of this mixture get no adapters and stay as they are"]


def _gathered_bytes(config: Config, spec: ModelSpec, element: int) -> int:
    """Whole layers at the peak of a backward pass: one that computes, one that is gathered for what
    comes next, embedding and head; and a gradient on its way, in fp32."""
    outside = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    layer = (spec.num_parameters - outside) // spec.num_layers
    reduced = 0 if config.has_adapters else max(layer, outside) * FP32 + layer * element
    return (outside + 2 * layer) * element + reduced


def _stage_memory(config: Config, spec: ModelSpec, stage: int) -> Memory:
    trainer, element = config.trainer, BYTES[config.model.dtype]
    models = trainer_models(config)
    dense, experts = _stage_parameters(config, spec, stage)
    weights, state = dense + experts, 2 * FP32 + (0 if config.model.dtype == "fp32" else FP32)
    shards, expert_shards = (
        (config.mesh.data, config.mesh.expert_data) if trainer.distributed_optimizer else (1, 1)
    )
    activations, working_set = _activation_bytes(config, spec, stage)
    return Memory(
        "trainer",
        (
            ("weights", weights * element),
            ("gradients", weights * FP32),
            ("optimizer", dense * state // shards + experts * state // expert_shards),
            ("frozen models", weights * element * len(models.computed)),
            ("published weights", weights * element * models.keeps_published),
            ("activations", activations),
            ("working set", working_set),
            (
                "publish buckets",
                2 * min(LARGEST_BUCKET_BYTES, weights * element) * config.has_engines,
            ),
            ("reader's groups", _reader_bytes(config)),
        ),
        config.optimizer.offload and config.run.device != "cpu",
    )


def _reader_bytes(config: Config) -> int:
    """Buffers of the process group over which a replica's reader passes rollouts to its other ranks
    (samples.replica_feed).
    """
    return group_buffer_bytes(config.run.device) if config.mesh.replica_size > 1 else 0


def _stage_parameters(config: Config, spec: ModelSpec, stage: int) -> tuple[int, int]:
    """Parameters of a pipeline stage on one rank, and its experts'.

    Norms, biases and routers count as if divided by TP.
    """
    tensor, pipeline = config.trainer.tensor_parallel, config.trainer.pipeline_parallel
    vocabulary = spec.vocab_size * spec.hidden_size
    outside = vocabulary * (1 if spec.tied else 2) + spec.hidden_size
    layers = (spec.num_parameters - spec.num_expert_parameters - outside) // pipeline
    embedding = stage == 0
    # a tied head on another stage is a copy
    head = stage == pipeline - 1 and not (spec.tied and embedding)
    experts = spec.num_expert_parameters // pipeline // config.mesh.expert
    return (layers + vocabulary * (embedding + head)) // tensor, experts


def _activation_bytes(config: Config, spec: ModelSpec, stage: int) -> tuple[int, int]:
    """(kept for backward of the microbatches in flight under 1F1B, working set of the backward's
    largest step).

    A layer keeps per token: inputs and outputs of two norms (4 hidden sizes, divided by TP along
    the sequence); queries, keys and values before the rotation, queries and keys after it,
    attention's output; both halves of the gated layer and their product. Attention itself keeps one
    log-sum-exp per head. Selective recomputation keeps no rotated queries and keys; full
    recomputation keeps each layer's input, and one layer at a time in full.
    """
    trainer, element, amount = config.trainer, BYTES[config.model.dtype], work(config)
    tensor, tokens = trainer.tensor_parallel, amount.microbatch_tokens
    layer = spec.definition.layer_activations(spec)
    hidden = spec.hidden_size // tensor
    rotated = layer.rotated // tensor
    feed_forward = layer.feed_forward // tensor
    per_layer = layer.residual // tensor + rotated + layer.attention // tensor + feed_forward
    layers = spec.num_layers // trainer.pipeline_parallel
    microbatches = amount.microbatches_per_replica // amount.updates
    in_flight = max(1, min(trainer.pipeline_parallel - stage, microbatches))

    # Backward of one layer: gradients of the gated layer's three parts and of its input and output,
    # the gathered input.
    layer_step = feed_forward + 2 * hidden + (spec.hidden_size if tensor > 1 else 0)
    if trainer.recompute == "full":
        kept = hidden * layers * in_flight
        layer_step += per_layer
    else:
        kept = (
            (per_layer - (rotated if trainer.recompute == "selective" else 0)) * layers * in_flight
        )
        layer_step += rotated if trainer.recompute == "selective" else 0
    working_set = tokens * layer_step * element
    if stage == trainer.pipeline_parallel - 1:
        working_set = max(working_set, _head_bytes(config, spec, amount))
    # frozen models keep no activations, but their hidden states arrive in the same buffer as the
    # policy's
    received = hidden * in_flight * _num_beside(config) * element if stage else 0
    return tokens * (kept * element + received), working_set


def _head_bytes(config: Config, spec: ModelSpec, amount: Work) -> int:
    """Backward of the LM head: a chunk's log-probabilities and their gradient, the head's own
    gradient, hidden states.

    In bf16 the gradient of several chunks is summed in fp32. An entropy bonus needs one more tensor
    of the logits' size.
    """
    element, vocabulary = (
        BYTES[config.model.dtype],
        -(-spec.vocab_size // config.trainer.tensor_parallel),
    )
    rows = config.microbatch_responses * config.rollout.max_response_tokens
    if config.microbatch.max_tokens is not None:
        rows = amount.microbatch_tokens
    chunk = min(rows, config.model.head_chunk_tokens)
    logits = (2 + (config.algorithm.entropy_coef > 0)) * chunk * vocabulary * FP32
    sum_bytes = FP32 if element < FP32 and chunk < rows else 0
    gradient = 0 if config.has_adapters else vocabulary * spec.hidden_size * (element + sum_bytes)
    hidden = amount.microbatch_tokens * spec.hidden_size * element * (3 + _num_beside(config))
    return logits + gradient + hidden


def _num_beside(config: Config) -> int:
    """Frozen models in the policy's own pass."""
    return len(trainer_models(config).computed) if config.trainer.frozen_pass == "together" else 0


def engine_memory(
    config: Config, spec: ModelSpec, device_bytes: int | None, *, shared: bool = False
) -> Memory:
    """Weights, working set and KV cache; the cache is of its configured size on host memory
    (device_bytes None), else what the engine's share of its device leaves. shared: it is on a
    trainer's device.

    Working set: what vLLM reserves for a step of rollout.max_num_batched_tokens (the gated layer
    and the residuals of all tokens) and for sampling rollout.max_num_seqs sequences (logits in
    fp32, sorted or normalised copies of them).
    """
    rollout, element = config.rollout, BYTES[config.model.dtype]
    weights = spec.num_parameters * element // rollout.tensor_parallel
    # of a publish that arrives beside generation, outside of the share that the engine takes for
    # itself
    second = 0
    if config.publish.mode != "blocking":
        second = (
            FP32 * adapter_parameters(config, spec) if config.publish.lora == "adapter" else weights
        )
    if device_bytes is None:
        cache = int(rollout.kv_cache_gib * GIB)
        return Memory(
            "engine", (("weights", weights), ("second buffer", second), ("KV cache", cache))
        )
    step = (
        rollout.max_num_batched_tokens
        * (3 * spec.ffn_size // rollout.tensor_parallel + 3 * spec.hidden_size)
        * element
    )
    sampling = 3 * rollout.max_num_seqs * spec.vocab_size * FP32
    cache = max(0, int(device_bytes * config.memory_fraction) - weights - step - sampling)
    return Memory(
        "shared engine" if shared else "engine",
        (
            ("weights", weights),
            ("second buffer", second),
            ("working set", step + sampling),
            ("KV cache", cache),
        ),
    )


def kv_bytes_per_token(config: Config, spec: ModelSpec) -> int:
    """Keys and values of all layers on one device of an engine; heads are replicated where there
    are too few.
    """
    heads = -(-spec.num_kv_heads // config.rollout.tensor_parallel)
    return 2 * spec.num_layers * heads * spec.head_dim * BYTES[config.model.dtype]


def cache_tokens(
    config: Config, spec: ModelSpec, device_bytes: int | None, *, shared: bool = False
) -> int:
    """Tokens that an engine's KV cache holds; arguments as for engine_memory."""
    cache = dict(engine_memory(config, spec, device_bytes, shared=shared).parts)["KV cache"]
    return cache // kv_bytes_per_token(config, spec)


def wanted_sequences(config: Config) -> int:
    """Sequences that an engine may have in flight at once: its window or vLLM's limit, if an
    iteration has so many.
    """
    rollout = config.rollout
    limit = (
        rollout.max_num_seqs
        if rollout.window == "auto"
        else min(rollout.window, rollout.max_num_seqs)
    )
    return min(limit, -(-work(config).sequences // rollout.engines))


def wanted_tokens(config: Config, sequences: int | None = None) -> int:
    """KV cache for `wanted_sequences`, or as many, at their longest, in tokens; the prompt of a
    group once, by prefix caching.
    """
    rollout, sequences = config.rollout, sequences or wanted_sequences(config)
    prompts = -(-sequences // rollout.responses_per_prompt)
    return sequences * rollout.max_response_tokens + prompts * config.data.max_prompt_tokens


def format_bytes(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
