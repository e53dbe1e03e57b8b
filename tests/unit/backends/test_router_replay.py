"""Router replay: engines say which experts each token took, and the trainers' routers take the same ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.engines.expert_choice_codec import with_expert_choices
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.engines.registry import check_engine_keys, engine_kind
from pa_npu.environments.single_turn import samples_of
from pa_npu.errors import ConfigError, InvariantViolation
from pa_npu.families.shape import Experts
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_division
from pa_npu.planning.plan_text import derived_lines
from pa_npu.samples.columns import NONE, RunColumns
from pa_npu.samples.expert_choices import NO_CHOICE, ExpertChoices
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.samples.rollout_buffer import run_columns, trained_columns
from pa_npu.samples.wire import from_bytes, to_bytes
from pa_npu.trainer.loop import consume
from tests.helpers.backend import make_learner
from tests.helpers.engine_process import EngineProcess
from tests.helpers.engine_subjects import make_engine_model
from tests.helpers.groups import with_random_expert_choices
from tests.helpers.megatron import (
    TriModel,
    loaded_stage,
    model_config,
    relative_gradient_errors,
    single_process,
)
from tests.helpers.models import make_model
from tests.helpers.shelf import shelf_iterator
from tests.helpers.trainer_rank import make_groups

from pa_npu.backends.megatron.routing import replay_of  # isort: skip

EXPERTS, TAKEN, SPARSE = 8, 2, 2  # of the three layers the middle one is dense
EXPERT_CHOICES = ExpertChoices.from_experts(Experts(EXPERTS, TAKEN, 32, True, (0, 2)))
RUN = RunColumns.from_features([EXPERT_CHOICES])
REPLAY = {"router_replay": "rollout"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", layers=3, mlp_only_layers=[1])
    with single_process(model_config(path)):
        yield path


def force(hf_model: Any, taken: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    """Let transformers' routers take [tokens, layers, k], and their own choice where an id is none.

    Returns what they took.
    """
    found: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in hf_model.model.layers if hasattr(layer.mlp, "gate")]
    for number, gate in enumerate(gates):

        def forward(
            hidden: torch.Tensor, gate: Any = gate, own: torch.Tensor = taken[:, number]
        ) -> Any:
            probabilities = torch.nn.functional.linear(hidden, gate.weight).softmax(-1)
            chosen = torch.where(own < EXPERTS, own, probabilities.topk(TAKEN, -1).indices)
            found.append(chosen)
            weights = probabilities.gather(-1, chosen)
            return None, weights / weights.sum(-1, keepdim=True), chosen

        gate.forward = forward
    return found


def reference_gradients(path: Path, group: Group, weights: torch.Tensor) -> Any:
    """transformers' model, each sample alone and forced to its expert choices, with the gradients
    of the weighted sum of log-probs.
    """
    hf_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parts = weights.split(group.trained_lengths.tolist())
    for number, (tokens, part) in enumerate(zip(group.sequences(), parts, strict=True)):
        rows = slice(*group.offsets()[number : number + 2].tolist())
        taken = torch.from_numpy(group.columns[EXPERT_CHOICES.column][rows].astype(np.int64))
        force(hf_model, taken)
        sample = torch.from_numpy(tokens.astype(np.int64))[None]
        logprobs = (
            hf_model(sample)
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(-1, sample[0, 1:, None])
            .squeeze(-1)
        )
        (logprobs[-len(part) :] * part).sum().backward()
    return hf_model


def our_gradients(
    stage: TriModel, microbatch: Microbatch, weights: torch.Tensor, replays: bool
) -> None:
    stage.zero_grad()
    ours = stage(
        microbatch.tokens[None],
        microbatch.layout,
        microbatch.rows,
        microbatch.targets,
        1.0,
        7,
        balance=0.0,
        replay=replay_of(microbatch) if replays else None,
    )
    (ours.logprobs * weights).sum().backward()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("recompute", "missing"), [("none", 0.0), ("full", 0.3)])
def test_gradients_are_those_of_transformers_forced_to_the_same_experts(
    recompute: str, missing: float, shared: bool, model: Path
) -> None:
    """The routers' too, through the gate weights.

    Tokens without expert choices are routed by the trainer.
    """
    stage = loaded_stage(model, trainer={"recompute": recompute}).train()
    group = with_random_expert_choices(make_groups(0, 1, 4, seed=3)[0], EXPERT_CHOICES, 1, missing)
    (microbatch,) = build_microbatches(group, 4, shared, 16)
    weights = torch.randn(len(microbatch.targets), generator=torch.Generator().manual_seed(2))
    hf_model, spec = reference_gradients(model, group, weights), ModelSpec.read(str(model))
    our_gradients(stage, microbatch, weights, replays=True)
    errors = relative_gradient_errors(stage, hf_model, spec)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 5e-6, f"{worst}: relative gradient error {errors[worst]:.1e}"
    assert any("mlp.gate" in name for name in errors)
    our_gradients(stage, microbatch, weights, replays=False)
    assert max(relative_gradient_errors(stage, hf_model, spec).values()) > 0.1, (
        "its own choice would do as well"
    )


def chosen_by(stage: TriModel) -> dict[int, list[torch.Tensor]]:
    """Collects what the routers choose from here on, by the layer's number among those with
    experts, a tensor for each pass.
    """
    found: dict[int, list[torch.Tensor]] = {}
    for layer in (one for one in stage.policy.decoder.layers if hasattr(one.mlp, "router")):
        router = layer.mlp.router
        router.register_forward_hook(
            lambda own, _, output: found.setdefault(own.number, []).append(output[1])
        )
    return found


def recorded_from(path: Path, group: Group) -> Group:
    """The group with the expert choices that transformers' model takes, but for each sample's last
    token, as an engine has them.
    """
    hf_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = []
    for tokens in group.sequences():
        with torch.no_grad():
            logits = hf_model(
                torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True
            ).router_logits
        taken = (
            torch.stack([one.topk(TAKEN, -1).indices for one in logits], 1).numpy().astype(np.uint8)
        )
        taken[-1] = EXPERT_CHOICES.column.elsewhere
        rows.append(taken)
    return replace(group, columns={EXPERT_CHOICES.column: np.concatenate(rows)})


def trained(
    path: Path, groups: list[Group], noise: float = 0.0, updates: int = 1, **sections: Any
) -> tuple[Any, dict[int, Any]]:
    """The report of an iteration of a policy whose routers have noise on their weights, and what
    they chose.
    """
    config = model_config(
        path, rollout={"responses_per_prompt": 4, "max_response_tokens": 16}, **sections
    )
    learner, stage = make_learner(config)
    for layer in (one for one in stage.policy.decoder.layers if hasattr(one.mlp, "router")):
        weight = layer.mlp.router.weight
        weight.data += noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    learner.publish(0)
    found = chosen_by(stage)
    columns = RUN if groups[0].columns else NONE
    rollouts = shelf_iterator(groups, responses=4, pad_multiple=16, columns=columns)
    return consume(learner, rollouts, updates).report, found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_with_noise_on_the_routers_unreplayed_choices_change_and_replayed_ones_do_not(
    recompute: str, model: Path
) -> None:
    plain = make_groups(0, 2, 4, seed=1)
    groups = [recorded_from(model, group) for group in plain]
    sections = {"trainer": {"recompute": recompute}}
    same, expected = trained(model, plain, **sections)
    assert same.replay_changed is None and same.expert_choices_missing is None
    quiet, _ = trained(model, groups, **sections)
    assert quiet.replay_changed == 0.0 and quiet.expert_choices_missing == 0
    _, drifted = trained(model, plain, 0.3, **sections)
    noisy, replayed = trained(model, groups, 0.3, **sections)
    changed = different = total = 0
    packed = [build_microbatches(group, 4, True, 16)[0] for group in groups]
    for layer in range(SPARSE):
        passes = len(expected[layer]) // len(packed)  # a recomputed one comes twice
        for place in range(len(expected[layer])):
            known = packed[place // passes].packed["expert_choices"][:, layer].long()
            routed = (known < EXPERTS).all(-1)
            assert torch.equal(replayed[layer][place][routed], known[routed]), (
                "a replayed choice is not the engine's"
            )
            own = (drifted[layer][place][routed][:, :, None] == known[routed][:, None, :]).any(-1)
            different += int((~own).sum())
            total += own.numel()
            changed += int(
                (
                    expected[layer][place][routed].sort(-1).values != known[routed].sort(-1).values
                ).sum()
            )
    assert changed == 0, "without noise the trainer chooses as the engine"
    assert different > 0.05 * total, "the noise changes no choices: the test could not see it"
    assert (
        noisy.replay_changed
        and 0.5 * different / total < noisy.replay_changed < 2 * different / total
    )
    assert noisy.expert_choices_missing == 0, "the last token of a response needs none"


def test_old_policy_and_reference_take_the_same_expert_choices(model: Path) -> None:
    """So that ratios and the KL term compare weights, not experts: of weights that hardly move they
    are 1 and 0.
    """
    groups = [
        with_random_expert_choices(group, EXPERT_CHOICES, 4)
        for group in make_groups(0, 2, 4, seed=1)
    ]
    for frozen_pass in ("together", "separate"):
        report, _ = trained(
            model,
            groups,
            updates=2,
            algorithm={"kl_coef": 0.1, "clip_low": 1e-3, "clip_high": 1e-3},
            optimizer={"learning_rate": 1e-7},
            schedule={"prompts_per_iteration": 2, "updates_per_iteration": 2},
            trainer={"frozen_pass": frozen_pass},
        )
        assert report.kl < 1e-7 and report.clip_ratio == 0.0, frozen_pass


def test_missing_expert_choices_are_counted_and_above_a_share_the_run_stops(model: Path) -> None:
    groups = [
        with_random_expert_choices(group, EXPERT_CHOICES, 4)
        for group in make_groups(0, 8, 4, seed=1)
    ]
    values = groups[0].columns[EXPERT_CHOICES.column].copy()
    # the prompt's first token, which is packed once
    values[groups[0].offsets()[:-1]] = EXPERT_CHOICES.column.elsewhere
    values[groups[0].offsets()[1:] - 1] = (
        EXPERT_CHOICES.column.elsewhere
    )  # the last tokens need none
    report, found = trained(
        model, [replace(groups[0], columns={EXPERT_CHOICES.column: values}), *groups[1:]]
    )
    assert report.expert_choices_missing == 1
    assert all((chosen < EXPERTS).all() for layers in found.values() for chosen in layers)
    lost = [
        with_random_expert_choices(group, EXPERT_CHOICES, 4, missing=0.5)
        for group in make_groups(0, 2, 4, seed=1)
    ]
    with pytest.raises(
        InvariantViolation,
        match=r"router_replay: .*% of the update's tokens came without expert choices",
    ):
        trained(model, lost)


def test_a_shared_prompts_expert_choices_travel_once_per_group() -> None:
    group = with_random_expert_choices(make_groups(0, 1, 4, seed=3)[0], EXPERT_CHOICES, 1, 0.2)
    data = to_bytes(group, RUN)
    parsed = from_bytes(data, RUN)
    assert parsed.columns.keys() == group.columns.keys()
    np.testing.assert_array_equal(
        parsed.columns[EXPERT_CHOICES.column], group.columns[EXPERT_CHOICES.column]
    )
    own = len(group.tokens) - 3 * group.prompt_lengths()[0]
    # and a header
    assert len(data) - len(to_bytes(replace(group, columns={}))) < own * SPARSE * TAKEN + 120


def test_many_experts_have_two_bytes() -> None:
    small, large = (
        ExpertChoices.from_experts(Experts(count, 8, 32, True, (0, 1, 2, 3)))
        for count in (255, 256)
    )
    assert small.column.type.itemsize == 1 and large.column.type.itemsize == 2
    recorded = np.array([[[0] * 8] * 4, [[255] * 8] * 4, [[NO_CHOICE] * 8] * 4], np.uint16)
    tokens = np.arange(2, dtype=np.int32)
    generation = Generation(tokens, np.zeros(2, np.float32), "", "stop", version=0)
    values_of_tokens = with_expert_choices(generation, recorded, 2, large, "e").columns[
        large.column
    ]
    assert values_of_tokens[:, 0, 0].tolist() == [0, 255, NO_CHOICE, NO_CHOICE]
    ids = Microbatch.__new__(Microbatch)
    object.__setattr__(ids, "packed", {"expert_choices": torch.from_numpy(values_of_tokens)})
    for name, value in vars(
        build_microbatches(make_groups(0, 1, 1, seed=3)[0], 1, True, 1)[0]
    ).items():
        if name != "packed":
            object.__setattr__(ids, name, value)
    replay = replay_of(ids)
    assert replay is not None
    values, known = replay.in_layer(slice(0, 4), 0, 256)
    assert known.flatten().tolist() == [True, True, False, False] and values[1, 0] == 255


def test_what_cannot_replay_is_refused_in_a_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"router_replay: rollout with trainer.backend=fsdp, whose routers choose"
    ):
        model_config(model, algorithm=REPLAY, trainer={"backend": "fsdp"})
    dense = make_model(tmp_path)
    config = model_config(dense, algorithm=REPLAY)
    with pytest.raises(
        ConfigError, match=r"router_replay: rollout, but .* is no mixture of experts"
    ):
        check_division(config, ModelSpec.read(str(dense)))
    config = model_config(
        model,
        algorithm=REPLAY,
        rollout={"backend": "tests.unit.backends.test_router_replay:NO_CHOICES"},
    )
    with pytest.raises(ConfigError, match=r"whose engines do not say which experts a token took"):
        check_engine_keys(config, None)


NO_CHOICES = replace(engine_kind("transformers"), records_expert_choices=False)


def test_a_runs_columns_have_the_expert_choices_for_trainers_too(model: Path) -> None:
    config = model_config(model, algorithm=REPLAY)
    assert run_columns(config).declared == (EXPERT_CHOICES.column,)
    assert trained_columns(config).wants(EXPERT_CHOICES.column)
    assert (
        ExpertChoices.from_config(model_config(model)) is None
        and not run_columns(model_config(model)).declared
    )


async def test_the_trainer_takes_the_expert_choices_of_the_transformers_engine_which_are_its_own(
    model: Path, tmp_path: Path
) -> None:
    """Whole, and of a response that another engine goes on with; the trainer takes 100% of them."""
    directory = make_engine_model(
        tmp_path / "model", family="qwen3_moe", layers=3, mlp_only_layers=[1]
    )
    engine = EngineProcess("transformers", directory, tmp_path, {"max_num_seqs": 16})
    prompt = np.array([5, 9, 17, 33, 2, 77], np.int32)
    sampling = Sampling(
        max_tokens=12, temperature=1.0, ignore_eos=True, expert_choices=EXPERT_CHOICES
    )
    try:
        await engine.wait_ready()
        async with engine.client() as client:
            assert (await client.wait_ready(deadline_s=60.0)).records_expert_choices
            found = await client.generate(prompt, 3, 7, sampling, deadline_s=60.0)
            (rest,) = await client.generate(
                prompt,
                1,
                7,
                replace(sampling, max_tokens=7),
                deadline_s=60.0,
                written=found[0].tokens[:5],
            )
            (plain,) = await client.generate(
                prompt, 1, 7, replace(sampling, expert_choices=None), deadline_s=60.0
            )
    finally:
        await asyncio.to_thread(engine.kill)
    assert not plain.columns
    column = EXPERT_CHOICES.column
    np.testing.assert_array_equal(rest.columns[column], found[0].columns[column])
    hf_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for one in found:
        tokens = torch.from_numpy(np.concatenate([prompt, one.tokens]).astype(np.int64))[None]
        logits = hf_model(tokens[:, :-1], output_router_logits=True).router_logits
        wanted = torch.stack([layer.topk(TAKEN, -1).indices for layer in logits], 1)
        recorded = torch.from_numpy(one.columns[column].astype(np.int64))
        assert torch.equal(recorded[:-1].sort(-1).values, wanted.sort(-1).values)
        assert (recorded[-1] == column.elsewhere).all()
    ones = np.ones(3, np.float32)
    group = Group.from_samples(
        samples_of(prompt, [replace(one, version=0) for one in found]),
        ones,
        ones,
        run_seed=0,
        iteration=0,
        index=0,
        prompt_id=0,
    )
    packed = (
        build_microbatches(from_bytes(to_bytes(group, RUN), RUN), 3, True, 1)[0]
        .packed["expert_choices"]
        .long()
    )
    report, chosen = trained(directory, [group], 0.3)
    known = (packed < EXPERTS).all(-1).all(-1)
    for layer in range(SPARSE):
        assert torch.equal(chosen[layer][0][: len(known)][known], packed[known][:, layer])
    assert report.replay_changed > 0.01 and report.expert_choices_missing == 0


def test_the_plan_says_what_expert_choices_take(model: Path) -> None:
    spec = ModelSpec.read(str(model))
    for algorithm, expected in ((REPLAY, 1), ({}, 0)):
        config = model_config(model, algorithm=algorithm, run={"device": "cpu"})
        lines = derived_lines(config, spec, 2**34, False)
        assert (
            sum(
                line.startswith("expert choices        4 bytes per token, a shared")
                for line in lines
            )
            == expected
        )
