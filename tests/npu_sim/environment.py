"""Importing this gives the process a simulated Ascend machine: stub CANN from PA_NPU_SIM_STUBS, and torch_npu over it.

With PA_NPU_SIM_MINDSPEED set, also what MindSpeed needs beyond its own checkouts on PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.npu_sim import cann_stub, torchair_stub, triton_stub

cann_stub.load(Path(os.environ["PA_NPU_SIM_STUBS"]))

import torch_npu  # noqa: E402, F401 - after the libraries that it links against

if "PA_NPU_SIM_MINDSPEED" in os.environ:
    torchair_stub.install()
    triton_stub.install()
