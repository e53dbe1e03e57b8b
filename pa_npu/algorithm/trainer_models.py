"""The models that trainers keep: the policy, what the algorithm needs beside it, and what engines still need of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pa_npu.algorithm.algorithm import Algorithm, NeededModel
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config


@dataclass(frozen=True)
class TrainerModels:
    """Models beside the policy.

    computed: by name, those that go through every microbatch, frozen.
    directories: of those that come from a directory of their own and are no copies, by name.
    teachers: all teachers as the algorithm describes them, those that engines score among them.
    keeps_published: whether there is a copy of the published weights, which is never computed.
    keeps_reference: whether the reference has weights of its own. Without a change to come it is
    the policy with its adapters off.
    """

    computed: tuple[str, ...]
    keeps_published: bool
    keeps_reference: bool
    directories: Mapping[str, str] = field(default_factory=dict)
    teachers: tuple[NeededModel, ...] = ()

    @property
    def num_choices(self) -> Mapping[str, int]:
        """Returns, by model, how many most likely tokens trainers compute for every target."""
        return {
            model.name: model.num_choices
            for model in self.teachers
            if model.num_choices and model.name in self.directories
        }

    @property
    def compares_distributions(self) -> bool:
        """Returns whether the policy gives log-probs of a teacher's most likely tokens."""
        return any(model.num_choices for model in self.teachers)

    @property
    def held(self) -> tuple[NeededModel, ...]:
        """The teachers that trainers hold."""
        return tuple(model for model in self.teachers if model.computed_by == "trainers")

    @property
    def scored(self) -> tuple[NeededModel, ...]:
        """The teachers whose log-probs are columns of the samples."""
        return tuple(model for model in self.teachers if model.computed_by == "engines")

    @property
    def copies(self) -> tuple[str, ...]:
        """The models of the policy's shape by name, computed or not."""
        copies = tuple(name for name in self.computed if name not in self.directories)
        return (*copies, "published") if self.keeps_published else copies

    @property
    def with_weights(self) -> tuple[str, ...]:
        """The copies that have weights of their own where adapters are trained."""
        return tuple(name for name in self.copies if name != "reference" or self.keeps_reference)

    @property
    def published_source(self) -> str:
        """The model that keeps the published weights longest: a copy made for that, or the old
        policy, through all of an iteration's updates; else the policy, until its next update."""
        if self.keeps_published:
            return "published"
        return "old" if "old" in self.computed else "policy"


def trainer_models(config: Config, algorithm: Algorithm | None = None) -> TrainerModels:
    """algorithm: the configuration's; None makes it."""
    algorithm = build_algorithm(config) if algorithm is None else algorithm
    models = [model for model in algorithm.models if model.computed_by == "trainers"]
    computed = tuple(model.name for model in models)
    # with max_staleness the policy changes while engines still need the weights that were published
    publish = config.publish
    old_is_published = (
        "old" in computed and publish.divergence is None and publish.mode == "blocking"
    )
    begins_otherwise = bool(config.algorithm.reference_refresh_every or config.model.adapter)
    return TrainerModels(
        computed=computed,
        keeps_published=config.schedule.max_staleness > 0 and not old_is_published,
        keeps_reference="reference" in computed and (begins_otherwise or not config.has_adapters),
        directories={model.name: model.directory for model in models if model.directory},
        teachers=tuple(model for model in algorithm.models if model.is_teacher),
    )
