"""Checks of a node: versions against the matrix, busy devices from the vendors' tools, shared paths."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.launcher.checks import machine
from pa_npu.launcher.checks.machine import device_notes
from pa_npu.launcher.cluster import host
from pa_npu.launcher.cluster.host import NodeReport, inspect_node, leave_token, node_problem
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.trainer_versions import installed_versions, nearest_stack, trainer_problems
from pa_npu.platform.vendor_tools import parse_npu_smi, parse_nvidia_smi

NPU = {
    "python": "3.10.14",
    "torch": "2.7.1+cpu",
    "torch_npu": "2.7.1.post10",
    "megatron-core": "0.12.1",
    "cann": "9.1.0",
}

NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 97.6        48                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3390 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 94.1        47                0    / 0             |
{second}
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 1       {chip}                 | 172734        | python3.10               | 31187                   |
+===========================+===============+====================================================+
"""
ONE_CHIP = (
    "| 0                         | 0000:01:00.0  | 0           0    / 0          34510/ "
    "65536         |"
)
TWO_CHIPS = (
    "| 0     2                   | 0000:01:00.0  | 0           0    / 0          34510/ 65536      "
    "   |\n"
    "| 1     3                   | 0000:02:00.0  | 0           0    / 0          34510/ 65536      "
    "   |"
)


def test_the_supported_versions_have_no_problem_and_a_deviation_is_named() -> None:
    assert trainer_problems("npu", NPU) == []
    (line,) = trainer_problems("npu", NPU | {"torch": "2.9.0"})
    assert line.startswith("torch 2.9.0 is not of the supported ==2.7.1.* (")
    (line,) = trainer_problems(
        "npu", {name: version for name, version in NPU.items() if name != "cann"}
    )
    assert line.startswith("cann is not installed; ==9.1.* is supported")
    assert (
        trainer_problems(
            "cuda", {"python": "3.12.1", "torch": "2.12.0+cu130", "megatron-core": "0.16.1"}
        )
        == []
    )
    assert (
        trainer_problems("cuda", {"python": "3.12.1", "torch": "2.10.0", "megatron-core": "0.17.0"})
        != []
    )


@pytest.mark.parametrize("version", ["2.7.1", "2.7.1.post2", "2.7.1.post6"])
def test_an_extension_for_an_older_cann_is_told_from_its_later_post_releases(version: str) -> None:
    """2.7.1 without a suffix is release 7.2.0 for CANN 8.3; 26.1.0 for CANN 9.1 is .post8 and
    later.
    """
    (line,) = trainer_problems("npu", NPU | {"torch_npu": version})
    assert line.startswith(f"torch_npu {version} is not of the supported >=2.7.1.post8,<2.7.2 (")
    assert trainer_problems("npu", NPU | {"torch_npu": "2.7.1.post8"}) == []
    assert trainer_problems("npu", NPU | {"torch_npu": "2.8.0"}) != []


def test_one_environment_for_engines_and_trainers_is_a_stack_of_its_own() -> None:
    one = {"python": "3.11.9", "torch": "2.10.0+cpu", "torch_npu": "2.10.0.post4", "cann": "9.1.0"}
    assert trainer_problems("npu", one | {"megatron-core": "0.16.1", "mindspeed": "0.16.0"}) == []
    (line,) = trainer_problems("npu", one | {"megatron-core": "0.16.1", "mindspeed": "0.12.1"})
    assert line.startswith("mindspeed 0.12.1 is not of the supported ==0.16.0.* ")
    (line,) = trainer_problems("npu", one | {"megatron-core": "0.12.1"})
    assert line.startswith("megatron-core 0.12.1 is not of the supported >=0.16.0,<0.16.2")
    assert nearest_stack("npu", NPU).name.startswith("MindSpeed 26.1.0")


def test_the_extra_for_ascend_takes_no_torch_npu_that_is_refused() -> None:
    """setup.py and the matrix say the same."""
    (wanted,) = re.findall(
        r'"(torch_npu[^"]*)"', (Path(__file__).parents[3] / "setup.py").read_text()
    )
    specifier = Requirement(wanted).specifier
    for version in ("2.7.1", "2.7.1.post6", "2.7.1.post8", "2.7.1.post11", "2.7.2", "2.8.0"):
        assert specifier.contains(version) == (
            trainer_problems("npu", NPU | {"torch_npu": version}) == []
        ), version


def test_versions_are_read_without_importing() -> None:
    versions = installed_versions()
    assert Version(versions["torch"]).major == 2 and Version(versions["megatron-core"]) >= Version(
        "0.12.1"
    )


def test_a_version_that_python_does_not_know_counts_by_its_leading_numbers() -> None:
    assert trainer_problems("npu", NPU | {"cann": "9.1.T5.0.B1"}) == []
    (line,) = trainer_problems("npu", NPU | {"cann": "unknown"})
    assert line.startswith("cann unknown is not of the supported ==9.1.*")


def test_processes_on_ascend_devices_are_counted_by_chip() -> None:
    assert parse_npu_smi(NPU_SMI.format(second=ONE_CHIP, chip=0)) == {
        1: "python3.10 (pid 172734, 31187 MB)"
    }
    assert list(parse_npu_smi(NPU_SMI.format(second=TWO_CHIPS, chip=1))) == [3]
    assert parse_npu_smi("") == {}


def test_processes_on_gpus_are_found_by_uuid() -> None:
    devices = "0, GPU-aaaa\n1, GPU-bbbb\n"
    processes = (
        "GPU-bbbb, 4711, python, 71000 MiB\nGPU-bbbb, 4712, /usr/bin/a, b, 10 "
        "MiB\nGPU-gone, 1, x, 1 MiB\n"
    )
    assert parse_nvidia_smi(devices, processes) == {
        1: "python (pid 4711, 71000 MiB); /usr/bin/a, b (pid 4712, 10 MiB)"
    }
    assert parse_nvidia_smi(devices, "") == {}


def test_only_devices_of_the_run_are_reported_by_their_physical_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gpus:
        name = "cuda"
        visible_devices_env = "CUDA_VISIBLE_DEVICES"

    monkeypatch.setattr(
        machine, "busy_devices", lambda kind: {0: "other", 6: "python (pid 1, 9 MiB)"}
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    placement = Placement(((0,),), (2,), ((),), ((),))
    (line,) = device_notes(cast(Any, Gpus()), placement)
    assert line.startswith("device 6 is in use: python (pid 1, 9 MiB);")


def make(tmp_path: Path, **placement: Any) -> Config:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    tree = {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "model": {"path": str(model)},
        "data": {"train": "t"},
    }
    return Config.model_validate({**tree, "placement": placement})


class Cpu:
    name = "cpu"
    visible_devices_env = None


NOWHERE = Placement((), (), (), ())


def test_nodes_that_share_directory_and_model_have_no_problem(tmp_path: Path) -> None:
    config = make(tmp_path)
    token = leave_token(config)
    own, another = (
        inspect_node(config, cast(Any, Cpu()), NOWHERE, number, token) for number in (-1, 0)
    )
    assert node_problem(another, own) is None
    assert NodeReport(**asdict(another)) == another, "a report travels as JSON"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".nodes"], (
        "nothing else is left behind"
    )


def test_a_node_with_another_directory_model_or_version_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here = make(tmp_path / "a")
    there = make(tmp_path / "b")
    token = leave_token(here)
    own = inspect_node(here, cast(Any, Cpu()), NOWHERE, -1, token)
    name = f"node 127.0.0.1 ({own.host}): "

    def problem() -> str:
        return str(node_problem(inspect_node(there, cast(Any, Cpu()), NOWHERE, 0, token), own))

    with pytest.raises(UserError, match=r"^run\.dir: .* is not shared or not writable here"):
        problem()
    leave_token(there)
    with pytest.raises(UserError, match=r"^run\.dir: .* is another directory than the launcher's"):
        problem()
    refused = NodeReport(
        own.host, own.address, versions=own.versions, problem="run.dir: not shared"
    )
    assert node_problem(refused, own) == f"{name}run.dir: not shared"
    (tmp_path / "b" / "run" / ".nodes").write_text(token)
    assert problem() == "None", "the same model"
    (tmp_path / "b" / "model" / "config.json").write_text('{"changed": 1}')
    assert (
        problem().startswith(f"{name}model.path: ") and "give all nodes the same model" in problem()
    )
    monkeypatch.setattr(host, "installed_versions", lambda: {"torch": "0"})
    assert (
        problem().startswith(f"{name}")
        and "on the launcher's machine; install the same on all nodes" in problem()
    )


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match=r"run\.dir: .* cannot be written"):
        leave_token(make(tmp_path))
