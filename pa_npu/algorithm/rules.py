"""Rules between the algorithm's keys and others, and the loading of a configuration with them.

They are the algorithm's own, and so stand above the configuration, which does not know it. A class
of the user's own names its rules too; these are checked before a run, once the class has been tried
in a process of its own (trial.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pa_npu.algorithm.advantages import KNOWN_ADVANTAGES
from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.distillation import Distillation
from pa_npu.algorithm.registry import KINDS, build_algorithm
from pa_npu.algorithm.row_rules import broken_source
from pa_npu.config import load
from pa_npu.config.rules.unread import unread_keys
from pa_npu.config.schema import Config
from pa_npu.config.words import choose_among
from pa_npu.config.yaml_source import KeyPath


def load_config(
    paths: Iterable[str], overrides: Sequence[str] = (), values: Mapping[KeyPath, Any] | None = None
) -> Config:
    """Loads a configuration as `pa_npu.config.load.load_config` does, and checks the rules of its
    algorithm.
    """
    return load.load_config(paths, overrides, values, broken_rules)


def broken_rules(config: Config) -> Iterator[str]:
    """Yields a line for each rule of the algorithm that is broken: keys, values, rule, remedy."""
    yield from _unknown_names(config)
    if not config.algorithm.is_users_own:
        yield from rules_of(build_algorithm(config))


def rules_of(algorithm: Algorithm) -> Iterator[str]:
    """Yields the same of an algorithm whose code is known to import."""
    config = algorithm.config
    yield from broken_source(algorithm)
    yield from unread_keys(config, algorithm.unread)
    yield from algorithm.broken_rules()
    yield from _broken_skipping(algorithm)
    yield from _broken_teachers(algorithm)
    yield from _broken_demonstrations(algorithm)
    yield from _broken_observations(algorithm)
    if (
        config.environment.has_gateway
        and (key := needs_whole_groups(config, algorithm)) is not None
    ):
        yield (
            f"environment.name: {config.environment.name}, whose sessions are one sample, several or "
            f"none, while {key} needs exactly rollout.responses_per_prompt = "
            f"{config.rollout.responses_per_prompt} samples of every prompt; change that key"
        )


def _broken_skipping(algorithm: Algorithm) -> Iterator[str]:
    """Yields why groups with advantages of 0 may not be trained by rule, where a key asks for it."""
    config = algorithm.config
    if not config.schedule.skip_zero_advantage or algorithm.samples_from == "rows":
        return
    key = "schedule.skip_zero_advantage: true"
    if (reason := algorithm.needs_every_gradient) is not None:
        yield (
            f"{key} needs a loss by which a group with advantages of 0 has no gradient, but "
            f"{reason}; set skip_zero_advantage to false"
        )
    if algorithm.compares_whole_stages:
        yield (
            f"{key} with trainer.pipeline_parallel = {config.trainer.pipeline_parallel} and "
            f"schedule.finite_difference_every = {config.schedule.finite_difference_every}, which "
            "compares whole groups that every stage computes; set one of them to its default"
        )


def _broken_teachers(algorithm: Algorithm) -> Iterator[str]:
    """Yields a line where teachers are named, or need one, and the algorithm has none, or nothing
    else trains.
    """
    config, keys = algorithm.config, algorithm.keys
    if keys.distill_coef and not config.algorithm.is_users_own:
        if not isinstance(algorithm, Distillation):
            yield (
                f"algorithm.distill_coef: {keys.distill_coef:g} with algorithm.loss={keys.loss}, "
                "which is no policy gradient on the policy's responses; set it to 0, or loss to clip"
            )
        return
    if config.teacher and not any(model.is_teacher for model in algorithm.models):
        yield (
            f"teacher: {', '.join(config.teacher)} would be read by nothing; set "
            "algorithm.distill_coef, or remove the section"
        )
    if config.data.teacher_column is not None and not config.teacher:
        yield (
            f"data.teacher_column: {config.data.teacher_column} would be read by nothing; name "
            "teachers in `teacher`, or remove it"
        )
    if keys.advantage == "no-reward" and not config.algorithm.is_users_own:
        yield (
            "algorithm.advantage: no-reward with algorithm.distill_coef = 0 trains nothing; set "
            "distill_coef, or another advantage"
        )


def _broken_demonstrations(algorithm: Algorithm) -> Iterator[str]:
    """Yields what demonstrations cannot be trained with."""
    config = algorithm.config
    groups = config.demonstration_groups
    demonstrated = config.data.demonstrated
    if not groups or demonstrated is None or algorithm.samples_from == "rows":
        return
    named = f"data.demonstrations: {demonstrated.path}"
    if not config.mesh.shares(groups):
        yield (
            f"data.demonstrations.share: makes {groups} groups an iteration, which "
            f"{config.mesh.data} replicas cannot share; choose it so that share * "
            f"schedule.prompts_per_iteration is a multiple of {config.mesh.data}"
        )
    schedule = config.schedule
    for key, value, is_set in (
        ("algorithm.loss", config.algorithm.loss, config.algorithm.loss == "dpo"),
        ("algorithm.advantage", "batch-std", algorithm.needs_whole == "batch"),
        (
            "schedule.updates_per_iteration",
            schedule.updates_per_iteration,
            schedule.updates_per_iteration > 1,
        ),
        (
            "schedule.tokens_per_update",
            schedule.tokens_per_update,
            schedule.tokens_per_update is not None,
        ),
        ("schedule.max_staleness", schedule.max_staleness, schedule.max_staleness > 0),
        ("placement.colocate", "true", config.placement.colocate),
    ):
        if is_set:
            yield (
                f"{named} beside {key} = {value}, with which rows of data are not trained; change "
                "that key, or remove data.demonstrations"
            )


def _broken_observations(algorithm: Algorithm) -> Iterator[str]:
    """Yields what observations cannot be trained with."""
    config = algorithm.config
    roles = config.environment.observations
    if not roles or algorithm.samples_from == "rows":
        return
    named = f"environment.observations: {', '.join(roles)}"
    environment = config.environment.name
    if environment == "single_turn" or config.environment.has_sessions:
        yield (
            f"{named} with environment.name = {environment}, which shows no tokens by role; set "
            "environment.name to tools or a class of yours that calls EnvironmentContext.show, or "
            "remove the key"
        )
    elif environment == "tools" and set(roles) != {"tool"}:
        yield f"{named}: environment.name = tools shows the role tool alone; remove the others"
    elif config.algorithm.loss == "dpo":
        yield (
            f"{named} beside algorithm.loss = dpo, whose pairs train what the policy wrote; change "
            "the loss, or remove the key"
        )


def needs_whole_groups(config: Config, algorithm: Algorithm) -> str | None:
    """Returns the key that needs exactly responses_per_prompt samples of every prompt.

    None where environments may make any number.
    """
    if algorithm.whole_groups_key is not None:
        return algorithm.whole_groups_key
    if (stages := config.trainer.pipeline_parallel) > 1:
        return (
            f"trainer.pipeline_parallel = {stages}, whose stages agree on the number of "
            "microbatches beforehand,"
        )
    return None


def divides_groups(config: Config, algorithm: Algorithm) -> bool:
    """Returns whether several replicas may train a part each of a group."""
    return config.devices.unequal_groups and algorithm.needs_whole == "samples"


def _unknown_names(config: Config) -> Iterator[str]:
    """Values that name a function: one of ours, or module:function of the user's, imported before a
    run.
    """
    named: list[tuple[str, str, tuple[str, ...]]] = [
        ("algorithm.loss", config.algorithm.loss, tuple(KINDS)),
        ("algorithm.advantage", config.algorithm.advantage, KNOWN_ADVANTAGES),
    ]
    for key, name, known in named:
        module, separator, function = name.partition(":")
        if name not in known and not (separator and module.strip() and function.strip()):
            yield (
                f"{key}: {name!r} is not {', '.join(known)} or module:function; "
                f"{choose_among(name, known)}"
            )
