"""Ascend C tests: the kernel under the CPU model, the model itself, the build."""
