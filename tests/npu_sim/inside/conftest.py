"""Import torch_npu over the stub libraries, before any test; collects nothing in an ordinary process."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "PA_NPU_SIM_STUBS" in os.environ else ["test_*.py"]

if not collect_ignore_glob:
    import tests.npu_sim.environment  # noqa: F401 - imported for its effect
