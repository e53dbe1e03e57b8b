"""The objective of one update: from microbatches and the models' outputs to a sum of losses, its metrics and its normaliser.

    backend: forward ──Outputs──> objective.loss ──scalar──> backend: backward, gradients added up unnormalised
             after the last one   objective.normaliser ──> backend: divide, once (invariant I3)

An Objective is made anew for every update. The backend runs the models that the algorithm needs
(trainer_models.py), calls `loss` for each microbatch where log-probs are computed, `sent` where
hidden states go on to another stage, and knows no loss. What passes backward is counted where its
gradient does (invariant I7), so that a backward that is left out or run twice shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from pa_npu.algorithm.agreement_sums import DifferenceSums
from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.choices import (
    CHOICE_LOGPROBS_COLUMN,
    SCORES_COLUMN,
    Choices,
    by_target,
)
from pa_npu.algorithm.component_sums import all_metric_names, all_sums
from pa_npu.algorithm.loss_gradient import GivenChoices, GivenLoss, WatchedHeads
from pa_npu.algorithm.microbatch_agreement import measure, stretches
from pa_npu.algorithm.model_outputs import (
    FixedWeights,
    Logprobs,
    Outputs,
    PolicyState,
    Targets,
    Weights,
    named_weights,
    token_batch,
)
from pa_npu.algorithm.normaliser import Counts
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.algorithm.update_sums import SAMPLED_EVERY, MetricSums, Reductions, Totals
from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness
from pa_npu.errors import InvariantViolation


@dataclass(frozen=True)
class TrainedResponse:
    """One response whose gradient has passed backward: its group's dispatch index, its number
    there, its trained tokens.
    """

    group: int
    number: int
    tokens: int


JudgeFirst = Callable[[DifferenceSums, str], None]
"""Takes the differences of a first microbatch, and which of its tokens they are of: "" for all."""

Keep = Callable[[int, Sequence[tuple[int, int]], Sequence[int], torch.Tensor], None]
"""Takes the denominators of the ratios: iteration, sources, response lengths, log-probs."""


class Objective:
    """One update's, on one rank.

    entered, trained: the responses that were given to `loss` or `sent`, and those whose gradient
    has come back, each as often.
    given: what the loss of each microbatch was given, and what came back. Nothing of it is
    calculated before `finish`, so that a microbatch pays for no more than keeping it.
    first_sampled: the first element of a gradient's sample, which moves from update to update.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        judge_first: JudgeFirst | None = None,
        keep: Keep | None = None,
        *,
        first_sampled: int = 0,
        num_expected: int = 0,
        reference: PolicyState | None = None,
        before_first: Callable[[], None] = lambda: None,
        algorithm: Algorithm | None = None,
        watch_all: bool = False,
    ) -> None:
        """judge_first: called with the differences of the first microbatch that the policy wrote
        any of, before its backward, and of long responses with those of each stretch of their
        length, as where it lies; it may raise.

        reference: the weights that the reference must be of; None: nobody knows. before_first:
        called before the first microbatch's backward, on every stage. algorithm: the
        configuration's; None makes it. watch_all: keep the choices of all targets, not of a sample.
        num_expected: the microbatches of the update before, 0 if nobody knows.
        """
        self._config = config
        self._device = device
        self._judge_first = judge_first
        self._keep = keep
        self._reference = reference
        self._before_first: Callable[[], None] | None = before_first
        self.first_sampled = first_sampled % SAMPLED_EVERY
        self._algorithm = build_algorithm(config) if algorithm is None else algorithm
        models = trainer_models(config, self._algorithm)
        self._models = models
        self._watch_all = watch_all
        self._computes_old = "old" in models.computed
        self._directories = {
            name: FixedWeights(directory) for name, directory in models.directories.items()
        }
        self._freshness = Freshness.from_sections(config.schedule, config.publish)
        self.totals = Totals()
        self.sums = MetricSums(device, all_metric_names(self._algorithm))
        self.entered: list[TrainedResponse] = []
        self.trained: list[TrainedResponse] = []
        self.given: list[GivenLoss] = []
        self._references: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._heads = WatchedHeads(self.first_sampled, num_expected)

    @property
    def entropy_gradient(self) -> bool:
        """Returns whether gradients flow through the entropy."""
        return self._config.algorithm.entropy_coef > 0

    def begin(self) -> None:
        """Looks at the update's start, once, before the first backward. Backends call it ahead of a
        filler; what belongs to responses calls it by itself.
        """
        if self._before_first is not None:
            before, self._before_first = self._before_first, None
            before()

    def balance(self, microbatch: Targets) -> float:
        """Returns the factor of the routers' auxiliary loss: with the microbatch's part of the
        normaliser, its weight in their mean.
        """
        lengths = microbatch.leading
        counts = Counts(tokens=sum(lengths), responses=sum(length > 0 for length in lengths))
        return self._config.algorithm.router_aux_coef * self._algorithm.normaliser(counts)

    def sent(self, microbatch: Targets, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `hidden` unchanged, as a stage sends it to the next; its gradient comes back from
        there.
        """
        self._enter(microbatch, hidden)
        return hidden

    def loss(self, microbatch: Targets, outputs: Outputs) -> torch.Tensor:
        """Returns the sum over the microbatch's tokens, whose gradient the backend computes,
        undivided.

        Raises InvariantViolation.
        """
        denominator = self._denominator(microbatch, outputs)
        self._check_denominator(microbatch, denominator, outputs.policy.weights)
        old_logprobs = denominator.values
        if self._keep is not None:
            self._keep(
                microbatch.iteration, microbatch.sources, microbatch.response_lengths, old_logprobs
            )
        reference = outputs.frozen.get("reference")
        self._check_reference(microbatch, reference)
        batch = token_batch(
            microbatch,
            outputs,
            old_logprobs=old_logprobs,
            weights=self._weights(microbatch),
            group_size=self._config.rollout.responses_per_prompt,
            columns=self._with_teachers(microbatch, outputs),
            choices=self._choices(microbatch, outputs),
        )
        if self._freshness.max_staleness:
            batch = replace(batch, ages=microbatch.ages)
        given = self._watch(microbatch, outputs, batch)
        sums = all_sums(self._algorithm, batch)
        # of the iteration's weight version, as the trainer computes them
        generated = outputs.frozen.get("old", outputs.policy)
        differences = measure(
            microbatch,
            generated.values,
            outputs.entropy,
            self._config,
            is_drawn=_is_unmoved(outputs),
        )
        is_written = bool(microbatch.versions)
        self.sums.add(sums.metrics, differences, microbatch.ages.max(), is_written=is_written)
        if self._judge_first is not None and is_written:
            judge, self._judge_first = self._judge_first, None
            judge(DifferenceSums(*differences.tolist()), "")  # waits for the device
            for where, chosen in stretches(microbatch):
                of_stretch = measure(
                    microbatch,
                    generated.values,
                    outputs.entropy,
                    self._config,
                    is_drawn=_is_unmoved(outputs),
                    chosen=chosen,
                )
                stretch_sums = DifferenceSums(*of_stretch.tolist())
                if stretch_sums.n:
                    judge(stretch_sums, where)
        if reference is not None:
            self._references.append((reference.values, given.batch.logprobs))
        self._enter(microbatch, sums.loss, given)
        return sums.loss

    @torch.no_grad()
    def finish(self) -> None:
        """Adds to `sums` what all microbatches together say of ratios, of the reference and of the
        gradients that came to their losses. Called once, when the last backward has ended.
        """
        ratios = [(given.denominators, given.batch.logprobs) for given in self.given]
        if ratios:
            self.sums.moved = _any_differs(ratios)
        if self._references:
            self.sums.apart = _any_differs(self._references)
        factors = [given.factor for given in self.given if given.factor is not None]
        if factors:
            self.sums.factor_error = (torch.stack(factors).float() - 1.0).abs().max()

    def loss_advantages(self) -> list[float]:
        """Returns, of the responses that were given to `loss`, in that order, the sum of the
        advantages with which their tokens were trained. Waits for the device.
        """
        lengths = [length for given in self.given for length in given.lengths]
        values = torch.cat([given.advantages for given in self.given]).float().cpu()
        index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        sums: list[float] = torch.zeros(len(lengths)).index_add(0, index, values).tolist()
        return sums

    def normaliser(self, totals: Totals, reductions: Reductions) -> float:
        """Returns the divisor of the update's sum. totals: of all replicas.

        Collective if only the last stage knows it.
        """
        counts = Counts(
            tokens=totals.tokens_leading + totals.tokens_by_rule,
            responses=totals.responses_leading + totals.responses_by_rule,
        )
        if (metric := self._algorithm.counted_metric) is not None:
            counts = replace(counts, units=self.sums.total(metric, reductions))
        return self._algorithm.normaliser(counts)

    def _with_teachers(self, microbatch: Targets, outputs: Outputs) -> dict[str, torch.Tensor]:
        """Returns the microbatch's columns, and the log-probs of each teacher: of those that
        trainers hold from the frozen pass, of others as they came with the samples.

        Raises InvariantViolation where these are of other weights (I7).
        """
        columns = dict(microbatch.columns)
        for name, directory in self._directories.items():
            if name not in outputs.frozen:  # no target here asks for it
                columns[name] = torch.full_like(outputs.policy.values.detach(), torch.nan)
                continue
            logprobs = outputs.frozen[name]
            if logprobs.weights != directory:
                raise InvariantViolation(
                    f"I7 gradient: iteration {microbatch.iteration}: a microbatch of groups "
                    f"{microbatch.group_indices} learns from {named_weights(logprobs.weights)}, where "
                    f"{name} is {named_weights(directory)}; give the log-probs of that one"
                )
            columns[name] = logprobs.values
        for model in self._models.scored:
            columns[model.name] = microbatch.columns[SCORES_COLUMN]
        return columns

    def _choices(self, microbatch: Targets, outputs: Outputs) -> Choices | None:
        """Returns the policy's and the teachers' distributions over the teachers' most likely
        tokens.
        """
        policy = outputs.policy.choices
        by_model = {
            name: logprobs.choices
            for name, logprobs in outputs.frozen.items()
            if logprobs.choices is not None
        }
        for model in self._models.scored:
            if model.num_choices:
                by_model[model.name] = microbatch.columns[CHOICE_LOGPROBS_COLUMN]
        teacher = by_target(self._models.teachers, microbatch.columns, by_model)
        return None if policy is None or teacher is None else Choices(policy, teacher)

    def _weights(self, microbatch: Targets) -> torch.Tensor:
        """float32 [N]: the aggregation's weights of the leading component, 1 of others, times those
        that the datum gives.
        """
        weights = self._algorithm.token_weights(microbatch.leading, self._device)
        component, factors = microbatch.columns.get("component"), microbatch.columns.get("weight")
        if component is not None:
            of_all = torch.ones(len(component), device=self._device)
            of_all[component == 1] = weights
            weights = of_all
        return weights if factors is None else weights * factors

    def _watch(self, microbatch: Targets, outputs: Outputs, batch: TokenBatch) -> GivenLoss:
        """Keeps what the gradient of this microbatch must follow from, its denominators as the
        algorithm names them.
        """
        policy = outputs.policy.values
        logprobs = policy.detach()
        old = logprobs
        if self._algorithm.ratio == "sampling":
            old = microbatch.engine_logprobs
        elif "old" in outputs.frozen:
            old = outputs.frozen["old"].values
        seen = TokenBatch(
            logprobs=logprobs,
            entropy=batch.entropy.detach(),
            old_logprobs=old,
            reference_logprobs=batch.reference_logprobs,
            engine_logprobs=microbatch.engine_logprobs,
            advantages=microbatch.advantages,
            weights=batch.weights,
            response_index=batch.response_index,
            num_responses=batch.num_responses,
            group_size=batch.group_size,
            ages=batch.ages,
            columns=batch.columns,
        )
        watched = None
        if batch.choices is not None:
            weights = self._algorithm.choice_weights(batch)
            watched = GivenChoices(batch, weights, every_target=self._watch_all)
        given = GivenLoss(
            seen,
            tuple(microbatch.sources),
            tuple(microbatch.response_lengths),
            outputs.head,
            choices=watched,
            denominators=batch.old_logprobs,
            advantages=batch.advantages,
        )
        given.watch(policy)
        self._heads.add(given)
        self.given.append(given)
        return given

    def _enter(
        self, microbatch: Targets, output: torch.Tensor, given: GivenLoss | None = None
    ) -> None:
        """given: of a loss, whose gradient is kept there."""
        self.begin()
        responses = [
            TrainedResponse(group, number, tokens)
            for (group, number), tokens in zip(
                microbatch.sources, microbatch.response_lengths, strict=True
            )
        ]
        self.entered += responses
        self.totals.add(
            microbatch.response_lengths, microbatch.leading, microbatch.num_computed_tokens
        )
        if output.requires_grad:
            output.register_hook(partial(self._passed, responses, given))

    def _passed(
        self, responses: list[TrainedResponse], given: GivenLoss | None, gradient: torch.Tensor
    ) -> None:
        self.trained += responses
        if given is not None:
            # of two backwards, which the responses show, the last one's
            given.factor = gradient.detach()

    def _denominator(self, microbatch: Targets, outputs: Outputs) -> Logprobs:
        """Log-probs of the policy that ratios are taken against.

        The proximal one is the policy at the iteration's beginning; with one update per iteration
        the policy itself: ratio 1.
        """
        if self._algorithm.ratio == "sampling":
            return Logprobs(microbatch.engine_logprobs, "engine")
        if "old" in outputs.frozen:
            return outputs.frozen["old"]
        return replace(outputs.policy, values=outputs.policy.values.detach())

    def _check_denominator(
        self, microbatch: Targets, denominator: Logprobs, policy: Weights | Literal["engine"] | None
    ) -> None:
        """Raises InvariantViolation where these are not of the policy that the algorithm names
        (I7).
        """
        if not isinstance(policy, PolicyState):
            return  # nobody has named the weights
        subject = f"a microbatch of groups {microbatch.group_indices}"
        if self._algorithm.ratio != "sampling" and not self._computes_old:
            self._freshness.check(policy.version + policy.updates, microbatch.versions, subject)
            if not self._algorithm.reads_old_logprobs:
                return
        wanted = "engine" if self._algorithm.ratio == "sampling" else PolicyState(policy.version)
        if denominator.weights != wanted:
            raise InvariantViolation(
                f"I7 gradient: iteration {microbatch.iteration}: {subject} has ratios against "
                f"{named_weights(denominator.weights)}, where "
                f"algorithm.ratio = {self._algorithm.ratio} takes {named_weights(wanted)}; give "
                "the log-probs of that one"
            )

    def _check_reference(self, microbatch: Targets, reference: Logprobs | None) -> None:
        """Raises InvariantViolation where the reference's log-probs are of other weights than the
        reference's (I7).
        """
        if reference is None or self._reference is None or reference.weights == self._reference:
            return
        raise InvariantViolation(
            f"I7 gradient: iteration {microbatch.iteration}: a microbatch of groups "
            f"{microbatch.group_indices} has a KL to {named_weights(reference.weights)}, where the "
            f"reference is {named_weights(self._reference)}; give the log-probs of that one"
        )


def _any_differs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns 1 if an element of any first tensor is another one than in the second, else 0; fp32."""
    first, second = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    return (first != second).any().float()


def _is_unmoved(outputs: Outputs) -> bool:
    """Returns whether the policy, whose entropy is known, is the old one, whose log-probs are
    compared.
    """
    weights = outputs.policy.weights
    return "old" not in outputs.frozen or (
        isinstance(weights, PolicyState) and weights.updates == 0
    )
