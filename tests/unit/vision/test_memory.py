"""Memory of large arrays goes back to the system as soon as they are forgotten, whatever lies between them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Arrays of three megabytes, a small one behind each that stays, and how much memory is left when
# the large ones are forgotten.
_PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np
from pa_npu.vision.memory import give_back_large_arrays

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

if sys.argv[1] == "yes":
    assert give_back_large_arrays()
np.ones(3_000_000, np.uint8)  # glibc takes this size from its heap from here on
before = resident_mib()
large, small = [], []
for _ in range(100):
    large.append(np.ones(3_000_000, np.uint8))
    small.append(np.ones(100_000, np.uint8))
large.clear()
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_of_images_that_are_forgotten_is_given_back() -> None:
    kept_mib = {}
    environment = {name: v for name, v in os.environ.items() if not name.startswith("MALLOC_")}
    for is_called in ("yes", "no"):
        command = [sys.executable, "-c", _PROGRAM, is_called]
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment, timeout=120
        )
        kept_mib[is_called] = float(output.stdout)
    assert kept_mib["yes"] < 30, "ten are of the small arrays"
    assert kept_mib["no"] > 200, "negative control"
