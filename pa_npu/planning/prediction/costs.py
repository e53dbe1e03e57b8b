"""Costs of decoding, of training and of a publish, from published figures of a device.

The figures say which part of a cost is reading weights, arithmetic, dispatch or communication, and
so how it changes with the model, the layout and the device. The records of a run give the factor by
which its costs differ from them (tools/cluster/calibration.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.engine_memory import kv_bytes_per_token
from pa_npu.planning.iteration_model.subjects import EngineSpeed
from pa_npu.planning.memory import BYTES, FP32, trainer_memory
from pa_npu.planning.publish import published_bytes, senders_of
from pa_npu.platform.typical import BYTES_ON_THE_WIRE, LARGEST_BUCKET_BYTES, TypicalSpeed

# The share of the arithmetic of decoding that is not hidden behind reading the weights.
_NOT_HIDDEN = 0.5
# The share of its peak that a device reaches on a prompt.
_PROMPT_EFFICIENCY = 0.5
# The share of a device's dispatch that grows with the number of layers, in a model that has
# TypicalSpeed.layers of them.
_BY_LAYERS = 0.5
# Latency of a collective within a node.
_COLLECTIVE_S = 15e-6
# Bytes that an optimizer step reads and writes per parameter (weight, gradient, two moments, master
# copy).
_STEP_BYTES = 40
# The messages of a border between trainers, coordinator and engines, whatever the model's size.
_BORDER_MESSAGES_S = 0.05


@dataclass(frozen=True)
class EngineCost:
    """Seconds of an engine.

    step_s: per decode step.
    sequence_s: per sequence in a decode step.
    context_s: per token of context of each of these sequences.
    prompt_token_s: per token of a prompt that is computed.
    prefix_block: tokens of a block of the prefix cache; responses share a prompt's whole blocks.
    """

    step_s: float
    sequence_s: float
    context_s: float
    prompt_token_s: float
    prefix_block: int

    def speed(self, context: float) -> EngineSpeed:
        """Returns the speed with `context` tokens of context per sequence on average."""
        return EngineSpeed(
            step_s=self.step_s,
            sequence_s=self.sequence_s + self.context_s * context,
            prompt_token_s=self.prompt_token_s,
        )


def computed_prompt_tokens(prompt: int, responses: int, prefix_block: int) -> int:
    """Returns the tokens of a group's prompt that an engine computes: whole blocks once, the rest
    for each response.
    """
    shared = (prompt - 1) // prefix_block * prefix_block
    return shared + responses * (prompt - shared)


def typical_engine(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> EngineCost:
    """Returns the cost of an engine on such devices, from their published figures."""
    shards = config.rollout.tensor_parallel
    element = BYTES[config.model.dtype]
    weights_s = spec.num_parameters * element / shards / typical.memory_bytes
    arithmetic_s = 2.0 * spec.num_active_parameters / shards / typical.flops
    collectives_s = 2 * spec.num_layers * _COLLECTIVE_S if shards > 1 else 0.0
    dispatch_s = typical.decode_step_s * _layers_factor(spec, typical)
    return EngineCost(
        step_s=dispatch_s + weights_s + collectives_s,
        sequence_s=typical.sequence_s + _NOT_HIDDEN * arithmetic_s,
        context_s=kv_bytes_per_token(config, spec) / typical.memory_bytes,
        prompt_token_s=arithmetic_s / _PROMPT_EFFICIENCY,
        prefix_block=typical.prefix_block,
    )


def _layers_factor(spec: ModelSpec, typical: TypicalSpeed) -> float:
    """Returns the factor of the device's dispatch for a model with this number of layers."""
    if typical.layers is None:
        return 1.0
    return 1.0 - _BY_LAYERS + _BY_LAYERS * spec.num_layers / typical.layers


@dataclass(frozen=True)
class TrainerCost:
    """Seconds of trainers.

    microbatch_s, operation_s: of one device, per microbatch and per floating-point operation.
    step_s, border_s: of the whole configuration, per optimizer step and per border.
    """

    microbatch_s: float
    operation_s: float
    step_s: float
    border_s: float


def typical_trainer(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> TrainerCost:
    """Returns the cost of trainers on such devices, from their published figures."""
    mesh = config.mesh
    element = BYTES[config.model.dtype]
    step_s = _COLLECTIVE_S * math.log2(2 * mesh.data)
    dense = (spec.num_parameters - spec.num_expert_parameters) / (mesh.tensor * mesh.pipeline)
    step_s += _update_s(config, typical, dense, mesh.data * mesh.context)
    experts = spec.num_expert_parameters / mesh.pipeline / mesh.expert
    step_s += _update_s(config, typical, experts, mesh.expert_data)
    # an offloaded optimizer moves to the device and back
    step_s += 2.0 * trainer_memory(config, spec).on_host / typical.host_bytes

    gather_bytes = typical.wire_bytes
    if mesh.weight_shards <= config.devices.devices_per_node:
        gather_bytes = typical.node_bytes
    dispatch_s = typical.group_s * _layers_factor(spec, typical)
    published = published_bytes(config, spec)
    publish_s = publish_seconds(
        weight_bytes=published.worker,
        bucket_bytes=min(LARGEST_BUCKET_BYTES, BYTES_ON_THE_WIRE // published.num_senders),
        tensor_parallel=config.trainer.tensor_parallel,
        link=PublishLink(wire=typical.wire_bytes, gather=typical.node_bytes),
        senders=published.num_senders,
        gathers=senders_of(config) == "leader",
    )
    return TrainerCost(
        microbatch_s=dispatch_s + gather_seconds(config, spec, element, gather_bytes),
        operation_s=1.0 / (typical.flops * typical.training),
        step_s=step_s,
        border_s=publish_s + _BORDER_MESSAGES_S,
    )


def _update_s(config: Config, typical: TypicalSpeed, parameters: float, copies: int) -> float:
    """Returns the seconds of a step for `parameters` of a rank, of which there are `copies`: the
    update, and with Megatron the reduction of gradients. FSDP reduces with each microbatch.
    """
    if config.trainer.backend == "fsdp":
        return _STEP_BYTES * parameters / config.mesh.weight_shards / typical.memory_bytes
    shards = copies if config.trainer.distributed_optimizer else 1
    update_s = _STEP_BYTES * parameters / shards / typical.memory_bytes
    reduce_s = 2.0 * (copies - 1) / copies * FP32 * parameters / typical.wire_bytes
    return update_s + reduce_s


@dataclass(frozen=True)
class PublishLink:
    """The links that carry a publish. Rates are in bytes per second, latency in seconds per bucket.

    wire: the slowest link from a sender to an engine worker; workers pass on what they get.
    gather: the link between the ranks of a tensor-parallel group.
    """

    wire: float
    gather: float
    latency_s: float = 100e-6


def publish_seconds(
    weight_bytes: int,
    bucket_bytes: int,
    tensor_parallel: int,
    link: PublishLink,
    senders: int = 1,
    gathers: bool = True,
) -> float:
    """Returns the seconds in which all stages' weights reach every engine worker.

    Several senders send at the same time. The n buckets of each take n * wire seconds, with wire =
    bucket / rate + latency, and all weights pass the link of each worker:

        max(weights / rate + latency, n * wire)

    If a sender gathers what it sends over TP, the gather of bucket i + 1 runs while bucket i is on
    the wire; only the first one's has nothing to hide behind:

        gather + n * max(gather, wire)      with gather = (TP - 1) / TP * bucket / rate
    """
    buckets = math.ceil(weight_bytes / bucket_bytes)
    bucket = weight_bytes / buckets
    gather = 0.0
    if gathers:
        gather = (tensor_parallel - 1) / tensor_parallel * bucket / link.gather
    wire = bucket / link.wire + link.latency_s
    in_turn = gather + math.ceil(buckets / senders) * max(gather, wire)
    return max(weight_bytes / link.wire + link.latency_s, in_turn)


def gather_seconds(config: Config, spec: ModelSpec, element: int, wire_bytes: float) -> float:
    """Returns the seconds per microbatch in which FSDP gathers weights, forward and backward, and
    scatters gradients in fp32, as if computing hid none of it.
    """
    shards = config.mesh.weight_shards
    if config.trainer.backend != "fsdp" or shards == 1:
        return 0.0
    scattered = 0 if config.has_adapters else FP32
    num_gathers = 2 + len(trainer_models(config).computed)
    moved_bytes = spec.num_parameters * (num_gathers * element + scattered)
    return moved_bytes * (shards - 1) / shards / wire_bytes


class Costs:
    """Costs of any configuration, model and device, from published and assumed figures.

    A subclass may know better, from the records of a run.

    delivery_s: from a group's end until trainers can take it.
    """

    delivery_s: float = 0.0

    def engine_for(self, config: Config, spec: ModelSpec, typical: TypicalSpeed) -> EngineCost:
        return typical_engine(config, spec, typical)

    def trainer_for(self, config: Config, spec: ModelSpec, typical: TypicalSpeed) -> TrainerCost:
        return typical_trainer(config, spec, typical)


class GroupSeconds:
    """Returns, when called, the seconds that a replica takes for a group with these lengths of
    prompt and responses, in tokens.
    """

    def __init__(
        self, config: Config, spec: ModelSpec, cost: TrainerCost, typical: TypicalSpeed
    ) -> None:
        trainer = config.trainer
        self._work = GroupWork(spec, config)
        self._microbatch_s = cost.microbatch_s * passes(config)
        self._operation_s = cost.operation_s * passes(config) / config.mesh.replica_size
        shards = trainer.tensor_parallel
        element = BYTES[config.model.dtype]
        # two reductions of the hidden states forward and two backward in each layer
        reduced = 4 * spec.num_layers * 2.0 * (shards - 1) / shards * spec.hidden_size * element
        expert_bytes = typical.wire_bytes
        if config.mesh.expert <= config.devices.devices_per_node:
            expert_bytes = typical.node_bytes
        dispatched = _dispatched_bytes(config, spec, element)
        seconds = (reduced / typical.node_bytes + dispatched / expert_bytes) / config.mesh.context
        seconds *= passes(config)
        context_bytes = typical.wire_bytes
        if config.mesh.tensor * config.mesh.context <= config.devices.devices_per_node:
            context_bytes = typical.node_bytes
        seconds += gathered_key_bytes(config, spec) / context_bytes
        self._token_s = seconds / trainer.pipeline_parallel
        self._shared_prompt = config.attention.shared_prompt

    def __call__(self, prompt: int, lengths: Sequence[int]) -> float:
        num_microbatches = len(self._work.pieces(prompt, lengths))
        num_prompts = num_microbatches if self._shared_prompt else len(lengths)
        if self._work.keeps_prompt(prompt, num_microbatches):
            num_microbatches += 1
            num_prompts = 1
        tokens = sum(lengths) + prompt * num_prompts
        seconds = num_microbatches * self._microbatch_s + self._token_s * tokens
        return seconds + self._operation_s * self._work(prompt, lengths)


def gathered_key_bytes(config: Config, spec: ModelSpec) -> float:
    """Returns the bytes per token of a microbatch that a rank gets or sends for the keys and values
    of its context group, in all layers and passes: gathered in every forward and in the backward,
    and gradients summed in fp32.
    """
    ranks = config.mesh.context
    if ranks == 1:
        return 0.0
    num_gathers = 2 + len(trainer_models(config).computed)
    if config.trainer.recompute != "none":
        num_gathers += 1
    values = 2 * spec.num_kv_heads * spec.head_dim / config.mesh.tensor
    moved = num_gathers * BYTES[config.model.dtype] + FP32
    return spec.num_layers * values * moved * (ranks - 1) / ranks


def _dispatched_bytes(config: Config, spec: ModelSpec, element: int) -> float:
    """Returns the bytes per token of a microbatch that a rank exchanges with other ranks' experts,
    forward and backward, in all layers.

    Tokens are divided over tensor-parallel ranks, and assumed to be spread evenly over experts.
    """
    ranks = config.mesh.expert
    if spec.experts is None or ranks == 1:
        return 0.0
    exchanged = 4 * element * spec.experts.per_token * (ranks - 1) / ranks
    return len(spec.experts.layers) * spec.hidden_size * exchanged / config.mesh.tensor


def passes(config: Config) -> float:
    """Returns the cost of all passes over that of the policy's forward and backward.

    A forward is a third of these. Full recomputation adds one, and so does each frozen model.
    """
    num_forwards = len(trainer_models(config).computed)
    if config.trainer.recompute == "full":
        num_forwards += 1
    return 1.0 + num_forwards / 3.0
