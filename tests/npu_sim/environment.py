"""Importing this gives the process a simulated Ascend machine: stub CANN from PA_NPU_SIM_STUBS, and torch_npu over it.

With PA_NPU_SIM_MINDSPEED set, also what MindSpeed needs beyond its own checkouts on PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.npu_sim import cann_stub, torchair_stub, triton_stub

cann_stub.load(Path(os.environ["PA_NPU_SIM_STUBS"]))

import torch  # noqa: E402
import torch_npu  # noqa: E402, F401 - after the libraries that it links against

# HCCL takes the sends and receives of a pipeline border in one call of its own; the simulator's
# gloo takes each by itself.
torch.distributed.batch_isend_irecv = torch.distributed.distributed_c10d.batch_isend_irecv = (
    lambda operations: [
        operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
        for operation in operations
    ]
)

if "PA_NPU_SIM_MINDSPEED" in os.environ:
    torchair_stub.install()
    triton_stub.install()
