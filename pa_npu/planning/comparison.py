"""Compares a configuration with other ways to use the same devices, and names the best change.

The ways are: in turns, split, with roles that follow the work, and one version behind. A split
configuration is also compared with its own sizes without overlap, which is what a run measures with
schedule.compare_iterations.

    compare(config, spec)       predictions of this configuration and of the best sizes of each way,
                                on the same number of devices
    comparison_lines(compared)  the predictions as a plan prints them, with what to do, and a note
                                where they are too close to decide by

The predictions use published figures of a usual device and assumed lengths. Seconds are good to a
factor of two or three. The ratio of two ways on the same devices is known better, but a difference
below `TOO_CLOSE` says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.config.words import three_digits
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.prediction.divisions import with_changes
from pa_npu.planning.prediction.search import Sizes, fastest, first_allowed, fitting
from pa_npu.planning.prediction.virtual_run import Basis, Predicted, planned_basis
from pa_npu.planning.sizes import size_choices, size_words
from pa_npu.platform.typical import TypicalSpeed, typical_speed

TOO_CLOSE = 0.05
"""Share of an iteration by which two ways must differ for a prediction to tell them apart."""
IDLE = 0.3
"""Share of an iteration that a side must wait for a plan to warn of it."""
_EXAMPLE_SHARE = 0.4  # of groups without a gradient: usual of rewards that can be verified
_SAME = 0.001  # share by which two predictions of equal ways may differ
_MIN_GAIN = 0.02  # smallest gain of one key's change that is named
_TURNS = "in turns"
_SPLIT = "split"
_ROLES = "with roles"
_BEHIND = "one version behind"
_SYNCHRONOUS = "synchronous"
_NUM_PREDICTED = 2  # combinations of sizes that are predicted for each way
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
# Changes that are tried one at a time: a key, with the keys that have to follow it.
_SINGLE_CHANGES: tuple[tuple[str, ...], ...] = (
    ("trainer.tensor_parallel",),
    ("trainer.pipeline_parallel",),
    ("trainer.expert_parallel",),
    ("trainer.context_parallel",),
    ("trainer.recompute",),
    ("optimizer.offload",),
    ("rollout.max_num_seqs",),
    ("rollout.tensor_parallel", "rollout.engines"),
    ("trainer.devices", "rollout.engines"),
    ("placement.colocate", "trainer.devices", "rollout.engines"),
)


@dataclass(frozen=True)
class PlannedWay:
    """One way to use the devices, with the sizes that are best for it.

    seconds: duration of an iteration with its border.
    engines_idle, trainers_idle: shares of these seconds.
    border_s: seconds of the border, in which new weights go to the engines.
    """

    name: str
    sizes: str
    seconds: float
    engines_idle: float
    trainers_idle: float
    border_s: float = 0.0


@dataclass(frozen=True)
class Compared:
    """This configuration, the best of each way, and the change that would gain most.

    change: keys and values; None where no change gains.
    gain: the share of an iteration that `change` saves.
    together: whether each device both decodes and trains.
    assumptions: the lines that say on which figures the predictions rest.
    missing: names of the ways in which no sizes fit on these devices.
    work_s: seconds that engines and trainers take on devices that do both and never wait, with the
        best sizes; None where none fit.
    """

    this: PlannedWay
    ways: tuple[PlannedWay, ...]
    change: dict[str, Any] | None
    gain: float
    iterations: int
    together: bool
    work_s: float | None = None
    assumptions: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def synchronous(self) -> PlannedWay | None:
        """The same sizes without overlap; None where this configuration has none anyway."""
        return next((way for way in self.ways if way.name == _SYNCHRONOUS), None)

    @property
    def turns(self) -> PlannedWay | None:
        """The way of other systems: all devices decode, then all train."""
        return next((way for way in self.ways if way.name == _TURNS), None)

    @property
    def best(self) -> PlannedWay:
        """The fastest way that trains what the newest weights generated, this configuration
        included.
        """
        exact = [way for way in self.ways if way.name != _BEHIND]
        return min([self.this, *exact], key=lambda way: way.seconds)


def compare(
    config: Config, spec: ModelSpec, typical: TypicalSpeed | None = None
) -> Compared | None:
    """Predicts this configuration and the ways; `typical` is the speed of a device, that of a usual
    device of the configured kind where it is not given.

    Returns None where the run has no engines, does not start all engines itself, or engines are not alike.
    """
    if (
        not config.rollout.has_engines
        or config.rollout.attach
        or config.rollout.engine_settings
        or config.placement.devices is not None
    ):
        return None
    basis = planned_basis(config, spec, typical or typical_speed(config.run.device))
    ways = []
    missing = []
    for name, way in _ways(basis, config):
        if way is None:
            missing.append(name)
        else:
            ways.append(way)
    change, gain = _best_change(basis, config)
    return Compared(
        this=_this(basis, config),
        ways=tuple(ways),
        change=change,
        gain=gain,
        iterations=config.schedule.iterations,
        together=config.placement.colocate,
        work_s=_work_s(basis, config),
        assumptions=tuple(_assumptions(basis, config)),
        missing=tuple(missing),
    )


def _assumptions(basis: Basis, config: Config) -> Iterator[str]:
    """Yields what the predictions take for granted of devices and responses."""
    typical = basis.typical
    mean, _ = basis.workload.response_means(config)
    yield (
        f"assumed               {typical.name} ({typical.source}); responses of {mean:.0f} tokens "
        f"on average, of at most {config.rollout.max_response_tokens}; a run measures its own"
    )
    if build_algorithm(config).trains_by_rule:
        yield _share_line(basis, config)
    if config.run.device == "cpu":
        yield (
            "for cores alone       on cores changing between decoding and training costs nothing; "
            "on NPUs and GPUs it costs memory and time, so that another way may be the fastest: "
            "plan these with --device npu or cuda"
        )


def _share_line(basis: Basis, config: Config) -> str:
    """Returns the line that says how many groups have no gradient, and what training takes less."""

    def train_s(share: float) -> str:
        workload = replace(basis.workload, by_rule=share)
        assumed = replace(basis, workload=workload)
        return three_digits(assumed.predict(config, streams=False, iterations=1).train_s)

    share = basis.workload.by_rule
    if share:
        return (
            f"without gradient      {share:.0%} of the groups, as in the last iterations of "
            f"{config.run.dir}: training takes {train_s(share)} s, with all groups computed "
            f"{train_s(0.0)} s (schedule.skip_zero_advantage)"
        )
    return (
        "without gradient      no group is assumed; with equal rewards in "
        f"{_EXAMPLE_SHARE:.0%} of them training takes {train_s(_EXAMPLE_SHARE)} s in place of "
        f"{train_s(0.0)} s (schedule.skip_zero_advantage)"
    )


def _work_s(basis: Basis, config: Config) -> float | None:
    """Returns Compared.work_s."""
    free = size_choices(config, basis.spec, config.devices.num_policy_devices, _FREE)
    together = replace(free, colocate=(True,))
    return min((combination.work_s for combination in fitting(basis, together)), default=None)


def _this(basis: Basis, config: Config) -> PlannedWay:
    if config.schedule.max_staleness:
        return _way_behind(basis.predict(config, streams=False), config, "this")
    return _way(basis.predict(config, streams=config.schedule.stream), config, "this")


def _ways(basis: Basis, config: Config) -> Iterator[tuple[str, PlannedWay | None]]:
    """Yields each way by its name with its best sizes, the configured sizes being among those tried;
    None for a way in which nothing fits.
    """
    devices = config.devices.num_policy_devices
    is_periodic = config.schedule.stream and not config.schedule.max_staleness
    if is_periodic and not config.placement.colocate:  # where colocated, it is in turns
        yield _SYNCHRONOUS, _way(basis.predict(config, streams=False), config, _SYNCHRONOUS)
    exact = with_changes(
        config,
        {
            "schedule": {"max_staleness": 0, "stream": True},
            "publish": {"mode": "blocking", "divergence": None},
        },
    )
    if exact is not None:
        exact_basis = replace(basis, base=exact)
        free = size_choices(exact, basis.spec, devices, _FREE)
        together = replace(free, colocate=(True,))
        apart = replace(free, colocate=(False,))
        yield _TURNS, _turns(exact_basis, together, config)
        yield _SPLIT, _best(exact_basis, apart, config, _SPLIT)
        yield _ROLES, _best(exact_basis, together, config, _ROLES)

    behind = with_changes(
        config,
        {
            "schedule": {"max_staleness": max(1, config.schedule.max_staleness)},
            "placement": {"colocate": False},
        },
    )
    if behind is not None and config.schedule.iterations > 1:
        free = size_choices(behind, basis.spec, devices, _FREE)
        yield _BEHIND, _one_behind(replace(basis, base=behind), free, config)


def _fastest_way(ways: Sequence[PlannedWay]) -> PlannedWay | None:
    return min(ways, key=lambda way: way.seconds, default=None)


def _turns(basis: Basis, sizes: Sizes, config: Config) -> PlannedWay | None:
    """Returns the best way in which all devices decode, then all train."""
    candidates = []
    best = first_allowed(basis, fitting(basis, sizes))
    if best is not None:
        candidates.append(best)
    if config.placement.colocate:
        candidates.append(config)
    return _fastest_way(
        [
            _way(basis.predict(candidate, streams=False), candidate, _TURNS)
            for candidate in candidates
        ]
    )


def _best(basis: Basis, sizes: Sizes, config: Config, name: str) -> PlannedWay | None:
    """Returns the way `name` with the best of `sizes`, or with the configured ones where these are
    of that way and faster.
    """
    ways = [
        _way(prediction, candidate, name)
        for prediction, candidate in fastest(basis, sizes, _NUM_PREDICTED)
    ]
    if config.placement.colocate in sizes.colocate:
        ways.append(_way(basis.predict(config), config, name))
    return _fastest_way(ways)


def _one_behind(basis: Basis, sizes: Sizes, config: Config) -> PlannedWay | None:
    """Returns the best way in which engines generate with a version while trainers train what the
    version before generated.
    """
    candidates = [each for _, each in fastest(basis, sizes, _NUM_PREDICTED, iterations=1)]
    if not config.placement.colocate:
        candidates.append(config)
    return _fastest_way(
        [
            _way_behind(basis.predict(candidate, streams=False), candidate, _BEHIND)
            for candidate in candidates
        ]
    )


def _way(prediction: Predicted, config: Config, name: str) -> PlannedWay:
    return PlannedWay(
        name=name,
        sizes=size_words(config),
        seconds=prediction.iteration_s,
        engines_idle=prediction.engines_idle,
        trainers_idle=prediction.trainers_idle,
        border_s=prediction.border_s,
    )


def _way_behind(prediction: Predicted, config: Config, name: str) -> PlannedWay:
    """Returns the way in which both sides of a synchronous prediction work at the same time: the
    longer one is the iteration.
    """
    longer_s = max(prediction.generate_s, prediction.train_s)
    seconds = longer_s + prediction.border_s
    return PlannedWay(
        name=name,
        sizes=size_words(config),
        seconds=seconds,
        engines_idle=1.0 - prediction.generate_s / seconds,
        trainers_idle=1.0 - prediction.train_s / seconds,
        border_s=prediction.border_s,
    )


def _best_change(basis: Basis, config: Config) -> tuple[dict[str, Any] | None, float]:
    """Returns the change of a single key, with the keys that have to follow it, that shortens an
    iteration most, and the share that it saves; (None, 0.0) where none does.
    """
    behind = config.schedule.max_staleness > 0

    def seconds(candidate: Config) -> float:
        if behind:
            prediction = basis.predict(candidate, streams=False, iterations=1)
            return _way_behind(prediction, candidate, "").seconds
        streams = config.schedule.stream
        return basis.predict(candidate, streams=streams, iterations=1).iteration_s

    now_s = seconds(config)
    best_change = None
    best_gain = 0.0
    for keys in _SINGLE_CHANGES:
        if behind and keys[0] == "placement.colocate":
            continue
        sizes = size_choices(config, basis.spec, config.devices.num_policy_devices, keys)
        candidate = first_allowed(basis, fitting(basis, sizes))
        if candidate is None:
            continue
        change = _difference(config, candidate, keys)
        if not change:
            continue
        gain = 1.0 - seconds(candidate) / now_s
        if gain >= _MIN_GAIN and gain > best_gain:
            best_change = change
            best_gain = gain
    return best_change, best_gain


def _difference(config: Config, candidate: Config, keys: Sequence[str]) -> dict[str, Any]:
    """Returns by dotted key the values of `candidate` that differ from those of `config`."""
    changes = {}
    for key in keys:
        section, _, name = key.partition(".")
        value = getattr(getattr(candidate, section), name)
        if value != getattr(getattr(config, section), name):
            changes[key] = value
    return changes


def comparison_lines(compared: Compared) -> list[str]:
    """Returns the lines of a plan about the ways, and what follows from them."""
    this = compared.this
    turns = compared.turns
    border = f", of it {three_digits(this.border_s)} s for new weights" if this.border_s else ""
    lines = [
        f"an iteration          {three_digits(this.seconds)} s{border}: {this.sizes}; "
        f"{_idle(this, compared.together)}"
    ]
    lines += [
        f"  {way.name:<20}{three_digits(way.seconds)} s ({way.seconds / this.seconds:.2f} of this): "
        f"{way.sizes}"
        for way in compared.ways
    ]
    lines += [f"  {name:<20}no sizes fit on these devices" for name in compared.missing]
    lines.append(
        f"the whole run         {_duration(this.seconds * compared.iterations)} for "
        f"{compared.iterations} iterations"
    )
    if turns is not None and compared.work_s is not None:
        bound_s = min(compared.work_s, this.seconds, turns.seconds)
        lines.append(
            f"no order below        {three_digits(bound_s)} s, which full engines and trainers take; turns "
            f"are {turns.seconds / bound_s - 1.0:.0%} above it, and no overlap can gain more"
        )
    if compared.synchronous is not None:
        lines.append(
            f"overlap               {compared.synchronous.seconds / this.seconds:.2f}x as fast as "
            "the same sizes synchronous"
        )
    if turns is not None:
        gain = turns.seconds / this.seconds - 1.0
        lines.append(f"gain over turns       {_gain_words(gain, compared.together)}")
    lines.append(f"would gain most       {_best_change_words(compared)}")
    return [*lines, *_warnings(compared), *compared.assumptions]


def _best_change_words(compared: Compared) -> str:
    best = compared.best
    saved = 1.0 - best.seconds / compared.this.seconds
    if saved >= TOO_CLOSE and saved > compared.gain + TOO_CLOSE:
        return f"several keys, which auto finds: {saved:.0%} less ({best.sizes}, {best.name})"
    if compared.change is None:
        return "no change of a single key shortens an iteration by 2% or more"
    keys = " ".join(f"{key}={_in_yaml(value)}" for key, value in compared.change.items())
    return f"{keys}: {compared.gain:.0%} less"


def _gain_words(gain: float, together: bool) -> str:
    if gain < -_SAME and not together:
        return (
            "none: all devices decoding, then all training (placement.colocate=true), is predicted "
            f"to take {-gain:.0%} less than this split"
        )
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
    """Yields a note for each side that waits long, where a device does not do both."""
    if compared.together:
        return
    this = compared.this
    best = compared.best
    remedy = ""
    if best.seconds < (1.0 - TOO_CLOSE) * this.seconds:
        remedy = f"; {best.sizes}, {best.name}, would take {three_digits(best.seconds)} s"
    for side, share in (("engines", this.engines_idle), ("trainers", this.trainers_idle)):
        if share >= IDLE:
            yield (
                f"note: {side} idle for {share:.0%} of an iteration, which ends when the other "
                f"side does{remedy}"
            )


def _idle(way: PlannedWay, together: bool) -> str:
    if together:
        return f"devices idle {way.engines_idle:.0%}"
    return f"engines idle {way.engines_idle:.0%}, trainers {way.trainers_idle:.0%}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    all_hours, minutes = divmod(round(seconds / 60), 60)
    days, hours = divmod(all_hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _in_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
