"""How a model of transformers may be packed, found before a run by a trial of its real configuration with few layers.

The model gets random weights large enough for its context to matter, fp32, and short sequences. Its
windows shrink with them where the run's sequences are longer than they, but not so far that a
response no longer depends on the beginning of its prompt. What it must give are the log-probs and
gradients of its own forward over each sequence alone, by transformers' plainest attention. The
first of these ways that does is the run's:
    shared      prompts once, by this package's attention (separate, where
                attention.shared_prompt=false)
    packed      separate sequences in a row, by transformers' attention, which keeps them apart by
                their positions
    alone       one sequence at a time, without padding
Families with a file keep prompts apart by construction, and need no trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from pa_npu.attention import PrefixLayout
from pa_npu.attention.trie import pack
from pa_npu.backends.fsdp.model import OWN_ATTENTION, ScoredModel, without_dropout
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.any_model import ACTIVE, EXPERTS, config_of
from pa_npu.families.spec import ModelSpec

# Equal ways differ by rounding in fp32, some 1e-6; another mask changes log-probs by some tenths.
MOST_DIFFERENT = 1e-3
_LAYERS, _VOCABULARY, _INNER, _EXPERTS = 2, 160, 128, 8
# Sizes that no attention depends on.
_INNER_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_WINDOWS = ("sliding_window", "attention_chunk_size")
# (prompt, responses) of two groups.
_GROUPS = ((20, (7, 12, 3)), (9, (5, 14)))
# Through all layers together a window reaches back this much further than the longest prompt, so
# that whatever precedes it is seen.
_REACH = 1.4


@dataclass(frozen=True)
class Way:
    """How microbatches go through the model; `attention` as attention.implementation."""

    name: str
    attention: str

    def settle(self, config: Config) -> Config:
        attention = {"shared_prompt": self.name == "shared", "implementation": self.attention}
        alone = {"responses": 1, "max_tokens": None} if self.name == "alone" else {}
        return config.model_copy(
            update={
                "attention": config.attention.model_copy(update=attention),
                "microbatch": config.microbatch.model_copy(update=alone),
            }
        )


def fit(config: Config, spec: ModelSpec) -> tuple[Config, list[str]]:
    """The configuration as this model needs it, and what was found in a line.

    Raises ConfigError where no way is right.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    refused: list[str] = []
    for way in ways(config):
        problem = tried(spec, way, longest, config.trainer.recompute == "full", config.mesh.size)
        if problem is None:
            said = {
                "shared": "prompts are shared",
                "separate": "separate sequences are packed",
                "packed": f"separate sequences are packed, by transformers' {way.attention} "
                "attention",
                "alone": f"one sequence at a time, by transformers' {way.attention} attention",
            }[way.name]
            because = f"; not {', '.join(refused)}" if refused else ""
            return way.settle(config), [
                f"model.path: {spec.family}, {said}, as a trial of few layers found right{because}"
            ]
        refused.append(
            f"{way.name}{f' by {way.attention}' if way.attention in OWN_ATTENTION else ''} "
            f"({problem})"
        )
    raise ConfigError(
        f"model.path: {config.model.path}: {spec.family} gives neither log-probs nor gradients of "
        f"its own forward in any way that trainer.backend=fsdp has: {', '.join(refused)}; use "
        "another model"
    )


def ways(config: Config) -> Iterator[Way]:
    """Those that the configuration allows, the fastest first."""
    attention = config.attention
    if attention.implementation not in OWN_ATTENTION:
        yield Way("shared" if attention.shared_prompt else "separate", attention.implementation)
    own = (
        OWN_ATTENTION
        if attention.implementation not in OWN_ATTENTION
        else (attention.implementation,)
    )
    for name in ("packed", "alone"):
        yield from (Way(name, one) for one in own)


def tried(
    spec: ModelSpec, way: Way, longest: int, recompute: bool = False, ranks: int = 1
) -> str | None:
    """Why a way is wrong for this model, None where it is right. longest: tokens of the run's
    longest sequence.

    ranks: trainer ranks, which reduce together what each microbatch has a gradient for, and so must
    all have one for the same. Raises ConfigError where the model fails by itself.
    """
    try:
        model, sequences = few_layers(spec, longest), _sequences()
        expected = _alone(model, sequences)
        if _mixed_up(model, sequences, expected):
            return "a later token changes what comes before it, or the prompt changes nothing"
    except Exception as error:  # of anybody's code
        raise ConfigError(
            f"model.path: {spec.path}: a trial of {spec.family} with few layers fails in "
            f"transformers' own forward ({_line(error)}); use another model"
        ) from error
    try:
        other = few_layers(spec, longest)
        other.load_state_dict(model.state_dict())
        other.train()
        if recompute:
            other.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        scored = ScoredModel(other, way.attention)
        found = _scored(scored, sequences, way)
        return _different(model, other, expected, found) or (
            _depends_on_tokens(scored) if ranks > 1 else None
        )
    except Exception as error:  # whatever a model's code raises, it does not take this way
        return _line(error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _different(
    model: Any, other: Any, expected: list[torch.Tensor], found: list[torch.Tensor]
) -> str | None:
    """Say what of `other`, its log-probs `found` or its gradients, is not the model's."""
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    if not worst <= MOST_DIFFERENT:
        return f"log-probs differ by {worst:.2g}"
    for (name, parameter), wanted in zip(other.named_parameters(), model.parameters(), strict=True):
        if parameter.grad is None or wanted.grad is None:
            if parameter.grad is not wanted.grad:
                return f"{name} gets no gradient"
            continue
        size = float(wanted.grad.abs().max())
        difference = float((parameter.grad - wanted.grad).abs().max()) / max(size, 1e-6)
        if not difference <= MOST_DIFFERENT:
            return f"the gradient of {name} differs by {difference:.2g} of it"
    return None


def _depends_on_tokens(model: ScoredModel) -> str | None:
    """Name a weight that has a gradient from the trial's sequences, but none from a microbatch of
    one token.
    """
    had = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    model.zero_grad(set_to_none=True)
    zero = torch.zeros(1, dtype=torch.int64)
    model(zero, PrefixLayout.from_sequences([1]), zero, zero, 1.0, 16)[0].sum().backward()
    missing = [name for name, parameter in had if parameter.grad is None]
    return (
        f"{missing[0]} gets no gradient from some microbatches, which several trainer devices need"
        if missing
        else None
    )


def few_layers(spec: ModelSpec, longest: int) -> Any:
    """The model with random weights, by transformers' plainest attention; windows that the run
    exceeds are exceeded here too.
    """
    from transformers import AutoModelForCausalLM

    config = deepcopy(config_of(spec.path, spec.trust_remote_code))
    without_dropout(config)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    kept = sorted({kinds.index(kind) for kind in kinds} | {0, 1}) if kinds else range(_LAYERS)
    layers = min(len(kept), text.num_hidden_layers)
    for part in {id(one): one for one in (config, text)}.values():
        for names, most in ((_INNER_SIZES, _INNER), (EXPERTS, _few_experts(part))):
            for name in names:
                if isinstance(value := getattr(part, name, None), int):
                    setattr(part, name, min(value, most))
        for name in _WINDOWS:
            if isinstance(value := getattr(part, name, None), int) and value < longest:
                setattr(part, name, _window(layers))
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(part, name, None)
    text.vocab_size, text.num_hidden_layers = _VOCABULARY, layers
    if kinds:
        text.layer_types = [kinds[index] for index in kept][: text.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
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


def _window(layers: int) -> int:
    """Tokens that a window holds: the sequences exceed it, and yet a response sees all of its
    prompt through the layers.

    Each layer reaches window - 1 tokens further back. A model whose layers all have windows sees
    nothing else.
    """
    longest = max(prompt for prompt, _ in _GROUPS)
    return math.ceil(_REACH * longest / layers) + 1


def _few_experts(config: Any) -> int:
    """As many as a token passes through, in groups of two or more, of which routers take the sum of
    the two largest scores.
    """
    active = next(
        (number for name in ACTIVE if isinstance(number := getattr(config, name, None), int)), 1
    )
    groups = getattr(config, "n_group", None) or 1
    taken = getattr(config, "topk_group", None) or groups
    return groups * max(2, -(-active // taken), -(-_EXPERTS // groups))


@dataclass(frozen=True)
class _Sequence:
    tokens: torch.Tensor
    prompt: int


def _sequences() -> list[_Sequence]:
    generator = torch.Generator().manual_seed(1)

    def draw(number: int) -> torch.Tensor:
        return torch.randint(0, _VOCABULARY, (number,), generator=generator)

    found = []
    for prompt, responses in _GROUPS:
        first = draw(prompt)
        found += [_Sequence(torch.cat([first, draw(length)]), prompt) for length in responses]
    return found


def _weights(number: int) -> torch.Tensor:
    """Weights for the sum of a response's log-probs, so that no gradients cancel by themselves."""
    return torch.linspace(0.5, 1.5, number)


def _forward(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """transformers' own forward: log-probs of the tokens behind the prompt."""
    logits = model(tokens[None], use_cache=False).logits[0, prompt - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, tokens[prompt:, None])[:, 0]


def _alone(model: Any, sequences: list[_Sequence]) -> list[torch.Tensor]:
    found = []
    for one in sequences:
        logprobs = _forward(model, one.tokens, one.prompt)
        (logprobs * _weights(len(logprobs))).sum().backward()
        found.append(logprobs.detach())
    return found


@torch.no_grad()
def _mixed_up(model: Any, sequences: list[_Sequence], expected: list[torch.Tensor]) -> bool:
    """Whether the model is not causal, or so little of a context that a wrong one would not be
    seen.
    """
    one, short = sequences[0], len(expected[0]) - 1
    cut = _forward(model, one.tokens[:-1], one.prompt)
    if float((cut - expected[0][:short]).abs().max()) > MOST_DIFFERENT:
        return True
    foreign = torch.cat([sequences[1].tokens, one.tokens])
    seen = _forward(model, foreign, len(foreign) - len(expected[0]))
    return float((seen - expected[0]).abs().max()) < 10 * MOST_DIFFERENT


def _scored(model: ScoredModel, sequences: list[_Sequence], way: Way) -> list[torch.Tensor]:
    """Each sequence's log-probs as the backend computes them, with gradients summed over
    microbatches as there.
    """
    found = []
    for part in [[one] for one in sequences] if way.name == "alone" else [sequences]:
        if way.name == "shared":
            packed = pack([one.tokens.numpy() for one in part])
            layout, tokens, leaves = packed.layout, packed.tokens, packed.leaves
        else:
            layout = PrefixLayout.from_sequences([len(one.tokens) for one in part])
            tokens, leaves = torch.cat([one.tokens for one in part]), tuple(range(len(part)))
        rows = [
            layout.path_rows(leaf)[one.prompt - 1 : -1]
            for leaf, one in zip(leaves, part, strict=True)
        ]
        targets = torch.cat([one.tokens[one.prompt :] for one in part])
        scores = model(tokens, layout, torch.cat(rows), targets, 1.0, 16)
        split = scores.logprobs.split([len(some) for some in rows])
        torch.stack([(some * _weights(len(some))).sum() for some in split]).sum().backward()
        found += [some.detach() for some in split]
    return found
