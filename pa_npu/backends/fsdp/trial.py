"""Finds out before a run how a model of transformers may be packed, by a trial with few layers.

The model has its real configuration, random fp32 weights large enough for its context to matter,
and short sequences. If the run's sequences are longer than its windows, these shrink, but not so
far that a response no longer depends on the beginning of its prompt. A packing is right if it gives
the log-probs and gradients of the model's own forward over each sequence alone, by transformers'
plainest attention. The run uses the first of these packings that is right:

    shared      prompts once, by this package's attention (`separate` with
                attention.shared_prompt=false: separate sequences by the same attention)
    packed      separate sequences in a row, by transformers' attention, which keeps them apart by
                their positions
    alone       one sequence at a time, without padding

Families with a file keep prompts apart by construction, and need no trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pa_npu.attention import PrefixLayout
from pa_npu.backends.fsdp.model import OWN_ATTENTION, ScoredModel
from pa_npu.backends.fsdp.trial_model import few_layers
from pa_npu.backends.fsdp.trial_sequences import (
    MAX_DIFFERENCE,
    is_mixed_up,
    logprobs_alone,
    logprobs_behind_stems,
    packed_logprobs,
    processor_of,
    sequences_of,
)
from pa_npu.backends.fsdp.vision import freeze_tower, smallest_image, text_only
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.any_model import config_of
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import work

# Rope scalings that turn keys by the longest position of a pass.
_ROPES_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Packing:
    """How microbatches go through the model. attention: as attention.implementation."""

    name: str
    attention: str

    def configure(self, config: Config) -> Config:
        """Returns the configuration with this packing."""
        attention = {"shared_prompt": self.name == "shared", "implementation": self.attention}
        alone = {"responses": 1, "max_tokens": None} if self.name == "alone" else {}
        return config.model_copy(
            update={
                "attention": config.attention.model_copy(update=attention),
                "microbatch": config.microbatch.model_copy(update=alone),
            }
        )


def fit(config: Config, spec: ModelSpec) -> tuple[Config, list[str]]:
    """Returns the configuration as this model needs it, and the result of the trial in a line.

    Raises ConfigError if no packing is right.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    recompute = config.trainer.recompute == "full"
    refused: list[str] = []
    for packing in packings(config):
        problem = tried(
            spec,
            packing,
            longest,
            recompute,
            config.mesh.size,
            trains_tower=config.model.vision == "trained",
        )
        if problem is None:
            because = f"; not {', '.join(refused)}" if refused else ""
            line = (
                f"model.path: {spec.family}, {_described(packing)}, as a trial of few layers "
                f"found right{because}"
            )
            fitted = packing.configure(config)
            if fitted.depth_first_obstacle or work(fitted).stem_tokens == 0:
                return fitted, [line]
            obstacle = stems_obstacle(spec, packing, longest, recompute)
            if obstacle is None:
                return fitted, [line]
            again = fitted.microbatch.model_copy(update={"depth_first": False})
            return fitted.model_copy(update={"microbatch": again}), [
                f"{line}; the prompt of a group is computed in each of its microbatches ({obstacle})"
            ]
        attention = ""
        if packing.attention in OWN_ATTENTION:
            attention = f" by {packing.attention}"
        refused.append(f"{packing.name}{attention} ({problem})")
    if config.trainer.context_parallel > 1:
        raise ConfigError(
            f"trainer.context_parallel: {config.trainer.context_parallel}: the rows of a sequence "
            f"cannot be divided for {spec.family}, whose own attention is needed: "
            f"{', '.join(refused)}; set it to 1"
        )
    raise ConfigError(
        f"model.path: {config.model.path}: {spec.family} gives neither log-probs nor gradients of "
        f"its own forward in any way that trainer.backend=fsdp has: {', '.join(refused)}; use "
        "another model"
    )


def _described(packing: Packing) -> str:
    if packing.name == "shared":
        return "prompts are shared"
    if packing.name == "separate":
        return "separate sequences are packed"
    if packing.name == "packed":
        return f"separate sequences are packed, by transformers' {packing.attention} attention"
    return f"one sequence at a time, by transformers' {packing.attention} attention"


def packings(config: Config) -> Iterator[Packing]:
    """Yields the packings that the configuration allows, the fastest first."""
    implementation = config.attention.implementation
    transformers_attention: tuple[str, ...] = (implementation,)
    if implementation not in OWN_ATTENTION:
        name = "shared" if config.attention.shared_prompt else "separate"
        yield Packing(name, implementation)
        if config.trainer.context_parallel > 1:  # transformers' attention takes whole sequences
            return
        transformers_attention = OWN_ATTENTION
    for name in ("packed", "alone"):
        for attention in transformers_attention:
            yield Packing(name, attention)


def tried(
    spec: ModelSpec,
    packing: Packing,
    longest: int,
    recompute: bool = False,
    ranks: int = 1,
    trains_tower: bool = False,
) -> str | None:
    """Tries a packing; returns why it is wrong for this model, or None if it is right.

    longest: tokens of the run's longest sequence.
    ranks: number of trainer ranks. They reduce gradients together after each microbatch, so several
    ranks need a gradient for the same weights whatever the microbatch.
    trains_tower: whether a part that reads images is trained. A model with such a part is tried
    with an image.

    Raises ConfigError if the model fails by itself.
    """
    try:
        model = few_layers(spec, longest)
        sequences = sequences_of(model)
        if not trains_tower:
            freeze_tower(model)
        expected = logprobs_alone(model, sequences)
        if is_mixed_up(model, sequences, expected):
            return "a later token changes what comes before it, or the prompt changes nothing"
    except Exception as error:  # of anybody's code
        raise ConfigError(
            f"model.path: {spec.path}: a trial of {spec.family} with few layers fails in "
            f"transformers' own forward ({_line(error)}); use another model"
        ) from error
    try:
        candidate = few_layers(spec, longest)
        candidate.load_state_dict(model.state_dict())
        candidate.train()
        if not trains_tower:
            freeze_tower(candidate)
        if recompute:
            candidate.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        scored = ScoredModel(candidate, packing.attention)
        logprobs = packed_logprobs(
            scored,
            sequences,
            shares=packing.name == "shared",
            one_by_one=packing.name == "alone",
        )
        difference = _different(model, candidate, expected, logprobs)
        if difference is None and ranks > 1:
            return _depends_on_tokens(scored)
        return difference
    except Exception as error:  # whatever a model's code raises, it cannot be packed like this
        return _line(error)


def stems_obstacle(
    spec: ModelSpec, packing: Packing, longest: int, recompute: bool = False
) -> str | None:
    """Tries whether a prompt may be computed once, before the responses of several microbatches;
    returns why not, or None if it may. The packing has been found right.
    """
    text = config_of(spec.path, spec.trust_remote_code).get_text_config()
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind in _ROPES_BY_LENGTH:
        return f"rope scaling {kind} turns keys by the length of what is in a pass"
    try:
        model = few_layers(spec, longest)
        candidate = few_layers(spec, longest)
        candidate.load_state_dict(model.state_dict())
        if ScoredModel(candidate, packing.attention).reads_images:
            return "the model reads images"
        sequences = sequences_of(model)
        expected = logprobs_alone(model, sequences)
        candidate.train()
        if recompute:
            candidate.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        scored = ScoredModel(candidate, packing.attention)
        logprobs = logprobs_behind_stems(scored, sequences)
        return _different(model, candidate, expected, logprobs)
    except Exception as error:  # whatever a model's code raises, it cannot be computed like this
        return _line(error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _different(
    model: Any, candidate: Any, expected: list[torch.Tensor], logprobs: list[torch.Tensor]
) -> str | None:
    """Describes a difference of the candidate's log-probs or gradients from the model's; None if
    there is none. expected, logprobs: of each sequence, the model's and the candidate's.
    """
    worst = max(float((a - b).abs().max()) for a, b in zip(logprobs, expected, strict=True))
    if not worst <= MAX_DIFFERENCE:
        return f"log-probs differ by {worst:.2g}"
    for (name, parameter), reference in zip(
        candidate.named_parameters(), model.parameters(), strict=True
    ):
        if parameter.grad is None or reference.grad is None:
            if parameter.grad is not reference.grad:
                return f"{name} gets no gradient"
            continue
        size = float(reference.grad.abs().max())
        difference = float((parameter.grad - reference.grad).abs().max()) / max(size, 1e-6)
        if not difference <= MAX_DIFFERENCE:
            return f"the gradient of {name} differs by {difference:.2g} of it"
    return None


def _depends_on_tokens(model: ScoredModel) -> str | None:
    """Names a weight that has a gradient from the trial's sequences, but none from a microbatch of
    one token; None if there is none.
    """
    with_gradient = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    model.zero_grad(set_to_none=True)
    zero = torch.zeros(1, dtype=torch.int64)
    layout = PrefixLayout.from_sequences([1])
    images = None
    if model.reads_images:
        positions = text_only(layout, zero.device).positions
        images = smallest_image(positions, processor_of(model.causal))
    model(zero, layout, zero, zero, 1.0, 16, images=images)[0].sum().backward()
    for name, parameter in with_gradient:
        if parameter.grad is None:
            return (
                f"{name} gets no gradient from some microbatches, which several trainer devices "
                "need"
            )
    return None
