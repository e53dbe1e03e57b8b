"""Checks of datasets, held-out sets and rewards: all are read and tried as the coordinator will use them."""

from __future__ import annotations

import math
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import ConfigError, DataError
from pa_npu.families.model_directory import check_tokenizer, end_tokens_line
from pa_npu.launcher.checks.findings import Findings, LocalChecks
from pa_npu.rewards.functions import needs_answers
from pa_npu.vision.family import read_vision

if TYPE_CHECKING:
    from pa_npu.data.prompts import Prompt, PromptSet
    from pa_npu.data.row_sets import RowSet
    from pa_npu.data.trained_sets import AnySet

_ABSENT = "not here"
# Of each dataset, rows that a teacher's server scores before the run.
_TRIED_ROWS = 4


def check_prompts(
    config: Config, findings: Findings, tokenizer: Any, local: LocalChecks
) -> Prompt | None:
    """Checks all datasets and held-out sets of prompts with the tokenizer, and counts them.

    Returns a prompt to try rewards and tools on; None where no set is here.
    """
    from pa_npu.data.prompts import first_prompt_lines

    if findings.spec is not None:
        check_tokenizer(findings.spec, tokenizer)
        if not config.rollout.ignore_eos:
            findings.counts.append(end_tokens_line(findings.spec, tokenizer))

    datasets = config.data.datasets
    training = local.run(
        partial(check_training, tokenizer, config), *(dataset.path for dataset in datasets)
    )
    for number, dataset in enumerate(datasets):
        summary = training[number].summary if training else _ABSENT
        line = f"{config.data.key_of(number)}: {summary}"
        if len(datasets) > 1:
            line += f"; {dataset.called}, {config.data.shares[number]:.1%} of the prompts"
        findings.counts.append(line)

    sample: Prompt | None = None
    for name, held_out_set in config.evaluate.all_sets(config.data.test).items():
        held_out = local.run(partial(check_held_out, name, tokenizer, config), held_out_set.path)
        summary = held_out.summary if held_out else _ABSENT
        findings.counts.append(f"{config.evaluate.key_of(name)}: {summary}")
        if sample is None and held_out:
            sample = held_out.prompts[0]
    if training:
        sample = training[0].prompts[0]
        for loaded in training:
            findings.rows += [prompt.tokens for prompt in loaded.prompts[:_TRIED_ROWS]]
        findings.counts += first_prompt_lines(sample, tokenizer)
    if (demonstrated := config.data.demonstrated) is not None:
        rows = local.run(partial(check_demonstrations, tokenizer, config), demonstrated.path)
        findings.counts.append(f"data.demonstrations: {rows.summary if rows else _ABSENT}")
        findings.counts += rows.first_lines(tokenizer) if rows else []
    if any(prompt.images for prompts in training or () for prompt in prompts.prompts):
        check_images(config)
    return sample


def check_images(config: Config) -> None:
    """Raises ConfigError where prompts with images meet something that would leave them out: worlds
    of OpenEnv, whose policy sees nothing of a prompt, engines that take none, and teachers that see
    the text alone.
    """
    environment = config.environment
    if environment.name == "remote" and environment.options.get("protocol") == "openenv":
        raise ConfigError(
            "environment.options: protocol openenv, whose policy is shown observations alone, but "
            "the prompts have images; take another environment, or set data.images_column=null"
        )
    kind = engine_kind(config.rollout.backend)
    if not kind.reads_images:
        raise ConfigError(
            f"rollout.backend: {config.rollout.backend} takes no images, which the prompts have; "
            "set it to transformers, or data.images_column to null"
        )
    for name, teacher in config.teacher.items():
        if teacher.is_scored:
            raise ConfigError(
                f"teacher.{name}: engines score its text alone, but the prompts have images; let "
                "trainers hold it (model, with engines=0), or set data.images_column=null"
            )
    for name, directory in trainer_models(config).directories.items():
        if read_vision(directory) is None:
            raise ConfigError(
                f"{name}.model: {directory} reads no images, which the prompts have; use a teacher "
                "that does, or set data.images_column=null"
            )


def check_rows(config: Config, findings: Findings, tokenizer: Any, local: LocalChecks) -> None:
    """Checks all datasets and held-out sets whose rows are trained as they are, counts them, and
    shows what of the first row is trained.
    """
    from pa_npu.data.trained_sets import load_held_out_rows

    if findings.spec is not None:
        check_tokenizer(findings.spec, tokenizer)

    datasets = config.data.datasets
    training = local.run(
        partial(check_training_rows, tokenizer, config), *(dataset.path for dataset in datasets)
    )
    for number in range(len(datasets)):
        summary = training[number].summary if training else _ABSENT
        findings.counts.append(f"{config.data.key_of(number)}: {summary}")

    evaluation_sets = config.evaluate.all_sets(config.data.test)
    held_out = local.run(
        partial(load_held_out_rows, config, tokenizer, build_algorithm(config).row_is),
        *(dataset.path for dataset in evaluation_sets.values()),
    )
    for name in evaluation_sets:
        summary = held_out[name].summary if held_out else _ABSENT
        findings.counts.append(f"{config.evaluate.key_of(name)}: {summary}")
    if training:
        findings.num_rows = sum(len(rows.items) for rows in training)
        findings.counts += training[0].first_lines(tokenizer)


def check_demonstrations(tokenizer: Any, config: Config) -> RowSet | None:
    """Reads data.demonstrations as the coordinator will."""
    from pa_npu.data.trained_sets import load_demonstrations

    loaded = load_demonstrations(config, tokenizer)
    needed = config.demonstration_groups * config.rollout.responses_per_prompt
    if loaded is not None and len(loaded.rows) < needed:
        raise DataError(
            f"data.demonstrations: {loaded.path} has {counted(len(loaded.rows), 'row')}, but an "
            f"iteration trains {needed} of them ({config.demonstration_groups} groups of "
            f"rollout.responses_per_prompt = {config.rollout.responses_per_prompt}), so that it "
            "would hold some twice; lower data.demonstrations.share, or give more rows"
        )
    return loaded


def with_epochs(config: Config, findings: Findings) -> Config:
    """Returns the configuration with the iterations that schedule.epochs makes, once rows are
    counted.
    """
    from pa_npu.data.trained_sets import num_items

    schedule = config.schedule
    if schedule.epochs is None or findings.num_rows is None:
        return config
    rows_per_iteration = num_items(config, build_algorithm(config).row_is)
    iterations = max(1, math.ceil(schedule.epochs * findings.num_rows / rows_per_iteration))
    changed = schedule.model_copy(update={"iterations": iterations})
    return config.model_copy(update={"schedule": changed})


def check_training(tokenizer: Any, config: Config) -> list[PromptSet]:
    """Reads data.train as the coordinator will."""
    from pa_npu.data.hints import hints_of
    from pa_npu.data.image_rows import ImageInput
    from pa_npu.data.prompts import load_training
    from pa_npu.data.teachers import check_teacher_names
    from pa_npu.rewards.check import check_row_tests

    loaded = load_training(
        config.data,
        tokenizer,
        needs_answers(config.reward, config.environment),
        hints=hints_of(config),
        images=ImageInput.from_config(config),
    )
    per_iteration = config.schedule.prompts_per_iteration
    first_id = 0
    for number, (prompts, share) in enumerate(zip(loaded, config.data.shares, strict=True)):
        key = config.data.key_of(number)
        check_row_tests(config, prompts, key, first_id)
        check_teacher_names(prompts.prompts, prompts.path, config)
        first_id += prompts.num_read
        num_needed = math.ceil(share * per_iteration)
        if len(prompts.prompts) < num_needed:
            part = "" if share == 1 else f", of which its weight makes {num_needed} its own"
            raise DataError(
                f"{key}: {prompts.path} has {counted(len(prompts.prompts), 'prompt')} for "
                f"schedule.prompts_per_iteration = {per_iteration}{part}, so that an iteration "
                "would hold some twice; lower it or give more prompts"
            )
    return loaded


def check_training_rows(tokenizer: Any, config: Config) -> list[AnySet]:
    """Reads data.train as a coordinator without engines will."""
    from pa_npu.data.trained_sets import load_training_rows, num_items
    from pa_npu.evaluation.written_rows import check_written_rows

    row_is = build_algorithm(config).row_is
    for number, dataset in enumerate(config.data.datasets):
        check_written_rows(dataset.path, config.data.key_of(number))
    loaded = load_training_rows(config, tokenizer, row_is)
    rows_per_iteration = num_items(config, row_is)
    product = "schedule.prompts_per_iteration"
    if row_is == "sequence":
        product += " x rollout.responses_per_prompt"
    for number, (rows, share) in enumerate(zip(loaded, config.data.shares, strict=True)):
        num_needed = math.ceil(share * rows_per_iteration)
        if len(rows.items) < num_needed:
            raise DataError(
                f"{config.data.key_of(number)}: {rows.path} has {counted(len(rows.items), 'row')} "
                f"for the {num_needed} of an iteration ({product}), so that it would hold some "
                "twice; lower that or give more rows"
            )
    return loaded


def check_held_out(name: str, tokenizer: Any, config: Config) -> PromptSet:
    """Reads a held-out set as the coordinator will."""
    from pa_npu.data.image_rows import ImageInput
    from pa_npu.data.prompts import load_prompts
    from pa_npu.rewards.check import check_row_tests

    key = config.evaluate.key_of(name)
    prompts = load_prompts(
        config.evaluate.all_sets(config.data.test)[name],
        tokenizer,
        config.data,
        key,
        needs_answer=needs_answers(config.reward, config.environment),
        images=ImageInput.from_config(config),
    )
    check_row_tests(config, prompts, key)
    return prompts


def check_rewards(config: Config, sample: Prompt | None, ask_judge: bool = True) -> list[str]:
    """Checks that every reward function can be built, by a trial in a worker as the run will use
    it: user code may do anything.

    Args:
        sample: a prompt of the dataset, for which the functions are called once.
        ask_judge: whether the judge (reward.judge) is asked too, over the network.

    Returns the lines that the run begins with.
    """
    from pa_npu.rewards.check import check_reward_functions, sample_group

    group = None
    if sample is not None:
        size = config.rollout.responses_per_prompt
        group = sample_group(sample.text, sample.answer, sample.row, size)
    # a judge's scores are kept in run.dir, which a run that is refused has not
    with tempfile.TemporaryDirectory(prefix="pa_npu-check-") as directory:
        run = config.run.model_copy(update={"dir": directory})
        tried = config.model_copy(update={"run": run})
        return check_reward_functions(tried, group, ask_judge)
