"""Predictions from a run's records: costs are found again, other configurations follow, and what is off is said."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.recorded_run import ENGINE, TRAINER, iteration_s, tree, write_run
from safetensors.numpy import load_file

from pa_npu.config.schema import Config
from pa_npu.errors import DataError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.prediction import virtual_run
from pa_npu.planning.prediction.costs import GroupSeconds, gather_seconds, passes, typical_trainer
from pa_npu.planning.prediction.virtual_run import Basis
from pa_npu.planning.prediction.workload import Workload
from pa_npu.platform.typical import typical_speed
from tests.helpers.megatron import model_config
from tests.helpers.models import make_model
from tools.cluster.calibration import Calibration, published
from tools.cluster.fit import against_itself, calibrate
from tools.cluster.records import SeenRun, read_run, seen_workload

CORE = typical_speed("cpu")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[SeenRun, ModelSpec, Calibration, Workload]:
    directory = write_run(tmp_path_factory.mktemp("recorded") / "run")
    run = read_run(directory)
    spec = ModelSpec.read(run.config.model.path)
    return run, spec, calibrate(run, spec, CORE), seen_workload(run)


def test_costs_of_a_run_are_found_again_from_its_timeline(recorded):
    _, _, actual, _ = recorded
    assert actual.engine.step_s == pytest.approx(ENGINE.step_s, rel=0.1)
    # what a sequence adds with the context that these have, and a prompt's token
    assert actual.engine.speed(200).sequence_s == pytest.approx(
        ENGINE.speed(200).sequence_s, rel=0.1
    )
    assert actual.engine.prompt_token_s == pytest.approx(ENGINE.prompt_token_s, rel=0.25)
    assert actual.trainer.microbatch_s == pytest.approx(TRAINER.microbatch_s, rel=0.06)
    assert actual.trainer.operation_s == pytest.approx(TRAINER.operation_s, rel=0.06)
    assert (actual.trainer.step_s, actual.trainer.border_s) == pytest.approx(
        (TRAINER.step_s, TRAINER.border_s)
    )


OTHERS = {
    "the run itself": {},
    "a smaller window": {"rollout": {"window": 16}},
    "two engines": {"rollout": {"engines": 2}},
    "two replicas": {"trainer": {"devices": 2}},
    "three times the groups": {"schedule": {"prompts_per_iteration": 72}},
    "prompts not shared": {"attention": {"shared_prompt": False}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_configurations_are_predicted_within_five_percent(recorded, name):
    """Against engines and trainers with their true costs, which have the same groups in the same
    order.
    """
    run, spec, calibration, workload = recorded
    config = Config.model_validate(tree(Path(run.config.run.dir), **OTHERS[name]))
    predicted = Basis(config, spec, calibration, workload, CORE, None).predict(config)
    groups = config.schedule.prompts_per_iteration
    drawn = [
        [(s.prompt, list(s.lengths)) for s in virtual_run._drawn(workload, config, n, groups)]
        for n in range(3)
    ]
    true_s = (
        statistics.median(iteration_s(config, spec, shapes).end_s for shapes in drawn)
        + TRAINER.border_s
    )
    assert predicted.iteration_s == pytest.approx(true_s, rel=0.05)


def test_sessions_are_planned_by_the_tokens_that_trainers_compute(recorded, tmp_path):
    """Trees whose branches share three quarters of what was written; a leaf wrote nothing of its
    own.
    """
    directory = write_run(tmp_path / "run")
    path = directory / "timeline" / "coordinator.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in [event for event in events if "lengths" in event.get("args", {})]:
        args = event["args"]
        computed = [args["prompt"], [length // 4 for length in args["lengths"]]]
        rewarded = {"iteration": args["iteration"], "computed": computed}
        events.append(
            {
                **event,
                "name": event["name"].replace("group", "reward"),
                "lane": "rewards",
                "args": rewarded,
            }
        )
        args["lengths"] = [*args["lengths"], 0]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    run, spec, calibration, workload = recorded
    sessions = seen_workload(read_run(directory))
    assert sessions.origin == "measured" and len(sessions.shapes) == len(workload.shapes)
    whole, shared = (
        Basis(run.config, spec, calibration, of, CORE, None).predict(run.config)
        for of in (workload, sessions)
    )
    assert shared.train_s < 0.7 * whole.train_s and shared.generate_s > 0.8 * whole.generate_s


def test_without_a_timeline_what_the_controller_learned_is_used(tmp_path):
    run = read_run(write_run(tmp_path / "run", timeline=False))
    spec = ModelSpec.read(run.config.model.path)
    actual = calibrate(run, spec, CORE)
    assert actual.engine.step_s == pytest.approx(0.004) and actual.engine_error > 0.1
    assert seen_workload(run).origin == "calibrated"
    measured = statistics.median(seen.iteration_s for seen in run.iterations)
    assert Basis(run.config, spec, actual, seen_workload(run), CORE, None).predict(
        run.config
    ).iteration_s == pytest.approx(measured, rel=0.15)


def test_what_the_model_leaves_out_of_the_run_itself_is_measured_and_carried_over(
    tmp_path, recorded
):
    run, spec, calibration, workload = recorded
    _, usual = against_itself(run, spec, calibration, workload, CORE)
    assert usual == pytest.approx(1.0, abs=0.07)
    slow = read_run(write_run(tmp_path / "run", slower=1.3))
    corrected, ratio = against_itself(
        slow, spec, calibrate(slow, spec, CORE), seen_workload(slow), CORE
    )
    assert ratio == pytest.approx(1.3 * usual, rel=0.03)
    assert corrected.engine.step_s == pytest.approx(ratio * calibration.engine.step_s, rel=0.01)


def test_costs_grow_with_the_model_and_shrink_with_the_device(recorded):
    run, spec, calibration, workload = recorded
    larger = replace(spec, hidden_size=256, ffn_size=768, num_heads=8, num_layers=8)
    now = Basis(run.config, spec, calibration, workload, CORE, None).predict(run.config)
    more = Basis(run.config, larger, calibration, workload, CORE, None).predict(run.config)
    assert more.generate_s > 1.1 * now.generate_s and more.train_s > 2.0 * now.train_s
    faster = replace(
        CORE,
        flops=10 * CORE.flops,
        memory_bytes=10 * CORE.memory_bytes,
        decode_step_s=0.0005,
        sequence_s=1e-5,
    )
    assert (
        Basis(run.config, spec, calibration, workload, faster, None).predict(run.config).iteration_s
        < now.iteration_s
    )


def test_the_part_of_a_cluster_that_is_simulated_takes_as_long_as_all_of_it(recorded, monkeypatch):
    run, spec, _, workload = recorded
    changes = {
        "rollout": {"engines": 24},
        "trainer": {"devices": 12},
        "schedule": {"prompts_per_iteration": 384},
    }
    config = Config.model_validate(tree(Path(run.config.run.dir), **changes))
    costs = published(config, spec, CORE)
    part = Basis(config, spec, costs, workload, CORE, None).predict(config)
    monkeypatch.setattr(virtual_run, "_MAX_ENGINES", 10**6)
    monkeypatch.setattr(virtual_run, "_MAX_GROUPS", 10**6)
    whole = Basis(config, spec, costs, workload, CORE, None).predict(config)
    assert part.iteration_s == pytest.approx(whole.iteration_s, rel=0.06)
    assert part.tokens / part.iteration_s == pytest.approx(
        whole.tokens / whole.iteration_s, rel=0.06
    )


def test_a_directory_without_records_is_refused_in_one_line(tmp_path):
    with pytest.raises(DataError, match="no run directory"):
        read_run(tmp_path)
    write_run(tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().replace('"train_s"', '"other_s"')
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    with pytest.raises(DataError, match="train_s"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "bytes_per_parameter"),
    [
        ({}, 2 * 2 + 4),  # gathered in bf16 forward and backward, gradients scattered in fp32
        ({"algorithm": {"kl_coef": 0.1}}, 3 * 2 + 4),  # the reference once more
        ({"lora": {"rank": 4}}, 2 * 2),  # adapters' gradients are nothing beside the weights
        ({"model": {"dtype": "fp32"}}, 2 * 4 + 4),
    ],
    ids=["weights", "reference", "adapters", "fp32"],
)
def test_a_microbatch_of_sharded_trainers_moves_all_weights(
    sections, bytes_per_parameter, tmp_path
):
    """Each of 4 ranks in a ring sends and receives 3/4 of what is gathered and scattered; at 1
    GB/s.
    """
    model = make_model(tmp_path)
    parameters = sum(tensor.size for tensor in load_file(model / "model.safetensors").values())
    trainer = {"backend": "fsdp", "devices": 8, "shards": 4}
    config = model_config(model, trainer=trainer, **{"model": {"dtype": "bf16"}, **sections})
    spec, element = ModelSpec.from_config(config), {"fp32": 4, "bf16": 2}[config.model.dtype]
    expected = bytes_per_parameter * parameters * 3 / 4 / 1e9
    assert gather_seconds(config, spec, element, 1e9) == pytest.approx(expected)
    alone = model_config(model, trainer={**trainer, "shards": 1})
    assert (
        gather_seconds(alone, spec, element, 1e9)
        == gather_seconds(model_config(model), spec, element, 1e9)
        == 0
    )


def mixture_config(**trainer) -> Config:
    """Returns a configuration of Qwen3-30B-A3B in bf16 on 8 trainer devices of one node."""
    tree = {
        "model": {"path": "Qwen3-30B-A3B"},
        "data": {"train": "unused"},
        "placement": {"devices_per_node": 16},
    }
    return Config.model_validate({**tree, "trainer": {"devices": 8, **trainer}})


def test_a_mixtures_step_reduces_and_steps_experts_over_their_copies_alone():
    """On a device whose wire and memory are all that takes time: by hand."""
    spec = known_spec("Qwen3-30B-A3B")
    experts = 48 * 128 * 3 * 768 * 2048
    dense = spec.num_parameters - experts
    slow = replace(CORE, wire_bytes=1e6, memory_bytes=1e6)
    for trainer, of_dense, dense_copies, of_experts, copies in (
        ({"expert_parallel": 8}, 1, 8, 8, 1),
        ({"expert_parallel": 2}, 1, 8, 2, 4),
        ({"expert_parallel": 2, "pipeline_parallel": 2}, 2, 4, 4, 2),
        ({"expert_parallel": 4, "tensor_parallel": 2}, 2, 4, 4, 2),
    ):
        config = mixture_config(**trainer)
        assert (config.mesh.data, config.mesh.expert_data) == (dense_copies, copies)
        seconds = sum(
            (2 * 4 * (n - 1) / n + 40 / n) * parameters / 1e6
            for parameters, n in ((dense / of_dense, dense_copies), (experts / of_experts, copies))
        )
        assert typical_trainer(config, spec, slow).step_s == pytest.approx(seconds, rel=1e-3), (
            trainer
        )


def test_tokens_that_go_to_other_ranks_experts_take_time_by_the_bytes_that_leave():
    spec = known_spec("Qwen3-30B-A3B")
    slow = replace(CORE, node_bytes=1e6)
    lengths = [100] * 8

    def seconds(**trainer) -> float:
        config = mixture_config(**trainer)
        cost = typical_trainer(config, spec, slow)
        return GroupSeconds(config, spec, cost, slow)(50, lengths)

    alone = seconds()
    for trainer, each in (
        (
            {"expert_parallel": 4},
            4 * 2 * 8 * 3 / 4,
        ),  # there and back, twice, in bf16, 8 experts a token, 3 of 4 elsewhere
        ({"expert_parallel": 8}, 4 * 2 * 8 * 7 / 8),
    ):
        expected = 850 * 48 * 2048 * each * passes(mixture_config(**trainer)) / 1e6
        assert seconds(**trainer) - alone == pytest.approx(expected, rel=1e-6), trainer
    dense = Config.model_validate({"model": {"path": "Qwen3-8B"}, "data": {"train": "unused"}})
    shape = known_spec("Qwen3-8B")
    costs = [typical_trainer(dense, shape, speed) for speed in (CORE, slow)]
    actual = [GroupSeconds(dense, shape, costs[0], speed)(50, lengths) for speed in (CORE, slow)]
    assert actual[0] == actual[1], "a dense model on one device sends nothing"
