"""placement.colocate: engines and trainers on the same devices; what is refused, where they are, what must fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.launcher.placement import place, place_nodes
from pa_npu.planning.automatic import with_share
from pa_npu.planning.engine_memory import engine_memory
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.memory import trainer_memory
from pa_npu.planning.plan_text import derived_lines, predicted_line
from pa_npu.planning.prediction.costs import typical_trainer
from pa_npu.planning.prediction.virtual_run import assumed_basis
from pa_npu.planning.shortages import shortages
from pa_npu.platform.typical import typical_speed

GIB = 2**30
RECIPE = Path(__file__).resolve().parents[3] / "configs" / "grpo_qwen2.5_7b.yaml"
SPEC = known_spec("models/Qwen2.5-7B")


def colocated(**sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "schedule": {"stream": False},
        "placement": {"colocate": True},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(tree)


def test_engines_take_the_trainers_devices_and_a_device_counts_once() -> None:
    config = colocated(rollout={"engines": 2, "tensor_parallel": 2}, trainer={"devices": 4})
    placement = place(config, 4, range(64))
    assert placement.engine_devices == ((0, 1), (2, 3)) and placement.trainer_devices == (
        0,
        1,
        2,
        3,
    )
    assert (
        config.devices.num_devices == 4
        and config.rollout.engines == 2
        and all(map(config.devices.is_shared, range(2)))
    )
    assert "engine-1 on device 2,3, shared with trainers" in placement.lines()
    on_a_core = place(colocated(), None, [7])
    assert on_a_core.engine_cores == ((7,),) == (on_a_core.trainer_cores[0],)
    apart = place(
        Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}), 2, range(2)
    )
    assert apart.engine_devices == ((0,),) and apart.trainer_devices == (1,), "negative control"


def test_on_several_nodes_engines_are_where_their_trainers_are() -> None:
    config = colocated(
        rollout={"engines": 4},
        trainer={"devices": 4},
        schedule={"prompts_per_iteration": 4},
        placement={"cluster": "ray", "nnodes": 2},
    )
    first, second = place_nodes(config)
    assert first.engine_devices == ((0,), (1,)) == second.engine_devices and second.engines == (
        2,
        3,
    )
    assert second.trainer_devices == (0, 1) and second.ranks == (2, 3)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"schedule": {"stream": False, "max_staleness": 1}}, "set max_staleness to 0"),
        (
            {"rollout": {"engines": 1, "max_engines": 2}, "placement": {"cluster": "ray"}},
            "set one number of engines",
        ),
        ({"rollout": {"engines": 3}, "trainer": {"devices": 2}}, "set engines to at most 2"),
        ({"placement": {"devices": [0, 1, 2, 3, 4]}}, "placement.devices: 5 indices"),
        ({"evaluate": {"overlap": True}}, "evaluate.overlap"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as refused:
        colocated(**sections)
    assert "Value error, " in str(refused.value)
    assert "\n" not in str(refused.value).partition("Value error, ")[2].partition(" [type=")[0]


def test_the_plan_says_what_must_fit_on_a_device_together() -> None:
    assert SPEC is not None
    small = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "memory_fraction": 0.3,
        "tensor_parallel": 4,
    }
    trainer = {"devices": 8, "tensor_parallel": 4, "recompute": "full"}
    keys = {"trainer": trainer, "schedule": {"prompts_per_iteration": 16}}
    fits = colocated(rollout={**small, "engines": 2}, **keys)
    text = "\n".join(derived_lines(fits, SPEC, 80 * GIB, True))
    assert "8 = 8 trainer ranks, with 2 engines x 4 on them" in text
    assert "shared engine memory" in text and "both resident" in text
    assert not shortages(fits, SPEC, 80 * GIB, True)

    tight = colocated(rollout={**small, "engines": 2, "memory_fraction": 0.7}, **keys)
    (shortage,) = shortages(tight, SPEC, 80 * GIB, True)
    assert "of the engine beside it are more than nine tenths" in shortage.line()
    assert shortage.proposal is not None and shortage.proposal["rollout.memory_fraction"] < 0.7

    never = colocated(rollout={"max_num_seqs": 32})
    proposals = [
        s.proposal for s in shortages(never, SPEC, 64 * GIB, True) if s.role == "shared engine"
    ]
    assert proposals == [{"placement.colocate": False}]


def test_what_is_predicted_is_one_after_the_other() -> None:
    assert SPEC is not None
    keys: dict[str, Any] = {"rollout": {"engines": 2}, "trainer": {"devices": 2}}
    typical = typical_speed("cpu")
    config = colocated(**keys)
    basis = assumed_basis(config, SPEC, typical)
    actual = basis.predict(config, streams=False)
    whole_s = actual.generate_s + actual.train_s + actual.border_s
    assert actual.iteration_s == pytest.approx(whole_s, rel=0.02), "but for uneven replicas"
    assert predicted_line(config, SPEC).startswith(
        "predicted"
    ) and "devices idle" in predicted_line(config, SPEC)
    apart = basis.predict(colocated(**keys, placement={"colocate": False}))
    assert apart.iteration_s < apart.generate_s + apart.train_s, "negative control"


# 7B on 8 devices of 64 GiB, by the recipe's numbers


def recipe(*keys: str) -> Config:
    """The 7B recipe's model at sizes of this test's own, which do not move with what the planner
    finds.
    """
    inputs = ["run.device=npu", "placement.colocate=true", "rollout.engines=8", "trainer.devices=8"]
    inputs += ["trainer.tensor_parallel=4", "optimizer.offload=false", "rollout.max_num_seqs=128"]
    assert SPEC is not None
    return with_share(load_config([str(RECIPE)], [*inputs, *keys]), SPEC, 64 * GIB, True)


def kv_cache(config: Config) -> int:
    assert SPEC is not None
    return dict(engine_memory(config, SPEC, 64 * GIB, shared=True).parts)["KV cache"]


def test_a_7b_model_fits_with_roles_on_8_devices_of_64_gib() -> None:
    """All is there at once only where engines do not sleep; the optimizer is there only in a step
    where it is offloaded.
    """
    assert SPEC is not None
    asleep, offloaded, resident = (
        recipe(),
        recipe("optimizer.offload=true"),
        recipe("rollout.sleep=false"),
    )
    for config in (asleep, offloaded, resident):
        assert config.devices.follows_work and not shortages(config, SPEC, 64 * GIB, True)
    shares = [config.devices.memory_fraction for config in (asleep, offloaded, resident)]
    assert shares == [0.45, 0.6, 0.3], "what trainers leave as devices decode, and the default"
    assert kv_cache(resident) < 3 * GIB and kv_cache(asleep) > 4 * kv_cache(resident)
    assert kv_cache(offloaded) > kv_cache(asleep) + 9 * GIB
    text = "\n".join(derived_lines(offloaded, SPEC, 64 * GIB, True))
    assert "it sleeps while that trains" in text and "10.6 GiB of optimizer a rank" in text
    assert "both resident" in "\n".join(derived_lines(resident, SPEC, 64 * GIB, True))
    refused = shortages(
        recipe("rollout.sleep=false", "rollout.memory_fraction=0.45"), SPEC, 64 * GIB, True
    )
    assert [shortage.role for shortage in refused] == ["shared engine"], (
        "negative control: both are there"
    )


def test_an_offloaded_optimizer_is_beside_no_activations_and_its_way_takes_time() -> None:
    assert SPEC is not None
    plain, offloaded = (
        trainer_memory(recipe(*keys), SPEC) for keys in ((), ("optimizer.offload=true",))
    )
    parts = dict(plain.parts)
    assert (
        plain.total == sum(parts.values())
        and not plain.on_host
        and offloaded.on_host == parts["optimizer"]
    )
    assert offloaded.total == plain.total - min(parts["optimizer"], parts["activations"])
    assert (
        offloaded.at_rest == plain.at_rest - parts["optimizer"] and offloaded.state == plain.state
    )
    typical = typical_speed("npu")
    seconds = [
        typical_trainer(recipe(*keys), SPEC, typical).step_s
        for keys in ((), ("optimizer.offload=true",))
    ]
    assert seconds[1] - seconds[0] == pytest.approx(2 * parts["optimizer"] / typical.host_bytes)
    on_cores = recipe("run.device=cpu", "optimizer.offload=true")
    assert not trainer_memory(on_cores, SPEC).on_host, "nothing changes there"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"run": {"device": "cpu"}, "rollout": {"sleep": True}},
            "no memory of a device to give back; remove the key",
        ),
        (
            {
                "run": {"device": "npu"},
                "rollout": {"env": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}},
            },
            "or set rollout.sleep=false",
        ),
        (
            {"rollout": {"sleep": True}, "placement": {"colocate": False}},
            "rollout.sleep: true would be read by nothing",
        ),
    ],
)
def test_sleep_that_cannot_be_is_refused(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        colocated(**sections)
