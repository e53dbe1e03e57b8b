"""Algorithm: what a run trains and how, in one object. Everybody else asks it and knows no algorithm by name.

    coordinator   credit of a group's samples; what has to stay together
    trainers      models to run, the loss and its components, ratio, normaliser, metrics; the check
                  of credit
    planner       models that trainers hold and compute
    launcher      the rules between the keys that it reads

A kind of algorithm is a subclass in a file of its own: policy_gradient.py, preference_pairs.py,
row_preferences.py, supervised.py, distillation.py.
registry.py makes the run's object of its configuration. A class of the user's own is named by
algorithm.name=module:Class (docs/algorithms.md).

The launcher and the planner ask the object too, and need no torch for it: what computes imports it
where it begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pa_npu.algorithm.normaliser import Counts, broken_normalisers, normaliser
from pa_npu.config.rules.unread import Condition
from pa_npu.config.schema import Config

if TYPE_CHECKING:
    import torch

    from pa_npu.algorithm.choices import Choices
    from pa_npu.algorithm.loss_gradient import ExpectedGradient
    from pa_npu.algorithm.loss_sums import LossSums
    from pa_npu.algorithm.policy_losses import TokenBatch

TokenValues = npt.NDArray[np.float32]
SampleValues = npt.NDArray[np.float32]

# Credit is computed twice, on machines whose float64 sums may round differently.
CREDIT_ROUNDING = 1e-5


@dataclass(frozen=True)
class Component:
    """A part of the loss, and the tokens that it trains.

    number: what these tokens have in the datum, from 1; 0 is a token that is not trained.
    tokens: which ones these are, in a phrase.
    needs_provenance: whether the policy must have written them, so that a version and a log-prob
    are known. A supervised component needs neither.
    """

    number: int
    name: str
    tokens: str
    needs_provenance: bool = True


@dataclass(frozen=True)
class NeededModel:
    """A model that the loss reads beside the policy.

    source: where its weights come from: the policy as it was when the iteration began; the run's
    initial weights, which algorithm.reference_refresh_every may renew; `directory`, whose model
    may have another shape and never changes; or a teacher's engine or server, which scores the
    samples. computed_by: who runs it; what engines score comes in columns of the samples
    (samples/teachers.py).
    num_choices: of every target, so many of its most likely tokens are compared with the policy's
    distribution (TokenBatch.choices); 0: none.
    targets: a column and its value: the model is asked for targets that have it; None: for all.

    The log-probs of a teacher are a column of TokenBatch under the model's name.
    """

    name: str
    source: Literal[
        "policy at the iteration's start", "initial weights", "a directory", "a scoring engine"
    ]
    computed_by: Literal["trainers", "engines"] = "trainers"
    directory: str | None = None
    num_choices: int = 0
    targets: tuple[str, int] | None = None

    @property
    def is_teacher(self) -> bool:
        return self.source in ("a directory", "a scoring engine")


OBSERVATION = "observation"
"""Name of the component of environment.observations."""
DEMONSTRATION = "demonstration"
"""Name of the component of data.demonstrations."""

OLD_POLICY = NeededModel("old", "policy at the iteration's start")
REFERENCE = NeededModel("reference", "initial weights")


@dataclass(frozen=True, eq=False)
class ScoredSamples:
    """A group as credit sees it: G samples with T tokens, one sample after another.

    rewards: float32 [G]. lengths: int [G], tokens of each sample. tokens: int32 [T].
    component: uint8 [T]. columns: the declared ones that are filled by now, [T, *shape] by name.
    """

    rewards: SampleValues
    lengths: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    component: npt.NDArray[np.uint8]
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def spread(self, values: SampleValues) -> TokenValues:
        """[G] -> [T]: each sample's value on its tokens of the leading component, 0 on all others."""
        of_tokens = np.repeat(np.asarray(values, np.float32), self.lengths)
        of_tokens[self.component != 1] = 0
        return of_tokens


class Algorithm(ABC):
    """One per process. Subclasses say what they are by class attributes and these methods.

    components: of the loss, with the numbers 1, 2 and so on. The first one leads: the iteration's
    normaliser counts its tokens, its samples, or what it makes of them. A run with
    data.demonstrations has one more, `demonstrations`, whose loss is cross-entropy.
    samples_from: engines write the samples that are trained, or they are rows of data; then
    rollout.engines is 0, and nothing is generated, rewarded or published.
    row_is: what a row of data is: a sequence, or a pair of which the first is preferred. A pair is
    a group of its own.
    held_out_names: of what `held_out_sums` returns.
    """

    components: tuple[Component, ...]
    samples_from: ClassVar[Literal["engines", "rows"]] = "engines"
    row_is: ClassVar[Literal["sequence", "pair"]] = "sequence"
    held_out_names: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = config.algorithm
        self.demonstrations: Component | None = None
        if config.data.demonstrations is not None and self.samples_from == "engines":
            self.demonstrations = Component(
                number=len(self.components) + 1,
                name=DEMONSTRATION,
                tokens="those that rows of data.demonstrations mark",
                needs_provenance=False,
            )
            self.components = (*self.components, self.demonstrations)
        self.observations: Component | None = None
        if config.environment.observations and self.samples_from == "engines":
            self.observations = Component(
                number=len(self.components) + 1,
                name=OBSERVATION,
                tokens="those that the environment shows in a role of environment.observations",
                needs_provenance=False,
            )
            self.components = (*self.components, self.observations)

    # What it needs

    @property
    def models(self) -> tuple[NeededModel, ...]:
        """The models that its loss reads beside the policy."""
        return (REFERENCE,) if self.keys.has_reference else ()

    @property
    def needs_whole(self) -> Literal["samples", "groups", "batch"]:
        """Returns the parts that must be in one place: for the loss in one microbatch, for credit
        at one time.
        """
        return "groups" if self.whole_groups_key else "samples"

    @property
    def whole_groups_key(self) -> str | None:
        """The key, with its value, by which the loss needs all samples of a prompt together, and
        exactly rollout.responses_per_prompt of them; None where any number will do."""
        return None

    @property
    def loss_columns(self) -> tuple[Any, ...]:
        """The declared columns (samples.columns.Column) that the loss reads; each says who fills
        it.
        """
        return tuple(getattr(type(self), "columns", ()))

    @property
    def credit_columns(self) -> tuple[Any, ...]:
        """The declared columns that credit reads."""
        return ()

    # Which tokens it trains

    def token_components(
        self,
        tokens: npt.NDArray[np.int32],
        component: npt.NDArray[np.uint8],
        written: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.uint8]:
        """Returns the component of each token of a sample, uint8 [T]; 0 for its first token, which
        follows from nothing.

        By default it is as the environment put the sample together: 1 for tokens that the policy
        wrote. A subclass whose components train other tokens of any environment names them here.

        Args:
            tokens: int32 [T].
            component: uint8 [T], as the environment put it.
            written: bool [T], whether the policy wrote the token.
        """
        return component

    def broken_components(
        self, component: npt.NDArray[np.uint8], written: npt.NDArray[np.bool_]
    ) -> str | None:
        """Says, as a phrase, why these are not components that it can train; None where they are."""
        if component.max(initial=0) <= 1 and np.array_equal(component != 0, written):
            return None  # as nearly all groups are
        for number in np.unique(component[component != 0]).tolist():
            if number > len(self.components):
                known = ", ".join(f"{known.number} ({known.name})" for known in self.components)
                return f"there is no component {number}; the algorithm has {known}"
            part = self.components[number - 1]
            without = int(np.count_nonzero((component == number) & ~written))
            if part.needs_provenance and without:
                return (
                    f"{without} tokens of component {number} ({part.name}) have no weight version: "
                    "the policy did not write them, and this component trains tokens that it wrote"
                )
        return None

    # Credit

    @property
    @abstractmethod
    def credit_key(self) -> str:
        """Returns the key, with its value, from which credit follows, for messages."""

    @abstractmethod
    def credit(self, group: ScoredSamples) -> TokenValues:
        """Returns the advantages of one group, float32 [T]; 0 on tokens that are not trained."""

    def batch_credit(self, groups: Sequence[ScoredSamples]) -> list[TokenValues]:
        """Returns the same of all groups of an iteration.

        Called where the iteration is handed over as a whole.
        """
        return [self.credit(group) for group in groups]

    def broken_credit(self, group: ScoredSamples, advantages: TokenValues) -> str | None:
        """Says why `advantages` [T] are not the group's credit, as a phrase; None where they are
        (invariant I7).

        By default credit is computed again. It must not depend on more than the group.
        """
        expected = self.credit(group)
        wrong = np.abs(advantages - expected) > CREDIT_ROUNDING * np.abs(expected).max(initial=0.0)
        if not wrong.any():
            return None
        token = int(wrong.argmax())
        return (
            f"the advantage of token {token} is {advantages[token]:.6g} and should be "
            f"{expected[token]:.6g}"
        )

    # Groups without a gradient

    @property
    def needs_every_gradient(self) -> str | None:
        """Says, as a phrase, why a group whose advantages are all 0 may have a gradient; None where
        its gradient is exactly 0, so that it may be trained by rule (schedule.skip_zero_advantage).

        By default nothing is known of the loss. A subclass that returns None promises that every
        term of its loss, and everything that is added to it, has the advantage as a factor.
        """
        return f"{type(self).__name__} does not promise it (needs_every_gradient in its class)"

    @property
    def trains_by_rule(self) -> bool:
        """Returns whether groups with advantages of 0 are trained by rule:
        schedule.skip_zero_advantage, where null means that the loss is ours and needs no gradient
        of theirs.

        The launcher has set the key to false where the model forbids it (settled_rule).
        """
        config = self.config
        if config.schedule.skip_zero_advantage is not None:
            return config.schedule.skip_zero_advantage
        is_users_own = config.algorithm.is_users_own or ":" in self.keys.loss
        if is_users_own or self.samples_from == "rows" or self.compares_whole_stages:
            return False
        return self.needs_every_gradient is None

    @property
    def compares_whole_stages(self) -> bool:
        """Returns whether a finite difference is taken of groups that every stage of a pipeline
        computes.
        """
        config = self.config
        return config.trainer.pipeline_parallel > 1 and config.schedule.finite_difference_every > 0

    def is_without_gradient(self, group: ScoredSamples, advantages: TokenValues) -> bool:
        """Says whether the gradient of a group with these advantages [T] is exactly 0."""
        if self.needs_every_gradient is not None or advantages.any():
            return False
        return bool(group.component.max(initial=0) <= 1)

    def broken_rule(self, rewards: SampleValues) -> str | None:
        """Says, as a phrase, why a group with these rewards [G] may not be trained by rule; None
        where it may, or where its rewards alone do not say (I7).
        """
        return self.needs_every_gradient

    # The loss

    @property
    def ratio(self) -> Literal["proximal", "sampling"]:
        """The policy that log-probs are compared with, algorithm.ratio resolved.

        proximal: that of the iteration's beginning. sampling: the one that wrote the token, by what
        the engine reported; auto takes it with max_staleness, where no weights stand between the
        two.
        """
        if self.keys.ratio != "auto":
            return self.keys.ratio
        uncorrected = self.config.schedule.max_staleness and self.keys.importance_sampling == "none"
        return "sampling" if uncorrected else "proximal"

    @property
    def reads_old_logprobs(self) -> bool:
        """Returns whether the loss may depend on that policy's log-probs, so that these have to be
        the right ones.
        """
        return True

    @abstractmethod
    def token_weights(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns the weights of the leading component's tokens, float32 [sum of lengths].

        lengths: such tokens of each sample.
        """

    @abstractmethod
    def loss_sums(self, batch: TokenBatch) -> LossSums:
        """Returns the sum over the leading component's tokens of a microbatch, each with its
        weight, undivided.
        """

    def loss_of(self, component: Component, batch: TokenBatch) -> torch.Tensor:
        """Returns the loss of each token of a component that does not lead, [tokens], before its
        weight.

        batch: of these tokens alone.
        """
        if component in (self.demonstrations, self.observations):
            return -batch.logprobs
        return self.component_loss(component, batch)

    def component_loss(self, component: Component, batch: TokenBatch) -> torch.Tensor:
        """Returns the same for a component that the subclass declares."""
        raise NotImplementedError(
            f"{type(self).__name__} has no loss for component {component.name}"
        )

    @property
    @abstractmethod
    def metric_names(self) -> tuple[str, ...]:
        """The names in the metrics of `loss_sums`, "loss" and "policy_loss" among them."""

    def expected_gradient(self, batch: TokenBatch) -> ExpectedGradient:
        """Returns the gradient of `loss_sums` at the log-probs by a second calculation, on the host
        (I7).

        By default it is autograd's again, in fp64. That sees what the loss is given and what
        becomes of its gradient, not a mistake in the formula: a second formula sees that too.
        """
        from pa_npu.algorithm.component_sums import gradient_by_autograd

        return gradient_by_autograd(lambda wide: self.loss_sums(wide).loss, batch)

    def choice_weights(self, batch: TokenBatch) -> torch.Tensor:
        """Returns the factor of each target's comparison of distributions, [tokens]."""
        return batch.weights

    def expected_choice_gradient(self, choices: Choices, weights: torch.Tensor) -> ExpectedGradient:
        """Returns the gradient of `loss_sums` at the policy's log-probs of a teacher's most likely
        tokens by a second calculation, [N, k + 1], on the host (I7).

        choices: in fp64, of targets of the leading component. weights: their `choice_weights`.
        Called only where a model has num_choices.
        """
        raise NotImplementedError(f"{type(self).__name__} compares no distributions")

    # Held-out rows

    def held_out_sums(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        """Returns sums over a microbatch of held-out rows by name; "loss", which chooses the best
        checkpoint, is among them. By default it is the cross-entropy of their trained tokens.
        """
        return {"loss": -batch.logprobs.float().sum()}

    def held_out_count(self, *, rows: int, tokens: int) -> int:
        """Returns what those sums are divided by. tokens: trained ones."""
        return tokens

    # The normaliser

    @property
    def counted_metric(self) -> str | None:
        """The metric whose sum is Counts.units, known after the loss alone; None where N follows
        from what was dispatched."""
        return None

    def normaliser(self, counts: Counts) -> float:
        """Returns N, which every component's sum is divided by: that of algorithm.aggregation."""
        return normaliser(self.keys.aggregation, counts, self.config.rollout.max_response_tokens)

    def broken_normalisers(
        self, normalisers: Sequence[float], dispatched: Counts, num_groups: int
    ) -> str | None:
        """Says why these are not the normalisers of an iteration's updates, as a phrase; None if
        they are (I7). An algorithm with a normaliser of its own checks it in its own way.
        """
        expected = self.normaliser(dispatched)
        return broken_normalisers(normalisers, expected, dispatched, self.keys.aggregation)

    # Its keys

    def broken_rules(self) -> Iterator[str]:
        """Yields a line for each conflict between its keys and others: keys, values, rule, remedy."""
        yield from ()

    @property
    def unread(self) -> tuple[Condition, ...]:
        """The keys that this algorithm does not read: set, they are refused."""
        return ()
