"""Searches the sizes of a run on a given number of devices for the fastest that fit into memory.

fitting     every combination of sizes with which engines and trainers fit, the fastest by a quick
            estimate first
fastest     the best few of these, predicted in virtual time

Some thousand combinations are judged. So the cost of trainers is computed once for each of their
layouts, and that of engines once for each of theirs; only combinations that are predicted are
checked by the rules of the configuration.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.config.mesh import nodes_of
from pa_npu.config.schema import Config
from pa_npu.dispatch.roles import role_units
from pa_npu.errors import ConfigError
from pa_npu.planning.amounts import work
from pa_npu.planning.engine_memory import engine_memory, kv_bytes_per_token
from pa_npu.planning.memory import USABLE, share_left, trainer_memory
from pa_npu.planning.model_rules import check_division, check_engine
from pa_npu.planning.prediction.costs import GroupSeconds
from pa_npu.planning.prediction.divisions import (
    MAX_SEQUENCES,
    MIN_SEQUENCES,
    NUM_SHAPES,
    decode_group_s,
    device_bytes,
    eighths,
    with_changes,
)
from pa_npu.planning.prediction.virtual_run import Basis, Predicted
from pa_npu.planning.prediction.workload import mean_context

# The share of a split's shorter side that does not overlap with the longer one: the head and the
# tail of an iteration.
_NOT_OVERLAPPED = 0.2
# The share of the seconds that the longest response takes beyond a mean one which is not hidden
# behind training on the same devices.
_TAIL_LEFT = 0.5
# Combinations whose estimate exceeds the best of their mode by this factor are not predicted.
_WORTH_PREDICTING = 1.25

# Engine sizes whose best estimates differ by less than this are all predicted.
_NEARLY_EQUAL = 1.05

Changes = dict[str, dict[str, Any]]  # section -> key -> value


@dataclass(frozen=True)
class Sizes:
    """The sizes that may be chosen; a key that is given has one value.

    engines, trainers: numbers of engines and of trainers' devices; None for any.
    shards: devices of an engine.
    recompute: the cheapest first.
    max_sequences: on an engine; None for as many as its cache holds.
    """

    devices: int
    engines: int | None
    trainers: int | None
    shards: Sequence[int]
    tensor: Sequence[int]
    stages: Sequence[int]
    experts: Sequence[int]
    context: Sequence[int]
    recompute: Sequence[str]
    offload: Sequence[bool]
    colocate: Sequence[bool]
    max_sequences: int | None = None


@dataclass(frozen=True)
class Fitting:
    """A combination of sizes that fits.

    seconds: estimate of an iteration.
    work_s: seconds of full engines and trainers that never wait for each other, which no order of
        the same work can undercut.
    together: whether each device both decodes and trains.
    changes: what the combination changes in the configuration, by section and key.
    """

    seconds: float
    work_s: float
    together: bool
    changes: Changes

    @property
    def layout(self) -> tuple[int, ...]:
        """Parallel sizes and numbers, without recomputation and offload."""
        trainer, rollout = self.changes["trainer"], self.changes["rollout"]
        sizes = [
            trainer[key]
            for key in (
                "devices",
                "tensor_parallel",
                "pipeline_parallel",
                "expert_parallel",
                "context_parallel",
            )
        ]
        return (*sizes, rollout["engines"], rollout["tensor_parallel"])


def fastest(
    basis: Basis, sizes: Sizes, max_predicted: int, *, iterations: int | None = None
) -> list[tuple[Predicted, Config]]:
    """Predicts the `max_predicted` combinations of each mode that look best, and then as many
    with the engines of the fastest of these.

    Returns (prediction, configuration) of each, the fastest first; nothing where nothing fits.
    """
    combinations = fitting(basis, sizes)
    tried: list[tuple[Predicted, Config]] = []
    left: list[Config] = []

    def predict(configs: Sequence[Config]) -> None:
        for config in configs:
            tried.append((basis.predict(config, iterations=iterations), config))
        tried.sort(key=lambda item: item[0].iteration_s)

    for together in dict.fromkeys(combination.together for combination in combinations):
        mode = [combination for combination in combinations if combination.together == together]
        worth = _worth_predicting(basis, mode)
        predict(worth[:max_predicted])
        left += worth[max_predicted:]
    if tried:
        engines = _engines(tried[0][1])
        predict([config for config in left if _engines(config) == engines][:max_predicted])
    return tried


def _engines(config: Config) -> tuple[bool, int, int]:
    """Returns what tells engines apart: whether they are on trainers' devices, number and size."""
    rollout = config.rollout
    return config.placement.colocate, rollout.engines, rollout.tensor_parallel


def _worth_predicting(basis: Basis, combinations: Sequence[Fitting]) -> list[Config]:
    """Returns the allowed combinations, the best of each engine size before all others where the
    estimates are nearly equal.

    The estimate knows no waves: engines with few places for sequences have a last one that is
    nearly empty, which only the prediction sees.
    """
    firsts: list[Config] = []
    others: list[Config] = []
    engine_sizes = set()
    best_s = None
    for seconds, config in _allowed(basis, combinations):
        best_s = best_s or seconds
        shards = config.rollout.tensor_parallel
        if shards not in engine_sizes and seconds <= _NEARLY_EQUAL * best_s:
            engine_sizes.add(shards)
            firsts.append(config)
        else:
            others.append(config)
    return firsts + others


def first_allowed(basis: Basis, combinations: Sequence[Fitting]) -> Config | None:
    """Returns the best combination that breaks no rule; None where all do."""
    for _, config in _allowed(basis, combinations):
        return config
    return None


def _allowed(basis: Basis, combinations: Sequence[Fitting]) -> Iterator[tuple[float, Config]]:
    """Yields (estimate in seconds, configuration) of the combinations, given the fastest first,
    that break no rule and are worth a prediction; for each layout only the best recomputation and
    offload.
    """
    best_s = None
    layouts = set()
    for combination in combinations:
        if best_s is not None and combination.seconds > _WORTH_PREDICTING * best_s:
            return
        if combination.layout in layouts:
            continue
        config = with_changes(basis.base, combination.changes, basis.spec)
        if config is None or (combination.together and not _within_nodes(config)):
            continue
        best_s = best_s or combination.seconds
        layouts.add(combination.layout)
        yield combination.seconds, config


def fitting(basis: Basis, sizes: Sizes) -> list[Fitting]:
    """Returns every combination that fits, the fastest by the estimate first; among equals the one
    that recomputes and moves less.
    """
    search = _Search(basis, sizes)
    combinations: list[Fitting] = []
    for together in sizes.colocate:
        combinations += search.fitting_in_mode(together)
    return sorted(combinations, key=lambda combination: combination.seconds)


class _Search:
    """The combinations of `sizes` that fit; keeps what was estimated for a layout."""

    def __init__(self, basis: Basis, sizes: Sizes) -> None:
        self.basis = basis
        self.sizes = sizes
        self.updates = work(basis.base).updates
        self.shapes = basis.workload.draw(basis.base, 0, NUM_SHAPES)
        self.device_bytes = device_bytes(basis.typical)

        lengths: list[int] = []
        for shape in self.shapes:
            lengths += shape.lengths
        mean_length = statistics.mean(lengths)
        self.tail_steps = max(lengths) - mean_length
        group_size = basis.base.rollout.responses_per_prompt
        self.mean_held = mean_length + basis.workload.prompt_mean / group_size

        self._engine_s: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._train_s: dict[tuple[Any, ...], float] = {}

    def fitting_in_mode(self, together: bool) -> Iterator[Fitting]:
        """Yields what fits with engines on the trainers' devices, or else beside them."""
        sizes = self.sizes
        for trainers in self._numbers_of_trainers(together):
            decoding = sizes.devices if together else sizes.devices - trainers
            for stages, tensor, experts, context in itertools.product(
                sizes.stages, sizes.tensor, sizes.experts, sizes.context
            ):
                layout = {
                    "devices": trainers,
                    "tensor_parallel": tensor,
                    "pipeline_parallel": stages,
                    "expert_parallel": experts,
                    "context_parallel": context,
                }
                for config, changes, train_s in self._trainers(layout, together):
                    yield from self._with_engines(config, changes, train_s, decoding, together)

    def _numbers_of_trainers(self, together: bool) -> list[int]:
        """Returns how many trainer ranks there may be."""
        devices = self.sizes.devices
        trainers = self.sizes.trainers
        if together:
            return [devices] if trainers in (None, devices) else []
        if trainers is not None:
            return [trainers] if trainers < devices else []
        return [number for number in eighths(devices) if number != devices]

    def _trainers(
        self, layout: dict[str, int], together: bool
    ) -> Iterator[tuple[Config, Changes, float]]:
        """Yields (configuration, changes, seconds of training) for a layout, with every kind of
        recomputation and offload with which it fits.
        """
        placement = {"colocate": together}
        base = _with_unchecked(self.basis.base, {"trainer": layout, "placement": placement})
        mesh = base.mesh
        if mesh.size != layout["devices"] or mesh.expert != layout["expert_parallel"]:
            return
        if not mesh.shares(base.schedule.prompts_per_iteration):
            return
        if base.groups_per_replica % self.updates or not _divides(base, self.basis):
            return
        for recompute, offload in itertools.product(self.sizes.recompute, self.sizes.offload):
            changes: Changes = {
                "trainer": {**layout, "recompute": recompute},
                "optimizer": {"offload": offload},
            }
            config = _with_unchecked(base, changes)
            memory = trainer_memory(config, self.basis.spec)
            if self.device_bytes is not None and memory.total > USABLE * self.device_bytes:
                continue
            key = (*layout.values(), recompute, offload)
            if key not in self._train_s:
                self._train_s[key] = self._training_s(config)
            yield config, changes, self._train_s[key]

    def _with_engines(
        self, config: Config, changes: Changes, train_s: float, decoding: int, together: bool
    ) -> Iterator[Fitting]:
        """Yields every size of engine that holds enough sequences on `decoding` devices."""
        for shards in self.sizes.shards:
            engines = decoding // shards
            if decoding % shards or engines < 1 or self.sizes.engines not in (None, engines):
                continue
            rollout: dict[str, Any] = {"engines": engines, "tensor_parallel": shards}
            whole = _with_unchecked(config, {"rollout": rollout})
            if together and self.device_bytes is not None:
                share = self._engine_share(whole, self.device_bytes)
                if share <= 0:
                    continue
                rollout["memory_fraction"] = share
                whole = _with_unchecked(whole, {"rollout": rollout})
            max_num_seqs = self._max_sequences(whole, together)
            if max_num_seqs is None:
                continue
            rollout["max_num_seqs"] = max_num_seqs

            generate_s, tail_s = self._generating_s(_with_unchecked(whole, {"rollout": rollout}))
            device_s = generate_s * decoding + train_s * config.trainer.devices
            if together:
                # devices that all change their roles together hide nothing
                is_in_turns = len(role_units(whole)) == 1
                seconds = generate_s + train_s + (1.0 if is_in_turns else _TAIL_LEFT) * tail_s
            else:
                decode_s = generate_s + tail_s
                seconds = max(decode_s, train_s) + _NOT_OVERLAPPED * min(decode_s, train_s)
            yield Fitting(
                seconds=seconds,
                work_s=device_s / self.sizes.devices,
                together=together,
                changes={**changes, "rollout": rollout, "placement": {"colocate": together}},
            )

    def _engine_share(self, config: Config, memory_bytes: int) -> float:
        """Returns the share of a device that an engine has beside its trainer; 0 where the trainer
        does not leave the share that was given.
        """
        left = share_left(config, self.basis.spec, memory_bytes)
        share = self.basis.base.rollout.memory_fraction
        if share is None:
            return left
        return share if share <= left else 0.0

    def _max_sequences(self, config: Config, together: bool) -> int | None:
        """Returns the configured number of sequences if an engine's cache holds them at their mean
        length, else what it holds, as a power of two; None where that is too few, or the model
        cannot be divided so.
        """
        try:
            check_engine(config, self.basis.spec)
        except ConfigError:
            return None
        if self.device_bytes is None:
            return self.basis.base.rollout.max_num_seqs
        memory = engine_memory(config, self.basis.spec, self.device_bytes, shared=together)
        tokens = dict(memory.parts)["KV cache"] / kv_bytes_per_token(config, self.basis.spec)
        sequences = tokens / self.mean_held
        if sequences < MIN_SEQUENCES:
            return None
        configured = self.sizes.max_sequences
        if configured is not None and configured <= sequences:
            return configured
        return min(MAX_SEQUENCES, 2 ** int(math.log2(sequences)))

    def _generating_s(self, config: Config) -> tuple[float, float]:
        """Returns the seconds of full engines, and of the steps that the longest response takes
        beyond a mean one.
        """
        rollout = config.rollout
        key = (rollout.engines, rollout.tensor_parallel, rollout.max_num_seqs)
        if key not in self._engine_s:
            engine = self.basis.costs.engine_for(config, self.basis.spec, self.basis.typical)
            group_s = decode_group_s(config, engine, self.shapes)
            generate_s = config.schedule.prompts_per_iteration * group_s / rollout.engines
            tail_s = self.tail_steps * engine.speed(mean_context(self.shapes)).step_s
            self._engine_s[key] = (generate_s, tail_s)
        return self._engine_s[key]

    def _training_s(self, config: Config) -> float:
        cost = self.basis.costs.trainer_for(config, self.basis.spec, self.basis.typical)
        seconds = GroupSeconds(config, self.basis.spec, cost, self.basis.typical)
        group_s = statistics.mean(shape.train_s(seconds) for shape in self.shapes)
        groups_s = config.schedule.prompts_per_iteration * group_s / config.mesh.data
        return groups_s + self.updates * cost.step_s + cost.border_s


def _divides(config: Config, basis: Basis) -> bool:
    try:
        check_division(config, basis.spec)
    except ConfigError:
        return False
    return True


def _within_nodes(config: Config) -> bool:
    """Returns whether each engine on the trainers' devices, which are given in the order of ranks,
    has devices of one node only.
    """
    if config.placement.nnodes == 1:
        return True
    engine_nodes = [
        nodes_of(config.devices.ranks_beside(index), config.devices.devices_per_node)
        for index in range(config.rollout.engines)
    ]
    return all(len(nodes) == 1 for nodes in engine_nodes)


def _with_unchecked(config: Config, changes: Changes) -> Config:
    """Returns the configuration with changes that are not checked, which takes a hundredth of the
    time of checked ones.
    """
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in changes.items()
    }
    return config.model_copy(update=sections)
