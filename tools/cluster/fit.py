"""Costs fitted to a run's records, and what that says about their error.

Engines. A group whose longest response has L tokens takes  L a + N b + C c + T p  seconds: N the sequences that decoded meanwhile,
summed over its steps, C their tokens of context, summed too, T the tokens of prompts that were
computed meanwhile. When a sequence ended is known from its length: a response of l tokens ended l /
L of its group's steps after that began. a, b, c, p >= 0 by least squares on relative errors; what
the run leaves open is as typical figures have it, p / b above all.

Trainers. A microbatch takes  m + o F  seconds, F its operations, fitted alike and scaled so that all together take what the
trainers reported.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pa_npu.dispatch.assignment import GroupWork
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.subjects import GroupTiming
from pa_npu.planning.prediction.costs import (
    EngineCost,
    TrainerCost,
    computed_prompt_tokens,
    passes,
    typical_engine,
    typical_trainer,
)
from pa_npu.planning.prediction.virtual_run import Basis
from pa_npu.planning.prediction.workload import Workload
from pa_npu.platform.typical import TypicalSpeed
from tools.cluster.calibration import Calibration
from tools.cluster.records import SeenIteration, SeenRun

Array = npt.NDArray[np.float64]

# What typical figures weigh against all that was seen: they decide what that leaves open.
_PRIOR = 2e-4
_ROUNDS = 4
# Of what a prompt's token costs over a sequence in a step: by what it may differ from typical
# figures, in powers of two, and by how much squared errors must fall for a factor of two. Prompts
# come with sequences in every group, and where a machine is noisy a run can hardly tell the two
# apart.
_PROMPT_POWERS = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
_PROMPT_PULL = 0.5
# Residuals beyond so many times their median do not count more than that.
_OUTLIER = 3.0
_LEAST_ERROR = 0.03
# What the model of an iteration left out of the run that was given is believed up to this factor.
_LARGEST_CORRECTION = 1.5


def calibrate(run: SeenRun, spec: ModelSpec, typical: TypicalSpeed) -> Calibration:
    """From a run of a model of this shape on such devices.

    Raises DataError where the records have too little.
    """
    config = run.config
    engine, engine_error = _fit_engine(run, spec, typical)
    trainer, trainer_error = _fit_trainer(run, spec, typical)
    delivered = [timing.delivered_s for seen in run.complete for timing in seen.groups]
    delivery_s = statistics.median(delivered) if delivered else 0.0
    return Calibration(
        config,
        spec,
        typical,
        engine,
        trainer,
        delivery_s,
        engine_error,
        trainer_error,
        "calibrated",
    )


def _fit_engine(run: SeenRun, spec: ModelSpec, typical: TypicalSpeed) -> tuple[EngineCost, float]:
    prior = typical_engine(run.config, spec, typical)
    samples = [
        groups
        for seen in run.complete
        for _, of_engine in itertools.groupby(sorted(seen.groups, key=_engine), _engine)
        if (groups := list(of_engine))
    ]
    if not samples:
        return _learned_engine(run, prior)
    usual = np.array([prior.step_s, prior.sequence_s, prior.context_s, prior.prompt_token_s])
    cost = prior
    for _ in range(_ROUNDS):
        pieces = [_rows(groups, cost, run.config.rollout.max_num_seqs) for groups in samples]
        rows = np.concatenate([rows for rows, _ in pieces])
        seconds = np.concatenate([seconds for _, seconds in pieces])
        rows, seconds = rows[rows[:, 0] > 0], seconds[rows[:, 0] > 0]
        if not len(rows):
            return _learned_engine(run, prior)
        coefficients = _engine_coefficients(rows, seconds, usual)
        step_s, sequence_s, context_s, prompt_s = (
            max(float(value), 1e-12) for value in coefficients
        )
        cost = EngineCost(step_s, sequence_s, context_s, prompt_s, prior.prefix_block)
    return cost, _error(rows @ coefficients, seconds)


def _engine(timing: GroupTiming) -> str:
    return timing.engine


def _learned_engine(run: SeenRun, prior: EngineCost) -> tuple[EngineCost, float]:
    """From what the controller had learned, where the timeline does not have the groups' lengths."""
    names = ("decode_step_s", "decode_sequence_s", "prompt_token_s")
    learned = [seen.record.get("learned") or {} for seen in run.iterations]
    step_s, sequence_s, prompt_s = (
        float(statistics.median([numbers[name] for numbers in learned if name in numbers] or [0.0]))
        for name in names
    )
    if step_s + sequence_s <= 0.0:
        run.median("learned.decode_step_s")  # which says that there is none
    context = run.median("prompt_length_mean") + 0.5 * run.median("response_length_mean")
    usual = prior.speed(context).sequence_s
    return (
        EngineCost(
            max(step_s, 1e-12),
            max(sequence_s, 1e-12) * prior.sequence_s / usual,
            max(sequence_s, 1e-12) * prior.context_s / usual,
            max(prompt_s, 1e-12),
            prior.prefix_block,
        ),
        0.15,
    )


def _rows(
    groups: Sequence[GroupTiming], cost: EngineCost, max_num_seqs: int
) -> tuple[Array, Array]:
    """([n, 4] steps, sequences and context summed over them, prompt tokens; [n] seconds) of one
    engine's groups.

    A group that waited in the engine's own queue has zeros.
    """
    starts = np.array([group.start_s for group in groups])
    ends = np.array([group.end_s for group in groups])
    longest = np.array([max(group.lengths) for group in groups], float)
    sizes = np.array([len(group.lengths) for group in groups])
    owner = np.repeat(np.arange(len(groups)), sizes)
    lengths = np.concatenate([np.asarray(group.lengths, float) for group in groups])
    contexts = np.repeat([float(group.prompt_tokens) for group in groups], sizes) + 0.5 * lengths
    prompts = np.array(
        [
            computed_prompt_tokens(g.prompt_tokens, len(g.lengths), cost.prefix_block)
            for g in groups
        ],
        float,
    )
    leased = np.array([sizes[(starts <= at) & (ends > at)].sum() for at in starts])
    order = np.argsort(starts, kind="stable")
    stalls = _stalls(starts[order], cost.prompt_token_s * prompts[order])

    times = np.array([starts.min(), ends.max()])
    clock = np.array([0.0, 1.0])
    living = weight = np.zeros(1)
    steps = np.zeros(1)
    for _ in range(2):
        first = np.interp(starts, times, clock)
        last = np.interp(ends, times, clock)
        leaves = np.interp(
            first[owner] + (last - first)[owner] * lengths / longest[owner], clock, times
        )
        times = np.concatenate([starts[owner], leaves, stalls[:, 1]])
        by_time = np.argsort(times, kind="stable")
        times = times[by_time]
        signs = np.concatenate(
            [np.ones(len(leaves)), -np.ones(len(leaves)), np.zeros(len(stalls))]
        )[by_time]
        carried = np.concatenate([contexts, contexts, np.zeros(len(stalls))])[by_time]
        living = np.cumsum(signs)[:-1]
        weight = np.cumsum(signs * carried)[:-1]
        seconds = cost.step_s + cost.sequence_s * np.maximum(living, 1.0) + cost.context_s * weight
        number = np.searchsorted(stalls[:, 0], times[:-1], "right") - 1
        decodes = (number < 0) | (times[:-1] >= stalls[np.maximum(number, 0), 1])
        steps = np.diff(times) / seconds * decodes
        clock = np.concatenate([[0.0], np.cumsum(steps)])

    def over_steps(values: Array) -> Array:
        """Mean of a number over each group's time, times its steps."""
        area = np.concatenate([[0.0], np.cumsum(values * steps)])
        passed = np.interp(ends, times, clock) - np.interp(starts, times, clock)
        return (
            longest
            * (np.interp(ends, times, area) - np.interp(starts, times, area))
            / np.maximum(passed, 1e-12)
        )

    sums = np.concatenate([[0.0], np.cumsum(prompts[order])])
    begun = (
        np.searchsorted(starts[order], ends, "left"),
        np.searchsorted(starts[order], starts, "left"),
    )
    computed = np.maximum(sums[begun[0]] - sums[begun[1]], prompts)
    rows = np.stack([longest, over_steps(living), over_steps(weight), computed], axis=1)
    rows[leased > max_num_seqs] = 0.0
    return rows, ends - starts


def _stalls(starts: Array, seconds: Array) -> Array:
    """[n, 2] from when to when an engine computes prompts, and decodes nothing; starts rise."""
    stalls: list[list[float]] = []
    for start_s, took_s in zip(starts.tolist(), seconds.tolist(), strict=True):
        if stalls and start_s <= stalls[-1][1]:
            stalls[-1][1] += took_s
        else:
            stalls.append([start_s, start_s + took_s])
    return np.array(stalls)


def _engine_coefficients(rows: Array, seconds: Array, usual: Array) -> Array:
    """a, b, c and p, which is a multiple of b: the usual one, unless another fits much better."""
    best = usual
    least = float("inf")
    for power in _PROMPT_POWERS:
        ratio = 2.0**power * usual[3] / usual[1]
        a, b, c = _least_squares(
            np.stack([rows[:, 0], rows[:, 1] + ratio * rows[:, 3], rows[:, 2]], 1),
            seconds,
            usual[:3],
        )
        coefficients = np.array([a, b, c, ratio * b])
        residual = np.abs(rows @ coefficients / seconds - 1.0)
        held = np.minimum(residual, _OUTLIER * float(np.median(residual)))
        value = math.log(float(np.mean(held**2)) + 1e-12) + _PROMPT_PULL * power**2
        if value < least:
            best = coefficients
            least = value
    return best


def _least_squares(rows: Array, seconds: Array, usual: Array) -> Array:
    """Coefficients >= 0 with the least squares of relative errors, outliers held down; `usual`,
    scaled to fit, decides the rest.
    """
    relative = rows / seconds[:, None]
    scale = float(np.median(1.0 / np.maximum(relative @ usual, 1e-12)))
    unit = relative * (usual * scale)  # a coefficient of 1 is the usual one
    weights = np.ones(len(rows))
    coefficients = np.ones(len(usual))
    for _ in range(_ROUNDS):
        pull = _PRIOR * weights.sum()
        gram = (unit * weights[:, None]).T @ unit + pull * np.eye(len(usual))
        moment = unit.T @ weights + pull
        coefficients = _non_negative(gram, moment)
        residual = np.abs(unit @ coefficients - 1.0)
        weights = np.minimum(
            1.0, _OUTLIER * max(float(np.median(residual)), 0.01) / np.maximum(residual, 1e-9)
        )
    return coefficients * usual * scale


def _non_negative(gram: Array, moment: Array) -> Array:
    """argmin of q'Gq - 2m'q over q >= 0, by trying which are not 0."""
    size = len(moment)
    best = np.zeros(size)
    least = 0.0
    for count in range(1, size + 1):
        for kept in map(list, itertools.combinations(range(size), count)):
            part = np.linalg.solve(gram[np.ix_(kept, kept)], moment[kept])
            if part.min() <= 0.0:
                continue
            value = float(part @ gram[np.ix_(kept, kept)] @ part - 2 * moment[kept] @ part)
            if value < least:
                best = np.zeros(size)
                least = value
                best[kept] = part
    return best


def _error(predicted: Array, seconds: Array) -> float:
    """Relative error of a sum over many: the mean error and the error of the mean, not that of
    single ones.
    """
    relative = predicted / seconds - 1.0
    return max(
        _LEAST_ERROR, abs(float(np.mean(relative))) + float(np.std(relative)) / len(relative) ** 0.5
    )


def _fit_trainer(run: SeenRun, spec: ModelSpec, typical: TypicalSpeed) -> tuple[TrainerCost, float]:
    config = run.config
    prior = typical_trainer(config, spec, typical)
    per_replica = passes(config) / config.mesh.replica_size
    work = GroupWork(spec, config)
    operations = {id(seen): _operations(seen, work) for seen in run.complete}
    pieces = [
        (
            [
                len(trained.groups) * config.microbatches_per_group,
                sum(operations[id(seen)][n] for n in trained.groups),
            ],
            trained.seconds,
        )
        for seen in run.complete
        for trained in seen.trained
        if config.microbatches_per_group == 1
        and all(number in operations[id(seen)] for number in trained.groups)
    ]
    usual = np.array([prior.microbatch_s * passes(config), prior.operation_s * per_replica])
    if len(pieces) > 1:
        rows = np.array([row for row, _ in pieces], float)
        seconds = np.array([value for _, value in pieces])
        coefficients = _least_squares(rows, seconds, usual)
    else:
        coefficients = usual
    factors = []
    for seen in run.iterations:
        total = _iteration_operations(run, seen, operations.get(id(seen)), work)
        groups = float(seen.record.get("groups") or config.schedule.prompts_per_iteration)
        computed = _computed_share(seen)
        total *= computed
        groups *= computed
        per_microbatch, per_operation = coefficients
        predicted = per_microbatch * groups * config.microbatches_per_group + per_operation * total
        measured = (
            float(seen.record["train_s"]) - float(seen.record.get("step_s", 0.0))
        ) * config.mesh.data
        factors.append(measured / predicted)
    factor = float(statistics.median(factors))
    cost = TrainerCost(
        max(factor * float(coefficients[0]) / passes(config), 1e-12),
        max(factor * float(coefficients[1]) / per_replica, 1e-30),
        max(run.median("step_s") / config.schedule.updates_per_iteration, 1e-9),
        max(run.median("publish_s"), 1e-9),
    )
    return cost, max(_LEAST_ERROR, float(np.std(np.array(factors) / factor)) / len(factors) ** 0.5)


def _computed_share(seen: SeenIteration) -> float:
    """Returns the share of the responses' tokens that trainers computed; the rest was trained by
    rule (schedule.skip_zero_advantage).
    """
    tokens = seen.record.get("tokens_response") or 1
    return max(1e-3, 1.0 - seen.record.get("tokens_skipped", 0) / tokens)


def _operations(seen: SeenIteration, work: GroupWork) -> dict[int, float]:
    return {timing.index: timing.work(work) for timing in seen.groups}


def _iteration_operations(
    run: SeenRun, seen: SeenIteration, known: dict[int, float] | None, work: GroupWork
) -> float:
    """Operations of training all groups of an iteration; by mean lengths where those of the groups
    are not recorded.
    """
    if known:
        return sum(known.values())
    record = seen.record
    responses = run.config.rollout.responses_per_prompt
    prompt = float(record["prompt_length_mean"])
    mean = float(record["response_length_mean"])
    groups = float(record.get("groups") or run.config.schedule.prompts_per_iteration)
    return groups * work(max(1, round(prompt)), [max(1, round(mean))] * responses)


def against_itself(
    run: SeenRun,
    spec: ModelSpec,
    calibration: Calibration,
    workload: Workload,
    typical: TypicalSpeed,
) -> tuple[Calibration, float]:
    """Costs corrected by what the run's own iterations took over what is predicted of them, and
    that ratio.
    """
    kinds = {
        bool(seen.record.get("periodic", run.config.schedule.stream)) for seen in run.iterations
    }
    streams = True in kinds
    measured = [
        seen.iteration_s
        for seen in run.iterations
        if bool(seen.record.get("periodic", run.config.schedule.stream)) == streams
    ]
    predicted = Basis(run.config, spec, calibration, workload, typical, None).predict(
        run.config, streams=streams
    )
    outside_s = predicted.border_s
    ratio = (statistics.median(measured) - outside_s) / (predicted.iteration_s - outside_s)
    ratio = min(max(ratio, 1.0 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
    return _corrected(calibration, ratio), ratio


def _corrected(calibration: Calibration, factor: float) -> Calibration:
    """Returns the same with engines and trainers slower by a factor: what the model of an iteration
    left out of the run itself.
    """
    engine = calibration.engine
    trainer = calibration.trainer
    return replace(
        calibration,
        engine=EngineCost(
            engine.step_s * factor,
            engine.sequence_s * factor,
            engine.context_s * factor,
            engine.prompt_token_s * factor,
            engine.prefix_block,
        ),
        trainer=replace(
            trainer,
            microbatch_s=trainer.microbatch_s * factor,
            operation_s=trainer.operation_s * factor,
        ),
    )
