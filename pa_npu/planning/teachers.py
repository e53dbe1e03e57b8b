"""Teachers that the run holds: their shapes, their engines, and the rules between them and the policy.

teacher_specs(config)                  shapes by name of those that trainers hold, from their
                                       directories or published ones
engine_teacher_specs(config)           the same of those that have engines
teacher_engine_config(config, name)    the configuration that a teacher's engines are started with
check_teacher(config, spec, name)      rules between a teacher's shape and the policy's
check_vocabularies(name, path, a, b)   both tokenizers give every token the same id
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pa_npu.algorithm.distillation import teacher_name
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, DataError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.model_rules import check_division, check_engine

# Tokens of a step of a teacher's engine: their logits in fp32 are 2.4 GB at 150,000 tokens of a
# vocabulary, and log-probs as much again.
_SCORED_AT_ONCE = 4096


def of_teacher(config: Config, directory: str) -> Config:
    """Returns the configuration with the teacher in the policy's place, to read and check it as the
    policy is.
    """
    model = config.model.model_copy(update={"path": directory, "adapter": None})
    return config.model_copy(update={"model": model})


def teacher_engine_config(config: Config, name: str) -> Config:
    """Returns the configuration that the engines of teacher `name` are started and asked with: the
    run's, with the teacher in the policy's place.
    """
    teacher = config.teacher[name]
    assert teacher.model is not None, "a teacher with engines has a model"
    backend = teacher.backend or config.rollout.backend
    rollout: dict[str, Any] = {
        "backend": backend,
        "engines": teacher.engines,
        "max_engines": None,
        "attach": (),
        "engine_settings": (),
        "tensor_parallel": teacher.tensor_parallel,
        "sleep": False,
    }
    if backend != config.rollout.backend:
        rollout |= {"extra_args": (), "graph_mode": None}
    if config.run.device != "cpu":
        # a step has the logits of all its tokens; on cpu sequences are not cut
        max_scored = min(config.rollout.max_num_batched_tokens, _SCORED_AT_ONCE)
        rollout["max_num_batched_tokens"] = max(max_scored, config.rollout.max_num_seqs)
    # a request that scores also writes one token
    data = {"max_prompt_tokens": config.data.max_prompt_tokens + 1}
    changed = of_teacher(config, teacher.model)
    return changed.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "data": config.data.model_copy(update=data),
            "teacher": {name: teacher},
            "placement": config.placement.model_copy(update={"colocate": False}),
        }
    )


def engine_teachers(config: Config) -> dict[str, str]:
    """Returns the directories of teachers that have engines, by the model's name."""
    return {
        teacher_name(name): str(teacher.model)
        for name, teacher in config.teacher.items()
        if teacher.place == "engines"
    }


def engine_teacher_specs(config: Config) -> dict[str, ModelSpec]:
    """Returns the shape of every teacher that has engines, by its key in `teacher`.

    Raises DataError where one is neither here nor known.
    """
    return {
        name: _spec(config, teacher_name(name), str(teacher.model))
        for name, teacher in config.teacher.items()
        if teacher.place == "engines"
    }


def teacher_specs(config: Config) -> dict[str, ModelSpec]:
    """Returns the shape of every teacher that trainers hold, by the model's name.

    Raises DataError where one is neither here nor known.
    """
    return {
        name: _spec(config, name, directory)
        for name, directory in trainer_models(config).directories.items()
    }


def _spec(config: Config, name: str, directory: str) -> ModelSpec:
    known = None if Path(directory).is_dir() else known_spec(directory)
    try:
        return known or ModelSpec.from_config(of_teacher(config, directory))
    except DataError as error:
        raise DataError(str(error).replace("model.path:", f"{name}.model:", 1)) from None


def check_teacher(config: Config, spec: ModelSpec, name: str, teacher: ModelSpec) -> None:
    """Raises ConfigError where the teacher cannot be divided like the policy, or over its engines,
    does not know all of the policy's tokens, or is too short.

    spec: the policy's.
    """
    key = f"{name}.model"
    try:
        if name in engine_teachers(config):
            teacher_config = teacher_engine_config(config, name.removeprefix("teacher."))
            check_engine(teacher_config, teacher)
        else:
            check_division(config, teacher)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    if teacher.vocab_size < spec.vocab_size:
        raise ConfigError(
            f"{key}: {teacher.path} has {teacher.vocab_size} tokens, fewer than the "
            f"{spec.vocab_size} of {spec.path}, so that it has no log-prob of some that the policy "
            "may write; use a teacher with the policy's vocabulary"
        )
    keys = config.algorithm
    if keys.distill_divergence != "sampled" and keys.distill_top_k > spec.vocab_size:
        raise ConfigError(
            f"algorithm.distill_top_k: {keys.distill_top_k} is more than the {spec.vocab_size} "
            f"tokens of {spec.path}; lower it"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > teacher.max_positions:
        raise ConfigError(
            f"{key}: {teacher.path} has {teacher.max_positions} positions, fewer than "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}; lower one of these"
        )


def check_vocabularies(name: str, directory: str, tokenizer: Any, teachers: Any) -> None:
    """Raises DataError where two tokenizers do not give every token the same id.

    tokenizer: the policy's. teachers: that of the teacher `name`.
    """
    ours, theirs = tokenizer.get_vocab(), teachers.get_vocab()
    if ours == theirs:
        return
    by_id = {number: token for token, number in theirs.items()}
    different = [(number, token) for token, number in ours.items() if by_id.get(number) != token]
    if different:
        number, token = min(different)
        there = by_id.get(number)
        has = "no such token" if there is None else f"{there!r:.60} there"
        raise DataError(
            f"{name}.model: {directory}: token {number} is {token!r:.60} of the policy and {has}; "
            f"{len(different)} of {len(ours)} tokens differ; use a teacher with the policy's "
            "vocabulary"
        )
