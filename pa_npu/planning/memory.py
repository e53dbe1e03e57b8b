"""Bytes that a trainer rank needs on a device, by purpose, before anything runs; engines are in engine_memory.py.

The figures are for choosing sizes before a run. Weights, gradients, optimizer and frozen models are
exact; activations and working set are counts of the tensors that are alive at the peak of a
backward pass. The allocator's measurements on a CPU (docs/results/memory_cpu.md) are within 3% of
the total and 15% of the counted parts (fsdp: 7% and 32%). Allocator overhead, attention kernels'
workspaces, the buffers of training's process groups and the device's context are left out:
`shortages` keeps a tenth of a device for these. The groups over which a replica's reader passes
rollouts to its other ranks are counted.
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
from pa_npu.planning.teachers import teacher_specs
from pa_npu.platform.pieces import gathering_bytes
from pa_npu.platform.typical import LARGEST_BUCKET_BYTES, group_buffer_bytes
from pa_npu.vision.family import is_of_tower, read_tower

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2}
FP32 = 4
_STATE = ("weights", "gradients", "optimizer", "frozen models", "published weights")
_BACKWARD = ("activations", "gathered layers", "images")
USABLE = 0.9
"""Share of a device that a plan fills; the figures leave out the rest."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device of a role, by purpose.

    offloaded: whether the optimizer's part is in host memory except during the step.
    """

    role: str
    parts: tuple[tuple[str, int], ...]
    offloaded: bool = False

    @property
    def total(self) -> int:
        """Bytes at the peak. An offloaded optimizer is on the device only when the tensors of a
        backward pass are not, so only the larger of the two counts.
        """
        everything = sum(size for _, size in self.parts)
        backward = sum(size for name, size in self.parts if name in _BACKWARD)
        return everything - min(self.on_host, backward)

    @property
    def at_rest(self) -> int:
        """Bytes that a trainer keeps while its device decodes: all but those of a backward pass.

        The whole working set counts, which a probe of the weights may need.
        """
        return sum(size for name, size in self.parts if name not in _BACKWARD) - self.on_host

    @property
    def on_host(self) -> int:
        """Bytes in host memory that come to the device for the step."""
        return dict(self.parts)["optimizer"] if self.offloaded else 0

    @property
    def state(self) -> int:
        """Bytes that are held all the time and known exactly: weights, gradients, optimizer, frozen
        models.
        """
        return sum(size for name, size in self.parts if name in _STATE)

    def line(self) -> str:
        """Returns the total as a sum of its parts, in words."""
        parts = [(name, size) for name, size in self.parts if size]
        if not self.offloaded:
            return f"{format_bytes(self.total)} = {_sum(parts)}"
        backward = [(name, size) for name, size in parts if name in _BACKWARD]
        always = [(n, size) for n, size in parts if n not in (*_BACKWARD, "optimizer")]
        step = f"optimizer {format_bytes(self.on_host)} in a step"
        return (
            f"{format_bytes(self.total)} = {_sum(always)} + the larger of {step}, "
            f"{_sum(backward)} before it"
        )


def _sum(parts: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{name} {format_bytes(size)}" for name, size in parts)


def trainer_memory(config: Config, spec: ModelSpec) -> Memory:
    """Returns the memory of the fullest rank of a replica."""
    stages = range(config.trainer.pipeline_parallel)
    fullest = max(
        (_stage_memory(config, spec, stage) for stage in stages), key=lambda memory: memory.total
    )
    if config.trainer.backend != "fsdp":
        return fullest
    element = BYTES[config.model.dtype]
    if config.has_adapters:
        state = _adapter_parts(config, spec, element)
    else:
        state = _sharded_parts(config, spec, element)
    parts = [(name, state.get(name, size)) for name, size in fullest.parts]
    gathered = ("gathered layers", _gathered_bytes(config, spec, element))
    images = ("images", _image_bytes(config, spec, element))
    return Memory(fullest.role, (*parts, gathered, images), fullest.offloaded)


def beside_engine(config: Config, spec: ModelSpec) -> int:
    """Returns the bytes of the fullest rank while the engine on its device has its memory: those
    kept at rest where the engine sleeps during training, else all.
    """
    memory = trainer_memory(config, spec)
    return memory.at_rest if config.devices.engines_sleep else memory.total


def share_left(config: Config, spec: ModelSpec, device_bytes: int) -> float:
    """Returns the share of a device that a trainer leaves to the engine beside it, in steps of a
    twentieth. At 0 or below it leaves nothing.
    """
    return math.floor(20 * (USABLE - beside_engine(config, spec) / device_bytes)) / 20


def _sharded_parts(config: Config, spec: ModelSpec, element: int) -> dict[str, int]:
    """Returns by purpose the bytes that a rank of fsdp holds all the time: trained weights,
    gradients and moments in fp32, all of it sharded.

    element: bytes of a weight in model.dtype.
    """
    weights = spec.num_parameters
    trained = weights - (spec.num_tower_parameters if config.model.vision == "frozen" else 0)
    models = trainer_models(config)
    teachers = sum(teacher.num_parameters for teacher in teacher_specs(config).values())
    frozen = weights * (len(models.computed) - len(models.directories)) + teachers
    unsharded = {
        "weights": weights * FP32,
        "gradients": trained * FP32,
        "optimizer": 2 * trained * FP32,
        "frozen models": frozen * element,
        "published weights": weights * element * models.keeps_published,
    }
    return {name: size // config.mesh.weight_shards for name, size in unsharded.items()}


def _adapter_parts(config: Config, spec: ModelSpec, element: int) -> dict[str, int]:
    """Returns the same for a rank that trains adapters (LoRA): the model's weights once, and the
    state of adapters alone.
    """
    adapter_bytes = FP32 * adapter_parameters(config, spec)
    copies = trainer_models(config).with_weights
    published = copies.count("published")
    teachers = sum(teacher.num_parameters for teacher in teacher_specs(config).values())
    unsharded = {
        "weights": spec.num_parameters * element + adapter_bytes,
        "gradients": adapter_bytes,
        "optimizer": 2 * adapter_bytes,
        "frozen models": (len(copies) - published) * adapter_bytes + teachers * element,
        "published weights": published * adapter_bytes,
    }
    return {name: size // config.mesh.weight_shards for name, size in unsharded.items()}


def adapter_parameters(config: Config, spec: ModelSpec) -> int:
    """Returns the parameters of one set of adapters: rank x (inputs + outputs) of every layer that
    gets one.
    """
    shape = AdapterShape.from_config(config)
    chosen = 0
    for name, size in spec.definition.linear_layers(spec).items():
        is_left_out = config.model.vision == "frozen" and is_of_tower(name)
        if shape.chooses(name) and not is_left_out:
            chosen += sum(size)
    return shape.rank * chosen


def without_adapters(config: Config, spec: ModelSpec) -> list[str]:
    """Returns a line where the experts, most of a mixture's parameters, get no adapters, which
    lora.targets=all does not tell.
    """
    if not (config.has_adapters and spec.definition.fuses_experts(spec)):
        return []
    return ["lora.targets: the experts of this mixture get no adapters and stay as they are"]


def _gathered_bytes(config: Config, spec: ModelSpec, element: int) -> int:
    """Returns the bytes of whole layers at the peak of a backward pass: the layer that computes,
    the next one, embedding, head and tower; and of a gradient that is being reduced, in fp32.
    """
    tower = spec.num_tower_parameters
    outside = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    layer = (spec.num_parameters - outside - tower) // spec.num_layers
    gathered = (outside + tower + 2 * layer) * element
    if config.has_adapters:
        return gathered
    if config.model.vision == "trained":
        outside += tower
    return gathered + max(layer, outside) * FP32 + layer * element


def _image_bytes(config: Config, spec: ModelSpec, element: int) -> int:
    """Returns the bytes of a microbatch's images in the tower, if its prompts are images alone.

    Patches come in fp32. A frozen tower has one block's tensors at a time: residuals, norms,
    queries, keys and values, attention's output, and the three parts of the gated layer. A trained
    one keeps those of all blocks, or each block's input where it computes them again.
    """
    tower = read_tower(spec.path) if spec.num_tower_parameters else None
    if tower is None:
        return 0
    tokens = min(work(config).microbatch_tokens, _prompt_rows(config))
    block = 8 * tower.hidden_size + 3 * tower.ffn_size
    kept = block
    if config.model.vision == "trained":
        per_block = tower.hidden_size if config.trainer.recompute == "full" else block
        kept += per_block * tower.depth
    return tokens * tower.merged**2 * (tower.patch_values * FP32 + kept * element)


def _prompt_rows(config: Config) -> int:
    """Returns the tokens of the prompts in a microbatch, each at its longest."""
    prompt = config.data.max_prompt_tokens
    group = prompt + config.rollout.max_response_tokens * config.microbatch_responses
    groups = max(1, (config.microbatch.budget or 0) // group)
    return prompt * groups


def _stage_memory(config: Config, spec: ModelSpec, stage: int) -> Memory:
    trainer = config.trainer
    element = BYTES[config.model.dtype]
    models = trainer_models(config)
    dense, experts = stage_parameters(config, spec, stage)
    weights = dense + experts
    teachers = sum(
        sum(stage_parameters(config, teacher, stage)) for teacher in teacher_specs(config).values()
    )
    frozen = weights * (len(models.computed) - len(models.directories)) + teachers
    state = 2 * FP32  # the two moments
    if config.model.dtype != "fp32":
        state += FP32  # the master copy
    shards = expert_shards = 1
    if trainer.distributed_optimizer:
        shards = config.mesh.data * config.mesh.context
        expert_shards = config.mesh.expert_data
    activations, working_set = _activation_bytes(config, spec, stage)
    return Memory(
        role="trainer",
        parts=(
            ("weights", weights * element),
            ("gradients", weights * FP32),
            ("optimizer", dense * state // shards + experts * state // expert_shards),
            ("frozen models", frozen * element),
            ("published weights", weights * element * models.keeps_published),
            ("activations", activations),
            ("working set", working_set),
            (
                "publish buckets",
                2 * min(LARGEST_BUCKET_BYTES, weights * element) * config.rollout.has_engines,
            ),
            ("reader's groups", _reader_bytes(config)),
        ),
        offloaded=config.optimizer.offload and config.run.device != "cpu",
    )


def _reader_bytes(config: Config) -> int:
    """Returns the buffers of the process group over which a replica's reader passes rollouts to its
    other ranks (samples.replica_feed).
    """
    return group_buffer_bytes(config.run.device) if config.mesh.replica_size > 1 else 0


def stage_parameters(config: Config, spec: ModelSpec, stage: int) -> tuple[int, int]:
    """Returns a rank's parameters of a pipeline stage: those of all but the experts, and the
    experts'.

    Norms, biases and routers count as if divided by TP.
    """
    tensor = config.trainer.tensor_parallel
    pipeline = config.trainer.pipeline_parallel
    vocabulary = spec.vocab_size * spec.hidden_size
    outside = vocabulary * (1 if spec.tied else 2) + spec.hidden_size
    layers = (spec.num_parameters - spec.num_expert_parameters - outside) // pipeline
    embedding = stage == 0
    is_last = stage == pipeline - 1
    # a tied head on another stage than the embedding is a copy of it
    head = is_last and not (spec.tied and embedding)
    norm = spec.hidden_size if is_last else 0
    experts = spec.num_expert_parameters // pipeline // config.mesh.expert
    return (layers + vocabulary * (embedding + head) + norm) // tensor, experts


def _activation_bytes(config: Config, spec: ModelSpec, stage: int) -> tuple[int, int]:
    """Returns (bytes kept for the backward of the microbatches in flight under 1F1B, working set of
    the backward's largest step).

    A layer keeps per token: inputs and outputs of two norms (4 hidden sizes, divided by TP along
    the sequence); queries, keys and values before the rotation, queries and keys after it,
    attention's output; both halves of the gated layer and their product. Attention itself keeps one
    log-sum-exp per head. Selective recomputation keeps no rotated queries and keys; full
    recomputation keeps each layer's input, and one layer at a time in full.
    """
    trainer = config.trainer
    element = BYTES[config.model.dtype]
    amount = work(config)
    tensor = trainer.tensor_parallel
    tokens = rank_tokens(config, amount.microbatch_tokens)
    layer = spec.definition.layer_activations(spec)
    hidden = spec.hidden_size // tensor
    rotated = layer.rotated // tensor
    feed_forward = layer.feed_forward // tensor
    per_layer = layer.residual // tensor + rotated + layer.attention // tensor + feed_forward
    layers = spec.num_layers // trainer.pipeline_parallel
    microbatches = amount.microbatches_per_replica // amount.updates
    in_flight = max(1, min(trainer.pipeline_parallel - stage, microbatches))

    if trainer.recompute == "full":
        kept_per_layer = hidden
        recomputed = per_layer
    elif trainer.recompute == "selective":
        kept_per_layer = per_layer - rotated
        recomputed = rotated
    else:
        kept_per_layer = per_layer
        recomputed = 0
    kept = kept_per_layer * layers * in_flight

    # The backward of a layer begins with the gated one: it holds gradients of its three parts and
    # of its input and output, and the gathered input.
    gated_step = recomputed + feed_forward + 2 * hidden
    if tensor > 1:
        gated_step += spec.hidden_size
    # Attention's comes after it, with the gated layer's tensors released: it holds gradients of its
    # own tensors, and keys of rows before or beside these.
    attention_step = recomputed + layer.attention // tensor - feed_forward
    kept_keys, keys_of_layer = kept_keys_bytes(config, spec, amount)
    keys = gathered_keys_bytes(config, spec, amount) + keys_of_layer
    working_set = max(tokens * gated_step * element, tokens * attention_step * element + keys)
    if stage == trainer.pipeline_parallel - 1:
        working_set = max(working_set, _head_bytes(config, spec, amount))
    # Frozen models keep no activations, but a later stage receives their hidden states in the same
    # buffer as the policy's.
    received = 0
    if stage > 0:
        received = hidden * in_flight * _num_models_in_pass(config) * element
    return tokens * (kept * element + received) + kept_keys, working_set


_ID_BYTES = 8


def _head_bytes(config: Config, spec: ModelSpec, amount: Work) -> int:
    """Returns the bytes of the LM head's backward: log-probabilities of a chunk and their gradient,
    the head's gradient, hidden states.

    In bf16 the gradient of several chunks is summed in fp32. An entropy bonus needs one more tensor
    of the logits' size.
    """
    element = BYTES[config.model.dtype]
    vocabulary = -(-spec.vocab_size // config.trainer.tensor_parallel)
    rows = config.microbatch_responses * config.rollout.max_response_tokens
    if config.microbatch.budget is not None:
        rows = amount.microbatch_tokens
    rows = rank_tokens(config, rows)
    chunk = min(rows, config.model.head_chunk_tokens)
    logits = (2 + (config.algorithm.entropy_coef > 0)) * chunk * vocabulary * FP32
    gradient = 0
    if not config.has_adapters:
        sum_bytes = FP32 if element < FP32 and chunk < rows else 0
        gradient = vocabulary * spec.hidden_size * (element + sum_bytes)
    count = max((model.num_choices for model in trainer_models(config).teachers), default=0)
    if count:
        # ids, both models' log-probs and the gradient at the policy's, of every target
        choices = rows * (count + 1) * (_ID_BYTES + 3 * FP32)
    else:
        choices = 0
    num_states = 3 + _num_models_in_pass(config)
    tokens = rank_tokens(config, amount.microbatch_tokens)
    hidden = tokens * spec.hidden_size * element * num_states
    return logits + gradient + choices + hidden


def rank_tokens(config: Config, tokens: int) -> int:
    """Returns the tokens of a microbatch that a rank computes, padding included."""
    multiple = config.mesh.context * config.trainer.pad_multiple
    return -(-tokens // multiple) * config.trainer.pad_multiple


def gathered_keys_bytes(config: Config, spec: ModelSpec, amount: Work) -> int:
    """Returns the bytes of keys and values of the whole sequence at the peak of a layer's backward,
    which a rank of a context group has for a few heads at a time (attention/context.py).
    """
    if config.mesh.context == 1:
        return 0
    return gathering_bytes(
        kv_heads=spec.num_kv_heads // config.trainer.tensor_parallel,
        head_dim=spec.head_dim,
        rows=amount.microbatch_tokens,
        element_bytes=BYTES[config.model.dtype],
    )


def kept_keys_bytes(config: Config, spec: ModelSpec, amount: Work) -> tuple[int, int]:
    """Returns (bytes of the keys and values of a prompt that is computed once for several
    microbatches, of all layers; bytes of one layer's in its backward) (attention/stems.py).

    Kept are the keys and values of every model, unless the activations of the policy have them, and
    the sums of their gradients in fp32. A layer's backward puts the kept ones before its own, and
    has the gradients of both in fp32.
    """
    if not amount.stem_tokens:
        return 0, 0
    element = BYTES[config.model.dtype]
    per_row = 2 * (spec.num_kv_heads // config.trainer.tensor_parallel) * spec.head_dim
    models = _num_models_in_pass(config) + (config.trainer.recompute != "none")
    kept = amount.stem_tokens * per_row * spec.num_layers * (models * element + FP32)
    of_layer = amount.microbatch_tokens * per_row * (element + FP32)
    return kept, of_layer


def _num_models_in_pass(config: Config) -> int:
    """Returns how many frozen models are computed in the policy's pass."""
    return len(trainer_models(config).computed) if config.trainer.frozen_pass == "together" else 0


def format_bytes(count: float) -> str:
    """Returns `count` in GiB, or in MiB below one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
