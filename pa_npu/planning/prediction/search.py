"""Sizes of a run on a given number of devices: all that fit into memory, by a quick estimate; the best of them by prediction.

fitting     every combination of sizes with which engines and trainers fit, the fastest by a quick
            estimate first
fastest     iterations of the best few in virtual time

Some thousand combinations are judged. So what trainers cost is computed once for each of their
layouts and what engines cost once for each of theirs; only what is predicted is checked by the
rules of the configuration.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pa_npu.config.mesh import nodes_of
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.planning.amounts import work
from pa_npu.planning.memory import (
    GIB,
    USABLE,
    engine_memory,
    kv_bytes_per_token,
    left_share,
    trainer_memory,
)
from pa_npu.planning.model_rules import check_division, check_engine
from pa_npu.planning.prediction.costs import GroupSeconds, computed_prompt_tokens
from pa_npu.planning.prediction.divisions import LEAST_SEQUENCES, MOST_SEQS, SAMPLE, changed
from pa_npu.planning.prediction.virtual_run import Basis, Predicted
from pa_npu.planning.prediction.workload import Shape, mean_context

_EIGHTHS = 8
# Of the shorter side of a split, what does not overlap with the longer one: the head and the tail
# of an iteration.
_NOT_OVERLAPPED = 0.2
# Of what the longest response takes beyond a mean one, what is not hidden behind training on the
# same devices.
_TAIL_LEFT = 0.5
# Combinations whose estimate is further behind the best of their mode are not predicted.
_WORTH_PREDICTING = 1.25

Changes = dict[str, dict[str, Any]]  # section -> key -> value


@dataclass(frozen=True)
class Sizes:
    """Which sizes may be chosen; one value of a key is a value that is given. engines, trainers:
    None for any.

    shards: of an engine. recompute: cheapest first. sequences: the most on an engine; None for what
    its cache holds.
    """

    devices: int
    engines: int | None
    trainers: int | None
    shards: Sequence[int]
    tensor: Sequence[int]
    stages: Sequence[int]
    experts: Sequence[int]
    recompute: Sequence[str]
    offload: Sequence[bool]
    colocate: Sequence[bool]
    sequences: int | None = None


@dataclass(frozen=True)
class Fitting:
    """A combination that fits. seconds: of an iteration, estimated. changes: of the configuration
    that was given.

    work_s: what full engines and trainers take that never wait for each other, which no order of
    the same work can undercut.
    """

    seconds: float
    work_s: float
    together: bool
    changes: Changes

    @property
    def layout(self) -> tuple[int, ...]:
        """Parallel sizes and numbers, whatever is recomputed or moved to the host."""
        trainer, rollout = self.changes["trainer"], self.changes["rollout"]
        sizes = [
            trainer[key]
            for key in ("devices", "tensor_parallel", "pipeline_parallel", "expert_parallel")
        ]
        return (*sizes, rollout["engines"], rollout["tensor_parallel"])


def fastest(
    basis: Basis, sizes: Sizes, most: int, *, iterations: int | None = None
) -> list[tuple[Predicted, Config]]:
    """Predicts the `most` combinations of each mode that look best; returns them, the fastest
    first, none where nothing fits.
    """
    found = fitting(basis, sizes)
    tried: list[tuple[Predicted, Config]] = []
    for together in dict.fromkeys(each.together for each in found):
        of_mode = [each for each in found if each.together == together]
        for config in itertools.islice(_allowed(basis, of_mode), most):
            tried.append((basis.predicted(config, iterations=iterations), config))
    return sorted(tried, key=lambda item: item[0].iteration_s)


def first_allowed(basis: Basis, found: Sequence[Fitting]) -> Config | None:
    """Returns the best combination that breaks no rule."""
    return next(_allowed(basis, found), None)


def _allowed(basis: Basis, found: Sequence[Fitting]) -> Iterator[Config]:
    """Yields what no rule forbids, and is worth a prediction; of each layout the best way to hold
    it in memory alone.
    """
    best_s, seen = None, set()
    for each in found:
        if best_s is not None and each.seconds > _WORTH_PREDICTING * best_s:
            return
        if each.layout in seen:
            continue
        config = changed(basis.base, each.changes, basis.spec)
        if config is None or (each.together and not _within_nodes(config)):
            continue
        best_s = best_s or each.seconds
        seen.add(each.layout)
        yield config


def fitting(basis: Basis, sizes: Sizes) -> list[Fitting]:
    """Everything that fits, the fastest by the estimate first; of equals the one that recomputes
    and moves less.
    """
    search = _Search(basis, sizes)
    found = [each for together in sizes.colocate for each in search.of_mode(together)]
    return sorted(found, key=lambda each: each.seconds)


@dataclass
class _Search:
    basis: Basis
    sizes: Sizes
    shapes: list[Shape] = field(init=False)
    _engine_s: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    _train_s: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.updates = work(self.basis.base).updates
        self.shapes = self.basis.workload.draw(self.basis.base, 0, SAMPLE)
        typical = self.basis.typical
        self.device_bytes = None if typical.memory_gib is None else typical.memory_gib * GIB
        lengths = [length for shape in self.shapes for length in shape.lengths]
        group = self.basis.base.rollout.responses_per_prompt
        self.mean_held = statistics.mean(lengths) + self.basis.workload.prompt_mean / group

    def of_mode(self, together: bool) -> Iterator[Fitting]:
        """Yields what fits with engines on the trainers' devices, or beside them."""
        sizes = self.sizes
        for trainers in self._shares(together):
            decoding = sizes.devices if together else sizes.devices - trainers
            for layout in itertools.product(sizes.stages, sizes.tensor, sizes.experts):
                for config, changes, train_s in self._trainers(trainers, *layout, together):
                    yield from self._with_engines(config, changes, train_s, decoding, together)

    def _shares(self, together: bool) -> list[int]:
        """Numbers of trainer ranks."""
        devices, given = self.sizes.devices, self.sizes.trainers
        if together:
            return [devices] if given in (None, devices) else []
        if given is not None:
            return [given] if given < devices else []
        return sorted(
            {max(1, min(devices - 1, round(devices * n / _EIGHTHS))) for n in range(1, _EIGHTHS)}
            - {devices}
        )

    def _trainers(
        self, devices: int, stages: int, tensor: int, experts: int, together: bool
    ) -> Iterator[tuple[Config, Changes, float]]:
        """Yields the layout of so many ranks with every way to hold its state and activations in
        memory.
        """
        layout = {
            "devices": devices,
            "tensor_parallel": tensor,
            "pipeline_parallel": stages,
            "expert_parallel": experts,
        }
        base = _with(self.basis.base, {"trainer": layout, "placement": {"colocate": together}})
        mesh = base.mesh
        if (
            mesh.size != devices
            or mesh.expert != experts
            or not mesh.shares(base.schedule.prompts_per_iteration)
        ):
            return
        if base.groups_per_replica % self.updates or not _divides(base, self.basis):
            return
        for recompute, offload in itertools.product(self.sizes.recompute, self.sizes.offload):
            changes: Changes = {
                "trainer": {**layout, "recompute": recompute},
                "optimizer": {"offload": offload},
            }
            config = _with(base, changes)
            memory = trainer_memory(config, self.basis.spec)
            if self.device_bytes is not None and memory.total > USABLE * self.device_bytes:
                continue
            key = (devices, stages, tensor, experts, recompute, offload)
            if key not in self._train_s:
                self._train_s[key] = self._training_s(config)
            yield config, changes, self._train_s[key]

    def _with_engines(
        self, config: Config, changes: Changes, train_s: float, decoding: int, together: bool
    ) -> Iterator[Fitting]:
        """Yields every size of engine that holds enough sequences."""
        for shards in self.sizes.shards:
            engines = decoding // shards
            if decoding % shards or engines < 1 or self.sizes.engines not in (None, engines):
                continue
            rollout: dict[str, Any] = {"engines": engines, "tensor_parallel": shards}
            whole = _with(config, {"rollout": rollout})
            if together and self.device_bytes is not None:
                share = self._share(whole)
                if share <= 0:
                    continue
                rollout["memory_fraction"] = share
                whole = _with(whole, {"rollout": rollout})
            if (most := self._most_sequences(whole, together)) is None:
                continue
            rollout["max_num_seqs"] = most
            generate_s, tail_s = self._generating_s(_with(whole, {"rollout": rollout}))
            seconds = generate_s + _TAIL_LEFT * tail_s + train_s
            work_s = (generate_s * decoding + train_s * config.trainer.devices) / self.sizes.devices
            if not together:
                generate_s += tail_s
                seconds = max(generate_s, train_s) + _NOT_OVERLAPPED * min(generate_s, train_s)
            yield Fitting(
                seconds,
                work_s,
                together,
                {**changes, "rollout": rollout, "placement": {"colocate": together}},
            )

    def _share(self, config: Config) -> float:
        """The share of a device that an engine has beside its trainer; 0 where what was given is
        not left.
        """
        assert self.device_bytes is not None
        left = left_share(config, self.basis.spec, self.device_bytes)
        given = self.basis.base.rollout.memory_fraction
        if given is None:
            return left
        return given if given <= left else 0.0

    def _most_sequences(self, config: Config, together: bool) -> int | None:
        """Sequences that an engine's cache holds at their mean length, as a power of two; None
        where they are too few, or the model cannot be divided so."""
        try:
            check_engine(config, self.basis.spec)
        except ConfigError:
            return None
        if self.device_bytes is None:
            return self.basis.base.rollout.max_num_seqs
        memory = engine_memory(config, self.basis.spec, self.device_bytes, shared=together)
        held = (
            dict(memory.parts)["KV cache"]
            / kv_bytes_per_token(config, self.basis.spec)
            / self.mean_held
        )
        if held < LEAST_SEQUENCES:
            return None
        most = min(MOST_SEQS, 2 ** int(math.log2(held)))
        return most if self.sizes.sequences is None else min(most, self.sizes.sequences)

    def _generating_s(self, config: Config) -> tuple[float, float]:
        """Seconds of full engines, and of the steps that the longest response takes beyond a mean
        one.
        """
        rollout, groups = config.rollout, config.schedule.prompts_per_iteration
        key = (rollout.engines, rollout.tensor_parallel, rollout.max_num_seqs)
        if key not in self._engine_s:
            engine = self.basis.costs.engine_for(config, self.basis.spec, self.basis.typical)
            tokens = statistics.mean(sum(shape.lengths) for shape in self.shapes)
            computed = statistics.mean(
                computed_prompt_tokens(shape.prompt, len(shape.lengths), engine.prefix_block)
                for shape in self.shapes
            )
            speed = engine.speed(mean_context(self.shapes))
            together = max(
                1.0,
                min(rollout.max_num_seqs, groups * rollout.responses_per_prompt / rollout.engines),
            )
            group_s = (
                tokens * (speed.step_s / together + speed.sequence_s)
                + computed * speed.prompt_token_s
            )
            lengths = [length for shape in self.shapes for length in shape.lengths]
            tail_s = (max(lengths) - statistics.mean(lengths)) * speed.step_s
            self._engine_s[key] = (groups * group_s / rollout.engines, tail_s)
        return self._engine_s[key]

    def _training_s(self, config: Config) -> float:
        cost = self.basis.costs.trainer_for(config, self.basis.spec, self.basis.typical)
        seconds = GroupSeconds(config, self.basis.spec, cost, self.basis.typical)
        group_s = statistics.mean(seconds(*shape.trained) for shape in self.shapes)
        steps_s = self.updates * cost.step_s
        return (
            config.schedule.prompts_per_iteration * group_s / config.mesh.data
            + steps_s
            + cost.border_s
        )


def _divides(config: Config, basis: Basis) -> bool:
    try:
        check_division(config, basis.spec)
    except ConfigError:
        return False
    return True


def _within_nodes(config: Config) -> bool:
    """Whether each engine on the trainers' devices has those of one node, which are given in the
    order of ranks.
    """
    beside = (config.ranks_beside(index) for index in range(config.rollout.engines))
    return config.placement.nnodes == 1 or all(
        len(nodes_of(ranks, config.devices_per_node)) == 1 for ranks in beside
    )


def _with(config: Config, changes: Changes) -> Config:
    """The configuration with changes that are not checked, which takes a hundredth of the time."""
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in changes.items()
    }
    return config.model_copy(update=sections)
