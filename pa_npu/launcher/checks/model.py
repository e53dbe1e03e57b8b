"""Checks of the model: its files, its adapters, and whether it fits into the devices' memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.config.texts import shown
from pa_npu.config.words import nearest_name
from pa_npu.engines.protocol import Scoring
from pa_npu.errors import ConfigError, DataError
from pa_npu.families.model_directory import (
    check_end_tokens,
    check_plain_files,
    check_weights,
    load_tokenizer,
)
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.checks.findings import Findings
from pa_npu.planning.known_models import NAMES, known_spec
from pa_npu.planning.memory import adapter_parameters
from pa_npu.planning.model_rules import check_model
from pa_npu.planning.shortages import shortages
from pa_npu.planning.teachers import (
    check_teacher,
    check_vocabularies,
    engine_teachers,
    of_teacher,
)
from pa_npu.vision.processor import ImageProcessor


def check_model_files(config: Config) -> ModelSpec:
    """Checks that the model can be read, is supported, divides as configured, and that its files
    agree. Returns its shape.
    """
    spec = ModelSpec.from_config(config)
    check_model(config, spec)
    check_plain_files(spec.path)
    check_weights(spec)
    check_end_tokens(spec)
    return spec


def planned_model(config: Config, findings: Findings) -> ModelSpec:
    """Returns the shape to plan with: of the model's files, or the published one of its name where
    there are no files.

    Raises UserError where neither is known, because nothing could be said of memory or time.
    """
    path = config.model.path
    if Path(path).exists():
        return check_model_files(config)
    spec = known_spec(path)
    if spec is None:
        nearest = nearest_name(Path(path).name, NAMES)
        example = nearest or "Qwen2.5-7B or Qwen3-8B"
        raise ConfigError(
            f"model.path: {shown(path)} does not exist, and no public model of this name is known "
            "to plan with; give the directory of an HF model, or a known name, such as "
            f"{example}"
        )
    check_model(config, spec)
    findings.notes.append(
        f"model.path: {shown(path)} is not here; planned with the published shape of "
        f"{Path(path).name}"
    )
    return spec


def check_memory(config: Config, findings: Findings) -> None:
    """Raises ConfigError where the run certainly does not fit into its devices; adds a note where
    it probably does not.
    """
    if findings.spec is None or findings.device_bytes is None:
        return
    for shortage in shortages(config, findings.spec, findings.device_bytes, findings.own_memory):
        if shortage.fatal:
            raise ConfigError(shortage.line())
        findings.notes.append(shortage.line())


def adapter_lines(config: Config, spec: ModelSpec) -> list[str]:
    """Says how much of the model adapters train; nothing where all weights are trained."""
    if not config.has_adapters:
        return []
    rank = AdapterShape.from_config(config).rank
    num_trained = adapter_parameters(config, spec)
    share = num_trained / spec.num_parameters
    return [
        f"adapters (LoRA): rank {rank}, {num_trained:,} trained parameters beside "
        f"{spec.num_parameters:,} ({share:.2%})"
    ]


def teacher_directories(config: Config) -> dict[str, str]:
    """Returns the directories of teachers that trainers or engines hold, by the model's name."""
    return {**trainer_models(config).directories, **engine_teachers(config)}


def vision_lines(config: Config, spec: ModelSpec) -> list[str]:
    """Says which part of the model reads images, and whether it is trained; nothing for a model
    without one.
    """
    tower = spec.num_tower_parameters
    if not tower:
        if config.model.vision == "trained":
            raise ConfigError(
                f"model.vision: trained, but {spec.path} has no part that reads images; remove the key"
            )
        return []
    processor = ImageProcessor.from_directory(spec.path, config.data.max_image_pixels)
    side = processor.token_pixels
    largest = processor.max_pixels // side**2
    lines = [
        f"model.vision: {config.model.vision}, {tower:,} of {spec.num_parameters:,} parameters read "
        f"images of up to {processor.max_pixels:,} pixels, a token for {side} x {side} of them, "
        f"{largest:,} for the largest"
    ]
    longest = config.data.max_prompt_tokens
    if largest >= longest:
        lines.append(
            f"images: the largest takes more than data.max_prompt_tokens = {longest:,}; "
            f"data.max_image_pixels={longest // 2 * side**2} makes images half of a prompt at most"
        )
    return lines


def check_teachers(config: Config, spec: ModelSpec | None) -> None:
    """Checks that every teacher that the run holds can be read and goes with the policy.

    spec: the policy's; None where it is not known.
    """
    for name, directory in teacher_directories(config).items():
        try:
            teacher = ModelSpec.from_config(of_teacher(config, directory))
            check_plain_files(directory)
            check_weights(teacher)
        except DataError as error:
            raise DataError(str(error).replace("model.path:", f"{name}.model:", 1)) from None
        if spec is not None:
            check_teacher(config, spec, name, teacher)


def check_teacher_vocabularies(config: Config, tokenizer: Any) -> None:
    """Checks that every teacher that is here has the vocabulary of this tokenizer."""
    for name, directory in teacher_directories(config).items():
        if Path(directory).is_dir():
            of_directory = load_tokenizer(directory, config.model.trust_remote_code)
            check_vocabularies(name, directory, tokenizer, of_directory)


def check_teacher_servers(config: Config, findings: Findings, tokenizer: Any) -> None:
    """Lets the servers of teachers score the first rows. tokenizer: the policy's."""
    for name, teacher in config.teacher.items():
        if teacher.url is None:
            continue
        from pa_npu.engines.teacher_server import try_server

        scoring = Scoring(config.rollout.temperature, config.scored_choices)
        key = f"teacher.{name}"
        try_server(teacher.url, key, rows=findings.rows, scoring=scoring, tokenizer=tokenizer)
        findings.counts.append(
            f"{key}.url: {teacher.url} has scored {len(findings.rows)} rows, whose tokens are its "
            "own"
        )
