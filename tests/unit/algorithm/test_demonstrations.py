"""Demonstrations beside the reward: the update is the formula by hand, and trainers have them before engines answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.rules import rules_of
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.coordinator.demonstrations import Demonstrations
from pa_npu.data.row_sets import Row, RowSet
from pa_npu.data.stream import TrainingStream
from pa_npu.errors import DataError
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner, Update
from tests.helpers.backend import Source, make_learner
from tests.helpers.groups import trained_advantages
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.scripted_production import GROUPS as ASKED
from tests.helpers.scripted_production import (
    RESPONSES,
    ScriptedEngine,
    ScriptedRewards,
    Shelf,
    make_producer,
    prompts,
)
from tests.helpers.scripted_production import config as scripted_config
from tests.helpers.trainer_rank import make_groups

RATE, GROUPS, SIZE, WEIGHT = 3e-3, 2, 4, 0.25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    with single_process(model_config(path)):
        yield path


@pytest.fixture
def store_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def config_of(model: Path, backend: str = "megatron", **algorithm: Any) -> Config:
    return model_config(
        model,
        data={"demonstrations": {"path": "d.jsonl", "weight": WEIGHT, "share": 1.0}},
        algorithm=algorithm,
        trainer={"backend": backend},
        rollout={"responses_per_prompt": SIZE, "max_response_tokens": 16},
        schedule={"prompts_per_iteration": GROUPS},
        optimizer={"learning_rate": RATE, "clip_grad": 0.0, "epsilon": 1e-3},
        publish={"noise_margin": None},
    )


def rows(number: int = 24) -> list[Row]:
    """Of which the second half is trained, each with a weight of its own."""
    rng = np.random.default_rng(4)
    made = []
    for row_id in range(number):
        tokens = rng.integers(3, 120, rng.integers(6, 12)).astype(np.int32)
        weight = np.zeros(len(tokens), np.float32)
        weight[len(tokens) // 2 :] = 1 + row_id % 2
        made.append(Row(row_id, tokens, weight, "", 0))
    return made


def demonstrations_of(config: Config, given: list[Row] | None = None) -> Demonstrations:
    given = rows() if given is None else given
    return Demonstrations(config, RowSet("d.jsonl", tuple(given), len(given), 0, 0, ""))


def groups_of(config: Config) -> list[Group]:
    """Demonstrations first, and behind them groups that the policy wrote."""
    algorithm = build_algorithm(config)
    shown = [
        group.group(0, 0, number, algorithm.credit)
        for number, group in enumerate(demonstrations_of(config).groups(0))
    ]
    written = make_groups(0, GROUPS, SIZE, seed=7)
    return [*shown, *(replace(group, index=len(shown) + group.index) for group in written)]


def learner_of(config: Config) -> Learner:
    if config.trainer.backend == "megatron":
        return make_learner(config)[0]
    spec, timeline = ModelSpec.read(config.model.path), Timeline(None, "")
    module = backend_module(config.trainer.backend)
    backend = module.create(config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline)
    return Learner(config, backend, PLATFORM, timeline)


def update(learner: Learner, groups: list[Group], responses: int = SIZE) -> Update:
    pieces = [one for group in groups for one in build_microbatches(group, responses, True, 1)]
    source = Source(pieces)
    source.advantages = {group.index: trained_advantages(group) for group in groups}
    learner.publish(0)
    learner.accumulate(source)
    return learner.step()


def by_hand(
    model: Path, groups: list[Group], factor: float
) -> tuple[float, float, float, dict[str, torch.Tensor]]:
    """Loss, the demonstrations' part of it, norm of the gradient and weights after AdamW's step.

    Sum over the policy's tokens of -A r, with the ratio r to the same policy, and over the
    demonstrations' of -factor x the row's weight x log p, divided by the number of the policy's.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    by_tokens = {row.tokens.tobytes(): row for row in rows()}
    rewarded, shown, num_written = torch.zeros(()), torch.zeros(()), 0
    for group in groups:
        starts, ends = group.offsets()[:-1].tolist(), group.offsets()[1:].tolist()
        for start, end in zip(starts, ends, strict=True):
            ids = torch.from_numpy(group.tokens[start:end].astype(np.int64))
            logits = policy(ids[None]).logits[0, :-1]
            logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            written = group.versions[start + 1 : end] >= 0
            if written.any():
                advantages = torch.from_numpy(group.advantages[start + 1 : end])
                ratio = (logprobs - logprobs.detach()).exp()
                rewarded = rewarded - (advantages * ratio)[torch.from_numpy(written)].sum()
                num_written += int(written.sum())
                continue
            row = by_tokens[np.asarray(group.tokens[start:end], np.int32).tobytes()]
            shown = shown - factor * (torch.from_numpy(row.weight[1:]) * logprobs).sum()
    loss = (rewarded + shown) / num_written
    loss.backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt().item()
    optimizer.step()
    weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    return loss.item(), shown.item() / num_written, norm, weights


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_update_with_demonstrations_is_the_formula_by_hand(
    backend: str, model: Path, tmp_path: Path
) -> None:
    config = config_of(model, backend)
    groups = groups_of(config)
    learner = learner_of(config)
    done = update(learner, groups)
    loss, shown, norm, weights = by_hand(model, groups, WEIGHT)
    assert done.report.loss == pytest.approx(loss, rel=1e-5)
    assert done.report.demonstration_loss == pytest.approx(shown, rel=1e-5)
    assert done.report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert done.normaliser == sum(int(group.written.sum()) for group in groups)
    learner.backend.export(tmp_path)
    exported = {
        name: tensor
        for file in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert exported.keys() <= weights.keys() and len(exported) > 10
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor.float(), weights[name], rtol=1e-3, atol=1e-5, msg=name)
    without, _, other_norm, _ = by_hand(model, groups, 0.0)
    assert loss != pytest.approx(without, rel=1e-2), "it must show"
    assert norm != pytest.approx(other_norm, rel=1e-3), "it must show"


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "dr-grpo"])
def test_no_cut_into_microbatches_changes_the_update(aggregation: str, model: Path) -> None:
    config = config_of(model, aggregation=aggregation)
    groups = groups_of(config)
    first, *others = (update(learner_of(config), groups, size) for size in (1, 2, 4))
    for other in others:
        assert other.normaliser == first.normaliser
        assert other.report.loss == pytest.approx(first.report.loss, rel=1e-5)
        assert other.report.grad_norm == pytest.approx(first.report.grad_norm, rel=1e-5)


def test_the_first_comparison_with_engines_is_of_what_the_policy_wrote(model: Path) -> None:
    """I5: demonstrations come first, and no engine has log-probs of them."""
    config = config_of(model)
    groups = groups_of(config)
    learner = learner_of(config)
    judged: list[float] = []
    source = Source([one for group in groups for one in build_microbatches(group, SIZE, True, 1)])
    source.advantages = {group.index: trained_advantages(group) for group in groups}
    learner.publish(0)
    learner.accumulate(source, lambda differences, place: judged.append(differences.n))
    (first_written,) = (group for group in groups if group.index == GROUPS)
    assert judged == [first_written.num_trained]
    assert learner.step().first.n == first_written.num_trained


def test_an_iterations_rows_follow_from_its_number_and_an_epoch_has_each_once() -> None:
    config = config_of(Path("m"))
    demonstrations = demonstrations_of(config)

    def taken(iteration: int) -> list[int]:
        groups = demonstrations.groups(iteration)
        return sorted(row.row_id for group in groups for row in group.prompt.rows)  # type: ignore[attr-defined]

    later = taken(2)
    assert sorted(taken(0) + taken(1) + later) == list(range(24))
    assert taken(2) == later == sorted(later)
    assert taken(0) != later, "negative control"


def test_a_checkpoint_of_other_demonstrations_is_refused() -> None:
    config = config_of(Path("m"))
    loaded = RowSet("t.jsonl", tuple(rows()), 24, 0, 0, "")

    def stream_with(given: list[Row] | None) -> TrainingStream[Row]:
        fingerprint = None if given is None else demonstrations_of(config, given).fingerprint
        return TrainingStream(config.data, [loaded], 1, fingerprint)

    state = stream_with(rows()).state()
    stream_with(rows()).restore(state)
    changed = rows()
    changed[3].weight[-1] = 0.5
    with pytest.raises(DataError, match=r"data\.demonstrations: its rows differ"):
        stream_with(changed).restore(state)


@pytest.mark.parametrize("order", ["prompt", "completion"])
@pytest.mark.parametrize("stream", [True, False])
async def test_they_are_in_the_buffer_before_an_engine_is_asked(store_thread, order, stream):
    config = scripted_config(
        data={"demonstrations": {"path": "d.jsonl", "weight": WEIGHT, "share": 0.5}},
        schedule={"order": order, "stream": stream},
    )
    shelf = Shelf()
    seen: list[int] = []
    engine = ScriptedEngine("a", [2, 0, 1, 3, 7, 6, 5, 4])
    engine.on_asked = lambda: seen.append(len(shelf.groups))
    producer = make_producer(config, [engine], ScriptedRewards(), shelf, store_thread)
    producer.demonstrations = demonstrations_of(config)
    produced = await producer.produce(5, prompts())

    num_shown = ASKED // 2
    groups = {group.index: group for group in shelf.groups.values()}
    assert sorted(groups) == list(range(ASKED + num_shown))
    assert seen[0] == (num_shown if stream else 0)
    for number in range(num_shown):
        group = groups[number]
        assert not group.written.any() and not group.advantages.any()
        assert set(group.component[group.trained].tolist()) == {2}
        assert group.weight is not None
        assert set(group.weight[group.trained].tolist()) == {WEIGHT, 2 * WEIGHT}
    for index in range(ASKED):
        group = groups[num_shown + index]
        assert group.prompt_id == 100 + index and group.written.any()
    numbers = produced.numbers
    assert numbers["demonstrations"] == {
        "rows": num_shown * RESPONSES,
        "tokens": sum(groups[number].num_trained for number in range(num_shown)),
    }
    written = [groups[num_shown + index] for index in range(ASKED)]
    assert numbers["groups"] == ASKED
    assert numbers["tokens_response"] == sum(group.num_trained for group in written)
    assert numbers["reward_mean"] == pytest.approx(
        float(np.mean([group.rewards for group in written]))
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": {"devices": 2}}, "data.demonstrations.share: makes 1 groups an iteration"),
        ({"algorithm": {"name": "online-dpo"}}, "beside algorithm.loss = dpo"),
        (
            {"schedule": {"prompts_per_iteration": 3, "updates_per_iteration": 2}},
            "beside schedule.updates_per_iteration = 2",
        ),
        ({"schedule": {"max_staleness": 1}}, "beside schedule.max_staleness = 1"),
        ({"algorithm": {"name": "sft"}}, "would be read by nothing"),
    ],
)
def test_what_demonstrations_do_not_go_with_is_one_line(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"train": "t", "demonstrations": {"path": "d.jsonl", "share": 0.25}},
        "rollout": {"max_response_tokens": 16},
        "schedule": {"prompts_per_iteration": 4},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    lines = list(rules_of(build_algorithm(Config.model_validate(tree))))
    named = [line for line in lines if line.startswith("data.demonstrations")]
    assert len(named) == 1 and message in named[0], lines
