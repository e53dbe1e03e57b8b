"""Ascend without hardware: torch_npu's real schemas, autograd and dispatcher over stub CANN libraries.

`test_npu_sim.py` runs `inside/` in a process of its own, because importing torch_npu changes torch
for good. In there
    cann_stub      builds stand-ins for the CANN libraries; device memory is host memory
    environment    makes a process such a machine when imported
    simulator      NpuSim, a dispatch mode that runs every operator on npu tensors with CPU kernels
                   or a reference, and HCCL's collectives on gloo
    reference_ops  what the fused NPU operators compute
    train_rank     one rank of the real trainer in there
So calls, argument names, shapes, layouts, devices and the algebra are checked; NPU numerics and
speed are not.
"""
