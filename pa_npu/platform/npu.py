"""The Ascend platform: torch_npu with its fused kernels, and HCCL."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch_npu

from pa_npu.errors import ConfigError
from pa_npu.platform.base import AcceleratorPlatform, Role, without_users

# Seconds: engines load for minutes while trainers wait for them.
HCCL_TIMEOUTS = {"HCCL_CONNECT_TIMEOUT": "1800"}
_EXEC_TIMEOUT = "HCCL_EXEC_TIMEOUT"
_EXEC_TIMEOUT_STEP = 68  # HCCL wants multiples of it
# Our own waits end first and say what was awaited. The device's deadline follows, which leaves its
# records, and last torch's watchdog, which ends the process: torch_npu warns of any other order
# ("The plog may not be recorded").
_DEVICE_MARGIN_S = 60.0
_WATCHDOG_MARGIN_S = 60.0
_DETERMINISTIC = {"HCCL_DETERMINISTIC": "strict"}


class NpuPlatform(AcceleratorPlatform):
    """Ascend NPUs (910B and later)."""

    name = "npu"
    comm_backend = "hccl"
    process_group_backend = "cpu:gloo,npu:hccl"
    visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"
    cluster_resource = "NPU"
    widest_dtype = torch.float32  # its matrix products have no fp64

    def __init__(self) -> None:
        self.ops = NpuOps()

    def set_deterministic(self, enabled: bool) -> None:
        if enabled:
            os.environ.update(without_users(_DETERMINISTIC))  # read when a communicator is created
        super().set_deterministic(enabled)

    def profiler(self) -> Any:
        return torch_npu.profiler

    def environment(self, role: Role) -> dict[str, str]:
        defaults: dict[str, str] = {}
        if role in ("engine", "trainer"):
            defaults |= HCCL_TIMEOUTS
        if role == "trainer":
            defaults |= {
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "TASK_QUEUE_ENABLE": "2",
                "CPU_AFFINITY_CONF": "1",
                # lengths vary, so blocks would fragment
                "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
                "OMP_NUM_THREADS": "4",
            }
        return without_users(defaults)

    def collective_environment(self, longest_s: float, deterministic: bool) -> dict[str, str]:
        deterministic_variables = without_users(_DETERMINISTIC) if deterministic else {}
        required = (
            math.ceil((longest_s + _DEVICE_MARGIN_S) / _EXEC_TIMEOUT_STEP) * _EXEC_TIMEOUT_STEP
        )
        users_value = os.environ.get(_EXEC_TIMEOUT)
        if users_value is None:
            return {_EXEC_TIMEOUT: str(required), **deterministic_variables}
        # 0: no deadline
        if not users_value.isdigit() or 0 < int(users_value) < required:
            raise ConfigError(
                f"HCCL_EXEC_TIMEOUT={users_value} of the environment would end collectives on the device "
                f"before their own deadline of {longest_s:g} s, which follows from "
                f"trainer.wait_timeout_s and publish.timeout_s; unset it, or set it to {required} or "
                "more"
            )
        return deterministic_variables

    def group_timeout_s(self, longest_s: float) -> float:
        device_s = float(os.environ.get(_EXEC_TIMEOUT) or 0)  # 0: the device waits for ever
        return max(longest_s, device_s + _WATCHDOG_MARGIN_S)

    def network_environment(self, address: str, interface: str) -> dict[str, str]:
        if "HCCL_SOCKET_IFNAME" in os.environ:
            return {}
        # without this HCCL takes the first interface that is not a container's bridge
        return without_users({"HCCL_IF_IP": address})


class NpuOps:
    """FusedOps by torch_npu's fused kernels, called directly rather than through MindSpeed's
    switches.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed: torch.Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
        return normed

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # SBND with cos and sin as S1 1D: the kernel takes four dimensions, the batch is one packed
        # sequence
        rotated: torch.Tensor = torch_npu.npu_rotary_mul(
            x.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1)
        )
        return rotated.squeeze(1)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = torch_npu.npu_swiglu(x, dim=-1)
        return activated

    def grouped_linear(
        self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        return _GroupedLinear.apply(rows, weight, counts)


class _GroupedLinear(torch.autograd.Function):
    """npu_grouped_matmul with a backward, which torch_npu does not have. group_type 0 divides the
    rows, 2 divides the dimension that is summed over.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.ends = torch.tensor(counts, dtype=torch.int64, device=rows.device).cumsum(0)
        if not len(rows):
            return rows.new_empty(0, weight.shape[1])
        return _grouped_matmul(rows, weight.transpose(-2, -1), ctx.ends, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight = ctx.saved_tensors
        if not len(rows):  # an operator that has nothing to multiply need not write its result
            return torch.empty_like(rows), torch.zeros_like(weight), None
        grad = grads[0].contiguous()
        return (
            _grouped_matmul(grad, weight, ctx.ends, 0),
            _grouped_matmul(grad.t(), rows, ctx.ends, 2),
            None,
        )


def _grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, group_type: int
) -> torch.Tensor:
    """Multiplies group by group. ends: where each group ends, on the device. split_item 3 asks for
    one tensor.
    """
    products: list[torch.Tensor] = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, group_type=group_type, group_list_type=0, split_item=3
    )
    return products[0]
