"""The CUDA platform: NCCL, and torch's kernels."""

from __future__ import annotations

import os

import torch

from pa_npu.platform.base import AcceleratorPlatform, Role, without_users
from pa_npu.platform.ops import TorchOps

# cuBLAS chooses between kernels at run time unless it has one fixed workspace; it reads this when
# it starts.
CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class CudaOps(TorchOps):
    """torch's fused RMSNorm; rotary and SwiGLU as everywhere."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def grouped_linear(
        self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        """torch's grouped product (2.10), which is for bf16; otherwise one group after another."""
        if rows.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
            return super().grouped_linear(rows, weight, counts)
        ends = torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
        return torch.nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


class CudaPlatform(AcceleratorPlatform):
    """NVIDIA GPUs."""

    name = "cuda"
    comm_backend = "nccl"
    process_group_backend = "cpu:gloo,cuda:nccl"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    cluster_resource = "GPU"

    def __init__(self) -> None:
        self.ops = CudaOps()

    def set_deterministic(self, enabled: bool) -> None:
        if enabled:
            os.environ.update(without_users(CUBLAS_WORKSPACE))
        torch.backends.cudnn.deterministic = enabled
        super().set_deterministic(enabled)

    def environment(self, role: Role) -> dict[str, str]:
        defaults: dict[str, str] = {}
        if role in ("engine", "trainer"):
            # vLLM turns NCCL's cuMem allocator off in its workers; the ranks of one group must
            # agree on it
            defaults |= {"NCCL_CUMEM_ENABLE": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        if role == "trainer":
            defaults |= {
                # Megatron's overlap of collectives with compute relies on the order
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                # lengths vary, so blocks would fragment
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                "OMP_NUM_THREADS": "4",
                **CUBLAS_WORKSPACE,
            }
        return without_users(defaults)

    def network_environment(self, address: str, interface: str) -> dict[str, str]:
        # = takes the name as a whole, not as a prefix
        return without_users({"NCCL_SOCKET_IFNAME": f"={interface}"})
