"""On-policy distillation: the policy writes responses, a teacher's log-probs of their tokens say what to change.

algorithm.distill_divergence=sampled:

    d_t = clip(log p_teacher(t) - log p_policy(t), -c, c)      no gradient; c: algorithm.distill_clip
    A_t = R_t + coef (d_t + g d_{t+1} + g^2 d_{t+2} + ...)     R_t: the reward's advantage
                                                               g: algorithm.distill_discount

The expectation of -d over the policy's tokens is KL(policy || teacher), so that A is the advantage
of a policy gradient that lowers it: MiniLLM, arXiv 2306.08543, eq. 2. With g = 0 each token answers
for its own distribution, with g = 1 for the rest of its response. The sum runs over the trained
tokens of a response. A teacher with the policy's own weights gives d = 0 exactly.

algorithm.distill_divergence=forward, reverse or js: coef times a divergence of the distributions
over the teacher's most likely tokens is added to each token's loss, with its own gradient
(divergences.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pa_npu.algorithm.algorithm import NeededModel
from pa_npu.algorithm.policy_gradient import PolicyGradient
from pa_npu.config.rules.learning import of_preset
from pa_npu.config.rules.unread import Condition
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import TeacherConfig

if TYPE_CHECKING:
    import torch

    from pa_npu.algorithm.choices import Choices
    from pa_npu.algorithm.loss_gradient import ExpectedGradient, Values
    from pa_npu.algorithm.loss_sums import LossSums
    from pa_npu.algorithm.policy_losses import TokenBatch

# The number of a token's teacher in a run of several, from 1, in the order of `teacher`.
TEACHER_COLUMN = "teacher"
TEACHER_KL = "teacher_kl"
TEACHER_DIVERGENCE = "teacher_divergence"
# As a share of the terms of a sum over later tokens: fp32 against fp64.
_ROUNDING_OF_SUMS = 1e-5


def teacher_name(name: str) -> str:
    """Returns the name of a teacher among the models, which is its key."""
    return f"teacher.{name}"


class Distillation(PolicyGradient):
    """A policy gradient whose advantages are a teacher's, or which has a divergence from a teacher
    as a further loss, alone or beside a reward.
    """

    @property
    def compares_distributions(self) -> bool:
        return self.keys.distill_divergence != "sampled"

    @property
    def models(self) -> tuple[NeededModel, ...]:
        return (*super().models, *self.teachers)

    @property
    def teachers(self) -> tuple[NeededModel, ...]:
        """The teachers, in the order of their numbers."""
        teachers = []
        for number, (name, teacher) in enumerate(self.config.teacher.items(), start=1):
            model = NeededModel(
                teacher_name(name),
                "a directory",
                directory=teacher.model,
                num_choices=self.keys.distill_top_k if self.compares_distributions else 0,
                targets=(TEACHER_COLUMN, number) if len(self.config.teacher) > 1 else None,
            )
            if teacher.is_scored:
                model = replace(
                    model, source="a scoring engine", computed_by="engines", directory=None
                )
            teachers.append(model)
        return tuple(teachers)

    # The loss

    def loss_sums(self, batch: TokenBatch) -> LossSums:
        kl = (batch.logprobs.detach() - self._teacher_logprobs(batch)).sum()
        if self.compares_distributions:
            sums = self._with_divergence(super().loss_sums(batch), batch)
        else:
            advantages = batch.advantages + self._teacher_advantages(batch)
            sums = super().loss_sums(replace(batch, advantages=advantages))
        return replace(sums, metrics=sums.metrics | {TEACHER_KL: kl})

    def _with_divergence(self, sums: LossSums, batch: TokenBatch) -> LossSums:
        from pa_npu.algorithm.divergences import divergence

        assert batch.choices is not None, "trainers give them where a model has num_choices"
        of_tokens = divergence(batch.choices, self.keys)
        loss = sums.loss + (of_tokens * self.choice_weights(batch)).sum()
        measured = {"loss": loss.detach(), TEACHER_DIVERGENCE: of_tokens.detach().sum()}
        return replace(sums, loss=loss, metrics=sums.metrics | measured)

    @property
    def metric_names(self) -> tuple[str, ...]:
        names = (*super().metric_names, TEACHER_KL)
        return (*names, TEACHER_DIVERGENCE) if self.compares_distributions else names

    def choice_weights(self, batch: TokenBatch) -> torch.Tensor:
        return batch.weights * self._coefficients(batch)

    def _coefficients(self, batch: TokenBatch) -> torch.Tensor:
        """Returns distill_coef times the weight of each token's teacher, [tokens] or []."""
        weights = [teacher.weight for teacher in self.config.teacher.values()]
        of_teachers = self.keys.distill_coef * batch.weights.new_tensor(weights)
        if len(weights) == 1:
            return of_teachers[0]
        return of_teachers[batch.columns[TEACHER_COLUMN].long() - 1]

    def expected_choice_gradient(self, choices: Choices, weights: torch.Tensor) -> ExpectedGradient:
        from pa_npu.algorithm.divergences import expected_gradient_of

        expected = expected_gradient_of(choices, self.keys)
        factor = weights.numpy()[:, None]
        return replace(
            expected, values=factor * expected.values, limit=abs(factor) * expected.limit + 1e-12
        )

    def expected_gradient(self, batch: TokenBatch) -> ExpectedGradient:
        import torch

        if self.compares_distributions:
            return super().expected_gradient(batch)  # the divergence has none at these log-probs

        added, terms = self._expected_advantages(batch)
        advantages = batch.advantages.double() + torch.from_numpy(added)
        expected = super().expected_gradient(replace(batch, advantages=advantages))
        ratio = np.exp((batch.logprobs - batch.old_logprobs).double().numpy())
        weights = batch.weights.double().numpy()
        rounding = _ROUNDING_OF_SUMS * np.abs(weights) * np.maximum(ratio, 1.0) * terms
        return replace(expected, limit=expected.limit + rounding)

    def _teacher_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        from pa_npu.algorithm.choices import by_target

        values = {model.name: batch.columns[model.name] for model in self.teachers}
        logprobs = by_target(self.teachers, batch.columns, values)
        assert logprobs is not None, "there is a teacher"
        return logprobs

    def _teacher_advantages(self, batch: TokenBatch) -> torch.Tensor:
        """Returns what the teacher adds to the advantages, [tokens], without gradient."""
        keys = self.keys
        log_ratios = self._teacher_logprobs(batch) - batch.logprobs.detach()
        if keys.distill_clip is not None:
            log_ratios = log_ratios.clamp(-keys.distill_clip, keys.distill_clip)
        sums = discounted_sums(log_ratios, batch.response_index, keys.distill_discount)
        return self._coefficients(batch) * sums

    def _expected_advantages(self, batch: TokenBatch) -> tuple[Values, Values]:
        """Returns the same by a second calculation in fp64, token by token from the end, and the
        size of its terms.
        """
        keys = self.keys
        log_ratios = (self._teacher_logprobs(batch).double() - batch.logprobs.double()).numpy()
        if keys.distill_clip is not None:
            log_ratios = np.clip(log_ratios, -keys.distill_clip, keys.distill_clip)
        response = batch.response_index.numpy()
        added, terms = np.zeros_like(log_ratios), np.zeros_like(log_ratios)
        later, later_terms, last = 0.0, 0.0, -1
        for token in range(len(log_ratios) - 1, -1, -1):
            if response[token] != last:
                later, later_terms, last = 0.0, 0.0, response[token]
            later = log_ratios[token] + keys.distill_discount * later
            later_terms = abs(log_ratios[token]) + keys.distill_discount * later_terms
            added[token], terms[token] = later, later_terms
        factor = self._coefficients(batch).double().numpy()
        return factor * added, factor * terms

    # Its keys

    @property
    def unread(self) -> tuple[Condition, ...]:
        divergence = self.keys.distill_divergence
        return (
            *super().unread,
            Condition(
                "algorithm.distill_clip algorithm.distill_discount",
                lambda c: divergence == "sampled",
                "set algorithm.distill_divergence to sampled",
            ),
            Condition(
                "algorithm.distill_top_k",
                lambda c: divergence != "sampled",
                "set algorithm.distill_divergence to forward, reverse or js",
            ),
            Condition(
                "algorithm.distill_beta",
                lambda c: divergence == "js",
                "set algorithm.distill_divergence to js",
            ),
        )

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        config, keys = self.config, self.keys
        coef = f"algorithm.distill_coef: {keys.distill_coef:g}{of_preset(config, 'distill_coef')}"
        if not config.teacher:
            yield f"{coef} needs a teacher; set teacher.NAME.model to its directory"
        for name, teacher in config.teacher.items():
            yield from _broken_teacher(config, f"teacher.{name}", teacher)
        column = config.data.teacher_column
        if len(config.teacher) > 1 and column is None:
            names = ", ".join(config.teacher)
            yield (
                f"teacher: {names} are {len(config.teacher)}, and nothing says which of them a row "
                "is for; set data.teacher_column to the column that names it"
            )
        if len(config.teacher) == 1 and column is not None:
            yield (
                f"data.teacher_column: {column} would be read by nothing, since there is one "
                "teacher; remove it"
            )
        if config.algorithm.router_replay != "none" and config.teacher:
            yield (
                f"algorithm.router_replay: {keys.router_replay} beside {coef}: a teacher's experts "
                "are not the policy's; set it to none"
            )
        every = config.schedule.finite_difference_every
        held = any(not teacher.is_scored for teacher in config.teacher.values())
        apart = held and config.trainer.frozen_pass == "separate"
        if self.compares_distributions and every and apart:
            yield (
                f"schedule.finite_difference_every: {every} with trainer.frozen_pass = separate "
                f"and algorithm.distill_divergence = {keys.distill_divergence}: the check needs "
                "the teacher in the policy's pass; set frozen_pass to together, or "
                "finite_difference_every to 0"
            )


def _broken_teacher(config: Config, key: str, teacher: TeacherConfig) -> Iterator[str]:
    """Yields what is wrong with the name and the keys of one teacher."""
    name = key.removeprefix("teacher.")
    if not name.strip() or not name.isprintable():
        yield (
            f"teacher: {name!r:.80} is no name of a teacher; name it with printable characters on one "
            "line, as rows and records do"
        )
    sources = {
        "model": teacher.model,
        "url": teacher.url,
        "hint_column": teacher.hint_column,
    }
    named_sources = [f"{name}={value}" for name, value in sources.items() if value is not None]
    if not named_sources:
        yield (
            f"{key}.model: is missing, so that there is no teacher; set it to an HF directory, or "
            "url to a server, or hint_column to a column of the data"
        )
    elif len(named_sources) > 1:
        names = " and ".join(named_sources)
        yield f"{key}: {names} are several teachers in one; keep one of these keys"
    if teacher.url is not None and not teacher.url.startswith(("http://", "https://")):
        yield f"{key}.url: {teacher.url!r:.80} is no URL; give http://HOST:PORT"
    if teacher.model is None or not teacher.engines:
        for name, default in (("engines", 0), ("tensor_parallel", 1), ("backend", None)):
            if getattr(teacher, name) != default:
                remedy = "set model" if teacher.model is None else "set engines to 1 or more"
                yield (
                    f"{key}.{name}: {getattr(teacher, name)} would be read by nothing, since the "
                    f"run starts no engines for this teacher; {remedy}, or remove the key"
                )
    if teacher.place != "policy":
        for name, usual in (("hint_text", "{hint}"), ("max_prompt_tokens", None)):
            if getattr(teacher, name) != usual:
                yield (
                    f"{key}.{name}: would be read by nothing; set hint_column, or remove the key"
                )
    elif "{hint}" not in teacher.hint_text:
        yield (
            f"{key}.hint_text: {teacher.hint_text!r:.80} does not contain {{hint}}, so that the "
            "policy would be shown nothing more; put {hint} where the column's text belongs"
        )
    elif config.environment.has_gateway:
        yield (
            f"{key}.hint_column: {teacher.hint_column} with environment.name = "
            f"{config.environment.name}, whose prompts are made by programs; use another environment, or a teacher with a model"
        )
    if teacher.place == "engines" and config.placement.cluster != "local":
        yield (
            f"{key}.engines: {teacher.engines} with placement.cluster = "
            f"{config.placement.cluster}: the run starts a teacher's engines on this machine only; "
            "start them with pa-npu engines and set url, or engines to 0"
        )


def discounted_sums(
    values: torch.Tensor, response_index: torch.Tensor, discount: float
) -> torch.Tensor:
    """Returns of each token the sum of its value and the later ones of its response, each times
    `discount` to the power of its distance: [tokens].

    In log2(tokens of the longest response) steps: a sum over n tokens and the sum over the n
    behind them make one over 2 n.

    Args:
        values: [tokens], ordered by response.
        response_index: int64 [tokens], consecutive for each response.
        discount: from 0 to 1.
    """
    if not discount or not len(values):
        return values
    longest = int(response_index.bincount().max())
    sums, reach, factor = values, 1, discount
    while reach < longest:
        behind = sums[reach:] * (response_index[reach:] == response_index[:-reach])
        sums = sums.clone()
        sums[:-reach] += factor * behind
        reach, factor = 2 * reach, factor * factor
    return sums
