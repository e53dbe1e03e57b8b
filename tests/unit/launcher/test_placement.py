"""Placement, ports, run directory and memory arithmetic."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, UserError
from pa_npu.families.shape import Rope
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.checks.machine import check_ports
from pa_npu.launcher.placement import engine_ports, place, port_problem, visible_devices
from pa_npu.launcher.run_directory import check_run_directory, own_run_directory
from pa_npu.planning.amounts import work
from pa_npu.planning.engine_memory import engine_memory
from pa_npu.planning.memory import trainer_memory
from pa_npu.planning.model_rules import check_model
from pa_npu.planning.plan_text import derived_lines


def make_config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}}
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return Config.model_validate(tree)


QWEN_7B = ModelSpec(
    path="qwen",
    family="qwen2",
    num_layers=28,
    hidden_size=3584,
    ffn_size=18944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=152064,
    rope=Rope(1e6),
    norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tied=False,
    max_positions=32768,
    eos_token_ids=(151645,),
)


def test_engines_take_the_first_devices_and_trainers_the_next() -> None:
    config = make_config(rollout={"engines": 2, "tensor_parallel": 2}, trainer={"devices": 4})
    placement = place(config, num_devices=8, cores=range(64))
    assert placement.engine_devices == ((0, 1), (2, 3))
    assert placement.trainer_devices == (4, 5, 6, 7)
    assert placement.trainer_cores == ((),) * 4, "only cpu runs are pinned"


def test_listed_devices_are_the_engines_then_the_trainers() -> None:
    config = make_config(placement={"devices": [3, 1, 0]}, trainer={"devices": 2})
    assert place(config, 8, []).trainer_devices == (1, 0)
    assert place(config, 8, []).engine_devices == ((3,),)


def test_cores_are_pinned_where_there_are_enough_and_shared_otherwise() -> None:
    config = make_config()
    assert place(config, None, [4, 7]).engine_cores == ((4,),)
    assert place(config, None, [4, 7]).trainer_cores == ((7,),)
    shared = place(config, None, [4])
    assert shared.trainer_cores == ((),)
    assert shared.lines() == ["engine-0, trainer-0 on the same core"]


@pytest.mark.parametrize(
    ("sections", "devices", "expected"),
    [
        ({"trainer": {"devices": 8}}, 8, "needs 9 devices"),
        ({"placement": {"devices": [0, 8]}}, 8, "highest index is 8"),
        ({"placement": {"devices": [1, 1]}}, 8, "share a device"),
        ({"placement": {"devices": [0, 2]}}, None, "2 cores are here"),
    ],
)
def test_devices_that_are_not_there_or_shared_are_refused(
    sections: Any, devices: int | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        place(make_config(**sections), devices, [0, 1])


def test_visible_devices_count_within_what_the_user_made_visible() -> None:
    assert visible_devices("CUDA_VISIBLE_DEVICES", [1, 2], {}) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    outer = {"CUDA_VISIBLE_DEVICES": "4,5, 6"}
    assert visible_devices("CUDA_VISIBLE_DEVICES", [1, 2], outer) == {"CUDA_VISIBLE_DEVICES": "5,6"}
    assert visible_devices(None, [1], outer) == {}


def test_free_ports_are_free_and_outside_of_outgoing_connections() -> None:
    ports = engine_ports(make_config(), range(3))
    assert len(set(ports)) == 3
    assert all(20000 <= port < 32000 and port_problem("127.0.0.1", port) is None for port in ports)
    assert engine_ports(make_config(placement={"port": 8000}), [0, 1]) == [8001, 8002]


@pytest.mark.parametrize("behind", [0, 1])
def test_a_taken_port_of_the_store_or_an_engine_is_refused_with_its_key(behind: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"placement.port: port {port} .* choose another"):
            check_ports(make_config(placement={"port": port - behind}), [0])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement.host: cannot listen on 203\.0\.113\.1"):
        check_ports(make_config(placement={"host": "203.0.113.1"}), [0])


def test_a_run_directory_belongs_to_one_configuration(tmp_path: Path) -> None:
    run = {"dir": str(tmp_path / "run")}
    config = make_config(run=run)
    check_run_directory(config)
    with own_run_directory(config) as directory:
        (directory / "metrics.jsonl").write_text("{}\n")
    check_run_directory(config)
    with pytest.raises(
        ConfigError, match=r"another configuration \(different: run.seed, schedule.iterations\)"
    ):
        check_run_directory(make_config(run=run | {"seed": 9}, schedule={"iterations": 3}))


def test_the_same_run_again_sets_the_earlier_files_aside_and_a_continued_one_keeps_them(
    tmp_path: Path,
) -> None:
    run = {"dir": str(tmp_path)}
    for number in (1, 2):
        with own_run_directory(make_config(run=run)) as directory:
            assert not (directory / "metrics.jsonl").exists()
            (directory / "metrics.jsonl").write_text(f"{number}")
    assert (tmp_path / "earlier" / "1" / "metrics.jsonl").read_text() == "1"
    for version in (1, 3):
        (tmp_path / "checkpoints" / f"iteration_{version:06d}").mkdir(parents=True)
    continued = make_config(
        run=run, checkpoint={"load": str(tmp_path / "checkpoints" / "iteration_000001")}
    )
    check_run_directory(continued)
    with own_run_directory(continued) as directory:
        assert (directory / "metrics.jsonl").read_text() == "2"
        assert [path.name for path in (directory / "checkpoints").iterdir()] == ["iteration_000001"]
    assert (tmp_path / "earlier" / "2" / "checkpoints" / "iteration_000003").is_dir(), (
        "newer than what is continued"
    )


def test_a_directory_in_use_or_not_a_directory_is_refused(tmp_path: Path) -> None:
    config = make_config(run={"dir": str(tmp_path / "run")})
    with (
        own_run_directory(config),
        pytest.raises(UserError, match="another run is at work"),
        own_run_directory(config),
    ):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a directory"):
        check_run_directory(make_config(run={"dir": str(tmp_path / "file" / "run")}))


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="/proc is the directory nobody can write to"
)
def test_an_unwritable_directory_is_refused() -> None:
    with pytest.raises(UserError, match="is not writable"):
        check_run_directory(make_config(run={"dir": "/proc/pa_npu_run"}))


def test_work_of_an_iteration_counts_the_prompt_once_when_it_is_shared() -> None:
    # G = 8, B = 16
    config = make_config(data={"max_prompt_tokens": 512}, rollout={"max_response_tokens": 64})
    shared = work(config)
    assert (shared.sequences, shared.microbatches_per_replica, shared.microbatch_tokens) == (
        128,
        16,
        512 + 8 * 64,
    )
    assert (shared.prompt_tokens, shared.response_tokens) == (128 * 512, 128 * 64)
    separate = work(
        config.model_copy(
            update={"attention": config.attention.model_copy(update={"shared_prompt": False})}
        )
    )
    assert separate.computed_tokens == 128 * (512 + 64)


def test_trainer_memory_of_a_known_model() -> None:
    """Qwen2.5-7B has 7.616 billion parameters; mixed precision costs 2 + 4 + 12 bytes per parameter
    without sharding.
    """
    assert QWEN_7B.num_parameters == 7_615_616_512
    parts = dict(trainer_memory(make_config(), QWEN_7B).parts)
    assert parts["weights"] == pytest.approx(2 * 7.6156e9, rel=1e-3)
    assert parts["gradients"] == 2 * parts["weights"]
    assert parts["optimizer"] == 6 * parts["weights"]
    assert parts["frozen models"] == 0
    split = make_config(trainer={"devices": 8, "tensor_parallel": 4}, algorithm={"kl_coef": 0.1})
    sharded = dict(trainer_memory(split, QWEN_7B).parts)
    assert sharded["weights"] == pytest.approx(parts["weights"] / 4, rel=1e-6)
    assert sharded["optimizer"] == pytest.approx(parts["optimizer"] / 8, rel=1e-6)
    assert sharded["frozen models"] == sharded["weights"]
    assert sharded["activations"] == pytest.approx(parts["activations"] / 4, rel=1e-3)


def test_a_frozen_model_takes_what_the_policys_weights_take() -> None:
    def frozen(dtype: str, **sections: dict[str, object]) -> tuple[int, int]:
        config = make_config(**{"algorithm": {"kl_coef": 0.1}, **sections})
        model = config.model.model_copy(update={"dtype": dtype})
        parts = dict(trainer_memory(config.model_copy(update={"model": model}), QWEN_7B).parts)
        return parts["frozen models"], parts["weights"]

    wide, weights = frozen("fp32")
    assert wide == weights == pytest.approx(4 * 7.6156e9, rel=1e-3)
    assert frozen("bf16") == (wide // 2, weights // 2)
    both = frozen("fp32", schedule={"updates_per_iteration": 2})
    assert both == (2 * wide, weights), "old policy and reference"


def test_frozen_models_add_the_hidden_states_that_a_later_stage_receives() -> None:
    """3584 numbers in bf16 per token, for the one microbatch in flight on the last of 4 stages."""
    trainer = {"devices": 4, "pipeline_parallel": 4, "recompute": "full"}
    without, with_reference = (
        dict(
            trainer_memory(
                make_config(trainer=trainer, algorithm={"kl_coef": kl_coef}), QWEN_7B
            ).parts
        )["activations"]
        for kl_coef in (0.0, 0.1)
    )
    assert (
        with_reference - without == work(make_config(trainer=trainer)).microbatch_tokens * 3584 * 2
    )


def test_recompute_and_pipeline_lower_what_a_rank_holds() -> None:
    plain = trainer_memory(make_config(), QWEN_7B)
    full = trainer_memory(make_config(trainer={"recompute": "full"}), QWEN_7B)
    staged = trainer_memory(make_config(trainer={"devices": 4, "pipeline_parallel": 4}), QWEN_7B)
    assert dict(full.parts)["activations"] < dict(plain.parts)["activations"] / 5
    assert plain.total / 4 < staged.total < plain.total / 2, (
        "the last stage holds the head beside its layers"
    )


@pytest.mark.parametrize(
    "trainer, kind, expected_mib",
    [
        ({"devices": 4}, "npu", 0),
        ({"devices": 4, "tensor_parallel": 4}, "npu", 2 * 200),
        ({"devices": 4, "pipeline_parallel": 4}, "npu", 2 * 200),
        ({"devices": 4, "tensor_parallel": 4}, "cuda", 0),
        ({"devices": 4, "tensor_parallel": 4}, "cpu", 0),
    ],
)
def test_groups_that_pass_rollouts_inside_a_replica_take_hccl_buffers(
    trainer: dict[str, object], kind: str, expected_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer for each direction."""
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    config = make_config(trainer=trainer, run={"device": kind})
    memory = trainer_memory(config, QWEN_7B)
    assert dict(memory.parts)["reader's groups"] == expected_mib * 2**20
    assert ("reader's groups" in memory.line()) == (expected_mib > 0)
    monkeypatch.setenv("HCCL_BUFFSIZE", "50")
    assert memory.total - trainer_memory(config, QWEN_7B).total == expected_mib * 2**20 * 3 // 4


def test_engine_memory_is_weights_and_the_cache_that_is_left() -> None:
    parts = dict(
        engine_memory(make_config(rollout={"memory_fraction": 0.5}), QWEN_7B, 64 * 2**30).parts
    )
    assert sum(parts.values()) == 32 * 2**30
    assert (
        dict(engine_memory(make_config(rollout={"kv_cache_gib": 2}), QWEN_7B, None).parts)[
            "KV cache"
        ]
        == 2 * 2**30
    )


@pytest.mark.parametrize("own_memory", [True, False])
@pytest.mark.parametrize("device_bytes", [None, 64 * 2**30])
def test_the_derived_arithmetic_can_be_printed_for_every_device(
    own_memory: bool, device_bytes: int | None
) -> None:
    text = "\n".join(derived_lines(make_config(), QWEN_7B, device_bytes, own_memory))
    assert "2 = 1 engine x 1 + 1 trainer rank" in text
    assert "trainer memory" in text and "engine memory" in text


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"trainer": {"devices": 3, "tensor_parallel": 3}},
            r"tensor_parallel: 3 does not divide the 28 attention heads",
        ),
        (
            {"trainer": {"devices": 7, "tensor_parallel": 7}},
            r"7 does not divide the 4 key/value heads .* \[1, 2, 4\]",
        ),
        (
            {"trainer": {"devices": 3, "pipeline_parallel": 3}},
            r"pipeline_parallel: 3 does not divide the 28 layers",
        ),
        (
            {"rollout": {"tensor_parallel": 3}},
            r"rollout.tensor_parallel: 3 does not divide the 28 attention heads",
        ),
        (
            {"rollout": {"max_response_tokens": 32768, "max_num_batched_tokens": 65536}},
            r"exceeds the 32768 positions",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(sections: Any, expected: str) -> None:
    tree = {"schedule": {"prompts_per_iteration": 84}, **sections}
    with pytest.raises(ConfigError, match=expected):
        check_model(make_config(**tree), QWEN_7B)
    check_model(make_config(), QWEN_7B)
