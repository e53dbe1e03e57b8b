"""Costs of a decode step and a prompt on an engine, of a group on a replica, and of a publish, by published figures of a device.

These give the shape: what of a cost is reading weights, arithmetic, dispatch, communication, and so
how it changes with the model, the layout and the device. A run gives the factor by which its own
costs differ from that (tools/cluster/calibration.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.dispatch.assignment import GroupWork
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.subjects import EngineSpeed
from pa_npu.planning.memory import BYTES, FP32, kv_bytes_per_token, trainer_memory
from pa_npu.platform.typical import LARGEST_BUCKET_BYTES, TypicalSpeed

# Of the arithmetic of decoding, what is not hidden behind reading the weights; of that of a prompt,
# what a device reaches.
_NOT_HIDDEN, _PROMPT_EFFICIENCY = 0.5, 0.5
# Of a device's dispatch, what goes by the number of layers, in a model with TypicalSpeed.layers of
# them.
_BY_LAYERS = 0.5
# Latency of a collective within a node.
_COLLECTIVE_S = 15e-6
# Optimizer: bytes that a step reads and writes per parameter (weight, gradient, two moments, master
# copy).
_STEP_BYTES = 40
# Of a border, what does not go by bytes: the messages between trainers, coordinator and engines.
_BORDER_MESSAGES_S = 0.05


@dataclass(frozen=True)
class EngineCost:
    """Seconds: of a decode step; per sequence in it; per token of context of each of these; per
    token of a prompt that is computed.

    prefix_block: tokens of which a prompt's responses share whole ones.
    """

    step_s: float
    sequence_s: float
    context_s: float
    prompt_token_s: float
    prefix_block: int

    def speed(self, context: float) -> EngineSpeed:
        """With so many tokens of context per sequence on average."""
        return EngineSpeed(
            self.step_s, self.sequence_s + self.context_s * context, self.prompt_token_s
        )


def computed_prompt_tokens(prompt: int, responses: int, prefix_block: int) -> int:
    """Tokens of a group's prompt that an engine computes: whole blocks once, the rest for each
    response.
    """
    shared = (prompt - 1) // prefix_block * prefix_block
    return shared + responses * (prompt - shared)


def typical_engine(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> EngineCost:
    """Cost of an engine on such devices, by their published figures."""
    shards, element = config.rollout.tensor_parallel, BYTES[config.model.dtype]
    weights_s = spec.num_parameters * element / shards / typical.memory_bytes
    arithmetic_s = 2.0 * spec.num_active_parameters / shards / typical.flops
    collectives_s = 2 * spec.num_layers * _COLLECTIVE_S if shards > 1 else 0.0
    return EngineCost(
        typical.decode_step_s * _of_layers(spec, typical) + weights_s + collectives_s,
        typical.sequence_s + _NOT_HIDDEN * arithmetic_s,
        kv_bytes_per_token(config, spec) / typical.memory_bytes,
        arithmetic_s / _PROMPT_EFFICIENCY,
        typical.prefix_block,
    )


def _of_layers(spec: ModelSpec, typical: TypicalSpeed) -> float:
    return (
        1.0
        if typical.layers is None
        else 1.0 - _BY_LAYERS + _BY_LAYERS * spec.num_layers / typical.layers
    )


@dataclass(frozen=True)
class TrainerCost:
    """Seconds of one device: per microbatch, per operation; and of an optimizer step and a border
    of the whole configuration.
    """

    microbatch_s: float
    operation_s: float
    step_s: float
    border_s: float


def typical_trainer(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> TrainerCost:
    """Cost of trainers on such devices, by their published figures."""
    trainer, mesh, element = config.trainer, config.mesh, BYTES[config.model.dtype]
    sharded = trainer.backend == "fsdp"
    step_s = _COLLECTIVE_S * math.log2(2 * mesh.data)
    for parameters, copies in (
        ((spec.num_parameters - spec.num_expert_parameters) / mesh.replica_size, mesh.data),
        (spec.num_expert_parameters / mesh.pipeline / mesh.expert, mesh.expert_data),
    ):
        shards = mesh.shards if sharded else copies if trainer.distributed_optimizer else 1
        step_s += _STEP_BYTES * parameters / shards / typical.memory_bytes
        if not sharded:  # which reduces with each microbatch, not with the step
            step_s += 2.0 * (copies - 1) / copies * FP32 * parameters / typical.wire_bytes
    # to the device and back
    step_s += 2.0 * trainer_memory(config, spec).on_host / typical.host_bytes
    link = Link(typical.wire_bytes, typical.node_bytes)
    between = typical.node_bytes if mesh.shards <= config.devices_per_node else typical.wire_bytes
    publish_s = publish_seconds(
        spec.num_parameters * element, LARGEST_BUCKET_BYTES, trainer.tensor_parallel, link
    )
    return TrainerCost(
        typical.group_s * _of_layers(spec, typical)
        + gather_seconds(config, spec, element, between),
        1.0 / (typical.flops * typical.training),
        step_s,
        publish_s + _BORDER_MESSAGES_S,
    )


@dataclass(frozen=True)
class Link:
    """The links that carry a publish. Rates in bytes per second, latency in seconds per bucket.

    wire: from a stage's leader to an engine worker, the slowest link on the way; workers pass on
    what they get.
    gather: between the ranks of a tensor-parallel group.
    """

    wire: float
    gather: float
    latency_s: float = 100e-6


def publish_seconds(
    weight_bytes: int, bucket_bytes: int, tensor_parallel: int, link: Link
) -> float:
    """Seconds in which all stages' weights reach every engine worker.

    Engines read the stages one after another, so that all bytes pass the same wire. The gather of
    bucket i + 1 runs while bucket i is on the wire; only the first one's has nothing to hide
    behind:

        gather + n * max(gather, wire)      per bucket, with gather = (TP - 1) / TP * bucket / rate,
                                            wire = bucket / rate + latency
    """
    buckets = math.ceil(weight_bytes / bucket_bytes)
    bucket = weight_bytes / buckets
    gather = (tensor_parallel - 1) / tensor_parallel * bucket / link.gather
    return gather + buckets * max(gather, bucket / link.wire + link.latency_s)


def gather_seconds(config: Config, spec: ModelSpec, element: int, wire_bytes: float) -> float:
    """Seconds per microbatch, as if computing hid none: weights gathered forward and backward,
    gradients scattered in fp32.
    """
    shards = config.mesh.shards
    if config.trainer.backend != "fsdp" or shards == 1:
        return 0.0
    scattered = 0 if config.has_adapters else FP32
    passes = 2 + len(trainer_models(config).computed)
    return spec.num_parameters * (passes * element + scattered) * (shards - 1) / shards / wire_bytes


class Costs:
    """Costs of any configuration, model and device: here by published and assumed figures, without
    a run.

    delivery_s: from a group's end until trainers can take it.
    """

    delivery_s: float = 0.0

    def engine_for(self, config: Config, spec: ModelSpec, typical: TypicalSpeed) -> EngineCost:
        return typical_engine(config, spec, typical)

    def trainer_for(self, config: Config, spec: ModelSpec, typical: TypicalSpeed) -> TrainerCost:
        return typical_trainer(config, spec, typical)


class GroupSeconds:
    """Seconds that a replica of a configuration takes for a group, from its prompt's and its
    responses' lengths.
    """

    def __init__(
        self, config: Config, spec: ModelSpec, cost: TrainerCost, typical: TypicalSpeed
    ) -> None:
        trainer = config.trainer
        self._work = GroupWork(spec, config)
        self._pieces = config.microbatches_per_group
        self._microbatch_s = cost.microbatch_s * passes(config)
        self._operation_s = cost.operation_s * passes(config) / config.mesh.replica_size
        shards, element = trainer.tensor_parallel, BYTES[config.model.dtype]
        # two reductions of the hidden states forward and two backward in each layer
        reduced = 4 * spec.num_layers * 2.0 * (shards - 1) / shards * spec.hidden_size * element
        between = (
            typical.node_bytes
            if config.mesh.expert <= config.devices_per_node
            else typical.wire_bytes
        )
        seconds = reduced / typical.node_bytes + _dispatched_bytes(config, spec, element) / between
        self._token_s = seconds * passes(config) / trainer.pipeline_parallel
        self._shared_prompt = config.attention.shared_prompt

    def __call__(self, prompt: int, lengths: Sequence[int]) -> float:
        tokens = sum(lengths) + prompt * (self._pieces if self._shared_prompt else len(lengths))
        seconds = self._pieces * self._microbatch_s + self._token_s * tokens
        return seconds + self._operation_s * self._work(prompt, lengths)


def _dispatched_bytes(config: Config, spec: ModelSpec, element: int) -> float:
    """Bytes per token of a microbatch that a rank sends to other ranks' experts and gets back,
    forward and backward, in all layers.

    Tokens are divided over tensor-parallel ranks, and taken to be spread evenly over experts.
    """
    ranks = config.mesh.expert
    if spec.experts is None or ranks == 1:
        return 0.0
    exchanged = 4 * element * spec.experts.per_token * (ranks - 1) / ranks
    return len(spec.experts.layers) * spec.hidden_size * exchanged / config.mesh.tensor


def passes(config: Config) -> float:
    """Forward and backward over that of the policy alone: full recomputation is another forward,
    and so is each frozen model.
    """
    return 1.0 + (len(trainer_models(config).computed) + (config.trainer.recompute == "full")) / 3.0
