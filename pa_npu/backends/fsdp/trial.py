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

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pa_npu.attention import PrefixLayout
from pa_npu.attention.stems import KeptKeys, PathRows
from pa_npu.attention.trie import pack
from pa_npu.backends.fsdp.model import OWN_ATTENTION, ScoredModel, without_dropout
from pa_npu.backends.fsdp.vision import (
    PackedImages,
    ShownPatches,
    freeze_tower,
    joined_images,
    smallest_image,
    text_only,
)
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.any_model import ACTIVE, EXPERTS, auto_class, config_of
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import work
from pa_npu.vision.family import FAMILIES
from pa_npu.vision.processor import ImageProcessor

# Right packings differ by rounding in fp32, some 1e-6; a wrong mask changes log-probs by some
# tenths.
MAX_DIFFERENCE = 1e-3
_LAYERS = 2
_VOCABULARY = 160
_INNER = 128
_EXPERTS = 8
# Sizes that no attention depends on.
_INNER_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Rope scalings that turn keys by the longest position of a pass.
_ROPES_BY_LENGTH = ("dynamic", "longrope")
# Of a model that reads images: the first of its special tokens, and an image in the first prompt.
_IMAGE_TOKEN = 150
_IMAGE_GRID = (1, 4, 6)
_IMAGE_START = 5
_IMAGE_TOKENS = 6
# (prompt, responses) of two groups.
_GROUPS = ((20, (7, 12, 3)), (9, (5, 14)))
# Through all layers together a window reaches back this many times the longest prompt, so that
# whatever precedes a response is seen.
_REACH = 1.4


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
        sequences = _sequences(model)
        if not trains_tower:
            freeze_tower(model)
        expected = _alone(model, sequences)
        if _mixed_up(model, sequences, expected):
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
        logprobs = _scored(scored, sequences, packing)
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
        sequences = _sequences(model)
        expected = _alone(model, sequences)
        candidate.train()
        if recompute:
            candidate.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        scored = ScoredModel(candidate, packing.attention)
        logprobs = _scored_behind_stems(scored, sequences)
        return _different(model, candidate, expected, logprobs)
    except Exception as error:  # whatever a model's code raises, it cannot be computed like this
        return _line(error)


def _scored_behind_stems(model: ScoredModel, sequences: list[_Sequence]) -> list[torch.Tensor]:
    """As `_scored`, each response by itself behind its prompt."""
    scores: list[torch.Tensor] = []
    first = 0
    nothing = torch.zeros(1, dtype=torch.int64)
    for prompt, responses in _GROUPS:
        rows = prompt - 1
        kept = KeptKeys(rows)
        stem = PathRows(PrefixLayout((rows,), (-1,)), own=kept)
        tokens = sequences[first].tokens
        opened = model(tokens[:rows], stem, nothing, nothing, 1.0, 16)
        for sequence in sequences[first : first + len(responses)]:
            layout = PrefixLayout((len(sequence.tokens),), (-1,))
            targets = sequence.tokens[prompt:]
            own = torch.arange(len(targets))
            piece = PathRows(layout, stems=(kept,))
            response = model(sequence.tokens[rows:], piece, own, targets, 1.0, 16).logprobs
            (response * _weights(len(response))).sum().backward()
            scores.append(response.detach())
        (opened.logprobs.sum() * 0.0).backward()
        kept.release()
        first += len(responses)
    return scores


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
        images = smallest_image(positions, _processor(model.causal))
    model(zero, layout, zero, zero, 1.0, 16, images=images)[0].sum().backward()
    for name, parameter in with_gradient:
        if parameter.grad is None:
            return (
                f"{name} gets no gradient from some microbatches, which several trainer devices "
                "need"
            )
    return None


def few_layers(spec: ModelSpec, longest: int) -> Any:
    """Returns the model with few layers and random weights, by transformers' plainest attention.
    Windows that the run exceeds are exceeded by the trial's sequences too.
    """
    config = deepcopy(config_of(spec.path, spec.trust_remote_code))
    without_dropout(config)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    kept_layers = (
        sorted({kinds.index(kind) for kind in kinds} | {0, 1}) if kinds else range(_LAYERS)
    )
    layers = min(len(kept_layers), text.num_hidden_layers)
    _shrink(config, layers, longest)
    if text is not config:
        _shrink(text, layers, longest)
    if getattr(config, "model_type", None) in FAMILIES:
        _shrink_tower(config)
    text.vocab_size = _VOCABULARY
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = [kinds[index] for index in kept_layers][: text.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(config).from_config(
            config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=spec.trust_remote_code,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def _shrink(config: Any, layers: int, longest: int) -> None:
    """Makes inner sizes, numbers of experts and windows of transformers' configuration as small as
    a trial with so many layers needs them.
    """
    num_experts = _few_experts(config)
    max_sizes = dict.fromkeys(_INNER_SIZES, _INNER) | dict.fromkeys(EXPERTS, num_experts)
    for name, max_size in max_sizes.items():
        value = getattr(config, name, None)
        if isinstance(value, int):
            setattr(config, name, min(value, max_size))
    for name in _WINDOWS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value < longest:
            setattr(config, name, _window(layers))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)


def _shrink_tower(config: Any) -> None:
    """Leaves two blocks of a tower, the first of which attends in windows if any does, and gives
    placeholders ids inside the small vocabulary.
    """
    vision = config.vision_config
    vision.depth = 2
    vision.intermediate_size = min(vision.intermediate_size, _INNER)
    if hasattr(vision, "fullatt_block_indexes"):
        vision.fullatt_block_indexes = [1]
    if hasattr(vision, "deepstack_visual_indexes"):
        vision.deepstack_visual_indexes = [0]
    config.image_token_id = _IMAGE_TOKEN
    config.video_token_id = _IMAGE_TOKEN + 1
    config.vision_start_token_id = _IMAGE_TOKEN + 2
    config.vision_end_token_id = _IMAGE_TOKEN + 3


def _window(layers: int) -> int:
    """Returns the tokens of a window that the trial's sequences exceed, and through which a response
    still sees all of its prompt by way of the layers.

    Each layer reaches window - 1 tokens further back. A model whose layers all have windows sees
    nothing else.
    """
    longest = max(prompt for prompt, _ in _GROUPS)
    return math.ceil(_REACH * longest / layers) + 1


def _few_experts(config: Any) -> int:
    """Returns a number of experts that is enough for the experts of one token, in groups of two or
    more: routers add the two largest scores of each group.
    """
    active = 1
    for name in ACTIVE:
        number = getattr(config, name, None)
        if isinstance(number, int):
            active = number
            break
    groups = getattr(config, "n_group", None) or 1
    chosen_groups = getattr(config, "topk_group", None) or groups
    return groups * max(2, -(-active // chosen_groups), -(-_EXPERTS // groups))


@dataclass(frozen=True)
class _Sequence:
    """prompt: number of its tokens. image: patches [patches, size] that are the model's image,
    which tokens _IMAGE_START and following are placeholders of; None without one.
    """

    tokens: torch.Tensor
    prompt: int
    image: torch.Tensor | None = None


def _sequences(model: Any) -> list[_Sequence]:
    """Returns the sequences of the trial. The first group's prompt shows an image if the model
    reads any.
    """
    generator = torch.Generator().manual_seed(1)
    reads_images = model.config.model_type in FAMILIES
    largest = _IMAGE_TOKEN if reads_images else _VOCABULARY

    def draw(number: int) -> torch.Tensor:
        return torch.randint(0, largest, (number,), generator=generator)

    image = None
    if reads_images:
        image = torch.randn(
            _IMAGE_GRID[1] * _IMAGE_GRID[2], _patch_size(model), generator=generator
        )
    sequences = []
    for prompt, responses in _GROUPS:
        first = draw(prompt)
        if image is not None:
            first[_IMAGE_START : _IMAGE_START + _IMAGE_TOKENS] = _IMAGE_TOKEN
        for length in responses:
            sequences.append(_Sequence(torch.cat([first, draw(length)]), prompt, image))
        image = None
    return sequences


def _patch_size(model: Any) -> int:
    """Returns the numbers of a patch."""
    vision = model.config.vision_config
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def _processor(model: Any) -> ImageProcessor:
    vision = model.config.vision_config
    return ImageProcessor(
        patch=vision.patch_size,
        merged=vision.spatial_merge_size,
        frames=vision.temporal_patch_size,
    )


def _weights(number: int) -> torch.Tensor:
    """Returns weights for the sum of a response's log-probs with which no gradients cancel."""
    return torch.linspace(0.5, 1.5, number)


def _forward(
    model: Any, tokens: torch.Tensor, prompt: int, image: torch.Tensor | None
) -> torch.Tensor:
    """Returns the log-probs of the tokens behind the prompt by transformers' own forward."""
    shown: dict[str, torch.Tensor] = {}
    if image is not None:
        shown = {
            "pixel_values": image,
            "image_grid_thw": torch.tensor([_IMAGE_GRID]),
            "mm_token_type_ids": (tokens == _IMAGE_TOKEN).int()[None],
        }
    logits = model(tokens[None], use_cache=False, **shown).logits[0, prompt - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, tokens[prompt:, None])[:, 0]


def _alone(model: Any, sequences: list[_Sequence]) -> list[torch.Tensor]:
    logprobs_by_sequence = []
    for sequence in sequences:
        logprobs = _forward(model, sequence.tokens, sequence.prompt, sequence.image)
        (logprobs * _weights(len(logprobs))).sum().backward()
        logprobs_by_sequence.append(logprobs.detach())
    return logprobs_by_sequence


@torch.no_grad()
def _mixed_up(model: Any, sequences: list[_Sequence], expected: list[torch.Tensor]) -> bool:
    """Returns whether the model is not causal, or depends on its context so little that a wrong
    context would not be detected.
    """
    sequence = sequences[0]
    short = len(expected[0]) - 1
    cut = _forward(model, sequence.tokens[:-1], sequence.prompt, sequence.image)
    if float((cut - expected[0][:short]).abs().max()) > MAX_DIFFERENCE:
        return True
    foreign = torch.cat([sequences[-1].tokens, sequence.tokens])  # the last shows no image
    seen = _forward(model, foreign, len(foreign) - len(expected[0]), sequence.image)
    return float((seen - expected[0]).abs().max()) < 10 * MAX_DIFFERENCE


def _scored(model: ScoredModel, sequences: list[_Sequence], packing: Packing) -> list[torch.Tensor]:
    """Returns each sequence's log-probs as the backend computes them, and sums gradients over
    microbatches as the backend does.
    """
    microbatches = [sequences]
    if packing.name == "alone":
        microbatches = [[sequence] for sequence in sequences]
    scores: list[torch.Tensor] = []
    for microbatch in microbatches:
        if packing.name == "shared":
            packed = pack([sequence.tokens.numpy() for sequence in microbatch])
            layout = packed.layout
            tokens = packed.tokens
            leaves = packed.leaves
        else:
            layout = PrefixLayout.from_sequences([len(sequence.tokens) for sequence in microbatch])
            tokens = torch.cat([sequence.tokens for sequence in microbatch])
            leaves = tuple(range(len(microbatch)))
        rows = []
        for leaf, sequence in zip(leaves, microbatch, strict=True):
            rows.append(layout.path_rows(leaf)[sequence.prompt - 1 : -1])
        targets = torch.cat([sequence.tokens[sequence.prompt :] for sequence in microbatch])
        images = _images(model, microbatch, layout, leaves)
        row_scores = model(tokens, layout, torch.cat(rows), targets, 1.0, 16, images=images)
        responses = row_scores.logprobs.split([len(response_rows) for response_rows in rows])
        losses = [(response * _weights(len(response))).sum() for response in responses]
        torch.stack(losses).sum().backward()
        scores += [response.detach() for response in responses]
    return scores


def _images(
    model: ScoredModel, sequences: list[_Sequence], layout: PrefixLayout, leaves: Sequence[int]
) -> PackedImages | None:
    """Returns the image of a microbatch, as the backend packs it; None for a model without."""
    if not model.reads_images:
        return None
    spans = []
    for leaf, sequence in zip(leaves, sequences, strict=True):
        if sequence.image is not None:
            image = sequence.image
            spans.append(layout.path_rows(leaf)[_IMAGE_START : _IMAGE_START + _IMAGE_TOKENS])
    if not spans:
        return text_only(layout, torch.device("cpu"))
    rows, first = np.unique(torch.cat(spans).numpy(), return_index=True)
    shown = ShownPatches(
        grid=_IMAGE_GRID,
        patches=image,
        rows=torch.from_numpy(rows),
        places=torch.from_numpy(first % _IMAGE_TOKENS),
    )
    merged = model.causal.config.vision_config.spatial_merge_size
    return joined_images(layout, [shown], merged, torch.device("cpu"))
