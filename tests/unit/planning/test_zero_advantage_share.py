"""Plans and schedules know the share of groups that trainers do not compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.comparison import compare
from pa_npu.planning.iteration_model.controller import Learned
from pa_npu.planning.iteration_model.subjects import (
    GroupOutlook,
    GroupTiming,
    IterationOutlook,
    IterationTimes,
    Rules,
)
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.model_rules import settled_rule
from pa_npu.planning.prediction.virtual_run import assumed_basis, planned_basis
from pa_npu.platform.typical import typical_speed

SPEED = typical_speed("npu")
RECIPE = "configs/grpo_qwen2.5_7b.yaml"
SPLIT = ("placement.colocate=false", "rollout.engines=4", "trainer.devices=4")


def config_of(*overrides: str) -> Config:
    return load_config([RECIPE], ["run.device=npu", "algorithm.kl_coef=0", *SPLIT, *overrides])


def spec_of(config: Config) -> ModelSpec:
    spec = known_spec(config.model.path)
    assert spec is not None
    return spec


def recorded_run(directory: Path, share: float) -> Path:
    directory.mkdir()
    lines = [
        json.dumps({"iteration": number, "equal_reward_ratio": 0.9 if number < 3 else share})
        for number in range(8)
    ]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_predicted_time_of_training_falls_by_the_share(share: float) -> None:
    config = config_of()
    basis = assumed_basis(config, spec_of(config), SPEED)
    some = replace(basis, workload=replace(basis.workload, by_rule=share))
    computed = basis.predict(config, streams=False, iterations=1)
    by_rule = some.predict(config, streams=False, iterations=1)
    step_s = basis.costs.trainer_for(config, basis.spec, SPEED).step_s
    step_s *= config.schedule.updates_per_iteration
    saved = (computed.train_s - by_rule.train_s) / (computed.train_s - step_s)
    assert saved == pytest.approx(share, abs=0.03)
    assert by_rule.generate_s == pytest.approx(computed.generate_s, rel=1e-6)


def test_a_plan_takes_the_share_from_the_last_iterations_of_its_run_directory(
    tmp_path: Path,
) -> None:
    run = recorded_run(tmp_path / "run", 0.4)
    config = config_of(f"run.dir={run}")
    spec = spec_of(config)
    assert planned_basis(config, spec, SPEED).workload.by_rule == pytest.approx(0.4)
    compared = compare(config, spec, SPEED)
    assert compared is not None
    line = next(line for line in compared.assumptions if "without gradient" in line)
    assert f"40% of the groups, as in the last iterations of {run}" in line


def test_a_plan_without_records_says_that_it_assumes_no_such_group() -> None:
    config = config_of()
    compared = compare(config, spec_of(config), SPEED)
    assert compared is not None
    line = next(line for line in compared.assumptions if "without gradient" in line)
    assert "no group is assumed" in line


def test_where_every_group_is_computed_records_change_nothing(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", 0.4)
    for key in ("schedule.skip_zero_advantage=false", "algorithm.kl_coef=0.01"):
        config = config_of(f"run.dir={run}", key)
        assert planned_basis(config, spec_of(config), SPEED).workload.by_rule == 0.0
        compared = compare(config, spec_of(config), SPEED)
        assert compared is not None
        assert not any("without gradient" in line for line in compared.assumptions)


def test_a_schedule_expects_the_share_of_the_last_iteration() -> None:
    """Half of the groups by rule: a replica's seconds for a group to come are half as many."""
    rules = Rules.from_config(config_of())
    groups = [GroupOutlook(prompt_tokens=10, longest=20.0, mean=20.0)] * 8
    outlook = IterationOutlook(groups=groups, engines=("engine-0",))
    seconds = {}
    for name, skipped in (("all", ()), ("half", (0, 2, 4, 6)), ("none", tuple(range(8)))):
        learned = Learned(rules, lambda prompt, lengths: float(prompt + sum(lengths)))
        everything = [
            GroupTiming(
                index=index,
                engine="engine-0",
                start_s=float(index),
                end_s=index + 1.0,
                prompt_tokens=10,
                lengths=(20,) * rules.responses,
            )
            for index in range(8)
        ]
        times = IterationTimes(iteration_s=10.0, border_s=0.1, train_s=8.0, step_s=0.0)
        learned.observe(outlook, everything, times)
        some = [replace(timing, by_rule=timing.index in skipped) for timing in everything]
        share = 1.0 - len(skipped) / 8
        learned.observe(outlook, some, replace(times, train_s=8.0 * share))
        seconds[name] = sum(group.train_s for group in learned.expected(outlook))
    assert seconds["half"] == pytest.approx(seconds["all"] / 2, rel=1e-6)
    assert seconds["none"] == 0.0


def test_sharded_trainers_of_a_mixture_compute_every_group_unless_they_are_told_otherwise() -> None:
    config = load_config(["configs/grpo_qwen3_30b_a3b.yaml"], ["run.device=npu"])
    mixture = spec_of(config)
    assert mixture.experts is not None
    assert settled_rule(config, mixture) is config, "Megatron steps every expert"
    trainer = config.trainer.model_copy(update={"backend": "fsdp"})
    sharded = config.model_copy(update={"trainer": trainer})
    assert settled_rule(sharded, mixture).schedule.skip_zero_advantage is False
    dense = spec_of(config_of())
    assert settled_rule(sharded, dense) is sharded
