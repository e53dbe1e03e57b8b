"""Plans of clusters: within their bounds, better with better devices, flat until something breaks, honest about origins."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.recorded_run import write_run

from pa_npu.config.load import load_config
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.prediction.costs import GroupSeconds
from pa_npu.planning.prediction.virtual_run import Basis
from pa_npu.planning.prediction.workload import assumed_workload
from tools.cluster.calibration import published
from tools.cluster.hardware import PUBLISHED, published_speed
from tools.cluster.limits import limited_s, limits
from tools.cluster.plan import ClusterPlan, KnownBasis, first_to_break, plan_cluster, planning_base
from tools.cluster.report import as_json, flatness, plan_lines
from tools.plan_cluster import device_counts, main


def basis(
    hardware: str = "910b", groups_per_device: float | None = 2.0, *overrides: str
) -> KnownBasis:
    config = load_config(["configs/grpo_qwen2.5_7b.yaml"], ["run.device=npu", *overrides])
    spec = known_spec(config.model.path)
    assert spec is not None
    typical = published_speed(hardware)
    base = planning_base(config, "npu")
    return KnownBasis(
        base,
        spec,
        published(base, spec, typical),
        assumed_workload(base),
        typical,
        groups_per_device,
        0.0,
    )


@pytest.fixture(scope="module")
def plans() -> tuple[KnownBasis, list[ClusterPlan]]:
    actual = basis()
    return actual, [plan_cluster(actual, devices) for devices in (8, 64)]


def test_no_prediction_is_below_its_bounds(plans):
    for plan in plans[1]:
        assert plan.perfect_s.value <= plan.separate_bound_s.value <= plan.iteration_s.value
        assert plan.perfect_s.value <= plan.colocated_s.value
        assert plan.iteration_s.low < plan.iteration_s.value < plan.iteration_s.high


def test_a_plan_fits_into_the_devices_and_uses_all_of_them(plans):
    for plan in plans[1]:
        rollout, trainer = plan.config.rollout, plan.config.trainer
        assert rollout.engines * rollout.tensor_parallel + trainer.devices == plan.devices
        assert (
            plan.trainer.total <= 0.9 * plan.device_bytes and plan.engine.total <= plan.device_bytes
        )


def test_the_colocated_bound_is_generation_and_training_on_all_devices_after_each_other(plans):
    """Training: operations over all devices, by hand; generation: what remains must be what that
    many engines take.
    """
    actual, (_, plan) = plans
    config = plan.config
    replica = config.trainer.tensor_parallel * config.trainer.pipeline_parallel
    cost = actual.costs.trainer_for(config, actual.spec, actual.typical)
    seconds = GroupSeconds(config, actual.spec, cost, actual.typical)
    shapes = actual.workload.draw(config, 0, 256)
    groups = config.schedule.prompts_per_iteration
    train_s = (
        groups
        * sum(seconds(s.prompt, s.lengths) for s in shapes)
        / len(shapes)
        / (plan.devices // replica)
    )
    engines = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(
                update={"engines": plan.devices // config.rollout.tensor_parallel}
            )
        }
    )
    generate_s = (
        Basis(engines, actual.spec, actual.costs, actual.workload, actual.typical, None)
        .predict(engines, streams=False)
        .generate_s
    )
    assert plan.colocated_s.value == pytest.approx(
        generate_s + train_s + cost.step_s + cost.border_s, rel=0.06
    )


def test_more_devices_shorten_the_same_work_and_faster_ones_too():
    same = basis("910b", None, "schedule.prompts_per_iteration=64")
    few, many = (plan_cluster(same, devices).iteration_s.value for devices in (8, 16))
    assert many < 0.9 * few
    faster = basis("h100", None, "schedule.prompts_per_iteration=64")
    assert plan_cluster(faster, 8).iteration_s.value < 0.8 * few


def test_the_division_that_is_chosen_is_the_best_of_those_simulated(plans):
    for plan in plans[1]:
        assert all(plan.iteration_s.value <= 1.02 * seconds for _, _, seconds in plan.alternatives)


def test_what_breaks_first_is_named_and_then_sets_the_time(plans):
    actual, (small, large) = plans
    assert limited_s(small.predicted.iteration_s, list(small.limits)) == pytest.approx(
        small.iteration_s.value
    )
    assert flatness([small, large]).startswith("8 to 64 devices: any two within ")
    many = large.config.model_copy(
        update={
            "schedule": large.config.schedule.model_copy(update={"prompts_per_iteration": 10**6})
        }
    )
    crowded = limits(many, large.predicted, 500.0, actual.typical)
    assert first_to_break(crowded, large.iteration_s.value).name.startswith("coordinator")
    assert limited_s(large.predicted.iteration_s, crowded) > 10 * large.predicted.iteration_s


def test_flat_is_what_any_two_sizes_differ_by_not_what_they_differ_from_the_smallest(plans):
    """Device-seconds per group: 1.05, 1.0, 1.12 are each within 10% of the first, and 12% apart;
    then 1.1 and 1.5.
    """
    large = plans[1][1]

    def of(devices: int, relative: float) -> ClusterPlan:
        seconds = replace(
            large.iteration_s, value=relative * large.iteration_s.value * large.devices / devices
        )
        return replace(large, devices=devices, iteration_s=seconds)

    sizes = [of(8, 1.05), of(16, 1.0), of(32, 1.12), of(64, 1.1), of(128, 1.5)]
    assert flatness(sizes[:2]) == "8 to 16 devices: any two within 5.0%"
    assert flatness(sizes[:3]) == "8 to 16 devices: any two within 5.0%; 32: +7%"
    assert flatness([sizes[1], sizes[2]]) == "32 to 32 devices: any two within 0.0%; 16: -11%"
    assert flatness(sizes) == "32 to 64 devices: any two within 1.8%; 8: -5%; 16: -9%; 128: +34%"


def test_without_a_run_every_figure_is_estimated(plans):
    actual, made = plans
    text = "\n".join(plan_lines(actual, made))
    assert "calibrated" not in text and "measured" not in text and text.count("estimated") >= 8
    assert max(map(len, text.splitlines()[6:])) <= 100
    assert {plan["tpspd"]["origin"] for plan in as_json(actual, made)["plans"]} == {"estimated"}


def test_every_published_device_has_a_source():
    assert {speed.name for speed in PUBLISHED.values()} >= {"Ascend 910B", "A100", "H100"}
    assert all(speed.source for speed in PUBLISHED.values())


def test_the_command_plans_from_a_run_and_says_what_is_calibrated(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["--from", str(run), "--devices", "2,4"]) == 0
    text = capsys.readouterr().out
    assert "calibrated" in text and "lengths                 measured" in text and "off by" in text
    assert main(["--from", str(run), "--devices", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    keys = plan["keys"]
    assert keys["rollout.engines"] * keys["rollout.tensor_parallel"] + keys["trainer.devices"] == 4
    # of another device than the run's nothing but lengths is known
    assert (
        main(["--from", str(run), "--devices", "4", "--hardware", "a100", "model.dtype=bf16"]) == 0
    )
    text = capsys.readouterr().out
    assert (
        "costs                   estimated" in text and "lengths                 measured" in text
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--from", "nowhere"], "no run directory"),
        (["--devices", "many"], "--devices 'many'"),
        (["--devices", "64..8"], "--devices"),
        (["--devices", "1"], "from 2 to"),
        (
            ["--devices", "8", "--hardware", "abacus"],
            "'abacus' is no device with published figures",
        ),
        (
            ["--devices", "8", "--hardware", "a3", "--model", "nobody/knows"],
            "none whose shape is known",
        ),
        (["--devices", "2", "--hardware", "a3", "--model", "Qwen2.5-32B"], "do not fit"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    config = [] if arguments[0] == "--from" else ["--config", "configs/grpo_qwen2.5_7b.yaml"]
    assert main([*config, *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_device_counts():
    assert device_counts("8..64") == [8, 16, 32, 64] and device_counts("8..48") == [8, 16, 32, 48]
    assert device_counts("64,8") == [8, 64]


def test_an_interval_is_wider_where_costs_are_carried_to_another_model(plans):
    actual, _ = plans
    run = replace(
        actual,
        costs=replace(actual.costs, origin="calibrated", engine_error=0.05, trainer_error=0.04),
    )
    another = replace(run, spec=replace(run.spec, num_layers=64))
    assert run.relative_error == pytest.approx(0.05) and another.relative_error > 0.2
    assert (run.origin, actual.origin) == ("calibrated", "estimated")
