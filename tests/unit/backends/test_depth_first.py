"""A group whose prompt is computed once, before its pieces, has the gradient of the group in one microbatch, on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.attention.stems import KeptKeys, PathRows
from pa_npu.backends.fsdp.trial import Packing, stems_obstacle
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.microbatch import cut, pack
from pa_npu.trainer.learner import Learner
from tests.helpers.backend import Source, make_learner
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model, make_other
from tests.helpers.reports import numbers
from tests.helpers.stems import depth_first, gradients, long_group, relative_errors
from tests.unit.backends.test_conformance import made_by

# as a share of each gradient's largest element; sums in fp32, in another order
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)
    with single_process(model_config(path)):
        yield path


def learner_of(path: Path, backend: str, **sections: dict[str, Any]) -> Learner:
    """With a reference and an old policy, whose passes go with the policy's."""
    tree: dict[str, dict[str, Any]] = {
        "trainer": {"backend": backend},
        "rollout": {"responses_per_prompt": 4, "max_response_tokens": 16},
        "algorithm": {"kl_coef": 0.1},
        "schedule": {"prompts_per_iteration": 2, "updates_per_iteration": 2},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    config = model_config(path, **tree)
    learner = made_by("fsdp")(config) if backend == "fsdp" else make_learner(config)[0]
    learner.publish(0)
    return learner


@pytest.mark.parametrize(
    ("backend", "recompute", "implementation"),
    [
        ("megatron", "none", "merge"),
        ("megatron", "selective", "gather"),
        ("megatron", "full", "auto"),
        ("fsdp", "none", "gather"),
        ("fsdp", "full", "merge"),
        ("fsdp", "none", "dense"),
    ],
)
def test_gradients_are_those_of_the_uncut_group_and_repeat_to_the_bit(
    backend: str, recompute: str, implementation: str, model: Path
) -> None:
    """The prompt in one stem and in three; one response or two behind it."""
    learner = learner_of(
        model,
        backend,
        trainer={"recompute": recompute},
        attention={"implementation": implementation},
    )
    group = long_group()
    whole = gradients(learner, [pack([group], True, 1)])
    for responses, stem_tokens, shape in (
        (2, None, [28, 9, 12]),
        (1, 11, [11, 11, 6, 6, 4, 8, 5]),
    ):
        parts = depth_first(group, responses, stem_tokens=stem_tokens)
        assert [part.layout.total for part in parts] == shape
        found = gradients(learner, parts)
        errors = relative_errors(found, whole)
        assert max(errors.values()) < TOLERANCE, max(errors, key=lambda name: errors[name])
        again = gradients(learner, depth_first(group, responses, stem_tokens=stem_tokens))
        assert all(torch.equal(found[name], values) for name, values in again.items())
    whole_pieces = [part.whole() for part in depth_first(group, 2) if not part.is_stem]
    by_pieces = gradients(learner, whole_pieces)
    assert max(relative_errors(by_pieces, whole).values()) < TOLERANCE
    lost = gradients(learner, whole_pieces[:1])
    assert max(relative_errors(lost, whole).values()) > 1e-2, "a lost piece must show"


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_in_bf16_it_is_as_near_to_fp32_as_pieces_with_their_prompts_are(
    backend: str, model: Path
) -> None:
    """Gradients for kept keys and values add up in fp32, so that no piece rounds another's."""
    group = long_group()
    exact = gradients(learner_of(model, backend), [pack([group], True, 1)])
    learner = learner_of(model, backend, model={"dtype": "bf16"})
    parts = depth_first(group, 1, stem_tokens=11)
    of_stems = gradients(learner, parts)
    of_pieces = gradients(learner, [part.whole() for part in parts if not part.is_stem])
    assert 0 < distance(of_stems, exact) < 1.2 * distance(of_pieces, exact)
    without_a_stem = gradients(learner, [part.whole() for part in parts if not part.is_stem][1:])
    assert distance(without_a_stem, exact) > 3 * distance(of_pieces, exact)


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference over the norm."""
    difference = sum(
        float((found[name].double() - exact[name].double()).square().sum()) for name in exact
    )
    whole = sum(float(values.double().square().sum()) for values in exact.values())
    return (difference / whole) ** 0.5


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_reports_of_an_update_are_those_of_pieces_with_their_prompts(
    backend: str, model: Path
) -> None:
    """Losses, KL to the reference and ratios against the old policy, whose passes are behind stems
    too; and fewer computed tokens.
    """
    groups = [long_group(index=index) for index in range(2)]

    def report(parts: list[Any]) -> dict[str, float]:
        learner = learner_of(model, backend)
        learner.accumulate(Source(parts))
        return numbers(learner.step().report)

    expected = report([pack([piece], True, 1) for group in groups for piece in cut(group, 2)])
    found = report([part for group in groups for part in depth_first(group, 2)])
    for key in ("loss", "policy_loss", "grad_norm", "kl", "entropy", "logprob_diff_mean"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-8), key
    assert found["tokens_response"] == expected["tokens_response"]
    assert found["tokens_computed"] == expected["tokens_computed"] - 2 * 28


def test_adapters_and_the_model_without_them_keep_keys_of_their_own(model: Path) -> None:
    """LoRA: policy and reference are one module, with adapters and without."""
    learner = learner_of(model, "fsdp", lora={"rank": 4}, trainer={"recompute": "full"})
    group = long_group()
    whole = gradients(learner, [pack([group], True, 1)])
    found = gradients(learner, depth_first(group, 2))
    assert max(relative_errors(found, whole).values()) < TOLERANCE


def test_a_mixture_routes_the_tokens_of_a_stem_too(tmp_path: Path, model: Path) -> None:
    path = make_model(tmp_path / "mixture", "qwen3_moe")
    learner = learner_of(path, "megatron")
    group = long_group()
    whole = gradients(learner, [pack([group], True, 1)])
    of_whole = learner.step().report
    learner = learner_of(path, "megatron")
    found = gradients(learner, depth_first(group, 2))
    assert max(relative_errors(found, whole).values()) < TOLERANCE
    report = numbers(learner.step().report)
    key = "expert_imbalance"
    # the prompt's last row is in each of the two pieces, 49 rows in place of 48
    assert report[key] == pytest.approx(numbers(of_whole)[key], rel=1 / 40)


def test_a_stem_without_its_backward_is_an_error_of_the_gradient() -> None:
    kept = KeptKeys(3)
    k = torch.randn(3, 1, 8, requires_grad=True)
    stem = PathRows(PrefixLayout((3,), (-1,)), own=kept)
    piece = PathRows(PrefixLayout((5,), (-1,)), stems=(kept,))
    shared_prompt_attention(k, k, k, stem, layer=0)
    q = torch.randn(2, 1, 8, requires_grad=True)
    shared_prompt_attention(q, q, q, piece, layer=0).sum().backward()
    with pytest.raises(InvariantViolation, match=r"I7 gradient: .* stem of 3 rows .* layer 0"):
        kept.release()
    with pytest.raises(ValueError, match="layer 0 of policy has kept no keys of the 3 rows"):
        shared_prompt_attention(q, q, q, piece, layer=0)
    with pytest.raises(ValueError, match="number of the calling layer"):
        shared_prompt_attention(q, q, q, piece)


def test_a_trial_says_which_models_of_transformers_take_stems(tmp_path: Path, model: Path) -> None:
    packing = Packing("shared", "auto")

    def spec_of(path: Path) -> ModelSpec:
        return ModelSpec.from_config(model_config(path, trainer={"backend": "fsdp"}))

    plain = make_other(tmp_path / "plain", "phi")
    assert stems_obstacle(spec_of(plain), packing, 64) is None
    assert stems_obstacle(spec_of(plain), packing, 64, recompute=True) is None
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    by_length = make_other(tmp_path / "dynamic", "mistral", rope_parameters=rope)
    assert "dynamic" in str(stems_obstacle(spec_of(by_length), packing, 64))
