"""The rehearsal of a configuration: who waits, whether groups suffice, and what to change, before anything runs."""

from __future__ import annotations

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.plan_text import predicted_lines
from pa_npu.planning.prediction.costs import typical_engine
from pa_npu.planning.prediction.rehearsal import Rehearsal, advice, can_rehearse, rehearse
from pa_npu.platform.typical import typical_speed

SPEED = typical_speed("npu")
RECIPE = "configs/grpo_qwen2.5_7b.yaml"
SPLIT = ("placement.colocate=false", "rollout.engines=4", "trainer.devices=4", "rollout.max_num_seqs=256")


def rehearsed(*overrides: str) -> tuple[Config, Rehearsal]:
    config = load_config([RECIPE], ["run.device=npu", *SPLIT, *overrides])
    spec = known_spec(config.model.path)
    assert spec is not None
    return config, rehearse(config, spec, SPEED)


def test_one_wave_of_equal_lengths_overlaps_little_and_sixteen_waves_nearly_all():
    equal = ("rollout.ignore_eos=true", "schedule.prompts_per_iteration=128", "trainer.devices=16")
    _, one = rehearsed(*equal, "rollout.max_num_seqs=256")
    _, sixteen = rehearsed(*equal, "rollout.max_num_seqs=16")
    assert one.waves == 1 and sixteen.waves == 16
    assert one.of_bound < 0.8 < 0.9 < sixteen.of_bound


def test_the_side_that_is_slower_waits_least():
    _, few = rehearsed("rollout.engines=1")
    assert few.generate_s > few.train_s and few.engines_idle < few.trainers_idle
    _, many = rehearsed("rollout.engines=16", "trainer.devices=4")
    assert many.train_s > many.generate_s and many.trainers_idle < many.engines_idle


def test_devices_for_both_are_predicted_with_roles_that_follow_the_work():
    """In turns every device waits for the longest response; with roles what is idle of a device is less."""
    shared = ("placement.colocate=true", "rollout.engines=8", "trainer.devices=8", "schedule.prompts_per_iteration=256")
    _, turns = rehearsed(*shared, "schedule.stream=false")
    config, roles = rehearsed(*shared)
    assert roles.iteration_s < 0.98 * turns.iteration_s
    assert turns.devices_idle is not None and roles.devices_idle is not None
    assert roles.devices_idle < turns.devices_idle
    spec = known_spec(config.model.path)
    assert spec is not None and "devices idle" in predicted_lines(config, spec)[0]


def test_a_7b_model_decodes_and_trains_as_fast_as_is_assumed_of_such_devices():
    """18 ms and 0.045 ms per sequence on an NPU; a GSM8K iteration of 128 x 8 on 4 + 4 devices takes tens of seconds."""
    config, found = rehearsed("schedule.prompts_per_iteration=128")
    spec = known_spec(config.model.path)
    assert spec is not None
    speed = typical_engine(config, spec, SPEED).speed(context=256)
    assert speed.step_s == pytest.approx(0.018, rel=0.1) and speed.sequence_s == pytest.approx(4.5e-5, rel=0.5)
    assert 10 < found.iteration_s < 100


def test_too_few_groups_are_said_with_what_more_would_bring():
    one_wave = ("rollout.ignore_eos=true", "schedule.prompts_per_iteration=128", "trainer.devices=16")
    config, found = rehearsed(*one_wave, "rollout.max_num_seqs=256")
    spec = known_spec(config.model.path)
    assert spec is not None and found.of_bound < 0.9
    text, after = advice(config, spec, SPEED, found)[0]
    assert "schedule.prompts_per_iteration=" in text and after.of_bound > found.of_bound
    lines = predicted_lines(config, spec)
    assert "of the bound" in lines[0] and "engines idle" in lines[0] and lines[1].startswith("to change")


def test_more_sequences_than_can_be_simulated_are_not():
    config = load_config([RECIPE], [*SPLIT, "schedule.prompts_per_iteration=100000"])
    spec = known_spec(config.model.path)
    assert spec is not None and not can_rehearse(config)
    assert "too many" in predicted_lines(config, spec)[0]


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5_7b",
        pytest.param("qwen3_8b", marks=pytest.mark.nightly),
        pytest.param("deepseek_r1_distill_qwen_7b", marks=pytest.mark.nightly),
        "qwen2.5_32b",
    ],
)
def test_every_recipe_idles_little_though_lengths_are_not_known_before(name: str):
    """Devices for both sides, by themselves; a split reaches eight tenths of its bound."""
    config = load_config([f"configs/grpo_{name}.yaml"], ["run.device=npu"])
    spec = known_spec(config.model.path)
    assert spec is not None
    found = rehearse(config, spec, SPEED)
    assert found.of_bound >= 0.8 if found.devices_idle is None else found.devices_idle < 0.2
