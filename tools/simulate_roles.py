"""Virtual time of one strictly on-policy iteration on N devices: in turns, by the best split, and with roles that follow the work.

    python tools/simulate_roles.py [--devices 8,16,64,256] [--seeds 2]

The policy is the one that runs use (pa_npu/dispatch/roles.py). It knows what a coordinator knows:
the speeds, the lengths of earlier responses, and which groups have ended. Groups go out by the
longest response that their prompts had before, and a decision is made no more often than its cost
allows. Engines are simulated one by one, with every sequence's true length, which the policy does
not see. A group is trained by a replica of R devices in its work / R; a change of roles costs 1% of
what decoding takes on all devices.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from pa_npu.dispatch.roles import Rest, decoding_units, trained_s
from pa_npu.dispatch.schedule import EngineSpeed

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """A run, of any number of devices. spread: of the logarithms of lengths, of `mean` tokens, up
    to `limit`. most: sequences on an engine. ratio: training over decoding, on all devices."""

    name: str
    devices: int
    groups: int
    size: int
    mean: int
    limit: int
    spread: float
    max_sequences: int
    ratio: float
    step_s: float = 0.018
    sequence_s: float = 0.000045
    prompt_token_s: float = 0.00001


SHAPES = (  # on 8 devices
    Shape("7B, answers of 200", 8, 256, 8, 200, 1024, 0.6, 512, 1.9),
    Shape("7B, the same, balanced", 8, 256, 8, 200, 1024, 0.6, 512, 1.0),
    Shape("7B, equal lengths", 8, 256, 8, 512, 512, 0.0, 512, 1.0),
    Shape("7B, 2k to 8k", 8, 128, 8, 2000, 8192, 0.8, 256, 0.7),
    Shape("7B, 4k to 16k", 8, 128, 16, 4000, 16384, 0.9, 256, 0.5),
    Shape("32B, 2k to 8k", 8, 128, 8, 2000, 8192, 0.8, 256, 0.7, 0.03, 0.00009, 0.00004),
    Shape("32B, 4k to 16k", 8, 128, 16, 4000, 16384, 0.9, 256, 0.5, 0.03, 0.00009, 0.00004),
)
MAX_GROUPS = 1024  # of an iteration, however many devices there are
# Seconds of a core that a decision takes per sequence in flight (20 rules, x86-64), and the share
# that decisions may take.
_DECISION_S = 5e-6
_SHARE_OF_CORE = 0.01


def on(shape: Shape, devices: int) -> Shape:
    """Returns the shape with as many groups per device, up to MAX_GROUPS."""
    return replace(
        shape, devices=devices, groups=min(MAX_GROUPS, shape.groups * devices // shape.devices)
    )


@dataclass(frozen=True)
class Ended:
    """Seconds: the iteration, its decoding; units that changed before the end."""

    end_s: float
    decoded_s: float
    changes: int


def draw(shape: Shape, seed: int, visit: int = 1) -> Lengths:
    """Lengths [groups, size]; half of their variance is the prompt's. visit: how often the prompts
    have come before.
    """
    if not shape.spread:
        return np.full((shape.groups, shape.size), shape.mean)
    noise = np.random.default_rng([seed, 0]).normal(0, 0.7 * shape.spread, (shape.groups, 1))
    visit_noise = np.random.default_rng([seed, 1, visit]).normal(
        0, 0.714 * shape.spread, (shape.groups, shape.size)
    )
    noise = noise + visit_noise
    return np.clip(np.exp(np.log(shape.mean) - shape.spread**2 / 2 + noise), 1, shape.limit).astype(
        np.int64
    )


class _Engine:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.now_s = 0.0
        self.steps = 0.0
        self.blocked_s = 0.0
        # ends at step, group, began at step (negative: moved here)
        self.running: list[tuple[float, int, int]] = []

    def step_s(self) -> float:
        return self.shape.step_s + self.shape.sequence_s * len(self.running)

    def end_s(self) -> float:
        return (
            self.now_s + (self.running[0][0] - self.steps) * self.step_s()
            if self.running
            else np.inf
        )

    def advance(self, now_s: float) -> None:
        if self.running and now_s > self.now_s:
            self.steps = min(self.running[0][0], self.steps + (now_s - self.now_s) / self.step_s())
        self.now_s = max(self.now_s, now_s)

    def add(self, tokens: float, group: int, written: float = 0.0) -> None:
        heapq.heappush(self.running, (self.steps + tokens, group, int(self.steps - written)))


def iterate(
    shape: Shape,
    replica: int,
    lengths: Lengths,
    earlier: Lengths,
    mode: str,
    engines_of_split: int = 0,
) -> Ended:
    """One iteration. mode: turns, roles, or split, with so many engines. earlier: lengths that the
    policy has seen, of the same prompts."""
    decode_alone_s = (
        float(np.sum(lengths))
        * (shape.step_s / shape.max_sequences + shape.sequence_s)
        / shape.devices
    )
    trains_s = _work(lengths, shape) / replica
    change_s = 0.01 * decode_alone_s
    count = engines_of_split if mode == "split" else shape.devices
    engines = [_Engine(shape) for _ in range(count)]
    order = list(np.argsort(-earlier.max(1), kind="stable"))
    left = np.full(shape.groups, shape.size)
    number = 0
    began = {}
    units = [list(range(at, at + replica)) for at in range(0, count, replica)]
    free_at: dict[int, float] = {}
    ended: list[tuple[float, int]] = []
    speed = EngineSpeed(shape.step_s, shape.sequence_s, shape.prompt_token_s)
    clock = due_s = 0.0

    def admit(engine: _Engine) -> None:
        nonlocal number
        while number < shape.groups and len(engine.running) + shape.size <= shape.max_sequences:
            for tokens in lengths[order[number]]:
                engine.add(int(tokens), int(order[number]))
            began[int(order[number])] = engine
            number += 1

    while number < shape.groups:  # in turn, a group each
        with_room = [
            engine for engine in engines if len(engine.running) + shape.size <= shape.max_sequences
        ]
        if not with_room:
            break
        engine = min(with_room, key=lambda engine: len(engine.running))
        for tokens in lengths[order[number]]:
            engine.add(int(tokens), int(order[number]))
        number += 1
    living = [k for unit in units for k in unit] if mode == "roles" else list(range(count))
    while any(engines[k].running for k in living):
        engine = min((engines[k] for k in living if engines[k].running), key=_Engine.end_s)
        clock = engine.end_s()
        engine.advance(clock)
        engine.steps = engine.running[0][0]
        done = False
        while engine.running and engine.running[0][0] <= engine.steps:
            group = heapq.heappop(engine.running)[1]
            left[group] -= 1
            if not left[group]:
                ended.append((clock, group))
                done = True
        admit(engine)
        decoding = [unit for unit in units if unit[0] in living]
        if (
            mode != "roles"
            or number < shape.groups
            or not done
            or len(decoding) < 2
            or clock < due_s
        ):
            continue
        due_s = clock + sum(len(engines[k].running) for k in living) * _DECISION_S / _SHARE_OF_CORE
        wanted = _decide(
            shape,
            replica,
            engines,
            decoding,
            ended,
            free_at,
            trains_s,
            earlier,
            speed,
            change_s,
            clock,
        )
        for _ in range(len(decoding) - wanted):
            decoding = [unit for unit in units if unit[0] in living]
            unit = min(decoding, key=lambda unit: sum(len(engines[k].running) for k in unit))
            moved = []
            for k in living:
                engines[k].advance(clock)
            for k in unit:
                moved += [
                    (end - engines[k].steps, group, engines[k].steps - at)
                    for end, group, at in engines[k].running
                ]
                engines[k].running = []
                living.remove(k)
                free_at[k] = clock + change_s
            for tokens, group, written in sorted(moved, reverse=True):
                target = min((engines[k] for k in living), key=lambda engine: len(engine.running))
                target.now_s += shape.prompt_token_s * (written + 200)
                target.add(tokens, group, written)
    decoded_s = max([clock, *(e.now_s for e in engines)])
    if mode == "split":
        free = [0.0] * max(1, (shape.devices - count) // replica)
    elif mode == "turns":
        free = [decoded_s + change_s] * (shape.devices // replica)
    else:
        free = [max(free_at.get(k, engines[k].now_s + change_s) for k in unit) for unit in units]
    return Ended(
        max(
            decoded_s,
            trained_s(
                sorted((at, trains_s[g]) for at, g in ended),
                free,
                shape.size if mode == "roles" else 1,
            ),
        ),
        decoded_s,
        len(free_at) // replica,
    )


def _decide(
    shape: Shape,
    replica: int,
    engines: list[_Engine],
    decoding: list[list[int]],
    ended: list[tuple[float, int]],
    free_at: dict[int, float],
    trains_s: npt.NDArray[np.float64],
    earlier: Lengths,
    speed: EngineSpeed,
    change_s: float,
    clock: float,
) -> int:
    """As the coordinator does: lengths of what is in flight are those of earlier responses that
    were longer than its age.
    """
    seen = np.sort(earlier.ravel()).astype(float)
    remaining: list[float] = []
    groups: list[int] = []
    written: list[float] = []
    numbers: dict[int, int] = {}
    for unit in decoding:
        for k in unit:
            engine = engines[k]
            steps = (
                engine.steps + max(0.0, clock - engine.now_s) / engine.step_s()
                if engine.running
                else engine.steps
            )
            for _, group, at in sorted(engine.running, key=itemgetter(1, 2)):
                age = max(0.0, steps - at)
                longer = seen[np.searchsorted(seen, age, side="right") :]
                quantile = (0.5 + len(groups)) * 0.6180339887 % 1.0
                expected = (
                    longer[int(quantile * len(longer))]
                    if len(longer)
                    else min(1.1 * age, shape.limit)
                )
                remaining.append(max(1.0, expected - age))
                groups.append(numbers.setdefault(group, len(numbers)))
                written.append(age + 200.0)
    costs = float(np.mean(trains_s))
    costs_and_times = _finished(ended, free_at, trains_s, replica, clock)
    rest = Rest(
        np.asarray(remaining), np.asarray(groups, np.int64), np.asarray(written), len(decoding), float(replica), 1.0,
        np.full(len(numbers), costs), costs_and_times[0], costs_and_times[1], shape.max_sequences, shape.size, change_s,
    )  # fmt: skip
    return decoding_units(rest, speed).units


def _finished(
    ended: list[tuple[float, int]],
    free_at: dict[int, float],
    trains_s: npt.NDArray[np.float64],
    replica: int,
    clock: float,
) -> tuple[list[float], list[float]]:
    """(seconds of finished groups that nobody has begun, when each training replica is free), from
    now.
    """
    units = sorted({k // replica: at for k, at in free_at.items()}.items())
    waiting = sorted(((at, trains_s[g]) for at, g in ended), key=itemgetter(0))
    if not units:
        return [cost for _, cost in waiting], []
    free = [at for _, at in units]
    heapq.heapify(free)
    ready: list[float] = []
    number = 0
    while free[0] < clock and (number < len(waiting) or ready):
        at = heapq.heappop(free)
        if not ready:
            at = max(at, waiting[number][0])
        while number < len(waiting) and waiting[number][0] <= at:
            heapq.heappush(ready, -waiting[number][1])
            number += 1
        heapq.heappush(free, at - heapq.heappop(ready))
    return [-cost for cost in ready] + [cost for _, cost in waiting[number:]], [
        max(0.0, at - clock) for at in free
    ]


def _work(lengths: Lengths, shape: Shape) -> npt.NDArray[np.float64]:
    """Device seconds of training each group: `ratio` times what decoding takes on all devices, by
    tokens.
    """
    work = lengths.sum(1) + 200.0
    decoded_s = _decoding_s(lengths, shape)
    return np.asarray(work / work.sum() * decoded_s * shape.devices * shape.ratio)


_DECODING: dict[tuple[Shape, int], float] = {}


def _decoding_s(lengths: Lengths, shape: Shape) -> float:
    key = (shape, int(lengths.sum()))
    if key not in _DECODING:
        ends = np.sort(lengths.ravel())[::-1]
        places = shape.devices * shape.max_sequences
        waves = [float(ends[at : at + places].max()) for at in range(0, len(ends), places)]
        per_engine = min(len(ends), places) / shape.devices
        _DECODING[key] = sum(waves) * (shape.step_s + 0.5 * shape.sequence_s * per_engine)
    return _DECODING[key]


def row(
    shape: Shape, replica: int, seeds: range, splits: bool = True
) -> tuple[float, float, float, float, float]:
    """Mean seconds: best split, turns, roles; floor; changes."""
    results = []
    for seed in seeds:
        lengths = draw(shape, seed)
        earlier = draw(shape, seed, visit=0)
        turns = iterate(shape, replica, lengths, earlier, "turns").end_s
        roles = iterate(shape, replica, lengths, earlier, "roles")
        counts = [
            e
            for e in range(replica, shape.devices, max(replica, shape.devices // 8))
            if not (shape.devices - e) % replica
        ]
        split = (
            min(
                (iterate(shape, replica, lengths, earlier, "split", e).end_s for e in counts),
                default=np.inf,
            )
            if splits
            else np.inf
        )
        floor = max(
            float(lengths.max()) * shape.step_s, float(_work(lengths, shape).sum()) / shape.devices
        )
        results.append((split, turns, roles.end_s, floor, float(roles.changes)))
    return tuple(np.mean(results, axis=0).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--devices", default="8,16,64,256")
    args = parser.parse_args()
    print(
        "| case | devices | groups | R | best split s | turns s | roles s | turns / roles | split "
        "/ roles | changes |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for devices, usual, replica in itertools.product(
        map(int, args.devices.split(",")), SHAPES, (1, 4)
    ):
        shape = on(usual, devices)
        split, turns, roles, _, changes = row(shape, replica, range(args.seeds))
        print(
            f"| {shape.name} | {devices} | {shape.groups} | {replica} | {split:.0f} | {turns:.0f} "
            f"| {roles:.0f} | {turns / roles:.2f} | {split / roles:.2f} | {changes:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
