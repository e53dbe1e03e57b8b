"""Predictions of a configuration before anything runs: who waits, and whether groups suffice."""

from __future__ import annotations

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.plan_text import predicted_line
from pa_npu.planning.prediction.costs import typical_engine
from pa_npu.planning.prediction.virtual_run import Predicted, assumed_basis
from pa_npu.platform.typical import typical_speed

SPEED = typical_speed("npu")
RECIPE = "configs/grpo_qwen2.5_7b.yaml"
SPLIT = (
    "placement.colocate=false",
    "rollout.engines=4",
    "trainer.devices=4",
    "rollout.max_num_seqs=256",
)


def spec_of(config: Config) -> ModelSpec:
    spec = known_spec(config.model.path)
    assert spec is not None
    return spec


def predicted(*overrides: str) -> tuple[Config, Predicted, Predicted]:
    """(configuration, synchronous, periodic)."""
    config = load_config([RECIPE], ["run.device=npu", *SPLIT, *overrides])
    basis = assumed_basis(config, spec_of(config), SPEED)
    return config, basis.predict(config, streams=False), basis.predict(config)


def of_bound(synchronous: Predicted, actual: Predicted) -> float:
    return max(synchronous.generate_s, synchronous.train_s) / (actual.iteration_s - actual.border_s)


def test_one_wave_of_equal_lengths_overlaps_little_and_sixteen_waves_nearly_all():
    equal = ("rollout.ignore_eos=true", "schedule.prompts_per_iteration=128", "trainer.devices=16")
    _, *one = predicted(*equal, "rollout.max_num_seqs=256")
    _, *sixteen = predicted(*equal, "rollout.max_num_seqs=16")
    assert one[1].waves == 1 and sixteen[1].waves == 16
    assert of_bound(*one) < 0.8 < 0.9 < of_bound(*sixteen)


def test_the_side_that_is_slower_waits_least():
    _, few, periodic = predicted("rollout.engines=1")
    assert few.generate_s > few.train_s and periodic.engines_idle < periodic.trainers_idle
    _, many, periodic = predicted("rollout.engines=16", "trainer.devices=4")
    assert many.train_s > many.generate_s and periodic.trainers_idle < periodic.engines_idle


def test_devices_for_both_are_predicted_with_roles_that_follow_the_work():
    """In turns every device waits for the longest response; with roles what is idle of a device is
    less.
    """
    shared = (
        "placement.colocate=true",
        "rollout.engines=8",
        "trainer.devices=8",
        "schedule.prompts_per_iteration=256",
    )
    config, turns, roles = predicted(*shared)
    assert roles.iteration_s < 0.98 * turns.iteration_s
    assert roles.engines_idle < turns.engines_idle
    assert "devices idle" in predicted_line(config, spec_of(config))
    alone = predicted(*shared, "trainer.tensor_parallel=8")
    assert alone[2].iteration_s == pytest.approx(alone[1].iteration_s), (
        "one unit has nobody to decode meanwhile"
    )


def test_a_7b_model_decodes_and_trains_as_fast_as_is_assumed_of_such_devices():
    """18 ms and 0.045 ms per sequence on an NPU; a GSM8K iteration of 128 x 8 on 4 + 4 devices
    takes tens of seconds.
    """
    config, _, actual = predicted("schedule.prompts_per_iteration=128")
    speed = typical_engine(config, spec_of(config), SPEED).speed(context=256)
    assert speed.step_s == pytest.approx(0.018, rel=0.1) and speed.sequence_s == pytest.approx(
        4.5e-5, rel=0.5
    )
    assert 10 < actual.iteration_s < 100


def test_the_line_says_how_much_of_the_bound_is_reached_and_more_groups_reach_more():
    one_wave = ("rollout.ignore_eos=true", "trainer.devices=16", "rollout.max_num_seqs=256")
    config, *few = predicted(*one_wave, "schedule.prompts_per_iteration=128")
    line = predicted_line(config, spec_of(config))
    assert (
        f"{of_bound(*few):.2f} of the bound" in line
        and "engines idle" in line
        and "assumed lengths" in line
    )
    _, *more = predicted(*one_wave, "schedule.prompts_per_iteration=512")
    assert of_bound(*more) > of_bound(*few)


def test_an_iteration_of_any_size_is_predicted():
    config, _, actual = predicted("schedule.prompts_per_iteration=100000")
    assert actual.waves > 20 and f"waves {actual.waves:.1f}" in predicted_line(
        config, spec_of(config)
    )


@pytest.mark.parametrize(
    "name", ["qwen2.5_7b", "qwen3_8b", "deepseek_r1_distill_qwen_7b", "qwen2.5_32b"]
)
def test_every_recipe_idles_little_though_lengths_are_not_known_before(name: str):
    """Devices for both sides, by themselves; a split reaches eight tenths of its bound."""
    config = load_config([f"configs/grpo_{name}.yaml"], ["run.device=npu"])
    basis = assumed_basis(config, spec_of(config), SPEED)
    actual = basis.predict(config)
    if config.trainer.devices == config.devices.num_devices:
        assert actual.engines_idle < 0.2
    else:
        assert of_bound(basis.predict(config, streams=False), actual) >= 0.8
