"""What the same devices would take in other ways: in turns, split, with roles, one version behind; and which key would gain most.

    compare(config, spec)       predictions of this configuration and of the best sizes of each way,
                                on the same number of devices
    comparison_lines(compared)  these as a plan prints them: what to do, and where a prediction is
                                too close to decide by

As in `prediction`: published figures of a usual device, assumed lengths. Seconds are good to a
factor of two or three; how two ways on the same devices compare is better known, and still a
difference below `TOO_CLOSE` says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.config.words import three_digits
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.prediction.divisions import changed
from pa_npu.planning.prediction.search import Sizes, fastest, first_allowed, fitting
from pa_npu.planning.prediction.virtual_run import Basis, Predicted, assumed_basis
from pa_npu.planning.sizes import choices_of, size_words
from pa_npu.platform.typical import TypicalSpeed, typical_speed

TOO_CLOSE = 0.05
"""Share of an iteration by which two ways must differ for a prediction to tell them apart."""
IDLE = 0.3
"""Share of an iteration from which on a side that waits is worth a warning."""
_SAME = 0.001  # share by which two predictions of the same differ
_LEAST_GAIN = 0.02  # of a change of one key, to be named
_BEHIND = "one version behind"
_TRIED = 2  # combinations of sizes that are predicted for each way
_FREE = (
    "rollout.engines",
    "rollout.tensor_parallel",
    "trainer.devices",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.expert_parallel",
    "trainer.recompute",
    "optimizer.offload",
)
# Keys that are chosen anew alone, each with those that have to follow it.
_ALONE: tuple[tuple[str, ...], ...] = (
    ("trainer.tensor_parallel",),
    ("trainer.pipeline_parallel",),
    ("trainer.expert_parallel",),
    ("trainer.recompute",),
    ("optimizer.offload",),
    ("rollout.max_num_seqs",),
    ("rollout.tensor_parallel", "rollout.engines"),
    ("trainer.devices", "rollout.engines"),
    ("placement.colocate", "trainer.devices", "rollout.engines"),
)


@dataclass(frozen=True)
class Way:
    """One way to use the devices. seconds: of an iteration with its border. *_idle: shares of it."""

    name: str
    sizes: str
    seconds: float
    engines_idle: float
    trainers_idle: float


@dataclass(frozen=True)
class Compared:
    """This configuration, the best of each way, and the change that would gain most.

    change: keys and values; None where none gains. gain: the share of an iteration that it saves.
    together: each device does both.
    work_s: what full engines and trainers take on devices that do both, with the best sizes; None
    where none fit.
    """

    this: Way
    ways: tuple[Way, ...]
    change: dict[str, Any] | None
    gain: float
    iterations: int
    together: bool
    work_s: float | None = None

    @property
    def turns(self) -> Way | None:
        """The same devices as other systems run: all decode, then all train."""
        return next((way for way in self.ways if way.name == "in turns"), None)

    @property
    def best(self) -> Way:
        """The fastest of this configuration and the ways that train what the newest weights
        generated.
        """
        exact = [way for way in self.ways if way.name != _BEHIND]
        return min([self.this, *exact], key=lambda way: way.seconds)


def compare(
    config: Config, spec: ModelSpec, typical: TypicalSpeed | None = None
) -> Compared | None:
    """Predicts the ways; None where a run has no engines, or they are not all its own and alike."""
    if (
        not config.has_engines
        or config.rollout.attach
        or config.rollout.engine_settings
        or config.placement.devices is not None
    ):
        return None
    basis = assumed_basis(config, spec, typical or typical_speed(config.run.device))
    this = _this(basis, config)
    ways = [way for way in _ways(basis, config) if way is not None]
    change, gain = _best_change(basis, config)
    return Compared(
        this=this,
        ways=tuple(ways),
        change=change,
        gain=gain,
        iterations=config.schedule.iterations,
        together=config.placement.colocate,
        work_s=_work_s(basis, config),
    )


def _work_s(basis: Basis, config: Config) -> float | None:
    """What the work takes on devices that do both and never wait, with the sizes that are best for
    that; None where none fit.
    """
    together = replace(choices_of(config, basis.spec, config.num_devices, _FREE), colocate=(True,))
    return min((each.work_s for each in fitting(basis, together)), default=None)


def _this(basis: Basis, config: Config) -> Way:
    if config.schedule.max_staleness:
        return _ahead(basis.predicted(config, streams=False), config, "this")
    return _way(basis.predicted(config, streams=config.schedule.stream), config, "this")


def _ways(basis: Basis, config: Config) -> Iterator[Way | None]:
    """Yields each way with the sizes that are best for it, this configuration's own among them."""
    devices, spec = config.num_devices, basis.spec
    plain: dict[str, dict[str, Any]] = {
        "schedule": {"max_staleness": 0, "stream": True},
        "publish": {"mode": "blocking", "divergence": None},
    }
    exact = changed(config, plain)
    if exact is not None:
        based = replace(basis, base=exact)
        free = choices_of(exact, spec, devices, _FREE)
        together = replace(free, colocate=(True,))
        yield _turns(based, together, config)
        yield _best(based, replace(free, colocate=(False,)), config, "split")
        yield _best(based, together, config, "with roles")
    ahead = changed(
        config,
        {
            "schedule": {"max_staleness": max(1, config.schedule.max_staleness)},
            "placement": {"colocate": False},
        },
    )
    if ahead is not None and config.schedule.iterations > 1:
        yield _one_behind(
            replace(basis, base=ahead), choices_of(ahead, spec, devices, _FREE), config
        )


def _turns(basis: Basis, sizes: Sizes, config: Config) -> Way | None:
    """All devices decode, then all train; no slower than this configuration's own sizes in turns."""
    tried = [
        first_allowed(basis, fitting(basis, sizes)),
        config if config.placement.colocate else None,
    ]
    ways = [
        _way(basis.predicted(each, streams=False), each, "in turns")
        for each in tried
        if each is not None
    ]
    return min(ways, key=lambda way: way.seconds, default=None)


def _best(basis: Basis, sizes: Sizes, config: Config, name: str) -> Way | None:
    """The best sizes of a way; no slower than this configuration's own, where they are of it."""
    ways = [_way(found, each, name) for found, each in fastest(basis, sizes, _TRIED)]
    if config.placement.colocate in sizes.colocate:
        ways.append(_way(basis.predicted(config), config, name))
    return min(ways, key=lambda way: way.seconds, default=None)


def _one_behind(basis: Basis, sizes: Sizes, config: Config) -> Way | None:
    """Engines generate a version while trainers train the one before; the longer side is the
    iteration.
    """
    tried = [each for _, each in fastest(basis, sizes, _TRIED, iterations=1)]
    tried += [] if config.placement.colocate else [config]
    ways = [_ahead(basis.predicted(each, streams=False), each, _BEHIND) for each in tried]
    return min(ways, key=lambda way: way.seconds, default=None)


def _way(found: Predicted, config: Config, name: str) -> Way:
    return Way(name, size_words(config), found.iteration_s, found.engines_idle, found.trainers_idle)


def _ahead(found: Predicted, config: Config, name: str) -> Way:
    """From the two sides of a synchronous prediction."""
    seconds = max(found.generate_s, found.train_s) + found.border_s
    return Way(
        name,
        size_words(config),
        seconds,
        1.0 - found.generate_s / seconds,
        1.0 - found.train_s / seconds,
    )


def _best_change(basis: Basis, config: Config) -> tuple[dict[str, Any] | None, float]:
    """The keys, chosen anew alone, whose change shortens an iteration most, with those that have to
    follow; and by what share.
    """
    behind = bool(config.schedule.max_staleness)

    def seconds(other: Config) -> float:
        if behind:
            return _ahead(basis.predicted(other, streams=False, iterations=1), other, "").seconds
        return basis.predicted(other, streams=config.schedule.stream, iterations=1).iteration_s

    now_s = seconds(config)
    best: tuple[dict[str, Any] | None, float] = (None, 0.0)
    for keys in _ALONE:
        if behind and keys[0] == "placement.colocate":
            continue
        other = first_allowed(
            basis, fitting(basis, choices_of(config, basis.spec, config.num_devices, keys))
        )
        if other is None or not (change := _difference(config, other, keys)):
            continue
        gain = 1.0 - seconds(other) / now_s
        if gain >= _LEAST_GAIN and gain > best[1]:
            best = (change, gain)
    return best


def _difference(config: Config, other: Config, keys: tuple[str, ...]) -> dict[str, Any]:
    values = {
        key: getattr(getattr(other, key.partition(".")[0]), key.partition(".")[2]) for key in keys
    }
    now = {
        key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in keys
    }
    return {key: value for key, value in values.items() if value != now[key]}


def comparison_lines(compared: Compared) -> list[str]:
    """What the same devices take, and what follows from that."""
    this, turns = compared.this, compared.turns
    lines = [
        f"an iteration          {three_digits(this.seconds)} s: {this.sizes}; "
        f"{_idle(this, compared.together)}"
    ]
    lines += [
        f"  {way.name:<20}{three_digits(way.seconds)} s ({way.seconds / this.seconds:.2f} of this): "
        f"{way.sizes}"
        for way in compared.ways
    ]
    lines.append(
        f"the whole run         {_duration(this.seconds * compared.iterations)} for "
        f"{compared.iterations} iterations"
    )
    if turns is not None and compared.work_s is not None:
        least_s = min(compared.work_s, this.seconds, turns.seconds)
        lines.append(
            f"no order below        {three_digits(least_s)} s, which full engines and trainers take; turns "
            f"are {turns.seconds / least_s - 1.0:.0%} above it, and no overlap can gain more"
        )
    if turns is not None:
        gain = turns.seconds / this.seconds - 1.0
        lines.append(f"gain over turns       {_gain_words(gain)}")
    saved = 1.0 - compared.best.seconds / this.seconds
    if saved >= TOO_CLOSE and saved > compared.gain + TOO_CLOSE:
        better = f"{compared.best.sizes}, {compared.best.name}"
        lines.append(
            f"would gain most       several keys, which auto finds: {saved:.0%} less ({better})"
        )
    elif compared.change is not None:
        keys = " ".join(f"{key}={_shown(value)}" for key, value in compared.change.items())
        lines.append(f"would gain most       {keys}: {compared.gain:.0%} less")
    else:
        lines.append(
            "would gain most       no change of a single key shortens an iteration by 2% or more"
        )
    return [*lines, *_warnings(compared)]


def _gain_words(gain: float) -> str:
    if gain < -_SAME:
        return f"none: turns with other sizes are predicted to take {-gain:.0%} less"
    if gain < _SAME:
        return "none: so run, these sizes are in turns, as all devices change together"
    if gain < TOO_CLOSE:
        return (
            f"{gain:.1%}, below {TOO_CLOSE:.0%}: too little to decide by; "
            "schedule.compare_iterations measures both"
        )
    return f"{gain:.0%}"


def _warnings(compared: Compared) -> Iterator[str]:
    this, better = compared.this, compared.best
    sides = {"engines": this.engines_idle, "trainers": this.trainers_idle}
    for side, share in sides.items() if not compared.together else ():
        if share >= IDLE:
            remedy = ""
            if better.seconds < (1.0 - TOO_CLOSE) * this.seconds:
                remedy = (
                    f"; {better.sizes}, {better.name}, would take {three_digits(better.seconds)} s"
                )
            yield (
                f"note: {side} idle for {share:.0%} of an iteration, which ends when the other "
                f"side does{remedy}"
            )


def _idle(way: Way, together: bool) -> str:
    if together:
        return f"devices idle {way.engines_idle:.0%}"
    return f"engines idle {way.engines_idle:.0%}, trainers {way.trainers_idle:.0%}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, left = divmod(minutes, 60)
    days, of_day = divmod(hours, 24)
    if days:
        return f"{days} d {of_day} h"
    return f"{hours} h {left} min" if hours else f"{left} min"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
