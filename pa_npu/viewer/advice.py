"""Advice on a run, from its numbers: what was seen, why it matters, which key to change.

Each rule looks at the last iterations after the warm-up and yields nothing where its numbers are
missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pa_npu.telemetry.report import WARMUP_ITERATIONS
from pa_npu.viewer.values import indices, mapping, number, numbers
from pa_npu.viewer.values import share as share_text

Record = Mapping[str, Any]

RECENT = 8
"""Iterations that a rule looks back on: enough to even out one with a checkpoint or an evaluation.
"""
MUCH_IDLE = 0.35
CLEARLY = 1.5
"""One side waits for the other if its idle share is at least so many times the other's."""
MANY_TRUNCATED = 0.1
MANY_EQUAL = 0.5
COLLAPSED_ENTROPY = 0.2
IDLE = ("trainer_idle", "engine_idle", "device_idle")
"""Keys of a record's idle shares, which pa_npu.telemetry.idle defines."""
DRIFT = 0.5
"""Share of the limit at which a run stops for a disagreement of log-probs."""


@dataclass(frozen=True)
class Advice:
    """A piece of advice.

    level: "act" where something is lost, "look" where it is worth a look.
    topic: the metric that it is about, which the page links to.
    """

    level: Literal["act", "look"]
    topic: str
    title: str
    text: str


def advise(
    records: Sequence[Record], config: Mapping[str, Any], begun: Sequence[int] = ()
) -> list[Advice]:
    """Returns advice on a run, that to act on first.

    config: the configuration by dotted key.
    begun: the first iteration of each attempt.
    """
    steady_records = steady(records, begun)
    if not steady_records:
        return []
    advice: list[Advice] = []
    for rule in RULES:
        advice += rule(steady_records, config)
    return sorted(advice, key=lambda piece: piece.level != "act")


def steady(records: Sequence[Record], begun: Sequence[int] = ()) -> list[Record]:
    """Returns the records of the iterations that tiles and advice look at.

    Left out are the first iterations of the run and of each further attempt, which compile kernels
    and fill caches, and the synchronous iterations of a periodic run, which are there for
    comparison. All records are returned where all would be left out.
    """
    warm = {*begun, *range(WARMUP_ITERATIONS)}
    kept = [record for record in records if record.get("iteration") not in warm] or list(records)
    if any(record.get("periodic") is True for record in kept):
        kept = [record for record in kept if record.get("periodic") is not False]
    return kept


def recent(records: Sequence[Record], key: str) -> float | None:
    """Returns the median of the last iterations' numbers; None where there are none."""
    values = numbers(records[-RECENT:], key)
    return statistics.median(values) if values else None


def _idle_devices(records: Sequence[Record], config: Mapping[str, Any]) -> Iterator[Advice]:
    """Yields advice for a run whose devices both decode and train."""
    device = recent(records, "device_idle")
    if device is None or device <= MUCH_IDLE:
        return
    seen = (
        "In the last iterations devices neither decoded nor trained for "
        f"{share_text(device)} of the time."
    )
    if config.get("schedule.stream") is False:
        yield Advice(
            "act",
            "trainer_idle",
            "Devices wait for the longest responses",
            f"{seen} schedule.stream=true lets them train as soon as the rest fits on fewer; the "
            "update stays the same.",
        )
    else:
        yield Advice(
            "look",
            "trainer_idle",
            "Devices wait, though roles follow the work",
            f"{seen} More groups per iteration (schedule.prompts_per_iteration) leave more to "
            "train meanwhile.",
        )


def _more(config: Mapping[str, Any], side: str) -> str:
    """Returns how `side`, which takes the time, gets more devices; the last one cannot be given."""
    if side == "engines":
        if config.get("trainer.devices") == 1:
            return "add engines (rollout.engines), or let devices do both (placement.colocate=true)"
        return "give devices from trainers to engines (rollout.engines, trainer.devices)"
    if config.get("rollout.engines") == 1:
        return "add trainers (trainer.devices), or let devices do both (placement.colocate=true)"
    return "give devices from engines to trainers (trainer.devices, rollout.engines)"


def _idle_sides(records: Sequence[Record], config: Mapping[str, Any]) -> Iterator[Advice]:
    """Yields advice for a run whose engines and trainers have different devices."""
    trainer = recent(records, "trainer_idle")
    engine = recent(records, "engine_idle")
    if trainer is None or engine is None or recent(records, "device_idle") is not None:
        return
    seen = (
        f"In the last iterations trainers were idle for {share_text(trainer)} of the time and "
        f"engines for {share_text(engine)}."
    )
    if config.get("schedule.stream") is False and trainer > MUCH_IDLE:
        yield Advice(
            "act",
            "trainer_idle",
            "Trainers wait for the whole batch",
            f"{seen} schedule.stream=true lets them train while engines generate; the update stays "
            "the same.",
        )
    elif trainer > MUCH_IDLE and trainer > CLEARLY * engine:
        yield Advice(
            "act",
            "trainer_idle",
            "Trainers wait for engines",
            f"{seen} Generation is what takes the time: {_more(config, 'engines')}, or make "
            "responses shorter.",
        )
    elif engine > MUCH_IDLE and engine > CLEARLY * trainer:
        yield Advice(
            "act",
            "engine_idle",
            "Engines wait for trainers",
            f"{seen} Training is what takes the time: {_more(config, 'trainers')}, or look at "
            "trainer.recompute and microbatch.max_tokens.",
        )
    elif min(trainer, engine) > MUCH_IDLE:
        yield Advice(
            "look",
            "trainer_idle",
            "Engines and trainers wait for each other",
            f"{seen} Little overlaps: more groups per iteration (schedule.prompts_per_iteration) "
            "or a smaller window make groups end one after another, so that training starts "
            "earlier.",
        )


def _truncated(records: Sequence[Record], config: Mapping[str, Any]) -> Iterator[Advice]:
    share = recent(records, "truncated_ratio")
    if share is not None and share > MANY_TRUNCATED and not config.get("rollout.ignore_eos"):
        yield Advice(
            "act" if share > 3 * MANY_TRUNCATED else "look",
            "truncated_ratio",
            "Responses are cut at the limit",
            f"{share_text(share)} of responses reached "
            f"rollout.max_response_tokens={config.get('rollout.max_response_tokens')} and were "
            "judged unfinished. Raise it, or add the overlong reward, which teaches to be shorter.",
        )


def _equal_groups(records: Sequence[Record], config: Mapping[str, Any]) -> Iterator[Advice]:
    share = recent(records, "equal_reward_ratio")
    if share is None or share <= MANY_EQUAL or config.get("schedule.dynamic_sampling"):
        return
    verdict = "wrong"
    helpful = "Easier"
    if (recent(records, "accuracy") or 0.0) > 0.5:
        verdict = "right"
        helpful = "Harder"
    yield Advice(
        "look",
        "equal_reward_ratio",
        "Most groups teach nothing",
        f"In {share_text(share)} of groups all responses had the same reward, mostly all "
        f"{verdict}: their advantages are zero. {helpful} prompts help, more responses per prompt, "
        "or schedule.dynamic_sampling=true.",
    )


def _drift(records: Sequence[Record], _: Mapping[str, Any]) -> Iterator[Advice]:
    for name, value_key, limit_key in (
        ("mean difference of log-odds", "logodds_diff_mean", "logodds_diff_limit"),
        ("slope against the log-odds", "logodds_slope", "logodds_slope_limit"),
    ):
        value = recent(records, value_key)
        limit = recent(records, limit_key)
        if value is not None and limit and value > DRIFT * limit:
            yield Advice(
                "act",
                "logodds_diff_mean",
                "Engine and trainer log-probs drift apart",
                f"Their {name} is {value:.2g}, {share_text(value / limit)} of the limit "
                f"({limit:.2g}) at which the run stops. Different kernels or types are the usual "
                "cause: see model.dtype, rollout.batch_invariant, the engine's version.",
            )
            return


def _entropy(records: Sequence[Record], _: Mapping[str, Any]) -> Iterator[Advice]:
    first = recent(records[:RECENT], "entropy")
    last = recent(records, "entropy")
    if not first or last is None or len(records) <= RECENT:
        return
    solved = (recent(records, "accuracy") or 0.0) > 0.9
    if last < COLLAPSED_ENTROPY * first and not solved:
        yield Advice(
            "act",
            "entropy",
            "Entropy has collapsed",
            f"It fell from {first:.3g} to {last:.3g} nats per token while the task is not solved: "
            "the policy explores little. Raise algorithm.clip_high (0.28, as DAPO), lower "
            "optimizer.learning_rate, or set algorithm.entropy_coef.",
        )


def _rewards(records: Sequence[Record], _: Mapping[str, Any]) -> Iterator[Advice]:
    last = records[-RECENT:]
    errors = sum(numbers(last, "reward_errors"))
    if errors:
        yield Advice(
            "act",
            "reward_mean",
            "Reward functions fail",
            f"{errors:.0f} groups of the last {len(last)} iterations had a "
            "function that failed or ran into reward.timeout_s; its rewards were zero, or without "
            "a verdict those of the others. coordinator.log names them.",
        )
    missing: dict[str, float] = {}
    for record in last:
        counts = mapping(record, "reward_no_verdict")
        for name in counts:
            missing[str(name)] = missing.get(str(name), 0.0) + (number(counts, name) or 0.0)
    if any(missing.values()):
        names = ", ".join(f"{count:.0f} by {name}" for name, count in sorted(missing.items()))
        yield Advice(
            "act",
            "reward_mean",
            "Responses have no verdict",
            f"In the last {len(last)} iterations: {names}. They had the mean of "
            "their group's others, so they taught nothing of it. coordinator.log has the reasons: "
            "a judge's server (reward.judge.timeout_s), the sandbox, or a row's tests.",
        )


def _lost_files(records: Sequence[Record], _: Mapping[str, Any]) -> Iterator[Advice]:
    failed = indices(records, "checkpoint_failed")
    if failed:
        yield Advice(
            "act",
            "checkpoint_s",
            "A checkpoint could not be written",
            f"That of version {failed[-1]}, the last of {len(failed)}; trainer-0.log says why.",
        )
    lost = number(records[-1], "records_lost")
    if lost:
        yield Advice(
            "act",
            "records_lost",
            "Records were lost",
            f"{lost:.0f} could not be written; is the disk full?",
        )


RULES: tuple[Callable[[Sequence[Record], Mapping[str, Any]], Iterator[Advice]], ...] = (
    _rewards,
    _lost_files,
    _drift,
    _idle_devices,
    _idle_sides,
    _truncated,
    _equal_groups,
    _entropy,
)
