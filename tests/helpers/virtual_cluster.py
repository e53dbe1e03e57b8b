"""Clusters in virtual time whose engines, trainers and lengths are known, and runs of the schedule controller on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pa_npu.dispatch.schedule import ORDERS, OrderName, Schedule, dispatch_order, same_windows
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import (
    EngineSpeed,
    GroupOutlook,
    IterationOutlook,
    IterationTimes,
    Prediction,
    Rules,
    VirtualCluster,
    VirtualGroup,
)
from tools.optimum import optimum_s
from tools.simulate import Outcome, simulate


@dataclass(frozen=True)
class Lengths:
    """median * exp(prompt_sigma x + response_sigma y) tokens, x by prompt and y by response, cut at
    limit; sigmas 0: all equal.
    """

    mean: float
    limit: int
    prompt_sigma: float = 0.0
    response_sigma: float = 0.0

    @property
    def equal(self) -> bool:
        return not (self.prompt_sigma or self.response_sigma)

    @functools.cached_property
    def median(self) -> float:
        """With which the mean is what it should be, by bisection over a large sample."""
        rng = np.random.default_rng(12345)
        draw = np.exp(
            self.prompt_sigma * rng.standard_normal(20000)
            + self.response_sigma * rng.standard_normal(20000)
        )
        low, high = 1.0, 4.0 * self.mean
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if np.minimum(middle * draw, self.limit).mean() < self.mean
                else (low, middle)
            )
        return low


@dataclass(frozen=True)
class Case:
    """train: seconds of training all groups on one replica's worth of devices, over the shortest
    generation (Tt / Tg).
    """

    name: str
    engines: tuple[EngineSpeed, ...]
    groups: int
    responses: int
    prompt: int
    lengths: Lengths
    max_num_seqs: int
    train: float
    replicas: int = 1
    border_s: float = 0.0
    noise: float = 0.2  # of the logarithm of what is known of a prompt's length

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"engine {number}" for number in range(len(self.engines)))

    @property
    def cluster(self) -> VirtualCluster:
        return VirtualCluster(
            dict(zip(self.names, self.engines, strict=True)), self.max_num_seqs, self.replicas
        )

    @property
    def most_places(self) -> int:
        return max(
            1, min(self.max_num_seqs // self.responses, math.ceil(self.groups / len(self.engines)))
        )

    def iteration(self, number: int) -> tuple[list[VirtualGroup], list[GroupOutlook]]:
        """Groups whose training costs a second per token, and what is known of them."""
        rng = np.random.default_rng([number, 77])
        spec = self.lengths
        groups, outlooks = [], []
        signal = (
            spec.prompt_sigma**2 / (spec.prompt_sigma**2 + self.noise**2)
            if spec.prompt_sigma
            else 0.0
        )
        spread = np.exp(
            spec.response_sigma * np.random.default_rng(1).standard_normal((4000, self.responses))
        )
        to_longest, to_mean = float(spread.max(1).mean()), float(spread.mean())
        for index in range(self.groups):
            x = spec.prompt_sigma * rng.standard_normal()
            draw = spec.median * np.exp(
                x + spec.response_sigma * rng.standard_normal(self.responses)
            )
            lengths = tuple(float(round(n)) for n in np.clip(draw, 1, spec.limit))
            known = spec.median * math.exp(
                signal * (x + self.noise * rng.standard_normal())
                + 0.5 * (1 - signal) * spec.prompt_sigma**2
            )
            if spec.equal:
                lengths, known = (spec.mean,) * self.responses, spec.mean
            mean, longest = min(known * to_mean, spec.limit), min(known * to_longest, spec.limit)
            tokens = self.responses * (self.prompt + mean)
            groups.append(
                VirtualGroup(index, self.prompt, lengths, self.prompt + sum(lengths), tokens)
            )
            outlooks.append(GroupOutlook(self.prompt, longest, mean))
        return groups, outlooks

    @functools.cached_property
    def shortest_generation_s(self) -> float:
        """The shortest generation of all constant windows and orders, without trainers."""
        samples = [
            self.iteration(1000 + number) for number in range(1 if self.lengths.equal else 3)
        ]
        ends = [
            np.mean(
                [
                    simulate(self.cluster, self._scaled(g, 0.0), self.constant(o, w)).generated_s
                    for g, o in samples
                ]
            )
            for w in self.windows
        ]
        return float(min(ends))

    @functools.cached_property
    def seconds_per_token(self) -> float:
        samples = [self.iteration(1000 + number)[0] for number in range(3)]
        work = np.mean([sum(group.train_s for group in groups) for groups in samples])
        return float(self.train * self.shortest_generation_s * self.replicas / work)

    @property
    def windows(self) -> list[int]:
        """Groups per engine."""
        top = self.most_places
        share = math.ceil(self.groups / len(self.engines))
        if top <= 16:
            return list(range(1, top + 1))
        grid = {max(1, round(top * 2 ** (-i / 3))) for i in range(16)}
        return sorted(grid | {n for k in range(1, 9) if (n := math.ceil(share / k)) <= top})

    def constant(
        self, outlooks: Sequence[GroupOutlook], places: int, order: OrderName = "longest-first"
    ) -> Schedule:
        indices = dispatch_order(order, [outlook.longest for outlook in outlooks])
        return Schedule(order, tuple(indices), (same_windows(self.names, places * self.responses),))

    def work(self, number: int) -> tuple[list[VirtualGroup], list[GroupOutlook]]:
        groups, outlooks = self.iteration(number)
        return self._scaled(groups, self.seconds_per_token), outlooks

    def bound_s(self, numbers: Sequence[int]) -> float:
        """max(Tg, Tt), Tg of the best constant window."""
        train = np.mean(
            [sum(g.train_s for g in self.work(number)[0]) / self.replicas for number in numbers]
        )
        samples = [self.work(number) for number in numbers]
        generate = min(
            np.mean(
                [
                    simulate(self.cluster, self._scaled(g, 0.0), self.constant(o, w)).generated_s
                    for g, o in samples
                ]
            )
            for w in self.windows
        )
        return float(max(train, generate))

    def best_constant_s(
        self, numbers: Sequence[int], orders: Sequence[OrderName] = ORDERS
    ) -> float:
        """Mean seconds under the constant window that is best in hindsight, longest first."""
        samples = [self.work(number) for number in numbers]
        return min(
            float(
                np.mean(
                    [
                        simulate(self.cluster, g, self.constant(o, w, order)).end_s
                        for g, o in samples
                    ]
                )
            )
            for w in self.windows
            for order in orders
        )

    def optimum_s(self, numbers: Sequence[int]) -> float:
        """Mean seconds with all lengths known, of the better of running backwards and windows by
        true lengths.
        """
        ends = []
        for number in numbers:
            groups, _ = self.work(number)
            known = [
                GroupOutlook(g.prompt_tokens, g.longest, sum(g.lengths) / len(g.lengths))
                for g in groups
            ]
            windows = same_windows(self.names, self.most_places * self.responses)
            forwards = (
                simulate(self.cluster, groups, self.constant(known, places, order)).end_s
                for places in {
                    self.most_places,
                    math.ceil(0.75 * self.most_places),
                    math.ceil(self.most_places / 2),
                }
                for order in ORDERS
            )
            ends.append(min(optimum_s(self.cluster, groups, windows), *forwards))
        return float(np.mean(ends))

    @staticmethod
    def _scaled(groups: Sequence[VirtualGroup], factor: float) -> list[VirtualGroup]:
        return [replace(group, train_s=factor * group.train_s) for group in groups]


def rules_of(case: Case, **changes: object) -> Rules:
    rules = Rules(
        "auto",
        "auto",
        case.responses,
        case.max_num_seqs,
        case.lengths.limit,
        case.replicas,
        "completion",
        1,
    )
    return replace(rules, **changes)


@dataclass(frozen=True)
class Ran:
    outcome: Outcome
    schedule: Schedule
    prediction: Prediction

    @property
    def end_s(self) -> float:
        return self.outcome.end_s


def run_controller(
    case: Case,
    iterations: int,
    rules: Rules | None = None,
    disturb: Callable[[int, VirtualCluster], VirtualCluster] = lambda number, cluster: cluster,
    streams: Callable[[int], bool] = lambda number: True,
    noise: float = 0.0,
) -> list[Ran]:
    """A run of the controller in virtual time. disturb: gives the cluster of an iteration. noise:
    of what is measured.
    """
    rules = rules or rules_of(case)
    controller = ScheduleController(rules, lambda prompt, lengths: prompt + sum(lengths))
    rng = np.random.default_rng(3)
    results = []
    for number in range(iterations):
        groups, outlooks = case.work(number)
        cluster = replace(disturb(number, case.cluster), order=rules.order, updates=rules.updates)
        schedule = controller.begin_iteration(
            IterationOutlook(outlooks, tuple(cluster.engines), streams(number))
        )
        outcome = simulate(cluster, groups, schedule, streams=streams(number))
        for timing in outcome.timings:
            stretched = timing.start_s + (timing.end_s - timing.start_s) * rng.lognormal(0.0, noise)
            controller.observe(replace(timing, end_s=stretched))
        prediction = controller.end_iteration(
            IterationTimes(outcome.end_s + case.border_s, case.border_s, outcome.train_s, 0.0)
        )
        results.append(Ran(outcome, schedule, prediction))
    return results


CPU_ENGINE = EngineSpeed(0.003, 0.0005, 5e-5)  # a 2.4 M parameter model on a core
NPU_ENGINE = EngineSpeed(0.018, 0.000045, 4.5e-5)  # a 7B model on a device
EQUAL, HEAVY = Lengths(512, 512), Lengths(400, 2048, 0.6, 0.4)
CPU = Case("cpu", (CPU_ENGINE,), 16, 8, 128, Lengths(64, 64), 128, 0.77, border_s=0.25)
NPU = Case("7b", (NPU_ENGINE,) * 4, 128, 8, 300, EQUAL, 256, 1.0, border_s=1.0)
LONG = Case(
    "16k",
    (EngineSpeed(0.018, 0.00018, 4.5e-5),) * 8,
    64,
    8,
    500,
    Lengths(4000, 16384, 0.6, 0.4),
    40,
    1.0,
    2,
    border_s=2.0,
)
