"""Reads model, tokenizer, data and settings of a run with engines, before it meets engines and trainers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.agents.open_sessions import Sessions
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import TEACHER_KEY_VARIABLE
from pa_npu.control.channel import StoreChannel, connect
from pa_npu.coordinator.assembly import make_sessions
from pa_npu.coordinator.demonstrations import Demonstrations
from pa_npu.coordinator.start import first_version, store_address
from pa_npu.data.hints import hints_of
from pa_npu.data.image_rows import ImageInput
from pa_npu.data.prompts import Prompt, load_prompts, load_training
from pa_npu.data.stream import TrainingStream
from pa_npu.data.teachers import check_teacher_names
from pa_npu.data.trained_sets import load_demonstrations
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.engines.protocol import Sampling
from pa_npu.engines.teacher_server import server_key
from pa_npu.environments.protocol import Environment
from pa_npu.environments.registry import make_environment
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.families.spec import ModelSpec
from pa_npu.rewards.functions import needs_answers
from pa_npu.samples.expert_choices import ExpertChoices

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The inputs of one coordinator.

    Args:
        spec: of the policy.
        store: host and port of the run's store.
        key: of the engines' servers; None if they have none.
        teacher_key: of teachers' servers; empty if they have none.
        first: the weight version that the run begins with.
        sampling: how responses of the training prompts are sampled.
        tokenizer: of the policy.
        demonstrations: rows that are trained beside what engines write; None without any.
        train: training prompts, at the position of the checkpoint.
        held_out: prompts of evaluations, by set.
        sessions: of agents; None if the run has no gateway.
        environment: makes samples of training prompts. It is not open yet.
        connect_within_s: how long the store may take to answer.
    """

    spec: ModelSpec
    store: tuple[str, int]
    key: str | None
    teacher_key: str
    first: int
    sampling: Sampling
    tokenizer: Any
    demonstrations: Demonstrations | None
    train: TrainingStream[Prompt]
    held_out: Mapping[str, tuple[Prompt, ...]]
    sessions: Sessions | None
    environment: Environment
    connect_within_s: float

    def channel(self, prefix: str) -> StoreChannel:
        """Connects to the store; keys of the channel begin with `prefix`."""
        host, port = self.store
        return StoreChannel(connect(host, port, self.connect_within_s), prefix)


def read_inputs(config: Config) -> RunInputs:
    """Reads the model's directory, the data and this process's environment.

    Raises UserError, DataError or ConfigError with the key or the file that is wrong.
    """
    spec = ModelSpec.from_config(config)
    store = store_address()
    # reward functions are users' code, and inherit the environment
    key = os.environ.pop(KEY_VARIABLE, None)
    teacher_key = server_key() if config.teacher else ""
    os.environ.pop(TEACHER_KEY_VARIABLE, None)
    first = first_version(config)
    sampling = training_sampling(config, spec)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    demonstrations = make_demonstrations(config, tokenizer)
    train, held_out = load_prompt_sets(config, tokenizer, demonstrations)
    sessions = make_sessions(config.run.dir, key)
    return RunInputs(
        spec=spec,
        store=store,
        key=key,
        teacher_key=teacher_key,
        first=first,
        sampling=sampling,
        tokenizer=tokenizer,
        demonstrations=demonstrations,
        train=train,
        held_out=held_out,
        sessions=sessions,
        environment=make_environment(config, tokenizer, sessions),
        connect_within_s=config.run.startup_timeout_s,
    )


def training_sampling(config: Config, spec: ModelSpec) -> Sampling:
    """Returns how responses of the training prompts are sampled."""
    return Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        stop_token_ids=spec.eos_token_ids,
        ignore_eos=config.rollout.ignore_eos,
        expert_choices=ExpertChoices.from_config(config, spec),
    )


def make_demonstrations(config: Config, tokenizer: Any) -> Demonstrations | None:
    """Makes the rows that are trained beside what engines write; None for a run without any."""
    loaded = load_demonstrations(config, tokenizer)
    if loaded is None:
        return None
    logger.info("demonstrations: %s", loaded.summary)
    for line in loaded.first_lines(tokenizer):
        logger.info("%s", line)
    return Demonstrations(config, loaded)


def load_prompt_sets(
    config: Config, tokenizer: Any, demonstrations: Demonstrations | None = None
) -> tuple[TrainingStream[Prompt], dict[str, tuple[Prompt, ...]]]:
    """Returns the training stream at the position of the checkpoint, and held-out prompts by set."""
    answers = needs_answers(config.reward, config.environment)
    images = ImageInput.from_config(config)
    loaded = load_training(config.data, tokenizer, answers, hints=hints_of(config), images=images)
    for prompts in loaded:
        check_teacher_names(prompts.prompts, prompts.path, config)
        logger.info("training on %s", prompts.summary)
    held_out = {}
    for name, dataset in config.evaluate.all_sets(config.data.test).items():
        key = config.evaluate.key_of(name)
        held_out[name] = load_prompts(
            dataset, tokenizer, config.data, key, 0, answers, images=images
        )
    for name, prompts in held_out.items():
        logger.info("evaluating on %s: %s", name, prompts.summary)
    fingerprint = None if demonstrations is None else demonstrations.fingerprint
    stream = TrainingStream(config.data, loaded, config.run.seed, fingerprint)
    if config.checkpoint.load:
        stream.restore(read_meta(Path(config.checkpoint.load)).data)
    return stream, {name: loaded_set.prompts for name, loaded_set in held_out.items()}
