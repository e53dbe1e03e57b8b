"""The trial before a run finds how a model of transformers may be packed, and lets nothing through that is another function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.attention import huggingface
from pa_npu.attention.layout import PrefixLayout
from pa_npu.backends.fsdp import trial, trial_sequences
from pa_npu.backends.fsdp.trial import Packing, fit, tried
from pa_npu.backends.fsdp.trial_model import few_layers
from pa_npu.backends.fsdp.trial_sequences import sequences_of
from pa_npu.backends.logprob import score_rows
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.cli import main
from tests.helpers.launched import random_tiny, settings
from tests.helpers.megatron import model_config
from tests.helpers.models import OTHERS, make_model, make_other
from tools.try_models import make_usable

SHARED = Packing("shared", "auto")


def run_of(model: Path, **sections: dict[str, Any]) -> tuple[Config, ModelSpec]:
    lengths = {
        "data": {"max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": 64, "responses_per_prompt": 4},
    }
    config = model_config(model, trainer={"backend": "fsdp"}, **lengths, **sections)
    return config, ModelSpec.from_config(config)


WAYS = {
    **dict.fromkeys(
        ("mistral", "phi", "phi3", "glm4", "granite", "olmo2", "gpt2", "qwen3_moe", "mixtral"),
        SHARED,
    ),
    **dict.fromkeys(("gemma3_text", "cohere2", "deepseek_v3"), Packing("packed", "sdpa")),
    "gemma2": Packing("packed", "eager"),  # whose soft caps sdpa leaves out
    # a state runs on through the packed row
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), Packing("alone", "sdpa")),
    "gpt_oss": Packing("alone", "eager"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_every_model_goes_the_fastest_way_that_is_right_and_says_so_in_one_line(
    kind: str, tmp_path: Path
) -> None:
    config, spec = run_of(make_other(tmp_path, kind))
    settled, (line,) = fit(config, spec)
    way = WAYS[kind]
    assert settled.attention.shared_prompt == (way.name == "shared")
    assert settled.attention.implementation == way.attention
    assert settled.microbatch_responses == (1 if way.name == "alone" else 4)
    assert re.match(rf"model.path: (transformers )?{kind}, ", line) and "\n" not in line
    assert Config.model_validate(settled.model_dump()) == settled, "no rule is broken"


def test_plan_says_how_a_model_is_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = random_tiny(tmp_path / "tiny")
    model, run = make_usable(tmp_path / "model", "gemma3_text", tiny), tmp_path / "run"
    assert main(["plan", *settings(tiny, run, model__path=model, trainer__backend="fsdp")]) == 0
    planned = capsys.readouterr().out
    assert (
        "model.path: transformers gemma3_text, separate sequences are packed, by transformers' sdpa"
        in planned
    )
    assert "not shared by auto (" not in planned and "; not shared (" in planned, (
        "and why no faster way is right"
    )


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "qwen3_next"])
def test_models_that_need_transformers_attention_are_refused_a_context_group(
    kind: str, tmp_path: Path
) -> None:
    """Windows, sinks, and a state that runs along the sequence."""
    config, spec = run_of(make_other(tmp_path, kind))
    trainer = config.trainer.model_copy(update={"devices": 2, "context_parallel": 2})
    config = config.model_copy(update={"trainer": trainer})
    with pytest.raises(
        ConfigError, match=r"trainer\.context_parallel: 2: the rows .* set it to 1$"
    ) as caught:
        fit(config, spec)
    if kind == "gemma3_text":  # whose windows the trial's small model has not: no number is said
        assert "attention has windows shorter than these sequences" in str(caught.value)


def test_a_window_that_no_sequence_exceeds_is_none(tmp_path: Path) -> None:
    model = make_other(tmp_path, "gemma3_text", sliding_window=128)
    config, spec = run_of(model)
    assert fit(config, spec)[0].attention.shared_prompt
    longer = config.model_copy(
        update={"data": config.data.model_copy(update={"max_prompt_tokens": 65})}
    )
    assert not fit(longer, spec)[0].attention.shared_prompt


SLIDING: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "layer_types": ["sliding_attention"] * 4,
        "num_hidden_layers": 4,
        "sliding_window": 64,
    },
    "mistral": {"sliding_window": 64},
    "one layer": {"sliding_window": 64, "num_hidden_layers": 1},
}


@pytest.mark.parametrize("kind", SLIDING)
def test_a_model_whose_layers_all_have_windows_is_packed_and_sequences_that_see_each_other_are_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows of the trial are shorter than its sequences, and still let a response see what
    precedes its prompt.
    """
    config, spec = run_of(
        make_other(tmp_path, kind if kind in OTHERS else "mistral", **SLIDING[kind])
    )
    model = few_layers(spec, 128)
    assert model.config.sliding_window < max(len(one.tokens) for one in sequences_of(model))
    settled, (line,) = fit(config, spec)
    assert settled.attention.implementation == "sdpa" and "separate sequences are packed" in line
    packed = Packing("packed", "sdpa")
    assert tried(spec, packed, 128) is None
    # by which transformers' attention keeps the sequences of a row apart
    _positions_go_on(monkeypatch)
    assert "log-probs differ" in str(tried(spec, packed, 128))


def test_experts_in_groups_stay_enough_for_their_router(tmp_path: Path) -> None:
    """As DeepSeek-V3 has them: 8 of 256 in 4 of 8 groups, each by its two best."""
    experts = {"n_routed_experts": 64, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
    config, spec = run_of(make_other(tmp_path, "deepseek_v3", **experts))
    assert few_layers(spec, 128).config.n_routed_experts == 16
    assert fit(config, spec)[0].attention.implementation == "sdpa"


@pytest.mark.parametrize(("module", "part"), [(trial, "few_layers"), (trial_sequences, "_forward")])
def test_whatever_a_model_raises_by_itself_is_one_line(
    module: Any, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("selected index k\nout of range")

    config, spec = run_of(make_other(tmp_path, "mistral"))
    monkeypatch.setattr(module, part, fail)
    with pytest.raises(ConfigError) as caught:
        fit(config, spec)
    line = str(caught.value)
    assert (
        line.startswith(f"model.path: {tmp_path}: a trial of transformers mistral")
        and "\n" not in line
    )
    assert line.endswith("(selected index k out of range); use another model")


def test_a_model_that_cannot_recompute_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("it does not support gradient checkpointing")

    _, spec = run_of(make_other(tmp_path, "mistral"))
    monkeypatch.setattr("transformers.MistralForCausalLM.gradient_checkpointing_enable", fail)
    assert tried(spec, SHARED, 128, recompute=True) == "it does not support gradient checkpointing"


def test_what_the_user_rules_out_is_not_taken(tmp_path: Path) -> None:
    config, spec = run_of(make_other(tmp_path, "mistral"), attention={"shared_prompt": False})
    assert fit(config, spec)[0] == config
    config, spec = run_of(tmp_path, attention={"shared_prompt": False, "implementation": "eager"})
    assert fit(config, spec)[0] == config


def test_recomputed_layers_have_the_same_gradients(tmp_path: Path) -> None:
    _, spec = run_of(make_other(tmp_path, "granite"))
    assert tried(spec, SHARED, 128, recompute=True) is None


def test_families_with_a_file_need_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "tried", lambda *_: pytest.fail("a trial"))
    config, spec = run_of(make_model(tmp_path))
    assert backend_module("fsdp").fit(config, spec) == (config, [])


def test_without_the_attentions_own_refusals_the_trial_finds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: windows and caps that the attention is not told of change log-probs."""
    whole = huggingface._attend

    def silent(
        *given: Any,
        sliding_window: Any = None,
        softcap: Any = None,
        s_aux: Any = None,
        **named: Any,
    ) -> Any:
        return whole(*given, **named)

    monkeypatch.setattr(huggingface, "_attend", silent)
    for kind in ("gemma3_text", "gemma2", "gpt_oss"):
        _, spec = run_of(make_other(tmp_path / kind, kind))
        assert "log-probs differ" in str(tried(spec, SHARED, 128)), kind


def _positions_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixLayout, "position_ids", lambda self, *_: torch.arange(self.total))


def _no_gradient_through_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from pa_npu.backends.fsdp import model

    def cut(hidden: torch.Tensor, weight: torch.Tensor, *given: Any, **named: Any) -> Any:
        return score_rows(hidden, weight.detach(), *given, **named)

    monkeypatch.setattr(model, "score_rows", cut)


def _half_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = huggingface.shared_prompt_attention

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, **named: Any
    ) -> torch.Tensor:
        return whole(q, k + (k.detach() - k) / 2, v, *given, **named)

    monkeypatch.setattr(huggingface, "shared_prompt_attention", attend)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (_positions_go_on, "log-probs differ"),
        (_no_gradient_through_the_head, "lm_head.weight gets no gradient"),
        (_half_a_gradient, "the gradient of"),
    ],
)
def test_faults_are_found(
    fault: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, spec = run_of(make_other(tmp_path, "mistral"))
    assert tried(spec, SHARED, 128) is None
    fault(monkeypatch)
    assert says in str(tried(spec, SHARED, 128))


def test_a_weight_without_a_gradient_from_some_microbatches_is_for_one_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks would reduce different weights together."""
    from pa_npu.backends.fsdp import model

    _, spec = run_of(make_other(tmp_path, "mixtral"))
    assert tried(spec, SHARED, 128, ranks=2) is None

    def cut(hidden: torch.Tensor, weight: torch.Tensor, *given: Any, **named: Any) -> Any:
        return score_rows(hidden, weight if len(hidden) > 1 else weight.detach(), *given, **named)

    monkeypatch.setattr(model, "score_rows", cut)
    assert tried(spec, SHARED, 128) is None
    assert "lm_head.weight gets no gradient from some microbatches" in str(
        tried(spec, SHARED, 128, ranks=2)
    )


def test_a_torch_that_is_too_old_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp import FSDPModule

    config, spec = run_of(make_model(tmp_path))
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(
        ConfigError, match=r"trainer.backend: fsdp needs .*; install torch 2.10 or later"
    ):
        backend_module("fsdp").fit(config, spec)


def test_a_model_that_no_way_is_right_for_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them one whose context changes nothing: no trial of it could fail."""
    config, spec = run_of(make_other(tmp_path, "mistral"))
    monkeypatch.setattr(trial_sequences, "_forward", _uniform)
    with pytest.raises(ConfigError) as caught:
        fit(config, spec)
    line = str(caught.value)
    assert (
        line.startswith("model.path: ")
        and line.endswith("; use another model")
        and "\n" not in line
    )
    assert "the prompt changes nothing" in line


def _uniform(model: Any, tokens: torch.Tensor, prompt: int, image: None) -> torch.Tensor:
    return torch.zeros(len(tokens) - prompt) + 0.0 * next(model.parameters()).sum()
