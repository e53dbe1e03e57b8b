"""From scored groups to the buffer: a number, advantages, a replica and its slot, and what the iteration's record says of it.

Delivery       each group as soon as it is released                        schedule.stream=true
HeldDelivery   all groups when the last one is there, by the same steps    schedule.stream=false
RolesDelivery  each when its replica's devices decode no more              placement.colocate with schedule.stream
               (roles_delivery.py)
Production     the iteration's numbers for its record, and its samples     always
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pa_npu.algorithm.algorithm import Algorithm, ScoredSamples, TokenValues
from pa_npu.config.schema import Config
from pa_npu.control.messages import Dispatched, DispatchedGroup
from pa_npu.coordinator.episode import Credit, ScoredGroup, check_components, check_size
from pa_npu.coordinator.features import Feature
from pa_npu.data.stream import Outcome
from pa_npu.dispatch.assignment import Assignment, GroupCost
from pa_npu.samples.attachments import described
from pa_npu.samples.group import Group
from pa_npu.samples.group_digest import content_digest, digest_group
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.telemetry.chain import GroupDigest
from pa_npu.telemetry.image_store import keep_image
from pa_npu.telemetry.sample_store import SAMPLES_IN_SHORT, KeptResponse, Stretch
from pa_npu.vision.images import PIXELS

Sums = defaultdict[str, float]


@dataclass(eq=False, repr=False)
class Delivery:
    """One iteration's groups, each as it is released.

    work: what training a group costs. store_thread: makes the buffer's blocking calls, in order.
    on_delivered: called with every group that is in the buffer.
    """

    config: Config
    algorithm: Algorithm
    production: Production
    assignment: Assignment
    work: GroupCost
    buffer: RolloutBuffer
    store_thread: Executor
    on_delivered: Sequence[Callable[[Group, ScoredGroup], None]]
    _held: list[tuple[int, ScoredGroup]] = field(default_factory=list, init=False)
    # of those that have been taken, by number
    _by_rule: set[int] = field(default_factory=set, init=False)

    async def accept(self, number: int, scored: ScoredGroup) -> None:
        """Delivers a group that is trained under this number."""
        check_size(self.config, self.algorithm, scored.prompt, scored.samples)
        check_components(self.algorithm, scored)
        self.production.add(number, scored)
        self._decide(number, scored)
        await self._deliver(number, scored)

    async def finish(self, num_groups: int) -> float:
        """Ends the delivery once all groups have been taken; returns the replicas' imbalance.

        Asserts that the groups fill all slots (I2).
        """
        self.assignment.finish(num_groups)
        return self.assignment.imbalance

    def is_by_rule(self, number: int) -> bool:
        """Says of a group that has been taken whether it is known to be trained by rule."""
        return number in self._by_rule

    @property
    def numbers(self) -> dict[str, Any]:
        """Returns further numbers of the iteration for its record."""
        return {}

    async def close(self) -> None:
        """Ends what runs in the background of the iteration, which may have failed."""

    async def _deliver(self, number: int, scored: ScoredGroup) -> None:
        slot = self.assignment.assign(number, self._cost(number, scored))
        await self._deliver_to(number, scored, slot)

    async def _deliver_to(self, number: int, scored: ScoredGroup, slot: tuple[int, int]) -> None:
        await self._put(number, scored, self.algorithm.credit, {slot: None})

    async def _put(
        self,
        number: int,
        scored: ScoredGroup,
        credit: Credit,
        slots: Mapping[tuple[int, int], tuple[int, int] | None],
    ) -> None:
        """Puts a group into the buffer.

        credit: gives the group's tokens their advantages. slots: each (replica, slot) that gets it,
        and which samples that replica trains; None for all of them.
        """
        group = scored.group(self.config.run.seed, self.production.iteration, number, credit)
        by_rule = number in self._by_rule
        loop = asyncio.get_running_loop()
        for slot, part in slots.items():
            sent = group if part is None else replace(group, part=part)
            put = partial(self.buffer.put, sent, *slot)
            if by_rule:
                put = partial(put, by_rule=True)
            await loop.run_in_executor(self.store_thread, put)
        for notify in self.on_delivered:
            notify(group, scored)
        self.production.put(group, scored, slots, by_rule=by_rule)

    def _decide(self, number: int, scored: ScoredGroup) -> None:
        """Decides whether the group is trained by rule: then it costs nothing, wherever it goes."""
        if not self.algorithm.trains_by_rule or self.algorithm.needs_whole == "batch":
            return
        samples = scored.for_credit
        if self.algorithm.is_without_gradient(samples, self.algorithm.credit(samples)):
            self._by_rule.add(number)

    def _cost(self, number: int, scored: ScoredGroup) -> float:
        return 0.0 if number in self._by_rule else self.work(*scored.trained_as)


class HeldDelivery(Delivery):
    """One iteration's groups, all at its end; advantages and replicas may be of the whole batch."""

    async def _deliver(self, number: int, scored: ScoredGroup) -> None:
        self._held.append((number, scored))

    async def finish(self, num_groups: int) -> float:
        samples = [scored.for_credit for _, scored in self._held]
        advantages = self.algorithm.batch_credit(samples)
        if self.algorithm.trains_by_rule and self.algorithm.needs_whole == "batch":
            for (number, _), group, values in zip(self._held, samples, advantages, strict=True):
                if self.algorithm.is_without_gradient(group, values):
                    self._by_rule.add(number)
        slots = self.assignment.assign_all(
            [number for number, _ in self._held],
            [self._cost(number, scored) for number, scored in self._held],
        )
        for (number, scored), values, slot in zip(self._held, advantages, slots, strict=True):
            await self._put(number, scored, partial(_known, values), {slot: None})
        return await super().finish(num_groups)


def _known(values: TokenValues, group: ScoredSamples) -> TokenValues:
    """Returns the credit of all groups together that is known already."""
    return values


@dataclass(frozen=True)
class Produced:
    """One iteration's production when it is over.

    numbers: the coordinator's part of the iteration record that does not depend on wall time
    between publishes. samples: for samples.jsonl. dispatched: what trainers compare with what they
    have trained (I2). digests: of its groups, for the run's chain. kept: for RUN/samples; outcomes:
    of all prompts that were asked, in order of dispatch; both empty where the iteration was
    produced before a restart.
    """

    iteration: int
    numbers: dict[str, Any]
    samples: list[dict[str, Any]]
    dispatched: Dispatched
    digests: Sequence[GroupDigest] = ()
    kept: Sequence[KeptResponse] = ()
    outcomes: Sequence[Outcome] = ()


class Production(Feature):
    """Accumulates the groups of one iteration: all as they are scored, and those that are trained
    (add, put).

    num_kept: the groups of the lowest dispatch indices, this many, are kept with their tokens, and
    the first SAMPLES_IN_SHORT of these in short; which ones does not depend on timing.
    num_demonstrations: groups of demonstrations, which have the first numbers. They are not kept,
    and have numbers of their own in the record.
    run_dir: where small copies of kept samples' images go; None keeps none.
    """

    def __init__(
        self,
        iteration: int,
        num_kept: float = 0,
        num_demonstrations: int = 0,
        run_dir: Path | None = None,
    ) -> None:
        self.iteration = iteration
        self._run_dir = run_dir
        self._num_kept = num_kept
        self.num_demonstrations = num_demonstrations
        self._demonstrated: Sums = defaultdict(int)
        self._start_s = time.perf_counter()
        self._samples: list[dict[str, Any]] = []
        self._kept: list[KeptResponse] = []
        self._in_buffer: list[DispatchedGroup] = []
        self._digests: list[GroupDigest] = []
        self._outcomes: dict[int, Outcome] = {}  # by dispatch index
        self._dispatched_correct = 0.0
        self._num_skipped = 0
        self._tokens_skipped = 0
        # sizes of each group that is trained, and of those with rewards what they were worth; see
        # add and end
        self._trained: list[tuple[int, ...]] = []
        self._judged: list[tuple[float, ...]] = []
        # by environments' and by reward functions' names
        self._counted: Sums = defaultdict(int)
        self._rewards: Sums = defaultdict(int)
        self._no_verdict: Sums = defaultdict(int)

    def scored(self, index: int, group: ScoredGroup) -> None:
        """Counts a scored group, trained or not: the policy's accuracy is over these, whatever is
        chosen for training.
        """
        prompt = group.prompt
        result = group.result
        for name, number in group.counted.items():
            self._counted[name] += number
        if result is None:
            self._outcomes[index] = Outcome(prompt.source, None, None)
            return
        right = _mean(result.correct.tolist())
        reward = _mean(result.total.tolist())
        self._dispatched_correct += right
        self._outcomes[index] = Outcome(prompt.source, None if result.errors else right, reward)

    def add(self, index: int, group: ScoredGroup) -> None:
        """Adds a group that is trained under this number."""
        samples = group.samples
        result = group.result
        lengths = group.lengths
        num_trained = sum(lengths)
        if group.is_demonstration:
            self._demonstrated["rows"] += len(samples)
            self._demonstrated["tokens"] += num_trained
            return
        self._trained.append(
            (
                len(samples),
                len(group.prompt.tokens),
                sum([len(sample.tokens) for sample in samples]) - num_trained,
                num_trained,
                min(lengths),
                max(lengths),
                sum([sample.finished for sample in samples]),
            )
        )
        if result is None:
            return
        rewards = result.total.tolist()
        self._judged.append(
            (
                int(np.count_nonzero(result.correct)),
                sum(rewards),
                _deviation(rewards),
                bool(result.errors),
                not result.is_informative,
            )
        )
        for name, values in result.functions.items():
            self._rewards[name] += sum(values.tolist())
        for name, number in result.no_verdict.items():
            self._no_verdict[name] += number

    def put(
        self,
        group: Group,
        scored: ScoredGroup,
        slots: Mapping[tuple[int, int], tuple[int, int] | None],
        *,
        by_rule: bool = False,
    ) -> None:
        """Notes a group that is in the buffer; the run's records have what was put.

        slots: by (replica, slot), which samples that replica trains; None: all. by_rule: whether
        only a notice of it is there.
        """
        if by_rule:
            self._num_skipped += 1
            self._tokens_skipped += sum(scored.lengths)
        self._digests.append(digest_group(group, slots))
        content = content_digest(group)
        leading = group.leading_lengths.tolist()
        for (replica, _), part in slots.items():
            first, last = part or (0, len(scored.lengths))
            self._in_buffer.append(
                DispatchedGroup(
                    index=group.index,
                    replica=replica,
                    response_tokens=tuple(scored.lengths[first:last]),
                    first=first,
                    leading_tokens=None
                    if leading == scored.lengths
                    else tuple(leading[first:last]),
                    by_rule=by_rule,
                    content=content,
                )
            )
        if scored.is_demonstration:
            return
        place = group.index - self.num_demonstrations
        if place < min(self._num_kept, SAMPLES_IN_SHORT):
            self._samples.append(_sample(group, scored))
        if place < self._num_kept:
            self._kept += _kept(group, scored)
            if self._run_dir is not None:
                for attachment in group.attachments:
                    if attachment.name == PIXELS:
                        keep_image(self._run_dir, attachment.digest.hex(), attachment.array)

    def end(self, replica_imbalance: float) -> Produced:
        """Ends the iteration: all groups are in the buffer. replica_imbalance: Assignment's."""
        counted = self._counted
        groups = len(self._trained)
        samples, prompts, others, tokens, shortest, longest, finished = zip(
            *self._trained, strict=True
        )
        responses = sum(samples)
        numbers: dict[str, Any] = {
            "groups": groups,
            "groups_dispatched": len(self._outcomes),
            "response_length_mean": sum(tokens) / responses,
            "response_length_min": min(shortest),
            "response_length_max": max(longest),
            "prompt_length_mean": sum(prompts) / groups,
            "truncated_ratio": 1 - sum(finished) / responses,
            "tokens_prompt": sum(others),
            "tokens_response": sum(tokens),
            "environment": dict(sorted(counted.items())),
            "generate_s": time.perf_counter() - self._start_s,
            "replica_imbalance": replica_imbalance,
        }
        if self._num_skipped:
            numbers["groups_skipped"] = self._num_skipped
            numbers["tokens_skipped"] = self._tokens_skipped
        if self._demonstrated:
            numbers["demonstrations"] = dict(self._demonstrated)
        if self._judged:
            numbers |= self._reward_numbers(groups, responses)
        if counted.get("tokens"):
            numbers["unique_ratio"] = counted["tokens_unique"] / counted["tokens"]
        in_short = sorted(self._samples, key=lambda sample: sample["index"])
        dispatched = Dispatched(self.iteration, tuple(self._in_buffer))
        outcomes = tuple(self._outcomes[index] for index in sorted(self._outcomes))
        return Produced(
            iteration=self.iteration,
            numbers=numbers,
            samples=in_short,
            dispatched=dispatched,
            digests=tuple(self._digests),
            kept=tuple(self._kept),
            outcomes=outcomes,
        )

    def _reward_numbers(self, groups: int, responses: int) -> dict[str, Any]:
        """Returns the metrics of the iteration's rewards, for a source that rewards its groups."""
        correct, reward, deviation, errors, equal = zip(*self._judged, strict=True)
        return {
            "accuracy_dispatched": self._dispatched_correct / len(self._outcomes),
            "reward_mean": sum(reward) / responses,
            "reward_std": sum(deviation) / groups,
            "accuracy": sum(correct) / responses,
            "rewards": {name: total / responses for name, total in sorted(self._rewards.items())},
            "reward_errors": sum(errors),
            "reward_no_verdict": dict(self._no_verdict),
            "equal_reward_ratio": sum(equal) / groups,
        }


def _mean(values: Sequence[float]) -> float:
    """Returns the mean; numpy takes ten times as long for the few values of a group."""
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation of a sample: with one less than the number of values as
    divisor.
    """
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _sample(group: Group, scored: ScoredGroup) -> dict[str, Any]:
    """Returns a line about each dispatched response, in short. Fields that a group does not hold
    are its prompt's.
    """
    prompt = scored.prompt
    result = scored.result
    responses: list[dict[str, Any]] = []
    for number, sample in enumerate(scored.samples):
        response = {
            "text": sample.text,
            "tokens": int(group.trained_lengths[number]),
            "finish_reason": "stop" if group.finished[number] else "length",
        }
        if result is not None:
            response["reward"] = float(group.rewards[number])
            response["correct"] = bool(result.correct[number])
        responses.append(response)
    return {
        "iteration": group.iteration,
        "index": group.index,
        "prompt_id": group.prompt_id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "responses": responses,
        "errors": [] if result is None else list(result.errors),
    }


def _stretches(group: Group, start: int, end: int) -> list[Stretch]:
    """Returns the tokens of a row of data by what they are trained with; none where the policy
    wrote a token.
    """
    if group.written[start:end].any():
        return []
    weights = group.trained[start:end].astype(np.float32)
    if group.weight is not None:
        weights *= group.weight[start:end]
    changes = (np.flatnonzero(np.diff(weights)) + 1).tolist()
    tokens = group.tokens[start:end]
    return [
        Stretch(tokens=tokens[first:last].tolist(), weight=float(weights[first]))
        for first, last in pairwise([0, *changes, end - start])
    ]


def _kept(group: Group, scored: ScoredGroup) -> list[KeptResponse]:
    """Returns the dispatched responses token by token. Fields that a group does not hold are its
    prompt's.
    """
    prompt = scored.prompt
    result = scored.result
    kept = []
    for number, (start, end) in enumerate(pairwise(group.offsets().tolist())):
        sample = scored.samples[number]
        trained = group.trained[start:end]
        leads = group.component[start:end] == 1
        rewards = {} if result is None else result.functions
        kept.append(
            KeptResponse(
                iteration=group.iteration,
                index=group.index,
                response=number,
                prompt_id=group.prompt_id,
                prompt=prompt.text,
                prompt_tokens=len(prompt.tokens),
                answer=prompt.answer,
                text=sample.text,
                finish_reason="stop" if group.finished[number] else "length",
                version=int(group.versions[start:end].max()),
                reward=float(group.rewards[number]),
                rewards={name: float(values[number]) for name, values in rewards.items()},
                advantage=float(group.advantages[start:end][leads][0]) if leads.any() else 0.0,
                correct=result is not None and bool(result.correct[number]),
                errors=() if result is None else tuple(result.errors),
                tokens=group.tokens[start:end][trained].tolist(),
                logprobs=group.logprobs[start:end][trained].tolist(),
                turns=[asdict(turn) for turn in sample.turns],
                attachments=described(sample.placeholders),
                stretches=_stretches(group, start, end),
            )
        )
    return kept
