"""Reads the vendors' own tools and records: which devices are busy, and the release of CANN.

Asking a device's runtime would occupy the device.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_TIMEOUT_S = 30.0
_NPU_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(\S.*?)\s*\|\s*(\d+)\s*\|")
_NPU_CHIP = re.compile(r"^\|\s*(\d+)(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:")
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # what CANN's set_env.sh sets
_MAX_CANN_FILES = 8


def busy_devices(kind: str) -> dict[int, str]:
    """Describes the processes on each busy device, by physical index. Empty also if the vendor's
    tool is not installed.
    """
    if kind == "cuda":
        devices = _output("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
        processes = _output(
            "nvidia-smi",
            "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
            "--format=csv,noheader",
        )
        return parse_nvidia_smi(devices, processes)
    if kind == "npu":
        return parse_npu_smi(_output("npu-smi", "info"))
    return {}


def parse_nvidia_smi(devices: str, processes: str) -> dict[int, str]:
    """Reads answers of nvidia-smi. devices: lines "index, uuid". processes: lines "uuid, pid, name,
    memory".
    """
    rows = [line.split(", ") for line in devices.splitlines()]
    index_of = {row[1].strip(): int(row[0]) for row in rows if len(row) == 2}
    names_by_device: dict[int, list[str]] = {}
    for line in processes.splitlines():
        fields = [field.strip() for field in line.split(", ")]
        if len(fields) >= 4 and fields[0] in index_of:
            name = ", ".join(fields[2:-1])
            names_by_device.setdefault(index_of[fields[0]], []).append(
                f"{name} (pid {fields[1]}, {fields[-1]})"
            )
    return {index: "; ".join(names) for index, names in sorted(names_by_device.items())}


def parse_npu_smi(text: str) -> dict[int, str]:
    """Reads the table of `npu-smi info`: chips first, then processes by NPU and chip. A device is a
    chip.
    """
    chips, _, processes = text.partition("Process id")
    chips_per_npu = 1
    for line in chips.splitlines():
        match = _NPU_CHIP.match(line)
        if match is not None:
            chips_per_npu = max(chips_per_npu, int(match[1]) + 1)
    names_by_device: dict[int, list[str]] = {}
    for line in processes.splitlines():
        match = _NPU_PROCESS.match(line)
        if match is not None:
            npu, chip, pid, name, memory = match.groups()
            device = int(npu) * chips_per_npu + int(chip)
            names_by_device.setdefault(device, []).append(f"{name} (pid {pid}, {memory} MB)")
    return {index: "; ".join(names) for index, names in sorted(names_by_device.items())}


def _output(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def cann_version() -> str | None:
    """Returns the release of Ascend's toolkit that the environment names, such as 9.1.0, from the
    toolkit's own record; None if there is no toolkit or no record.
    """
    homes = [os.environ[name] for name in _CANN_VARIABLES if os.environ.get(name)]
    if not homes:
        return None
    records = sorted(Path(homes[0]).glob("**/*install.info"))
    for file in records[:_MAX_CANN_FILES]:
        text = file.read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^version=(\S+)", text, re.MULTILINE)
        if match:
            return match[1]
    return None
