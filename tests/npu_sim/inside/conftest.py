"""Import torch_npu over the stub libraries, before any test; collects nothing in an ordinary process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

TORCH_NPU = os.environ.get("PA_NPU_INSIDE_SIM")
collect_ignore_glob = [] if TORCH_NPU else ["test_*.py"]

if TORCH_NPU:
    from tests.npu_sim import cann_stub

    with tempfile.TemporaryDirectory() as stubs:  # loaded libraries stay mapped when their files go
        cann_stub.build(Path(TORCH_NPU), Path(stubs))
        cann_stub.load(Path(stubs))
        import torch_npu  # noqa: F401
