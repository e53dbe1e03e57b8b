"""Routers of a mixture: fp32 in models of any type, and an auxiliary loss that is transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from pa_npu.algorithm.objective import Objective
from pa_npu.algorithm.rules import broken_rules
from pa_npu.attention import PrefixLayout
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_division
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.trainer.loop import consume
from tests.helpers.backend import make_learner
from tests.helpers.megatron import (
    loaded_stage,
    model_config,
    relative_gradient_errors,
    single_process,
)
from tests.helpers.models import make_model
from tests.helpers.shelf import shelf_iterator
from tests.helpers.trainer_rank import make_groups

LENGTH, COEFFICIENT = 24, 7.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", layers=3, mlp_only_layers=[1])
    with single_process(model_config(path)):
        yield path


def test_a_router_of_a_bf16_model_computes_in_fp32(model: Path) -> None:
    """Its choices and gate weights are those of the fp32 softmax of the bf16 weights and rows, not
    of a product in bf16.
    """
    router = loaded_stage(model, model={"dtype": "bf16"}).policy.decoder.layers[0].mlp.router
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights, chosen = router(rows)
    assert router.weight.dtype == torch.bfloat16 and weights.dtype == torch.float32
    expected, choices = (rows.double() @ router.weight.double().t()).softmax(-1).topk(2)
    assert torch.equal(chosen, choices)
    torch.testing.assert_close(
        weights.double(), expected / expected.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6
    )
    narrow = (rows @ router.weight.t()).float().softmax(-1).topk(2).indices
    assert not torch.equal(narrow, chosen), (
        "a product in bf16 would choose the same: the test could not see it"
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_auxiliary_loss_of_every_layer_has_the_gradient_of_transformers(
    recompute: str, model: Path
) -> None:
    """Padding counts nowhere. The loss itself is passed no other gradient than without it."""
    stage = loaded_stage(model, trainer={"recompute": recompute}).train()
    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.randint(0, 128, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(LENGTH - 1, generator=torch.Generator().manual_seed(2))
    output = hf_model(tokens, output_router_logits=True)
    expected = output.logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
    auxiliary = sum(load_balancing_loss_func((one,), 8, 2) for one in output.router_logits)
    ((expected * weights).sum() + COEFFICIENT * auxiliary).backward()

    layout = PrefixLayout.from_sequences([LENGTH]).pad(16)
    packed = torch.nn.functional.pad(tokens, (0, layout.padding))
    ours = stage(
        packed, layout, torch.arange(LENGTH - 1), tokens[0, 1:], 1.0, 7, balance=COEFFICIENT
    )
    factors: list[torch.Tensor] = []
    loss = (ours.logprobs * weights).sum()
    loss.register_hook(factors.append)
    loss.backward()
    assert factors == [1.0]
    spec = ModelSpec.read(str(model))
    errors = relative_gradient_errors(stage, hf_model, spec)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 5e-6, f"{worst}: relative gradient error {errors[worst]:.1e}"
    for parameter in stage.policy.parameters():
        parameter.grad = None
    ours = stage(packed, layout, torch.arange(LENGTH - 1), tokens[0, 1:], 1.0, 7)
    (ours.logprobs * weights).sum().backward()
    without = relative_gradient_errors(stage, hf_model, spec)
    assert max(without.values()) > 0.1, (
        "the gradient is hardly the auxiliary loss's: the test could not see it"
    )


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "dr-grpo"])
def test_factors_of_all_microbatches_are_the_coefficient_times_the_normaliser(
    aggregation: str, model: Path
) -> None:
    """So that the update divides their sum into a mean whose weights do not depend on how the
    update is cut (I3).
    """
    config = model_config(
        model,
        algorithm={"router_aux_coef": 0.25, "aggregation": aggregation},
        rollout={"responses_per_prompt": 4, "max_response_tokens": 16},
    )
    objective = Objective(config, torch.device("cpu"))
    group = make_groups(0, 1, 4, seed=1)[0]
    wanted = {
        "token-mean": int(group.trained_lengths.sum()),
        "sequence-mean": 4,
        "dr-grpo": 4 * 16,
    }[aggregation]
    for responses in (1, 2, 4):
        cut = build_microbatches(group, responses, True, 1)
        assert sum(map(objective.balance, cut)) == pytest.approx(0.25 * wanted), responses


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"trainer": {"backend": "fsdp"}}, "0.1 with trainer.backend=fsdp"),
        (
            {"algorithm": {"loss": "dpo", "kl_coef": 0.1}},
            "a mean over pairs, which no token has a part of",
        ),
    ],
)
def test_where_there_is_no_such_loss_its_coefficient_is_refused_in_a_line(
    sections: dict[str, Any], expected: str, model: Path
) -> None:
    algorithm = {"router_aux_coef": 0.1, **sections.get("algorithm", {})}
    with pytest.raises(ValueError, match=expected):
        for broken in broken_rules(model_config(model, **{**sections, "algorithm": algorithm})):
            raise ValueError(broken)


def test_a_dense_model_has_no_routers_to_balance(tmp_path: Path) -> None:
    config: Config = model_config(make_model(tmp_path), algorithm={"router_aux_coef": 0.1})
    with pytest.raises(
        ConfigError, match=r"algorithm.router_aux_coef: 0.1, but .* is no mixture of experts"
    ):
        check_division(config, ModelSpec.read(config.model.path))


def test_reports_say_how_evenly_tokens_are_spread_and_which_experts_none_has_taken(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By transformers' routers, over three updates of weights that hardly move: each packed token
    counts once, padding never.
    """
    directory = make_model(tmp_path, "qwen3_moe", layers=3, mlp_only_layers=[1], num_experts=32)
    responses = {"responses_per_prompt": 4, "max_response_tokens": 16}
    config = model_config(
        directory, rollout=responses, optimizer={"learning_rate": 1e-12}, algorithm={"kl_coef": 0.1}
    )
    hf_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    learner, _ = make_learner(config)
    seen = torch.zeros(2, 32)
    for iteration in range(3):
        groups = make_groups(iteration, 2, 4, seed=1)
        routed: list[list[torch.Tensor]] = [[], []]
        for group in groups:
            for number, sample in enumerate(group.sequences()):
                with torch.no_grad():
                    logits = hf_model(
                        torch.tensor(sample)[None].long(), output_router_logits=True
                    ).router_logits
                for own, layer in zip(routed, logits, strict=True):
                    own.append(layer[0 if number == 0 else group.prompt_lengths()[0] :])
        learner.publish(iteration)
        report = consume(
            learner, shelf_iterator(groups, iteration, responses=4, pad_multiple=16), 1
        ).report
        probabilities = [torch.cat(own).softmax(-1) for own in routed]
        counts = torch.stack(
            [torch.bincount(own.topk(2).indices.flatten(), minlength=32) for own in probabilities]
        )
        seen += counts
        imbalance = counts.amax(1) / counts.float().mean(1)
        entropy = torch.stack([-(own * own.log()).sum(-1).mean() for own in probabilities])
        assert report.expert_imbalance == pytest.approx(imbalance.mean().item())
        assert report.expert_imbalance_max == pytest.approx(imbalance.max().item())
        assert report.routing_entropy == pytest.approx(entropy.mean().item(), rel=1e-5)
        assert report.experts_untouched == int((seen == 0).sum())
    assert report.experts_untouched, "all were taken: the test could not see one that was not"
    missing = (seen[1] == 0).nonzero().flatten().tolist()
    assert f"layer 2: {', '.join(map(str, missing))}" in caplog.text
