"""Reads the vendors' own tools and records: devices that other processes use, and the release of CANN.

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
_MOST_CANN_FILES = 8


def busy_devices(kind: str) -> dict[int, str]:
    """Physical device index -> the processes on it, in words.

    Empty also where the vendor's tool is not installed.
    """
    if kind == "cuda":
        devices = _output("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
        processes = _output(
            "nvidia-smi",
            "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
            "--format=csv,noheader",
        )
        return parse_nvidia_smi(devices, processes)
    return parse_npu_smi(_output("npu-smi", "info")) if kind == "npu" else {}


def parse_nvidia_smi(devices: str, processes: str) -> dict[int, str]:
    """devices: lines "index, uuid". processes: lines "uuid, pid, name, memory"."""
    rows = [line.split(", ") for line in devices.splitlines()]
    index_of = {row[1].strip(): int(row[0]) for row in rows if len(row) == 2}
    found: dict[int, list[str]] = {}
    for line in processes.splitlines():
        fields = [part.strip() for part in line.split(", ")]
        if len(fields) >= 4 and fields[0] in index_of:
            name = ", ".join(fields[2:-1])
            found.setdefault(index_of[fields[0]], []).append(
                f"{name} (pid {fields[1]}, {fields[-1]})"
            )
    return {index: "; ".join(names) for index, names in sorted(found.items())}


def parse_npu_smi(text: str) -> dict[int, str]:
    """The table of `npu-smi info`: chips first, then processes by NPU and chip; a device is a chip."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "Process id" in line), len(lines))
    chips = [int(match[1]) for line in lines[:start] if (match := _NPU_CHIP.match(line))]
    per_npu = max(chips, default=0) + 1
    found: dict[int, list[str]] = {}
    for line in lines[start:]:
        if match := _NPU_PROCESS.match(line):
            npu, chip, pid, name, memory = match.groups()
            found.setdefault(int(npu) * per_npu + int(chip), []).append(
                f"{name} (pid {pid}, {memory} MB)"
            )
    return {index: "; ".join(names) for index, names in sorted(found.items())}


def _output(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def cann_version() -> str | None:
    """The release of Ascend's toolkit that the environment names, such as 9.1.0, from its own
    record; None where there is none.
    """
    home = next((os.environ[name] for name in _CANN_VARIABLES if os.environ.get(name)), None)
    for file in sorted(Path(home).glob("**/*install.info"))[:_MOST_CANN_FILES] if home else ():
        match = re.search(
            r"^version=(\S+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
        if match:
            return match[1]
    return None
